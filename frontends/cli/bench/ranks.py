"""`trouper bench ranks`: a model by tensor-parallel ranks, beside one process with as many threads, or beside one GPU."""

from typing import Annotated, Any, Literal

import typer

from trouper.frontends.cli.bench.options import GeometryOptions, ReportOptions
from trouper.frontends.cli.options import expand_options, integers


@expand_options
def ranks(
    ctx: typer.Context,
    ranks: Annotated[int, typer.Option(min=2, help="Number of tensor-parallel ranks.")] = 2,
    device: Annotated[
        Literal["cpu", "cuda"], typer.Option(help="Where: cpu, or cuda with a GPU for each rank.")
    ] = "cpu",
    prompt_tokens: Annotated[int, typer.Option(min=16, help="Tokens of the prompt.")] = 512,
    rows: Annotated[
        Any,
        typer.Option(parser=integers, metavar="N,N,…", help="Numbers of sequences that decode."),
    ] = "1,32",
    output_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each of them.")] = 32,
    num_iters: Annotated[int, typer.Option(min=1, help="Rounds of each engine, in turn.")] = 3,
    *,
    geometry: GeometryOptions,
    report: ReportOptions,
) -> None:
    """Measure a prompt and decode steps by ranks, beside one process on the same cores or one GPU."""
    from trouper.bench import ranks as core

    report.check()
    whole, cut = core.configs(
        geometry.args(), ranks, prompt_tokens, max(rows), output_tokens, device
    )
    records = core.measure_both(
        whole,
        cut,
        num_prompt_tokens=prompt_tokens,
        rows=rows,
        num_outputs=output_tokens,
        num_rounds=num_iters,
    )
    report.finish(ctx, {"results": records}, map(_line, records))


def _line(record: dict[str, Any]) -> str:
    return (
        f"{record['what']:20} one process {1000 * record['one_process_s']:.1f} ms, "
        f"{record['num_ranks']} ranks {1000 * record['ranks_s']:.1f} ms, {record['ratio']:.2f} of its speed"
    )
