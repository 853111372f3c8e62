"""`trouper bench latency`: measure the duration of one batch."""

from typing import Annotated, Any

import typer

from trouper.bench.cli.options import ReportOptions, reporting, tokenizer_of
from trouper.config.args import EngineArgs
from trouper.config.resolve import resolve
from trouper.errors import TrouperValidationError
from trouper.frontends.cli import output
from trouper.frontends.cli.arguments.options import expand_options
from trouper.frontends.cli.arguments.values import integers


@expand_options
def latency(
    ctx: typer.Context,
    input_len: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 32,
    output_len: Annotated[int, typer.Option(min=1, help="Tokens of each output.")] = 128,
    batch_size: Annotated[
        Any, typer.Option(parser=integers, metavar="N,N,…", help="Numbers of prompts in a batch.")
    ] = "8",
    n: Annotated[int, typer.Option(min=1, help="Completions of each prompt.")] = 1,
    num_iters_warmup: Annotated[
        int, typer.Option(min=0, help="Untimed batches before the timed ones.")
    ] = 10,
    num_iters: Annotated[int, typer.Option(min=1, help="Number of timed batches.")] = 30,
    seed: Annotated[int, typer.Option(help="Equal seeds give equal prompts.")] = 0,
    disable_detokenize: Annotated[
        bool, typer.Option("--disable-detokenize", help="Generate token ids without text.")
    ] = False,
    profile: Annotated[
        bool, typer.Option("--profile", help="Trace one batch instead of timing, and exit.")
    ] = False,
    breakdown: Annotated[
        bool, typer.Option("--breakdown", help="Show the parts of a decode step's time.")
    ] = False,
    plot: Annotated[
        str | None, reporting("Plot latencies over the batch sizes as PNG.", metavar="FILE")
    ] = None,
    *,
    report: ReportOptions,
    engine_args: EngineArgs,
) -> None:
    """Measure the duration of a batch; prefix caching is off by default."""
    from trouper.bench.datasets import SampleRequest, check_fit
    from trouper.bench.report import check_available, check_writable

    if min(batch_size) < 1:
        raise TrouperValidationError(
            "must be at least 1", parameter="batch_size", value=min(batch_size)
        )
    report.check()
    if plot is not None:
        check_available()
        check_writable("plot", plot)
    if engine_args.enable_prefix_caching is None:
        engine_args.enable_prefix_caching = False
    engine_args.seed = seed
    config = resolve(engine_args, offline=True)
    _, vocabulary = tokenizer_of(config.tokenizer)
    check_fit([SampleRequest((0,) * input_len, output_len)], config.max_model_len)

    from trouper.bench import latency as core

    if profile:
        core.profile(engine_args, vocabulary, batch_size[0], input_len, output_len)
        return
    num_batches = len(batch_size) * (num_iters_warmup + num_iters)
    with output.progress(num_batches, "batches") as bar:
        records = core.measure(
            engine_args,
            vocabulary,
            batch_sizes=batch_size,
            input_len=input_len,
            output_len=output_len,
            n=n,
            num_iters=num_iters,
            num_iters_warmup=num_iters_warmup,
            disable_detokenize=disable_detokenize,
            breakdown=breakdown,
            step=bar.update,
        )
    if plot is not None:
        from trouper.bench.report import plot as draw

        title = f"{config.model.name}: {input_len} tokens in, {output_len} out"
        draw(plot, core.points(records), title=title, concurrency="prompts in a batch")
    report.finish(ctx, {"results": records}, (line for r in records for line in _lines(r)))


def _lines(record: dict[str, Any]) -> list[str]:
    percentiles = ", ".join(f"{q} % {s:.4f}" for q, s in record["percentiles"].items())
    step = ", ".join(f"{name} {value:g}" for name, value in record.get("step", {}).items())
    return [
        f"Batch of {record['batch_size']}: avg latency {record['avg_latency']:.4f} s, "
        f"{record['output_tok_s']:.1f} output tokens/s",
        f"  percentiles, s: {percentiles}",
        *([f"  decode step: {step}"] if step else []),
    ]
