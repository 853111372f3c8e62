"""`trouper bench replicas`: what the front of several replicas costs, and how requests are shared out."""

from typing import Annotated, Any

import typer

from trouper.config.args import EngineArgs
from trouper.frontends.cli.bench.options import ReportOptions, note
from trouper.frontends.cli.options import expand_options, integers


@expand_options
def replicas(
    ctx: typer.Context,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="Folder or hub id; the demo model by default."),
    ] = None,
    data_parallel_size: Annotated[
        Any,
        typer.Option(
            "--data-parallel-size",
            "-dp",
            parser=integers,
            metavar="N,N,…",
            help="Numbers of replicas to measure, separated by commas.",
        ),
    ] = "1,2,4",
    streams: Annotated[int, typer.Option(min=1, help="Streams at once, of all replicas.")] = 64,
    output_len: Annotated[
        int, typer.Option(min=1, help="Tokens to generate in each stream.")
    ] = 200,
    num_iters: Annotated[int, typer.Option(min=1, help="Timed rounds of each, in turn.")] = 5,
    *,
    report: ReportOptions,
) -> None:
    """Measure an engine of replicas whose devices answer at once: its own time a token, and hits and balance of routing."""
    from trouper.bench import replicas as core

    report.check()
    args = EngineArgs(model=model, device="cpu", skip_tokenizer_init=True, disable_log_stats=True)
    results = core.measure(
        args,
        data_parallel_size,
        num_streams=streams,
        num_tokens=output_len,
        num_rounds=num_iters,
        tell=note,
    )
    lines = (
        f"{count:>2} replicas: {front['us_per_token']:.1f} µs a token, "
        f"hit rate {results['sharing'][count]['hit_rate']:.3f}, "
        f"most work over least {results['sharing'][count]['max_over_min']:.2f}"
        for count, front in results["front"].items()
    )
    report.finish(ctx, {"results": results}, lines)
