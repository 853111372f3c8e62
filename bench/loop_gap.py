"""Measurement of how long the event loop is kept from running while requests run.

A heartbeat sleeps for an interval and records by how much it wakes too late.  The same heartbeat beside an
idle engine gives the floor, which is due to timers and the operating system.
"""

from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

import anyio

from trouper.bench.datasets import SampleRequest
from trouper.bench.figures import summary
from trouper.params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from trouper.frontends.python.async_engine import AsyncLLMEngine

PERCENTILES = (50.0, 99.0, 99.9)


class Heartbeat:
    """A task that records the delay of each of its wake-ups, in ms."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self.late_ms: list[float] = []

    async def beat(self) -> None:
        while True:
            due = perf_counter() + self._interval_s
            await anyio.sleep(self._interval_s)
            self.late_ms.append(1000 * max(0.0, perf_counter() - due))


async def measure(
    engine: "AsyncLLMEngine",
    requests: Sequence[SampleRequest],
    *,
    interval_s: float = 0.001,
    idle_s: float = 1.0,
) -> dict[str, Any]:
    """Stream all requests at once beside a heartbeat.

    Returns:
        {"idle_ms": gaps, "busy_ms": gaps, "num_beats": n, "num_tokens": n, "duration_s": s}
    """
    idle, busy, num_tokens = Heartbeat(interval_s), Heartbeat(interval_s), 0
    with anyio.move_on_after(idle_s):
        await idle.beat()

    async def stream(request: SampleRequest) -> None:
        nonlocal num_tokens
        params = SamplingParams(
            max_tokens=request.output_len, ignore_eos=True, output_kind=RequestOutputKind.DELTA
        )
        prompt = list(request.prompt_token_ids)
        async with engine.generate(prompt, params) as outputs:
            async for output in outputs:
                num_tokens += len(output.outputs[0].token_ids)

    started = perf_counter()
    async with anyio.create_task_group() as beats:
        beats.start_soon(busy.beat)
        async with anyio.create_task_group() as streams:
            for request in requests:
                streams.start_soon(stream, request)
        beats.cancel_scope.cancel()
    duration_s = perf_counter() - started
    return {
        "idle_ms": summary(idle.late_ms, PERCENTILES),
        "busy_ms": summary(busy.late_ms, PERCENTILES),
        "num_beats": len(busy.late_ms),
        "num_tokens": num_tokens,
        "duration_s": duration_s,
    }
