"""Percentiles, spread, goodput and arrival times against their definitions."""

import math
import random
import statistics
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trouper.bench.arrivals import arrival_times
from trouper.bench.figures import num_good, percentile, repeats, spread, summary

VALUES = st.lists(st.floats(0, 1e6), min_size=1, max_size=30)


@given(VALUES, st.floats(0, 100))
def test_a_percentile_is_numpys(values, q):
    assert percentile(values, q) == pytest.approx(np.percentile(values, q), rel=1e-9, abs=1e-9)


@given(VALUES)
def test_percentiles_grow_from_the_least_to_the_largest_value(values):
    found = [percentile(values, q) for q in (0, 10, 50, 90, 100)]
    assert (found[0], found[-1]) == (min(values), max(values))
    assert all(a <= b or math.isclose(a, b) for a, b in pairwise(found))


@pytest.mark.parametrize(("values", "q"), [([], 50), ([1.0], -1), ([1.0], 101)])
def test_a_percentile_that_makes_no_sense_is_an_error(values, q):
    with pytest.raises(ValueError, match="percentile"):
        percentile(values, q)


@given(VALUES)
def test_a_summary_says_what_the_standard_library_says(values):
    found = summary(values, (50, 99.9))
    assert found["mean"] == pytest.approx(statistics.fmean(values))
    assert found["std"] == pytest.approx(np.std(values), rel=1e-6, abs=1e-6)
    assert found["median"] == pytest.approx(found["p50"])
    assert set(found) == {"mean", "median", "std", "max", "p50", "p99.9"}


def test_nothing_has_no_summary():
    assert summary([]) == {}


def test_the_spread_is_a_share_of_the_median():
    assert spread([9.0, 10.0, 12.0]) == pytest.approx(0.3)
    assert repeats([2.0, 1.0, 3.0]) == {"median_s": 2.0, "spread": 1.0, "all_s": [2.0, 1.0, 3.0]}


NAMES = st.sampled_from(["ttft", "tpot", "e2el"])


@given(
    st.lists(st.dictionaries(NAMES, st.integers(0, 9)), max_size=20),
    st.dictionaries(NAMES, st.integers(0, 9)),
)
def test_a_request_is_good_if_no_figure_is_over_its_limit(requests, objectives):
    bad = 0
    for request in requests:
        for name, value in request.items():
            if name in objectives and value > objectives[name]:
                bad += 1
                break
    assert num_good(requests, objectives) == len(requests) - bad


@given(
    st.integers(0, 200), st.floats(0.01, 1000), st.integers(0, 2**32), st.sampled_from([0.3, 1, 8])
)
def test_arrivals_are_in_order_and_last_as_long_as_the_rate_says(num, rate, seed, burstiness):
    times = arrival_times(num, rate, random.Random(seed), burstiness=burstiness)
    assert times == arrival_times(num, rate, random.Random(seed), burstiness=burstiness)
    assert len(times) == num
    assert times == sorted(times)
    assert all(time >= 0 for time in times)
    if num:
        assert times[-1] == pytest.approx(num / rate)


def test_an_infinite_rate_is_all_at_once():
    assert arrival_times(3, math.inf, random.Random(0)) == [0, 0, 0]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_the_gaps_vary_as_the_burstiness_says(burstiness):
    """The coefficient of variation of a gamma distribution of shape k is 1 / √k."""
    times = arrival_times(20_000, 10.0, random.Random(1), burstiness=burstiness)
    gaps = np.diff(times)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)
