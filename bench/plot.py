"""A picture of throughput and latencies over concurrency."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import NamedTuple

from trouper.errors import UnsupportedFeatureError
from trouper.extras import install_hint


class Latency(NamedTuple):
    """The middle and the tail of one latency."""

    median_ms: float
    p99_ms: float


class Point(NamedTuple):
    """One measurement at one concurrency; its latencies go by the names that the picture gives them."""

    concurrency: float
    tokens_per_s: float
    latencies: Mapping[str, Latency]


def check_available() -> None:
    """Before the measurement.  Raises UnsupportedFeatureError without matplotlib."""
    if find_spec("matplotlib") is None:
        raise UnsupportedFeatureError(f"--plot needs matplotlib: {install_hint('bench')}")


def plot(path: str, points: Sequence[Point], *, title: str, concurrency: str) -> None:
    """Write a PNG with a title: throughput on top, below it each latency, all over `concurrency`."""
    check_available()
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    points = sorted(points, key=lambda point: point.concurrency)
    names = list(dict.fromkeys(name for point in points for name in point.latencies))
    figure = Figure(figsize=(6, 3 * (1 + len(names))), layout="constrained")
    figure.suptitle(title, wrap=True)
    throughput, *below = figure.subplots(1 + len(names), sharex=True, squeeze=False)[:, 0]
    xs = [point.concurrency for point in points]
    throughput.plot(xs, [point.tokens_per_s for point in points], marker="o")
    throughput.set(ylabel="output tokens/s")
    for axes, name in zip(below, names, strict=True):
        found = [
            (point.concurrency, point.latencies[name])
            for point in points
            if name in point.latencies
        ]
        for label, pick in (("median", 0), ("99th percentile", 1)):
            axes.plot(
                [x for x, _ in found], [pair[pick] for _, pair in found], marker="o", label=label
            )
        axes.set(ylabel=f"{name}, ms")
        axes.legend()
    for axes in (throughput, *below):
        axes.set_xlabel(concurrency)
        axes.set_ylim(bottom=0)
        axes.grid(visible=True, alpha=0.3)
    figure.savefig(path, format="png", dpi=150)
