"""Measure the price of a worker process: the same streams with the model in a thread of the engine and in a process.

Both engines live in this process at once, and one is idle while the other is measured, so both see the same machine.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import anyio

from trouper.actors.engine.wiring import Engine, open_engine
from trouper.actors.executor.devices.process import ProcessDevice
from trouper.actors.executor.devices.threaded import ThreadedDevice
from trouper.config.args import EngineArgs
from trouper.config.resolve import resolve
from trouper.params import SamplingParams

PROMPT = "def quicksort(items):"
PLACES = ("inline", "process")
NUM_WARM_UP_TOKENS = 32


async def _stream(engine: Engine, name: str, num_tokens: int) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    async for _ in engine.generate(PROMPT, params, name):
        pass


async def tokens_per_s(engine: Engine, num_streams: int, num_tokens: int) -> float:
    """Run so many streams at once to their ends."""
    begun = time.perf_counter()
    async with anyio.create_task_group() as tasks:
        for number in range(num_streams):
            tasks.start_soon(_stream, engine, f"{number}", num_tokens)
    return num_streams * num_tokens / (time.perf_counter() - begun)


async def _measure(
    model: str | None,
    streams: Sequence[int],
    num_tokens: int,
    num_rounds: int,
    tell: Callable[[str], None],
) -> dict[str, dict[str, Any]]:
    results: dict[str, dict[str, Any]] = {}
    async with AsyncExitStack() as stack:
        engines: dict[str, Engine] = {}
        for place in PLACES:
            args = EngineArgs(model=model, max_num_seqs=max(streams), device_worker=place)
            config = resolve(args)
            device = ProcessDevice(config) if place == "process" else ThreadedDevice(config)
            engines[place] = await stack.enter_async_context(open_engine(config, device))
        for num_streams in streams:
            rates: dict[str, list[float]] = {place: [] for place in PLACES}
            for engine in engines.values():
                await tokens_per_s(engine, num_streams, NUM_WARM_UP_TOKENS)
            for _ in range(num_rounds):
                for place, engine in engines.items():
                    rates[place].append(await tokens_per_s(engine, num_streams, num_tokens))
            results[str(num_streams)] = compare(rates)
            tell(f"{num_streams} streams: done")
    return results


def compare(rates: dict[str, list[float]]) -> dict[str, Any]:
    """Medians of both, and the median of the ratios of neighbouring rounds, which a drift of the machine leaves alone."""
    ratios = [
        process / inline for process, inline in zip(rates["process"], rates["inline"], strict=True)
    ]
    return {
        "tokens_per_s": {
            place: round(statistics.median(found), 1) for place, found in rates.items()
        },
        "process_over_inline": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
    }


def measure(
    model: str | None,
    *,
    streams: Sequence[int],
    num_tokens: int,
    num_rounds: int,
    tell: Callable[[str], None] = lambda _: None,
) -> dict[str, dict[str, Any]]:
    """{number of streams: {"tokens_per_s", "process_over_inline", "ratios"}}; `tell` hears of each number when it is done."""
    work = partial(_measure, model, streams, num_tokens, num_rounds, tell)
    return anyio.run(work, backend="asyncio")
