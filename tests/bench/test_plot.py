"""The picture of `--plot`: what its axes are called and what it shows."""

import pytest

from trouper.bench.plot import Latency, Point, plot
from trouper.bench.serve import points

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


def test_the_picture_has_a_title_and_names_on_all_axes(draw):
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


def test_a_run_without_a_completed_request_leaves_a_gap_in_the_others(draw):
    with_batch = Point(1, 5.0, {"time of a batch": Latency(1.0, 2.0)})
    figure = draw([with_batch, Point(2, 0.0, {})], title="t", concurrency="prompts")
    assert [*figure.axes[0].lines[0].get_xdata()] == [1, 2]
    assert [*figure.axes[1].lines[0].get_xdata()] == [1]
