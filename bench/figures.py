"""Sum up many measurements in a few figures.  Pure."""

import statistics
from collections.abc import Mapping, Sequence

PERCENTILES = (10.0, 25.0, 50.0, 75.0, 90.0, 99.0)


def percentile(values: Sequence[float], q: float) -> float:
    """Linear between the two nearest ranks; q in [0, 100].  Raises ValueError without values."""
    if not values or not 0 <= q <= 100:
        raise ValueError("a percentile needs values, and q in [0, 100]")
    ordered = sorted(values)
    place = (len(ordered) - 1) * q / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def spread(values: Sequence[float]) -> float:
    """(largest - smallest) / median: what five repeats leave uncertain."""
    return (max(values) - min(values)) / statistics.median(values)


def summary(
    values: Sequence[float], percentiles: Sequence[float] = PERCENTILES
) -> dict[str, float]:
    """mean, median, std, max and p<q>; empty without values."""
    if not values:
        return {}
    figures = {
        "mean": statistics.fmean(values),
        "median": statistics.median(values),
        "std": statistics.pstdev(values),
        "max": max(values),
    }
    return figures | {f"p{q:g}": percentile(values, q) for q in percentiles}


def repeats(seconds: Sequence[float]) -> dict[str, object]:
    """Repeats of one measurement: median, spread and every value, in seconds."""
    return {
        "median_s": round(statistics.median(seconds), 6),
        "spread": round(spread(seconds), 4),
        "all_s": [round(value, 6) for value in seconds],
    }


def num_good(requests: Sequence[Mapping[str, float]], objectives: Mapping[str, float]) -> int:
    """How many requests keep every objective; a figure that a request does not have is kept."""
    return sum(
        all(request.get(name, 0.0) <= limit for name, limit in objectives.items())
        for request in requests
    )
