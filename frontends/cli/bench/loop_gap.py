"""`trouper bench loop-gap`: is the event loop ever kept from running?"""

from functools import partial
from typing import Annotated, Any, Literal

import anyio
import typer

from trouper.config.args import EngineArgs
from trouper.frontends.cli.bench.options import DatasetOptions, ReportOptions, tokenizer_of
from trouper.frontends.cli.options import expand_options


@expand_options
def loop_gap(
    ctx: typer.Context,
    loop: Annotated[Literal["trio", "asyncio"], typer.Option(help="Event loop.")] = "trio",
    interval_ms: Annotated[float, typer.Option(min=0.1, help="Between two heartbeats.")] = 1.0,
    idle: Annotated[float, typer.Option(min=0.0, help="Seconds of an idle engine, before.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Equal seeds give equal requests.")] = 0,
    *,
    dataset: DatasetOptions,
    report: ReportOptions,
    engine_args: EngineArgs,
) -> None:
    """How late a heartbeat wakes beside streaming requests."""
    from trouper.bench import loop_gap as core
    from trouper.bench.datasets import check_fit

    report.check()
    engine_args.seed = seed
    config = engine_args.resolve(offline=True)
    tokenizer, vocabulary = tokenizer_of(config.tokenizer)
    requests = dataset.requests(tokenizer, vocabulary, seed, texts=False)
    check_fit(requests, config.max_model_len)
    act = partial(core.measure, engine_args, requests, interval_s=interval_ms / 1000, idle_s=idle)
    record = anyio.run(act, backend=loop)
    report.finish(ctx, {"loop": loop, **record}, _lines(record))


def _lines(record: dict[str, Any]) -> list[str]:
    """Milliseconds by which a heartbeat was late."""
    names = ("p50", "p99", "p99.9", "max")
    lines = [f"{'late by, ms':12}" + "".join(f"{name:>10}" for name in names)]
    for state in ("idle", "busy"):
        figures = record[f"{state}_ms"]
        if figures:
            lines.append(f"{state:12}" + "".join(f"{figures[name]:10.3f}" for name in names))
    rate = record["num_tokens"] / record["duration_s"]
    lines.append(f"{record['num_beats']} heartbeats beside {rate:.0f} tokens/s")
    return lines
