"""Measure the duration of one batch of equal prompts, like `vllm bench latency`."""

import random
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

from trouper import LLM, EngineArgs, SamplingParams
from trouper.bench import steps
from trouper.bench.datasets import random_requests
from trouper.bench.report import PERCENTILES, Latency, Point, percentile


def measure(
    engine_args: EngineArgs,
    vocabulary: Sequence[int],
    *,
    batch_sizes: Sequence[int],
    input_len: int,
    output_len: int,
    n: int = 1,
    num_iters: int,
    num_iters_warmup: int,
    disable_detokenize: bool = False,
    breakdown: bool = False,
    step: Callable[[], object] = lambda: None,
) -> list[dict[str, Any]]:
    """Time batches and return one record for each batch size; latencies are in seconds.

    Args:
        breakdown: add the parts of a decode step to each record, see `bench/steps.py`.
        step: called after each batch, for a progress bar.
    """
    params = SamplingParams(
        n=n,
        temperature=1.0,
        ignore_eos=True,
        max_tokens=output_len,
        detokenize=not disable_detokenize,
    )
    rng = random.Random(engine_args.seed)
    records: list[dict[str, Any]] = []
    with steps.profile_folder(engine_args) as folder, LLM.from_engine_args(engine_args) as llm:
        for size in batch_sizes:
            requests = random_requests(size, input_len, output_len, vocabulary, rng)
            prompts = [list(request.prompt_token_ids) for request in requests]
            latencies: list[float] = []
            for _ in range(num_iters_warmup + num_iters):
                started = perf_counter()
                llm.generate(prompts, params, use_tqdm=False)
                latencies.append(perf_counter() - started)
                step()
            record = _record(size, n * output_len, latencies[num_iters_warmup:])
            if breakdown:
                generate = partial(llm.generate, prompts, params, use_tqdm=False)
                record["step"] = steps.breakdown(llm, generate, n * size, folder)
            records.append(record)
    return records


def profile(
    engine_args: EngineArgs,
    vocabulary: Sequence[int],
    batch_size: int,
    input_len: int,
    output_len: int,
) -> None:
    """Trace one batch with torch's profiler, after a warm-up batch.

    The trace is written to the folder of the engine's `profiler_config`. Its time is not part of the results.
    """
    rng = random.Random(engine_args.seed)
    requests = random_requests(batch_size, input_len, output_len, vocabulary, rng)
    prompts = [list(request.prompt_token_ids) for request in requests]
    params = SamplingParams(temperature=1.0, ignore_eos=True, max_tokens=output_len)
    with LLM.from_engine_args(engine_args) as llm:
        llm.generate(prompts, params, use_tqdm=False)
        llm.start_profile()
        llm.generate(prompts, params, use_tqdm=False)
        llm.stop_profile()


def _record(batch_size: int, num_made: int, latencies: list[float]) -> dict[str, Any]:
    average = sum(latencies) / len(latencies)
    return {
        "batch_size": batch_size,
        "avg_latency": average,
        "output_tok_s": batch_size * num_made / average,
        "percentiles": {f"{q:g}": percentile(latencies, q) for q in PERCENTILES},
        "latencies": latencies,
    }


def points(records: Sequence[dict[str, Any]]) -> list[Point]:
    """Return the points of the plot, one for each batch size. They show how latency grows with throughput."""
    return [
        Point(
            record["batch_size"],
            record["output_tok_s"],
            {
                "time of a batch": Latency(
                    1000 * record["percentiles"]["50"], 1000 * record["percentiles"]["99"]
                )
            },
        )
        for record in records
    ]
