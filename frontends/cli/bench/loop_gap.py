"""`trouper bench loop-gap`: delays of the event loop beside generation."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from trouper.config.args import EngineArgs
from trouper.config.resolve import resolve
from trouper.frontends.cli.bench.options import DatasetOptions, ReportOptions, tokenizer_of
from trouper.frontends.cli.options import expand_options
from trouper.frontends.cli.running import Interrupts, run_engine

if TYPE_CHECKING:
    from trouper.frontends.python.async_engine import AsyncLLMEngine


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
    """Measure how late a heartbeat wakes beside streaming requests."""
    from trouper.bench import loop_gap as core
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
        record.update(await core.measure(engine, requests, interval_s=interval_s, idle_s=idle))

    run_engine(engine_args, act, backend=loop)
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
    lines.append(f"{record['num_beats']} heartbeats beside {rate:.0f} tokens/s")
    return lines
