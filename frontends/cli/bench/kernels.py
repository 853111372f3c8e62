"""`trouper bench kernels`: each operation beside the measured roofs."""

from typing import Annotated, Any, Literal

import typer

from trouper.errors import TrouperValidationError
from trouper.frontends.cli.bench.options import ReportOptions, note
from trouper.frontends.cli.options import expand_options, integers


@expand_options
def kernels(
    ctx: typer.Context,
    op: Annotated[
        list[str] | None, typer.Option(help="One operation; repeatable.", metavar="NAME")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Whose shapes; Qwen3-0.6B's when left out.")
    ] = None,
    num_tokens: Annotated[
        Any, typer.Option(parser=integers, metavar="N,N,…", help="Tokens of a step.")
    ] = "1,16,256",
    context: Annotated[int, typer.Option(min=1, help="Tokens of a sequence that decodes.")] = 1024,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens in a block.")] = 128,
    dtype: Annotated[
        Literal["bfloat16", "float32"], typer.Option(help="Of all numbers.")
    ] = "bfloat16",
    roof_mib: Annotated[int, typer.Option(min=1, help="Array that is read for the roof.")] = 512,
    roof_gemm: Annotated[int, typer.Option(min=1, help="Side of the roof's matrices.")] = 2048,
    cold_mib: Annotated[
        int,
        typer.Option(min=0, help="Weights and caches are copied to so much: none is in a cache."),
    ] = 256,
    sample_ms: Annotated[float, typer.Option(min=0.0, help="Least length of a sample.")] = 20.0,
    *,
    report: ReportOptions,
) -> None:
    """Time, GB/s, GFLOP/s and share of the roof of every operation."""
    report.check()
    if min(num_tokens) < 1:
        raise TrouperValidationError(
            "must be at least 1", parameter="num_tokens", value=min(num_tokens)
        )
    config: dict[str, Any] | None = None
    if model is not None:
        from trouper.config import EngineArgs

        config = EngineArgs(model=model).resolve().model.hf_config

    from trouper.bench import kernels as core
    from trouper.bench.roofs import measure_roofs

    unknown = [name for name in op or () if name not in core.OPS]
    if unknown:
        names = "; ".join(core.OPS)
        raise TrouperValidationError(f"must be one of: {names}", parameter="op", value=unknown[0])
    shapes = core.shapes(
        config,
        num_tokens,
        context=context,
        block_size=block_size,
        cold_bytes=cold_mib * 2**20,
        dtype=dtype,
    )
    roofs = measure_roofs(shapes[0].dtype, read_bytes=roof_mib * 2**20, gemm=roof_gemm)
    records: list[dict[str, Any]] = []
    for record in core.measure(shapes, roofs, op or list(core.OPS), sample_s=sample_ms / 1000):
        note(f"{record['op']} {record['shape']}: {record['us']} µs")
        records.append(record)
    full = {
        "roofs": {"read_gb_s": roofs.read_bytes_s / 1e9, "gemm_gflop_s": roofs.flops_s / 1e9},
        "results": records,
    }
    report.finish(ctx, full, _lines(full))


def _lines(full: dict[str, Any]) -> list[str]:
    roofs = full["roofs"]
    return [
        f"roofs: read {roofs['read_gb_s']:.1f} GB/s, {roofs['gemm_gflop_s']:.0f} GFLOP/s",
        f"{'operation':26}{'shape':32}{'µs':>11}{'GB/s':>9}{'GFLOP/s':>10}{'of roof':>9}",
        *(
            f"{r['op']:26}{r['shape']:32}{r['us']:11.1f}{r['gb_s']:9.1f}{r['gflop_s']:10.1f}"
            f"{100 * r['share_of_roof']:7.0f} %"
            for r in full["results"]
        ),
    ]
