"""How long a user waits: import, `--help`, `trouper generate` up to its first text, `trouper serve` until it is ready.

Every measurement is a process of its own.  Cold is the very first start: no bytecode and no compiled
kernels on disk.  (The files of the model may be in the page cache either way.)
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

POLL_S = 0.01  # asking all the time would slow it down
PROMPT = "def quicksort(items):"
# Where Python, Numba, Triton and other libraries keep what they can make again.
CACHES = ("PYTHONPYCACHEPREFIX", "NUMBA_CACHE_DIR", "TRITON_CACHE_DIR", "XDG_CACHE_HOME")


class StartError(TrouperError):
    """A command that was to be timed failed."""


def commands(model: str | None, max_tokens: int) -> dict[str, list[str]]:
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
    tell: Callable[[str, dict[str, Any]], None] = lambda *_: None,
) -> dict[str, dict[str, Any]]:
    """{command: {"cold": repeats, "warm": repeats}}; `tell` hears of each command when it is done."""
    results: dict[str, dict[str, Any]] = {}
    for name, command in commands(model, max_tokens).items():
        results[name] = {}
        if num_iters_cold:
            results[name]["cold"] = repeats([_cold(command) for _ in range(num_iters_cold)])
        if num_iters_warm:
            for _ in range(num_iters_warmup):
                timed(command)
            results[name]["warm"] = repeats([timed(command) for _ in range(num_iters_warm)])
        tell(name, results[name])
    return results


def _cold(command: Sequence[str]) -> float:
    with empty_caches() as environment:
        return timed(command, environment)


@contextmanager
def empty_caches() -> Iterator[dict[str, str]]:
    """An environment in which every cache but the hub's downloads is empty."""
    cache = os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))
    hub = os.environ.get("HF_HOME", str(Path(cache) / "huggingface"))
    with tempfile.TemporaryDirectory() as folder:
        caches = {name: str(Path(folder) / name.lower()) for name in CACHES}
        yield {**os.environ, "HF_HOME": hub, **caches}


def timed(command: Sequence[str], environment: Mapping[str, str] | None = None) -> float:
    """Raises StartError."""
    return (until_ready if "serve" in command else until_output)(command, environment)


def until_ready(command: Sequence[str], environment: Mapping[str, str] | None = None) -> float:
    """Seconds from the start of a server to the first 200 of its `/health/ready`; then it is ended.

    Raises:
        StartError: it ended by itself.
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
            raise StartError(line.strip() or "it said nothing")
        except OSError:  # the port is closed again
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
    """Seconds from the start of the process to its first byte, or to its end if it prints nothing.

    Raises:
        StartError: it failed.
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
            raise StartError((log.read().strip().splitlines() or ["it said nothing"])[-1])
    return seconds
