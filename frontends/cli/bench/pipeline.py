"""`trouper bench pipeline`: one prompt through the stages of a pipeline, beside one process."""

from typing import Annotated, Any

import typer

from trouper.frontends.cli.bench.options import GeometryOptions, ReportOptions
from trouper.frontends.cli.options import expand_options, integers


@expand_options
def pipeline(
    ctx: typer.Context,
    stages: Annotated[int, typer.Option(min=2, help="Number of stages, a core each.")] = 2,
    chunks: Annotated[
        Any,
        typer.Option(parser=integers, metavar="N,N,…", help="Numbers of chunks of the prompts."),
    ] = "8,32",
    chunk_tokens: Annotated[int, typer.Option(min=16, help="Tokens of a chunk.")] = 128,
    stall: Annotated[
        bool, typer.Option("--stall", help="Have each step wait until the one before is answered.")
    ] = False,
    num_iters: Annotated[int, typer.Option(min=1, help="Prompts of each engine, in turn.")] = 3,
    *,
    geometry: GeometryOptions,
    report: ReportOptions,
) -> None:
    """Measure how much faster stages on a core each compute a prompt than one process on one core."""
    from trouper.bench import pipeline as core

    report.check()
    whole, cut = core.configs(geometry.args(), stages, chunk_tokens, max(chunks), stalls=stall)
    records = core.measure_on_one_core_each(
        whole, cut, chunk_tokens=chunk_tokens, chunks=chunks, num_rounds=num_iters
    )
    report.finish(ctx, {"stall": stall, "results": records}, map(_line, records))


def _line(record: dict[str, Any]) -> str:
    return (
        f"{record['num_chunks']:4} chunks of {record['chunk_tokens']}: "
        f"one stage {record['one_stage_s']:.2f} s, {record['num_stages']} stages {record['stages_s']:.2f} s, "
        f"{record['gain']:.2f} times as fast (at most {record['bound']:.2f})"
    )
