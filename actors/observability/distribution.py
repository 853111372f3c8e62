"""Observations in buckets: what Prometheus calls a histogram, at 0.2 µs an observation.

`prometheus_client`'s own takes 2 µs (a lock for each of three values), which at one observation a token is
too much for the event loop.  Here the Observer is the only writer, so that no lock is needed.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate


class Distribution:
    """Counts per bucket; a value equal to a bound counts as up to that bound.

    Each bucket has its own count here; `cumulative` adds them up for Prometheus, a rare operation.
    """

    __slots__ = ("_bounds", "_counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def __repr__(self) -> str:
        return f"<Distribution of {self.count}>"

    @property
    def count(self) -> int:
        """Observations so far."""
        return sum(self._counts)

    def observe(self, value: float) -> None:
        """Count one observation.

        The bucket is found by bisection, so the cost hardly depends on the number of bounds.
        """
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def observe_all(self, values: Iterable[float]) -> None:
        """Count several observations.

        It is faster than single calls, because names are looked up only once for all values.
        """
        counts, bounds = self._counts, self._bounds
        for value in values:
            counts[bisect_left(bounds, value)] += 1
            self.sum += value

    def cumulative(self) -> list[tuple[float, int]]:
        """Return (upper bound, observations up to it) pairs; the last bound is infinite.

        They are what Prometheus calls `le` buckets, in rising order, and the last count is that of all observations.
        """
        return list(zip((*self._bounds, float("inf")), accumulate(self._counts), strict=True))


def one_two_five(largest: int) -> tuple[float, ...]:
    """Return the bounds 1, 2, 5, 10, 20, 50 … up to `largest`.

    Steps of about a factor of two give the same relative resolution for small and large values.
    """
    series = (m * 10**e for e in range(len(str(largest))) for m in (1, 2, 5))
    return tuple(float(value) for value in series if value <= largest)
