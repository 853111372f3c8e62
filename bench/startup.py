"""Measure how long a user waits for `import`, `--help`, the first text of `generate`, and a ready server.

Every measurement runs in a new process. A cold start has no bytecode and no compiled kernels on disk, like the first
start after the installation; the model's files may be in the page cache in both cases.
"""

import http.client
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

from trouper.bench.report import repeats
from trouper.errors import TrouperError

# Polling more often would slow the server down.
POLL_S = 0.01
PROMPT = "def quicksort(items):"
# Folders of caches that Python, Numba, Triton and other libraries can rebuild.
CACHES = ("PYTHONPYCACHEPREFIX", "NUMBA_CACHE_DIR", "TRITON_CACHE_DIR", "XDG_CACHE_HOME")


class StartError(TrouperError):
    """A timed command failed, so its time has no meaning.

    The message contains the command and the end of its output. Other commands are not timed any more.
    """


def commands(model: str | None, max_tokens: int) -> dict[str, list[str]]:
    """Return the commands to time, by their names in the report.

    Starting only Python is the lower limit of all of them. `model` is by default the demo model.
    """
    trouper = [sys.executable, "-m", "trouper"]
    generate = [*trouper, "generate", PROMPT, "--max-tokens", str(max_tokens), "--no-echo"]
    return {
        "python": [sys.executable, "-c", "pass"],
        "import trouper": [sys.executable, "-c", "import trouper"],
        "trouper --help": [*trouper, "--help"],
        "trouper generate, first text": generate + (["--model", model] if model else []),
        "trouper serve, ready": [*trouper, "serve", *([model] if model else []), "--port", "0"],
    }


def measure(
    model: str | None,
    *,
    num_iters_cold: int,
    num_iters_warmup: int,
    num_iters_warm: int,
    max_tokens: int = 32,
    report: Callable[[str, dict[str, Any]], None] = lambda *_: None,
) -> dict[str, dict[str, Any]]:
    """Time all commands and return {command: {"cold": repeats, "warm": repeats}}.

    `report` is called after each command with its name and results.
    """
    results: dict[str, dict[str, Any]] = {}
    for name, command in commands(model, max_tokens).items():
        results[name] = {}
        if num_iters_cold:
            results[name]["cold"] = repeats([_cold(command) for _ in range(num_iters_cold)])
        if num_iters_warm:
            for _ in range(num_iters_warmup):
                timed(command)
            results[name]["warm"] = repeats([timed(command) for _ in range(num_iters_warm)])
        report(name, results[name])
    return results


def _cold(command: Sequence[str]) -> float:
    with empty_caches() as environment:
        return timed(command, environment)


@contextmanager
def empty_caches() -> Iterator[dict[str, str]]:
    """Yield an environment with empty caches, except for the hub's downloads.

    Kernels are then compiled again, as on a user's first start. They are removed after the block.
    """
    cache = os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))
    hub = os.environ.get("HF_HOME", str(Path(cache) / "huggingface"))
    with tempfile.TemporaryDirectory() as folder:
        caches = {name: str(Path(folder) / name.lower()) for name in CACHES}
        yield {**os.environ, "HF_HOME": hub, **caches}


def timed(command: Sequence[str], environment: Mapping[str, str] | None = None) -> float:
    """Return the seconds until a server is ready or another command prints its first byte.  Raises StartError."""
    return (until_ready if "serve" in command else until_output)(command, environment)


def until_ready(command: Sequence[str], environment: Mapping[str, str] | None = None) -> float:
    """Return the seconds from the start of a server to the first 200 of `/health/ready`, and stop it.

    Loading the model is included.

    Raises:
        StartError: the server exited.
    """
    started = perf_counter()
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stderr is not None
        line = ""
        try:
            for line in server.stderr:
                if found := re.search(r"listening at http://([^:]+):(\d+)", line):
                    while _status(found.group(1), int(found.group(2))) != 200:
                        sleep(POLL_S)
                    return perf_counter() - started
            raise StartError(line.strip() or "no message on stderr")
        except OSError:
            # The server has closed its port again.
            raise StartError((server.stderr.read().strip().splitlines() or [line])[-1]) from None
        finally:
            server.terminate()
            server.stderr.read()


def _status(host: str, port: int) -> int:
    connection = http.client.HTTPConnection(host, port)
    connection.request("GET", "/health/ready")
    status = connection.getresponse().status
    connection.close()
    return status


def until_output(command: Sequence[str], environment: Mapping[str, str] | None = None) -> float:
    """Return the seconds from the start of a process to its first byte, or to its end if it prints nothing.

    Raises:
        StartError: the process failed.
    """
    started = perf_counter()
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, env=environment
        ) as process,
    ):
        assert process.stdout is not None
        process.stdout.read(1)
        seconds = perf_counter() - started
        process.stdout.read()
        if process.wait():
            log.seek(0)
            raise StartError((log.read().strip().splitlines() or ["no message on stderr"])[-1])
    return seconds
