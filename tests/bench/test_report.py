"""A report says what it was made with, and nothing about who made it.

Percentiles, spread, goodput and arrival times against their definitions.

The picture of `--plot`: what its axes are called and what it shows.
"""

import getpass
import json
import math
import random
import re
import socket
import statistics
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trouper import __version__
from trouper.bench import report
from trouper.bench.report import (
    Latency,
    Point,
    num_good,
    percentile,
    plot,
    repeats,
    spread,
    summary,
)
from trouper.bench.serve import arrival_times, points
from trouper.errors import TrouperValidationError

RESULTS = Path(__file__).parents[2] / "bench" / "results"


def test_a_report_names_versions_processor_and_arguments():
    about = report.about(["bench", "latency"])
    assert about["versions"]["trouper"] == __version__
    assert "torch" in about["versions"]
    assert about["cpu"]
    assert about["cores"] >= 1
    assert about["arguments"] == ["bench", "latency"]


def test_report_names_neither_host_nor_user_nor_folders():
    text = json.dumps(report.about(["bench"]))
    for secret in (socket.gethostname(), str(Path.home()), str(Path.cwd()), getpass.getuser()):
        assert secret not in re.findall(r"[\w/.-]+", text)


def test_keys_are_not_written_down():
    typed = ["--api-key", "sk-1", "--hf-token=sk-2", "--seed", "3"]
    assert report.without_secrets(typed) == ["--api-key", "***", "--hf-token=***", "--seed", "3"]


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(TrouperValidationError, match=r"Is a directory.*parameter=plot"):
        report.check_writable("plot", str(tmp_path))
    with pytest.raises(TrouperValidationError, match="parameter=output_json"):
        report.write(str(tmp_path / "none" / "x.json"), {})


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_the_results_in_the_repository_are_reports(path):
    found = json.loads(path.read_text())
    assert found.pop("about")["versions"]["trouper"]
    assert found


VALUES = st.lists(st.floats(0, 1e6), min_size=1, max_size=30)


@given(VALUES, st.floats(0, 100))
def test_a_percentile_is_numpys(values, q):
    assert percentile(values, q) == pytest.approx(np.percentile(values, q), rel=1e-9, abs=1e-9)


@given(VALUES)
def test_percentiles_grow_from_least_to_largest_value(values):
    found = [percentile(values, q) for q in (0, 10, 50, 90, 100)]
    assert (found[0], found[-1]) == (min(values), max(values))
    assert all(a <= b or math.isclose(a, b) for a, b in pairwise(found))


@pytest.mark.parametrize(("values", "q"), [([], 50), ([1.0], -1), ([1.0], 101)])
def test_percentile_that_makes_no_sense_is_error(values, q):
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
def test_request_is_good_if_no_figure_is_over_its_limit(requests, objectives):
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
def test_arrivals_are_ordered_and_follow_rate(num, rate, seed, burstiness):
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


pytest.importorskip("matplotlib")

RECORD = {
    "max_concurrency": 4,
    "output_throughput": 50.0,
    "median_ttft_ms": 10.0,
    "p99_ttft_ms": 20.0,
    "median_e2el_ms": 100.0,
    "p99_e2el_ms": 200.0,
}


@pytest.fixture
def draw(monkeypatch, tmp_path):
    """The figure that a call of `plot` writes."""
    from matplotlib.figure import Figure

    seen = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: seen.append(figure))

    def draw(found, **options):
        plot(str(tmp_path / "x.png"), found, **options)
        return seen[-1]

    return draw


def test_picture_has_title_and_names_on_all_axes(draw):
    found = points([{**RECORD, "max_concurrency": 8}, RECORD])
    figure = draw(found, title="a model at a server", concurrency="open requests")
    assert figure.get_suptitle() == "a model at a server"
    names = ["output tokens/s", "time to first token, ms", "time of a request, ms"]
    assert [axes.get_ylabel() for axes in figure.axes] == names
    assert {axes.get_xlabel() for axes in figure.axes} == {"open requests"}
    first_token = figure.axes[1]
    assert [text.get_text() for text in first_token.get_legend().texts] == [
        "median",
        "99th percentile",
    ]
    median, tail = ([*line.get_xdata(), *line.get_ydata()] for line in first_token.lines)
    assert (median, tail) == ([4, 8, 10.0, 10.0], [4, 8, 20.0, 20.0])


def test_run_without_completed_request_leaves_gap_in_others(draw):
    with_batch = Point(1, 5.0, {"time of a batch": Latency(1.0, 2.0)})
    figure = draw([with_batch, Point(2, 0.0, {})], title="t", concurrency="prompts")
    assert [*figure.axes[0].lines[0].get_xdata()] == [1, 2]
    assert [*figure.axes[1].lines[0].get_xdata()] == [1]
