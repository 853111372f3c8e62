"""The values that `get_metrics()` returns, one for each metric and set of labels."""

import msgspec


class Metric(msgspec.Struct, frozen=True):
    """A metric's value at one moment; it is a `Counter`, a `Gauge` or a `Histogram`."""

    name: str
    labels: dict[str, str]


class Counter(Metric, frozen=True):
    """A metric whose value only grows."""

    value: int


class Gauge(Metric, frozen=True):
    value: float


class Histogram(Metric, frozen=True):
    count: int
    sum: float
    buckets: dict[str, int]  # upper bound -> observations up to it; the last bound is "+Inf"
