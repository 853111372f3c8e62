"""A picture of throughput and latency over concurrency."""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import NamedTuple

from trouper.errors import UnsupportedFeatureError
from trouper.extras import install_hint


class Point(NamedTuple):
    """One measurement at one concurrency."""

    concurrency: float
    tokens_per_s: float
    median_ms: float
    p99_ms: float


def check_available() -> None:
    """Before the measurement.  Raises UnsupportedFeatureError without matplotlib."""
    if find_spec("matplotlib") is None:
        raise UnsupportedFeatureError(f"--plot needs matplotlib: {install_hint('bench')}")


def plot(path: str, points: Sequence[Point], *, latency: str, concurrency: str) -> None:
    """Write a PNG: throughput above, latency below, both over `concurrency`."""
    check_available()
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    points = sorted(points)
    xs = [point.concurrency for point in points]
    figure = Figure(figsize=(6, 6), layout="constrained")
    above, below = figure.subplots(2, sharex=True)
    above.plot(xs, [point.tokens_per_s for point in points], marker="o")
    above.set(ylabel="output tokens/s")
    below.plot(xs, [point.median_ms for point in points], marker="o", label="median")
    below.plot(xs, [point.p99_ms for point in points], marker="o", label="99th percentile")
    below.set(xlabel=concurrency, ylabel=f"{latency} latency, ms")
    below.legend()
    for axes in (above, below):
        axes.set_ylim(bottom=0)
        axes.grid(visible=True, alpha=0.3)
    figure.savefig(path, format="png", dpi=150)
