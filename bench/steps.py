"""Find where the time of a decode step goes: planning, launching, computing, copying back, and nothing at all.

Some runs of one batch are watched from outside: when the device's thread began and ended each step, and how
long the policy took.  The median one is told.  Another is traced by torch's profiler; what the GPU did in it counts,
and when it did nothing, but not how long it all took, as tracing takes time itself.  Without a GPU the
trace says nothing, and the thread is the device.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, NamedTuple

import msgspec

from trouper.actors.executor.workers.model_host import ModelHost
from trouper.actors.messages.steps import StepPlan
from trouper.actors.scheduling.policy import Policy

GPU_EVENTS = ("kernel", "gpu_memcpy", "gpu_memset")
LEAST_IDLE_US = 5.0  # between two kernels of a graph lie one or two
POLICY = ("plan", "apply", "take_outputs")  # what it does for a step
NUM_REPEATS = 3
EDGE = 0.1  # of a trace at either end: not steady yet, or no longer


class TimedStep(NamedTuple):
    """On the device's thread: launched, on a GPU, or computed."""

    batch_size: int  # 0 unless all columns have one token and ran before
    begin_s: float
    end_s: float


class Watch(msgspec.Struct):
    steps: list[TimedStep] = msgspec.field(default_factory=list)
    plan_s: list[float] = msgspec.field(default_factory=list)  # one entry a call of the policy

    def figures(self, batch_size: int) -> dict[str, Any]:
        """Times of the longest unbroken row of decode steps, in µs; empty without two of them."""
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
    """Consecutive steps in which exactly so many sequences decode."""
    rows = groupby(steps, key=lambda step: step.batch_size == batch_size)
    return max((list(row) for is_wanted, row in rows if is_wanted), key=len, default=[])


@contextmanager
def watched() -> Iterator[Watch]:
    """Every engine of this process, until the block ends."""
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


def breakdown(
    llm: Any, generate: Callable[[], object], batch_size: int, folder: str
) -> dict[str, Any]:
    """Measure `generate` of a batch that decodes.  `llm` was made to write its profiles into `folder`.

    Returns:
        Nothing where no two full steps follow each other; else num_steps, and of one step step_us (all of it), plan_us (beside the others, on the event loop),
        launch_us (on the device's thread) and idle_share; on a GPU also device_us, copy_back_us and num_kernels.
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
        # Of two bounds the nearer: tracing makes the gaps longer, and the rest has those within a graph.
        rest = max(0.0, 1 - figures["device_us"] / figures["step_us"])
        figures["idle_share"] = min(gpu["idle_share"], rest)
    return {name: round(value, 4) for name, value in figures.items()}


def gpu_figures(events: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Sums over the middle of a Chrome trace; empty if no GPU did anything in it."""
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
    """Make the folder into which the engine writes its profiles; it is removed afterwards."""
    with TemporaryDirectory() as folder:
        engine_args.profiler_config = {"torch_profiler_dir": folder}
        yield folder
