"""Define the values returned by `get_metrics()`, one for each metric and set of labels."""

import msgspec


class Metric(msgspec.Struct, frozen=True):
    """A metric's value at one moment: a `Counter`, a `Gauge` or a `Histogram`.

    `name` is the same as in the Prometheus text.  Values with the same name differ in their `labels`.
    """

    name: str
    labels: dict[str, str]


class Counter(Metric, frozen=True):
    """A metric with a value that only grows while the engine lives.

    The difference between two readings is the number of events between them.  It starts at 0 with each engine.
    """

    value: int


class Gauge(Metric, frozen=True):
    value: float


class Histogram(Metric, frozen=True):
    count: int
    sum: float
    buckets: dict[str, int]  # upper bound -> observations up to it; the last bound is "+Inf"
