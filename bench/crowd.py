"""A crowd at the server's door: many clients at once, some of which leave; and many that all leave.

    python -m trouper.bench.crowd [--clients 256] [--seconds 60] [--leave 0.3] [--output FILE.json]

Starts `trouper serve` on the demo model and asks it over sockets from this process.
"""

import argparse
import json
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import anyio

from trouper.bench.report import about, write

MAX_TOKENS = 32
LONGEST = 2000  # of the demo's 2048 positions


def main() -> None:
    parser = argparse.ArgumentParser(description="A crowd at the server's door.")
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--leave", type=float, default=0.3, help="Share that leaves at random.")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    command = [sys.executable, "-m", "trouper", "serve", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        port = 0
        for line in server.stderr:
            if line.startswith("serving") or " serving " in line:
                port = int(re.findall(r":(\d+)", line)[-1])
                break
        try:
            crowd = Crowd(port, server.pid)
            results = anyio.run(crowd.run, options.clients, options.seconds, options.leave)
        finally:
            server.terminate()
            server.stderr.read()
        results["exit_code"] = server.wait()
    print(json.dumps(results, indent=1))
    if options.output:
        report = {"about": about(sys.argv[1:]), "results": results}
        write(str(options.output), report)


class Crowd:
    """`run` does all of it and returns the figures."""

    def __init__(self, port: int, pid: int) -> None:
        self._port, self._pid = port, pid
        self._random = random.Random(0)
        self._num_frames = 0  # of clients that stay
        self._answers: Counter[str] = Counter()

    async def run(self, num_clients: int, seconds: float, leave: float) -> dict[str, Any]:
        await self._many(num_clients, seconds / 4, 0.0)  # warm
        before = self._resources()
        staying = await self._many(num_clients, seconds, 0.0)
        leaving = await self._many(num_clients, seconds, leave)
        cancelled = await self._cancelled(200)
        await self._until_idle()
        return {
            "all stay": staying,
            "some leave": leaving,
            "200 cancelled, then one": cancelled,
            "before": before,
            "after": self._resources(),
            "event loop": await self._gaps(),
        }

    async def _many(self, num_clients: int, seconds: float, leave: float) -> dict[str, Any]:
        self._num_frames, self._answers = 0, Counter()
        begin = time.perf_counter()
        async with anyio.create_task_group() as clients:
            for _ in range(num_clients):
                clients.start_soon(self._ask_on, begin + seconds, leave)
        seconds = time.perf_counter() - begin
        return {"tokens_s": round(self._num_frames / seconds, 1), **self._answers}

    async def _ask_on(self, end: float, leave: float) -> None:
        while time.perf_counter() < end:
            if self._random.random() < leave:
                with anyio.move_on_after(self._random.uniform(0.0, 2.0)):
                    await self._ask(MAX_TOKENS)
                self._answers["left"] += 1
            else:
                answer = await self._ask(MAX_TOKENS)
                status = answer[9:12].decode()
                is_whole = answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
                self._answers[status if is_whole else "cut"] += 1
                self._num_frames += answer.count(b"data: {")

    async def _cancelled(self, num: int) -> dict[str, float]:
        async with anyio.create_task_group() as clients:
            for _ in range(num):
                clients.start_soon(self._ask_and_leave, 0.5)
        begin = time.perf_counter()
        answer = await self._ask(1)
        if answer[9:12] != b"200":
            raise SystemExit(answer.decode())
        return {"answer_s": round(time.perf_counter() - begin, 3)}

    async def _ask_and_leave(self, after_s: float) -> None:
        with anyio.move_on_after(after_s):
            await self._ask(LONGEST)

    async def _ask(self, max_tokens: int) -> bytes:
        fields = {"prompt": "def f(", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        return await self._exchange("POST /v1/completions", json.dumps(fields))

    async def _exchange(self, line: str, body: str = "") -> bytes:
        request = f"{line} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
        request += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n{body}"
        answer = bytearray()
        async with await anyio.connect_tcp("127.0.0.1", self._port) as stream:
            await stream.send(request.encode())
            async for piece in stream:
                answer += piece
        return bytes(answer)

    async def _until_idle(self) -> None:
        with anyio.fail_after(5):
            while (  # noqa: ASYNC110  # another process gives no sign
                b'"server_load":0' not in await self._exchange("GET /load")
            ):
                await anyio.sleep(0.05)

    async def _gaps(self) -> dict[str, float]:
        """How late the server's event loop was, from its own histogram."""
        text = (await self._exchange("GET /metrics")).decode()
        largest = re.search(r"event_loop_gap_max_seconds (\d\S*)", text)
        counts = re.findall(r'event_loop_gap_seconds_bucket\{le="(\S+)"\} (\S+)', text)
        total = float(counts[-1][1])
        p999 = next(float(bound) for bound, count in counts if float(count) >= 0.999 * total)
        return {"p99.9_at_most_s": p999, "max_s": float(largest.group(1)) if largest else 0.0}

    def _resources(self) -> dict[str, float]:
        pages = int(Path(f"/proc/{self._pid}/statm").read_text().split()[1])
        return {
            "rss_mib": round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1),
            "fds": len(os.listdir(f"/proc/{self._pid}/fd")),
            "threads": len(os.listdir(f"/proc/{self._pid}/task")),
        }


if __name__ == "__main__":
    main()
