"""Measure the duration of one batch of equal prompts, like `vllm bench latency`, and divide the time of its decode steps.

A step is divided into planning, launching, computing, copying back, and idling. Several runs of the batch are timed from outside: the
start and end of each step on the device's thread, and the calls of the policy; the median run is reported. One more run is traced by
torch's profiler, for what the GPU did and when it was idle; its total time is not used, because tracing itself takes time. Without a
GPU the device's thread computes the step.
"""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, NamedTuple

import msgspec

from trouper import LLM, EngineArgs, SamplingParams
from trouper.actors.executor.workers.model_host import ModelHost
from trouper.actors.messages.steps import StepPlan
from trouper.actors.scheduling.policy import Policy
from trouper.bench.datasets import random_requests
from trouper.bench.report import PERCENTILES, Latency, Point, percentile

GPU_EVENTS = ("kernel", "gpu_memcpy", "gpu_memset")
# Shorter gaps are not counted as idle time, because they occur between any two kernels of a graph.
LEAST_IDLE_US = 5.0
# The methods that the scheduler calls for a step.
POLICY = ("plan", "apply", "take_outputs")
NUM_REPEATS = 3
# This share of a trace is cut off at both ends, because the profiler starts and stops there.
EDGE = 0.1


class TimedStep(NamedTuple):
    """The start and end of a step on the device's thread; `batch_size` is 0 unless it is a pure decode step.

    Times are seconds of a monotonic clock.
    """

    batch_size: int
    begin_s: float
    end_s: float


class Watch(msgspec.Struct):
    """The steps of one run, and the seconds of each call of the policy, recorded by the methods that `watched` wraps."""

    steps: list[TimedStep] = msgspec.field(default_factory=list)
    plan_s: list[float] = msgspec.field(default_factory=list)

    def figures(self, batch_size: int) -> dict[str, Any]:
        """Return the times of the longest sequence of decode steps, in µs; empty without two consecutive steps."""
        steps = longest_row(self.steps, batch_size)
        if len(steps) < 2:
            return {}
        window_s = steps[-1].begin_s - steps[0].begin_s
        busy_s = sum(step.end_s - step.begin_s for step in steps[:-1])
        num = len(steps) - 1
        return {
            "num_steps": num,
            "step_us": 1e6 * window_s / num,
            "plan_us": 1e6 * sum(self.plan_s) / len(self.steps),
            "launch_us": 1e6 * busy_s / num,
            "idle_share": 1 - busy_s / window_s,
        }


def longest_row(steps: Sequence[TimedStep], batch_size: int) -> list[TimedStep]:
    """Return the longest sequence of consecutive steps in which exactly `batch_size` sequences decode.

    Steps with prompts or with another number of sequences interrupt it. Times between its steps can be added.
    """
    rows = groupby(steps, key=lambda step: step.batch_size == batch_size)
    return max((list(row) for is_wanted, row in rows if is_wanted), key=len, default=[])


@contextmanager
def watched() -> Iterator[Watch]:
    """Time the steps of all engines in this process during the block, by wrapping the methods of their classes.

    The methods are restored afterwards.
    """
    watch = Watch()
    plain_step, plain = ModelHost.execute, {name: getattr(Policy, name) for name in POLICY}

    def step(self: ModelHost, plan: Any) -> Any:
        begin = perf_counter()
        done = plain_step(self, plan)
        watch.steps.append(TimedStep(_batch_size(plan), begin, perf_counter()))
        return done

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            begin = perf_counter()
            result = method(*arguments)
            watch.plan_s.append(perf_counter() - begin)
            return result

        return call

    ModelHost.execute = step
    for name, method in plain.items():
        setattr(Policy, name, timed(method))
    try:
        yield watch
    finally:
        ModelHost.execute = plain_step
        for name, method in plain.items():
            setattr(Policy, name, method)


def _batch_size(plan: Any) -> int:
    is_decode = (
        isinstance(plan, StepPlan)
        and set(plan.num_scheduled_tokens) == {1}
        and not plan.new_sequences
    )
    return len(plan.request_slots) if is_decode else 0


def step_breakdown(
    llm: Any, generate: Callable[[], object], batch_size: int, folder: str
) -> dict[str, Any]:
    """Measure the decode steps of `generate`.  `llm` must write its profiles to `folder`.

    Returns:
        num_steps, and for one step its whole time step_us, plan_us (on the event loop, in parallel), launch_us (on the
        device's thread) and idle_share; on a GPU also device_us, copy_back_us and num_kernels. Empty if no two
        complete steps are consecutive.
    """
    runs: list[dict[str, Any]] = []
    for _ in range(NUM_REPEATS):
        with watched() as watch:
            generate()
        runs.append(watch.figures(batch_size))
    figures = sorted(runs, key=lambda run: run.get("step_us", 0.0))[NUM_REPEATS // 2]
    before = set(Path(folder).iterdir())
    llm.start_profile()
    with watched() as traced:
        generate()
    llm.stop_profile()
    (trace,) = set(Path(folder).iterdir()) - before
    gpu = gpu_figures(json.loads(trace.read_text())["traceEvents"])
    trace.unlink()
    in_trace = traced.figures(batch_size)
    if gpu and figures and in_trace:
        per_step = gpu["window_us"] / in_trace["step_us"]
        for name in ("device_us", "copy_back_us", "num_kernels"):
            figures[name] = gpu[name] / per_step
        # Both are upper bounds of the idle time: tracing lengthens gaps, and the difference includes gaps in a graph.
        rest = max(0.0, 1 - figures["device_us"] / figures["step_us"])
        figures["idle_share"] = min(gpu["idle_share"], rest)
    return {name: round(value, 4) for name, value in figures.items()}


def gpu_figures(events: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Sum the GPU's events in the middle of a Chrome trace; empty without such events.

    The edges of the trace are cut off, because the profiler starts and stops there.
    """
    events = sorted(
        (event for event in events if event.get("cat") in GPU_EVENTS), key=lambda event: event["ts"]
    )
    if not events:
        return {}
    first, last = events[0]["ts"], max(event["ts"] + event["dur"] for event in events)
    begin, end = first + EDGE * (last - first), last - EDGE * (last - first)
    inside = [event for event in events if begin <= event["ts"] < end]
    if not inside:
        return {}
    busy = idle = copied = 0.0
    begin = until = inside[0]["ts"]
    for event in inside:
        gap = event["ts"] - until
        idle += gap if gap > LEAST_IDLE_US else 0.0
        reached = min(end, event["ts"] + event["dur"])
        busy += max(0.0, reached - max(until, event["ts"]))
        until = max(until, reached)
        copied += event["dur"] if "DtoH" in event["name"] else 0.0
    return {
        "window_us": end - begin,
        "device_us": busy,
        "idle_share": idle / (end - begin),
        "copy_back_us": copied,
        "num_kernels": sum(event["cat"] == "kernel" for event in inside),
    }


@contextmanager
def profile_folder(engine_args: Any) -> Iterator[str]:
    """Yield a folder for the engine's profiles, and remove it after the block.

    The engine's arguments are changed to write its traces there. Traces can be large.
    """
    with TemporaryDirectory() as folder:
        engine_args.profiler_config = {"torch_profiler_dir": folder}
        yield folder


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
        breakdown: add the parts of a decode step to each record, see `bench/latency.py`.
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
    with profile_folder(engine_args) as folder, LLM.from_engine_args(engine_args) as llm:
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
                record["step"] = step_breakdown(llm, generate, n * size, folder)
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
