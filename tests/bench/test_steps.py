"""The breakdown of a decode step: from made-up traces, and from an engine."""

import pytest

from trouper.bench.latency import TimedStep, Watch, gpu_figures, longest_row, watched


def kernel(at, us, name="gemm", cat="kernel"):
    return {"ts": at, "dur": us, "name": name, "cat": cat}


def test_only_gaps_between_steps_are_idle():
    """Ten steps of 100 µs: kernels of 40 + 40 with 2 between, a copy of 3 beside them, 18 of nothing."""
    events = [{"cat": "cpu_op", "ts": 0, "dur": 9999, "name": "python"}]
    for i in range(10):
        at = 100 * i
        copy = kernel(at + 50, 3, "Memcpy DtoH (Device -> Pinned)", "gpu_memcpy")
        events += [kernel(at + 42, 40), copy, kernel(at, 40)]
    found = gpu_figures(events)
    # the window is that from the second step's first kernel to 90 % of the time
    assert found["window_us"] == pytest.approx(0.9 * 982 - 100)
    assert (found["num_kernels"], found["copy_back_us"]) == (16, 8 * 3)
    assert found["device_us"] == pytest.approx(8 * 80)
    assert found["idle_share"] * found["window_us"] == pytest.approx(7 * 18)


def test_a_trace_without_a_gpu_says_nothing():
    assert gpu_figures([{"cat": "cpu_op", "ts": 0, "dur": 5, "name": "add"}, {"ph": "M"}]) == {}


def test_only_the_longest_row_of_full_batches_counts():
    sizes = [0, 4, 4, 0, 4, 4, 4, 3, 4]
    steps = [TimedStep(size, i, i + 0.25) for i, size in enumerate(sizes)]
    assert longest_row(steps, 4) == steps[4:7]
    found = Watch(steps, [0.5] * 18).figures(4)
    assert found == pytest.approx(
        {"num_steps": 2, "step_us": 1e6, "plan_us": 1e6, "launch_us": 25e4, "idle_share": 0.75}
    )
    assert Watch(steps, []).figures(3) == {}


def test_an_engine_is_watched_until_the_block_ends(report):
    sizes = ["--input-len", "4", "--output-len", "12", "--batch-size", "2"]
    sizes += ["--dtype", "float32", "--max-num-seqs", "4", "--max-model-len", "128"]
    iterations = ["--num-iters", "1", "--num-iters-warmup", "0", "--breakdown"]
    (record,) = report("latency", *sizes, *iterations)["results"]
    step = record["step"]
    assert 5 <= step["num_steps"] <= 11
    assert 0 < step["launch_us"] <= step["step_us"]
    assert step["plan_us"] > 0
    assert 0 <= step["idle_share"] < 1
    assert "device_us" not in step
    with watched() as watch:
        pass
    report("latency", *sizes, *iterations[:4])
    assert watch.steps == watch.plan_s == []
