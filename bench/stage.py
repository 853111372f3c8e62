"""A server process on the demo model, the callers that ask it, and what both were seen to do."""

import http.client
import json
import os
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

from trouper.bench.callers import Call, Callers

PATIENCE_S = 60.0  # for the last answers
IDLE_S = 6.0  # the server has closed every connection that stayed idle for so long


class Stage:
    """`callers` have no other work than `ask` gives them."""

    def __init__(self, port: int, pid: int) -> None:
        self.callers = Callers(port)
        self.outcomes: Counter[str] = Counter()
        self._port, self._pid = port, pid
        self._random = random.Random(0)

    def some(self, mean: int) -> int:
        """A number of tokens: half as many to half as many again, so that clients do not march in step."""
        return self._random.randint(mean // 2, mean + mean // 2)

    def ask(self, max_tokens: int, kind: str, on_end: Callable[[Call], object]) -> Call:
        """A streaming completion; its frames are counted under `kind`, its end in `outcomes`."""
        fields = {"prompt": "def f(", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        body = json.dumps(fields)
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        request = f"{head}content-length: {len(body)}\r\n\r\n{body}"

        def end(call: Call) -> None:
            self.outcomes[call.outcome] += 1
            on_end(call)

        return self.callers.call(request.encode(), kind, end)

    def ask_on(
        self,
        num: int,
        max_tokens: int,
        kind: str,
        is_over: Callable[[], bool],
        stay_s: Callable[[], float] | None = None,
        may_leave: Callable[[], bool] = lambda: True,
    ) -> None:
        """So many clients, each of which asks again when it has its answer, or has left.

        It thinks of leaving after each `stay_s()`.
        """

        def ask(_: Call | None = None) -> None:
            if not is_over():
                stay(self.ask(self.some(max_tokens), kind, ask))

        def stay(call: Call) -> None:
            if stay_s is not None:
                self.callers.later(perf_counter() + stay_s(), partial(leave, call))

        def leave(call: Call) -> None:
            if call.outcome != "open":
                return
            if not may_leave():
                stay(call)
                return
            self.callers.drop(call)
            self.outcomes["left"] += 1
            ask()

        for _ in range(num):
            ask()

    def play(self, seconds: float) -> dict[str, Any]:
        """Let everybody go on for so long, and tell what was seen in that time."""
        outcomes, frames = self.outcomes.copy(), self.callers.num_frames.copy()
        gaps, begin, cpu = self.gaps(), perf_counter(), process_time()
        self.callers.run(begin + seconds)
        took, cpu = perf_counter() - begin, process_time() - cpu
        frames = self.callers.num_frames - frames
        return {
            "seconds": round(took, 1),
            "tokens_s": {kind: round(num / took, 1) for kind, num in frames.items()},
            "requests": dict(self.outcomes - outcomes),
            "loop_late_ms": lateness(self.gaps() - gaps),
            "client_cpu_share": round(cpu / took, 3),
        }

    def end(self) -> dict[str, float]:
        """Wait until everybody has his answer and his connection is closed, and tell what the server holds then."""
        self.callers.run(perf_counter() + PATIENCE_S, lambda: not self.callers.num_open)
        if self.callers.num_open:
            raise SystemExit(f"{self.callers.num_open} requests without an end")
        self.callers.run(perf_counter() + IDLE_S)
        while b'"server_load":0' not in self._get("/load"):
            pass
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

    def gaps(self) -> Counter[float]:
        """{seconds: how often the server's event loop has been late by at most that}"""
        bucket = rb'event_loop_gap_seconds_bucket\{le="(\S+)"\} (\S+)'
        found = re.findall(bucket, self._get("/metrics"))
        return Counter({float(bound): int(float(num)) for bound, num in found})

    def _get(self, path: str) -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE_S)
        connection.request("GET", path)
        answer = connection.getresponse().read()
        connection.close()
        return answer


@contextmanager
def served(*arguments: str) -> Iterator[Stage]:
    """Until the block ends; a server that then ends otherwise than with 0 is an error."""
    command = [sys.executable, "-m", "trouper", "serve", *arguments, "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        line = next(line for line in server.stderr if "serving" in line)
        stage = Stage(int(re.findall(r":(\d+)", line)[-1]), server.pid)
        try:
            yield stage
        finally:
            stage.callers.close()
            server.terminate()
            server.stderr.read()
    if server.returncode:
        raise SystemExit(f"the server ended with {server.returncode}")


def _metric(metrics: bytes, name: str) -> float:
    found = re.search(rf"^trouper:{name}\S* (\S+)$".encode(), metrics, re.MULTILINE)
    return float(found.group(1)) if found else -1.0


def lateness(counts: Counter[float]) -> dict[str, float]:
    """Bounds of the histogram that hold so many of its values."""
    total = max(counts.values(), default=0)

    def within(share: float) -> float:
        return 1000 * min(bound for bound, num in counts.items() if num >= share * total)

    return {"p99_at_most": within(0.99), "p99.9_at_most": within(0.999), "max_at_most": within(1)}
