"""Measure the cost of a worker process: the same streams with the model in a thread of the engine and in a process.

Both engines are open in this process, and one is idle while the other is measured, so both have the same machine.

Run it as `python -m trouper.bench.studies.parallel.worker`; `--help` lists its options.
"""

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Annotated, Any

import anyio
import typer

from trouper.actors.engine.wiring import Engine, open_engine
from trouper.actors.executor.devices.process import ProcessDevice
from trouper.actors.executor.devices.threaded import ThreadedDevice
from trouper.bench.cli.options import ReportOptions, note
from trouper.bench.studies.command import run_study
from trouper.config.args import EngineArgs
from trouper.config.resolve import resolve
from trouper.errors import TrouperValidationError
from trouper.frontends.cli.options import expand_options
from trouper.params import SamplingParams

PROMPT = "def quicksort(items):"
PLACES = ("inline", "process")
NUM_WARM_UP_TOKENS = 32


async def _stream(engine: Engine, name: str, num_tokens: int) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    async for _ in engine.generate(PROMPT, params, name):
        pass


async def tokens_per_s(engine: Engine, num_streams: int, num_tokens: int) -> float:
    """Run this many simultaneous streams to their ends.

    Returns the generated tokens per second of all streams together.
    """
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
    """Return the medians of both, and the median ratio of neighbouring rounds, which a drift of the machine hardly affects."""
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
    """Return {number of streams: {"tokens_per_s", "process_over_inline", "ratios"}}.

    `tell` receives lines of progress while the measurement runs.
    """
    work = partial(_measure, model, streams, num_tokens, num_rounds, tell)
    return anyio.run(work, backend="asyncio")


@expand_options
def worker(
    ctx: typer.Context,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="Folder or hub id; the demo model by default."),
    ] = None,
    streams: Annotated[
        str, typer.Option(help="Numbers of streams at once, separated by commas.")
    ] = "1,16,64",
    output_len: Annotated[
        int, typer.Option(min=1, help="Tokens to generate in each stream.")
    ] = 200,
    num_iters: Annotated[int, typer.Option(min=1, help="Timed rounds of each, in turn.")] = 5,
    *,
    report: ReportOptions,
) -> None:
    """Compare tokens per second with the model in a thread of the engine and in a process, alternately."""
    from trouper.config.args import EngineArgs

    report.check()
    numbers = _numbers(streams)
    resolve(EngineArgs(model=model, max_num_seqs=max(numbers)))
    results = measure(
        model, streams=numbers, num_tokens=output_len, num_rounds=num_iters, tell=note
    )
    lines = (
        f"{number:>4} streams: process / inline {found['process_over_inline']:.2f}  "
        f"({found['tokens_per_s']['process']:.0f} / {found['tokens_per_s']['inline']:.0f} tokens/s)"
        for number, found in results.items()
    )
    report.finish(ctx, {"results": results}, lines)


def _numbers(text: str) -> tuple[int, ...]:
    words = text.split(",")
    if not all(word.strip().isdecimal() and int(word) for word in words):
        raise TrouperValidationError(
            "must be positive numbers, separated by commas", parameter="streams", value=text
        )
    return tuple(int(word) for word in words)


if __name__ == "__main__":
    sys.exit(run_study(worker))
