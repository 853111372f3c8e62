"""`trouper bench kernels`: measure each operation against the machine's memory and arithmetic limits."""

import os
from typing import Annotated, Any, Literal

import typer

from trouper.bench.cli.options import ReportOptions, note
from trouper.config.devices import cuda_problem
from trouper.errors import TrouperValidationError, UnsupportedFeatureError
from trouper.extras import install_hint
from trouper.frontends.cli.options import expand_options
from trouper.frontends.cli.values import integers


@expand_options
def kernels(
    ctx: typer.Context,
    op: Annotated[
        list[str] | None,
        typer.Option(help="Measure only this operation; repeatable.", metavar="NAME"),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            help="Folder or preset with the shapes to measure; Qwen3-0.6B by default.",
        ),
    ] = None,
    device: Annotated[
        Literal["cpu", "cuda", "interpreter"],
        typer.Option(
            help="Device to measure; interpreter only tests the CUDA kernels, its times mean nothing."
        ),
    ] = "cpu",
    num_tokens: Annotated[
        Any, typer.Option(parser=integers, metavar="N,N,…", help="Numbers of tokens in a step.")
    ] = "1,16,256",
    context: Annotated[
        int, typer.Option(min=1, help="Cached tokens of each decoding sequence.")
    ] = 1024,
    block_size: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens in a KV block; by default 128, or 16 on a GPU."),
    ] = None,
    dtype: Annotated[
        Literal["bfloat16", "float32"], typer.Option(help="Type of weights and activations.")
    ] = "bfloat16",
    roof_mib: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Size of the array for the memory bandwidth: by default 512 MiB to read, or 4096 to copy on a GPU.",
        ),
    ] = None,
    roof_gemm: Annotated[
        int | None,
        typer.Option(
            min=1, help="Side of the square matrices for FLOP/s; by default 2048, or 8192 on a GPU."
        ),
    ] = None,
    cold_mib: Annotated[
        int,
        typer.Option(
            min=0,
            help="MiB to fill with copies of weights and KV, so that they do not fit into a cache.",
        ),
    ] = 256,
    sample_ms: Annotated[
        float, typer.Option(min=0.0, help="Shortest duration of a sample in milliseconds.")
    ] = 20.0,
    *,
    report: ReportOptions,
) -> None:
    """Measure the time, GB/s, GFLOP/s and share of the machine's limit of every operation."""
    report.check()
    if min(num_tokens) < 1:
        raise TrouperValidationError(
            "must be at least 1", parameter="num_tokens", value=min(num_tokens)
        )
    if device == "interpreter":
        # Triton reads the variable when it is imported.
        os.environ["TRITON_INTERPRET"] = "1"
    config: dict[str, Any] | None = None
    if model is not None:
        from trouper.config.args import EngineArgs
        from trouper.config.model import ModelConfig

        config = ModelConfig.load(EngineArgs(model=model, load_format="dummy")).hf_config

    from trouper.bench.kernels import measure as core
    from trouper.bench.kernels.cpu import OPS
    from trouper.bench.kernels.measure import clock_and_roofs

    table = OPS if device == "cpu" else _cuda_ops(device)
    unknown = [name for name in op or () if name not in table]
    if unknown:
        names = "; ".join(table)
        raise TrouperValidationError(f"must be one of: {names}", parameter="op", value=unknown[0])
    shapes = core.shapes(
        config,
        num_tokens,
        context=context,
        block_size=block_size or (128 if device == "cpu" else 16),
        cold_bytes=cold_mib * 2**20,
        dtype=dtype,
        device="cuda" if device == "cuda" else "cpu",
    )
    clock, roofs = clock_and_roofs(
        device, dtype, roof_mib=roof_mib, roof_gemm=roof_gemm, sample_s=sample_ms / 1000
    )
    records: list[dict[str, Any]] = []
    for record in core.measure(shapes, roofs, op or list(table), table=table, clock=clock):
        note(f"{record['op']} {record['shape']}: {record['us']} µs")
        records.append(record)
    memory = "copy_gb_s" if device == "cuda" else "read_gb_s"
    full = {
        "device": device,
        "roofs": {memory: roofs.bytes_s / 1e9, "gemm_gflop_s": roofs.flops_s / 1e9},
        "results": records,
    }
    report.finish(ctx, full, _lines(full))


def _cuda_ops(device: str) -> Any:
    """Return the CUDA operations.  Raises UnsupportedFeatureError without Triton or without the device."""
    try:
        from trouper.bench.kernels.cuda import OPS
        from trouper.kernels.cuda.launch import INTERPRETED  # pyright: ignore[reportUnknownVariableType]
    except ModuleNotFoundError as error:
        raise UnsupportedFeatureError(
            f"--device {device} needs the package {error.name}: {install_hint('cuda')}"
        ) from None
    if device == "cuda":
        problem = "TRITON_INTERPRET is set" if INTERPRETED else cuda_problem()
    else:
        problem = None if INTERPRETED else "Triton was already imported without its interpreter"
    if problem:
        raise UnsupportedFeatureError(f"--device {device}: {problem}")
    return OPS


def _lines(full: dict[str, Any]) -> list[str]:
    roofs = full["roofs"]
    name, rate = next(iter(roofs.items()))
    return [
        f"roofs: {name.split('_')[0]} {rate:.1f} GB/s, {roofs['gemm_gflop_s']:.0f} GFLOP/s",
        f"{'operation':26}{'shape':32}{'error':>9}{'µs':>11}{'GB/s':>9}{'GFLOP/s':>10}{'of roof':>9}",
        *(
            f"{r['op']:26}{r['shape']:32}{r['error']:9.1e}{r['us']:11.1f}{r['gb_s']:9.1f}{r['gflop_s']:10.1f}"
            f"{100 * r['share_of_roof']:7.0f} %"
            for r in full["results"]
        ),
    ]
