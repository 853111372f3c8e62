"""`trouper bench pipeline`: one prompt through the stages of a pipeline, beside one process."""

from typing import Annotated, Any

import typer

from trouper.config.args import EngineArgs
from trouper.frontends.cli.bench.options import ReportOptions
from trouper.frontends.cli.options import expand_options, integers


@expand_options
def pipeline(
    ctx: typer.Context,
    model: Annotated[
        str,
        typer.Option("--model", "-m", help="Folder, hub id, or a geometry with random weights."),
    ] = "qwen3-0.6b",
    load_format: Annotated[
        str, typer.Option(help="auto for a folder; dummy for random weights of a geometry.")
    ] = "dummy",
    dtype: Annotated[str, typer.Option(help="Type of the weights.")] = "bfloat16",
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
    report: ReportOptions,
) -> None:
    """Measure how much faster stages on a core each compute a prompt than one process on one core."""
    from trouper.bench import pipeline as core

    report.check()
    args = EngineArgs(model=model, load_format=load_format, dtype=dtype, skip_tokenizer_init=True)
    whole, cut = core.configs(args, stages, chunk_tokens, max(chunks), stalls=stall)
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
