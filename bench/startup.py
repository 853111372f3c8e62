"""How long a user waits: import, `--help`, and `trouper generate` up to its first text.

    python -m trouper.bench.startup [--repeats 5] [--model FOLDER] [--output FILE.json]

Every repeat is a process of its own; medians are quoted.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

PROMPT = "def quicksort(items):"


def main() -> None:
    parser = argparse.ArgumentParser(description="How long a user waits for the first output.")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--model")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    generate = [
        sys.executable,
        "-m",
        "trouper",
        "generate",
        PROMPT,
        "--max-tokens",
        "32",
        "--no-echo",
    ]
    if options.model:
        generate += ["--model", options.model]
    commands = {
        "python": [sys.executable, "-c", "pass"],
        "import trouper": [sys.executable, "-c", "import trouper"],
        "trouper --help": [sys.executable, "-m", "trouper", "--help"],
        "trouper generate, first text": generate,
    }
    results = {}
    for name, command in commands.items():
        seconds = [until_output(command) for _ in range(options.repeats)]
        results[name] = {
            "median_s": round(statistics.median(seconds), 3),
            "all_s": [round(value, 3) for value in seconds],
        }
        print(f"{name:32} {results[name]['median_s']:.3f} s", flush=True)
    if options.output:
        options.output.write_text(json.dumps(results, indent=1) + "\n")


def until_output(command: list[str]) -> float:
    """Seconds from the start of the process to its first byte, or to its end if it prints nothing."""
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        seconds = time.perf_counter() - started
        process.stdout.read()
    if process.returncode:
        raise SystemExit(f"{command} failed")
    return seconds


if __name__ == "__main__":
    main()
