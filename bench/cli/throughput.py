"""`trouper bench throughput` and `trouper bench latency`: measure offline throughput, or the duration of one batch."""

import sys
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from trouper.bench.cli.options import (
    DatasetOptions,
    ReportOptions,
    note,
    reporting,
    terminable,
    tokenizer_of,
)
from trouper.config.args import EngineArgs
from trouper.config.resolve import resolve
from trouper.errors import TrouperValidationError
from trouper.frontends.cli import output
from trouper.frontends.cli.options import expand_options
from trouper.frontends.cli.values import integers

if TYPE_CHECKING:
    from trouper.bench.throughput import Run


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
    report.finish(ctx, {"results": records}, (line for r in records for line in _latency_lines(r)))


def _latency_lines(record: dict[str, Any]) -> list[str]:
    percentiles = ", ".join(f"{q} % {s:.4f}" for q, s in record["percentiles"].items())
    step = ", ".join(f"{name} {value:g}" for name, value in record.get("step", {}).items())
    return [
        f"Batch of {record['batch_size']}: avg latency {record['avg_latency']:.4f} s, "
        f"{record['output_tok_s']:.1f} output tokens/s",
        f"  percentiles, s: {percentiles}",
        *([f"  decode step: {step}"] if step else []),
    ]


PLAIN, PREQUEUED = "as they come", "prequeued"


@expand_options
def throughput(
    ctx: typer.Context,
    backend: Annotated[
        Literal["trouper", "trouper-chat", "vllm", "vllm-chat", "hf", "hf-cb"],
        typer.Option(help="Engine to measure; engines other than trouper must be installed."),
    ] = "trouper",
    n: Annotated[int, typer.Option(min=1, help="Completions of each prompt.")] = 1,
    num_warmups: Annotated[
        int, typer.Option(min=0, help="Untimed requests before the timed ones.")
    ] = 0,
    seed: Annotated[int, typer.Option(help="Equal seeds give equal requests.")] = 0,
    repeat: Annotated[
        int, typer.Option(min=1, help="Number of runs; the report has their median and spread.")
    ] = 1,
    prequeue_requests: Annotated[
        bool,
        typer.Option("--prequeue-requests", help="Queue all requests before any is scheduled."),
    ] = False,
    compare_prequeue: Annotated[
        bool,
        typer.Option(
            "--compare-prequeue", help="Alternate runs with and without --prequeue-requests."
        ),
    ] = False,
    async_engine: Annotated[
        bool, typer.Option("--async-engine", help="Use AsyncLLMEngine instead of LLM.")
    ] = False,
    disable_detokenize: Annotated[
        bool, typer.Option("--disable-detokenize", help="Generate token ids without text.")
    ] = False,
    profile: Annotated[
        bool, typer.Option("--profile", help="Trace the device; needs --profiler-config.")
    ] = False,
    hf_max_batch_size: Annotated[
        int | None, typer.Option(min=1, help="Largest batch of --backend hf.")
    ] = None,
    *,
    dataset: DatasetOptions,
    report: ReportOptions,
    engine_args: EngineArgs,
) -> None:
    """Measure offline throughput in requests/s and tokens/s."""
    from trouper.bench import throughput as core
    from trouper.bench.datasets import check_fit

    wishes = core.RunOptions(
        backend=backend,
        n=n,
        prequeue_requests=prequeue_requests or compare_prequeue,
        async_engine=async_engine,
        profile=profile,
        disable_detokenize=disable_detokenize,
        hf_max_batch_size=hf_max_batch_size,
        use_tqdm=output.is_terminal(sys.stderr),
    )
    wishes.check(engine_args, dataset.dataset_name)
    report.check()
    engine_args.seed = seed
    config = resolve(engine_args, offline=True)
    if dataset.dataset_name == "sharegpt" and dataset.dataset_path is None:
        note("using random prompts, because there is no --dataset-path")
    tokenizer, vocabulary = tokenizer_of(config.tokenizer)
    requests = dataset.requests(tokenizer, vocabulary, seed, texts=wishes.is_chat)
    warm_ups = dataset.requests(tokenizer, vocabulary, seed + 1, texts=wishes.is_chat)[:num_warmups]
    check_fit([*requests, *warm_ups], config.max_model_len)
    ways = (PLAIN, PREQUEUED) if compare_prequeue else (PREQUEUED if prequeue_requests else PLAIN,)
    runs: dict[str, list[Run]] = {way: [] for way in ways}
    with terminable(), core.open_engine(wishes, engine_args) as engine:
        if warm_ups:
            engine.generate_all(warm_ups, prequeue=ways[0] == PREQUEUED)
        for _ in range(repeat):
            for way in ways:
                is_queued = way == PREQUEUED
                runs[way].append(core.run_observed(engine, requests, prequeue=is_queued))
    records = {way: _record(runs[way]) for way in ways}
    lines = [line for way in ways for line in _lines(way if len(ways) > 1 else "", runs[way])]
    first, *_ = records.values()
    more: dict[str, Any] = {"ways": records} if len(ways) > 1 else {}
    report.finish(ctx, {"model_id": config.model.name, "backend": backend, **first, **more}, lines)


def _record(runs: "Sequence[Run]") -> dict[str, Any]:
    """Return the record of all runs under vLLM's keys, with the median elapsed time."""
    from trouper.bench.report import repeats

    seconds, tokens = median(run.seconds for run in runs), runs[0].num_tokens
    return {
        "elapsed_time": seconds,
        "num_requests": runs[0].num_requests,
        "total_num_tokens": tokens,
        "total_output_tokens": runs[0].num_output_tokens,
        "requests_per_second": runs[0].num_requests / seconds,
        "tokens_per_second": tokens / seconds,
        "output_tokens_per_second": runs[0].num_output_tokens / seconds,
        "front_cpu_share": _front_share(runs),
        "repeats": repeats([run.seconds for run in runs])
        | {"all_steps": [run.num_steps for run in runs]},
    }


def _lines(way: str, runs: "Sequence[Run]") -> list[str]:
    from trouper.bench.report import spread

    run, seconds = runs[0], median(run.seconds for run in runs)
    lines = [
        f"Throughput: {run.num_requests / seconds:.2f} requests/s, {run.num_tokens / seconds:.2f} "
        f"total tokens/s, {run.num_output_tokens / seconds:.2f} output tokens/s",
        f"Total num prompt tokens: {run.num_prompt_tokens}",
        f"Total num output tokens: {run.num_output_tokens}",
    ]
    front_share = _front_share(runs)
    if front_share is not None:
        lines.append(f"Processor time outside the device thread: {100 * front_share:.2f} %")
    if len(runs) > 1:
        share = 100 * spread([run.seconds for run in runs])
        lines.append(f"{len(runs)} runs: median {seconds:.3f} s, spread {share:.1f} %")
    steps = [run.num_steps for run in runs if run.num_steps is not None]
    if steps:
        lines.append(
            f"Steps: {min(steps)}" + (f" to {max(steps)}" if max(steps) > min(steps) else "")
        )
    return [f"{way}:", *(f"  {line}" for line in lines)] if way else lines


def _front_share(runs: "Sequence[Run]") -> float | None:
    """Return the processor time of everything except the device, divided by the elapsed time."""
    shares = [run.front_s / run.seconds for run in runs if run.front_s is not None]
    return median(shares) if shares else None
