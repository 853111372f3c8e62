"""Measure how long the event loop is blocked while requests run.

A heartbeat sleeps for an interval and records how late it wakes. The same heartbeat with an idle engine gives the
baseline of timers and the operating system.

Run it as `python -m trouper.bench.studies.scheduling.loop_gap`; `--help` lists its options.
"""

import sys
from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any, Literal

import anyio
import typer

from trouper.bench.cli.options import DatasetOptions, ReportOptions, tokenizer_of
from trouper.bench.datasets import SampleRequest
from trouper.bench.report import summary
from trouper.bench.studies.command import run_study
from trouper.config.args import EngineArgs
from trouper.config.resolve import resolve
from trouper.frontends.cli.options import expand_options
from trouper.frontends.cli.running import Interrupts, run_engine
from trouper.params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from trouper.frontends.python.async_engine import AsyncLLMEngine


PERCENTILES = (50.0, 99.0, 99.9)


class Heartbeat:
    """A task that sleeps repeatedly, and records how late it wakes in ms: the time for which other code blocked the event loop."""

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
    """Stream all requests simultaneously, together with a heartbeat.

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


@expand_options
def loop_gap(
    ctx: typer.Context,
    loop: Annotated[
        Literal["trio", "asyncio"], typer.Option(help="Event loop to run on.")
    ] = "trio",
    interval_ms: Annotated[
        float, typer.Option(min=0.1, help="Milliseconds between two heartbeats.")
    ] = 1.0,
    idle: Annotated[
        float, typer.Option(min=0.0, help="Seconds of measurement on an idle engine first.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Equal seeds give equal requests.")] = 0,
    *,
    dataset: DatasetOptions,
    report: ReportOptions,
    engine_args: EngineArgs,
) -> None:
    """Measure how late a heartbeat wakes while requests stream."""
    from trouper.bench.datasets import check_fit

    report.check()
    engine_args.seed = seed
    config = resolve(engine_args, offline=True)
    tokenizer, vocabulary = tokenizer_of(config.tokenizer)
    requests = dataset.requests(tokenizer, vocabulary, seed, texts=False)
    check_fit(requests, config.max_model_len)
    record: dict[str, Any] = {}

    async def act(engine: "AsyncLLMEngine", _: Interrupts) -> None:
        interval_s = interval_ms / 1000
        record.update(await measure(engine, requests, interval_s=interval_s, idle_s=idle))

    run_engine(config, act, backend=loop)
    report.finish(ctx, {"loop": loop, **record}, _lines(record))


def _lines(record: dict[str, Any]) -> list[str]:
    """Make a table of the milliseconds by which heartbeats were late."""
    names = ("p50", "p99", "p99.9", "max")
    lines = [f"{'late by, ms':12}" + "".join(f"{name:>10}" for name in names)]
    for state in ("idle", "busy"):
        figures = record[f"{state}_ms"]
        if figures:
            lines.append(f"{state:12}" + "".join(f"{figures[name]:10.3f}" for name in names))
    rate = record["num_tokens"] / record["duration_s"]
    lines.append(f"{record['num_beats']} heartbeats while {rate:.0f} tokens/s were generated")
    return lines


if __name__ == "__main__":
    sys.exit(run_study(loop_gap))
