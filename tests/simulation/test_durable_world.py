"""A server with a journal through several lives: every client gets the text that its request has alone."""

import pytest

from .durable_world import draw_durable, draw_with_kills
from .explore import explore_seeds
from .run import simulate


@pytest.fixture(autouse=True)
def without_access_logs(caplog):
    caplog.set_level("CRITICAL")


@pytest.mark.parametrize("draw", [draw_durable, draw_with_kills])
def test_every_answer_outlives_its_server(draw):
    found = explore_seeds(range(10), draw)
    assert found.broken is None, f"{found.where}: {found.broken}"


@pytest.mark.slow
@pytest.mark.parametrize("first", range(100, 400, 100))
def test_every_answer_outlives_its_server_in_many_schedules(first):
    found = explore_seeds(range(first, first + 100), draw_durable)
    assert found.broken is None, f"{found.where}: {found.broken}"


def test_the_same_seed_plays_the_same_lives_again():
    first, second = (simulate(draw_durable(3)) for _ in range(2))
    assert first == second
