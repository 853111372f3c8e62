"""Start a server process with the demo model and clients for it, and collect the measurements of both."""

import http.client
import os
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

from trouper.bench.serve import local_server
from trouper.bench.studies.server.callers import Callers, ClientCall

TOKENS = "generation_tokens_total"
# Seconds to wait for the last answers.
PATIENCE_S = 60.0
BODY = '{"prompt": "def f(", "max_tokens": %d, "ignore_eos": true, "stream": true}'
# Seconds to read the frames that arrived while the metrics were read.
CATCH_UP_S = 0.1
# The server has closed all idle connections after this time.
IDLE_S = 6.0


class ServerUnderTest:
    """A server process with the clients that load it."""

    def __init__(self, port: int, pid: int) -> None:
        self.callers = Callers(port)
        self.outcomes: Counter[str] = Counter()
        self.port, self._pid = port, pid
        self._random = random.Random(0)

    def some(self, mean: int) -> int:
        """Draw a number of tokens between half and one and a half times the mean, so that clients do not run in lockstep."""
        return self._random.randint(mean // 2, mean + mean // 2)

    def ask(self, max_tokens: int, kind: str, on_end: Callable[[ClientCall], object]) -> ClientCall:
        """Send a streaming completion. Its frames are counted under `kind`, and its outcome in `outcomes`."""

        def end(call: ClientCall) -> None:
            self.outcomes[call.outcome] += 1
            on_end(call)

        return self.callers.call(completion(max_tokens), kind, end)

    def ask_on(
        self,
        num: int,
        max_tokens: int,
        kind: str,
        is_over: Callable[[], bool],
    ) -> "list[Client]":
        """Start this many clients; each sends a new request after each answer."""
        clients = [Client(self, max_tokens, kind, is_over) for _ in range(num)]
        for client in clients:
            client.ask()
        return clients

    def play(self, seconds: float) -> "TimedTurn":
        """Let all clients continue for this many seconds, and return their counts."""
        before = self._get("/metrics")
        self.callers.run_until(perf_counter() + CATCH_UP_S)
        outcomes = self.outcomes.copy()
        frames, server, begin = self.callers.num_frames.copy(), cpu_s(self._pid), perf_counter()
        cpu = process_time()
        self.callers.run_until(begin + seconds)
        took, cpu = perf_counter() - begin, process_time() - cpu
        server, frames = cpu_s(self._pid) - server, self.callers.num_frames - frames
        outcomes, after = self.outcomes - outcomes, self._get("/metrics")
        return TimedTurn(
            took,
            dict(frames),
            outcomes,
            _gaps(after) - _gaps(before),
            int(_metric(after, TOKENS) - _metric(before, TOKENS)),
            cpu,
            server,
        )

    def end(self) -> dict[str, float]:
        """Wait until all requests are answered and all connections closed. Returns the resources that the server then holds."""
        self.callers.run_until(perf_counter() + PATIENCE_S, lambda: not self.callers.num_open)
        if self.callers.num_open:
            raise SystemExit(
                f"{self.callers.num_open} requests were not answered within {PATIENCE_S:g} s"
            )
        while b'"server_load":0' not in self._get("/load"):
            pass
        # The server closes idle connections after less than `IDLE_S`, and ends their tasks.
        self.callers.run_until(perf_counter() + IDLE_S)
        process = Path(f"/proc/{self._pid}")
        pages = int((process / "statm").read_text().split()[1])
        metrics = self._get("/metrics")
        return {
            "rss_mib": round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1),
            "fds": len(list((process / "fd").iterdir())),
            "threads": len(list((process / "task").iterdir())),
            "tasks": _metric(metrics, "event_loop_tasks"),
            "kv_cache_usage": _metric(metrics, "kv_cache_usage_perc"),
        }

    def _get(self, path: str) -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        connection.request("GET", path)
        answer = connection.getresponse().read()
        connection.close()
        return answer


def cpu_s(pid: int) -> float:
    """Return the processor time of all threads of a process so far, without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


@cache
def completion(max_tokens: int) -> bytes:
    """Encode an HTTP request for a streaming completion."""
    body = BODY % max_tokens
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n{body}".encode()


class Client:
    """A client that sends a new request after each answer, until `is_over` returns true."""

    def __init__(
        self, stage: ServerUnderTest, max_tokens: int, kind: str, is_over: Callable[[], bool]
    ) -> None:
        self._stage = stage
        self._max_tokens = max_tokens
        self._kind = kind
        self._is_over = is_over
        self._call: ClientCall | None = None

    def ask(self, _: ClientCall | None = None) -> None:
        """Send a request, unless the last one is unanswered or the run is over."""
        if not (self._is_over() or (self._call is not None and self._call.outcome == "open")):
            num_tokens = self._stage.some(self._max_tokens)
            self._call = self._stage.ask(num_tokens, self._kind, self.ask)

    def leave(self) -> None:
        """Disconnect in the middle of the answer."""
        if self._call is not None and self._call.outcome == "open":
            self._stage.callers.drop(self._call)
            self._stage.outcomes["left"] += 1


@dataclass
class TimedTurn:
    """Counts of the clients and of the server in one or several turns."""

    seconds: float
    # Frames read by the clients, by kind of call.
    frames: dict[str, int]
    requests: Counter[str]
    # Histogram: how often the server's event loop was late by at most this many seconds.
    gaps: Counter[float]
    # Generated by the server.
    num_tokens: int
    # Processor time of the clients.
    client_s: float
    server_s: float

    def tokens_s(self, kind: str) -> float:
        return self.frames.get(kind, 0) / self.seconds

    def __add__(self, other: "TimedTurn") -> "TimedTurn":
        frames = {
            kind: self.frames.get(kind, 0) + other.frames.get(kind, 0)
            for kind in self.frames | other.frames
        }
        return TimedTurn(
            self.seconds + other.seconds,
            frames,
            self.requests + other.requests,
            self.gaps + other.gaps,
            self.num_tokens + other.num_tokens,
            self.client_s + other.client_s,
            self.server_s + other.server_s,
        )

    def figures(self) -> dict[str, Any]:
        return {
            "seconds": round(self.seconds, 1),
            "tokens_s": {kind: round(self.tokens_s(kind), 1) for kind in self.frames},
            "tokens_s of the server": round(self.num_tokens / self.seconds, 1),
            "requests": dict(self.requests),
            "loop_late_ms": lateness(self.gaps),
            "cores": {
                "server": round(self.server_s / self.seconds, 3),
                "clients": round(self.client_s / self.seconds, 3),
            },
        }


@contextmanager
def served(*arguments: str) -> Iterator[ServerUnderTest]:
    """Run a server until the block ends. Raises if its exit status is not 0."""
    with local_server(*arguments) as server:
        stage = ServerUnderTest(server.port, server.pid)
        try:
            yield stage
        finally:
            stage.callers.close()


def _gaps(metrics: bytes) -> Counter[float]:
    found = re.findall(rb'event_loop_gap_seconds_bucket\{le="(\S+)"\} (\S+)', metrics)
    return Counter({float(bound): int(float(num)) for bound, num in found})


def _metric(metrics: bytes, name: str) -> float:
    found = re.search(rf"^trouper:{name}(?:\{{\S*\}})? (\S+)$".encode(), metrics, re.MULTILINE)
    return float(found.group(1)) if found else -1.0


def lateness(counts: Counter[float]) -> dict[str, float]:
    """Return upper bounds of percentiles of a cumulative histogram."""
    total = max(counts.values(), default=0)

    def within(share: float) -> float:
        return 1000 * min(bound for bound, num in counts.items() if num >= share * total)

    return {"p99_at_most": within(0.99), "p99.9_at_most": within(0.999), "max_at_most": within(1)}
