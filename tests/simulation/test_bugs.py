"""Are the oracles awake?  Every planted bug must be found, and fast."""

import re
from pathlib import Path

import pytest

from .bugs import BUGS, planted
from .explore import (  # which has every kind of bug registered
    explore_seeds,
    num_schedules_until_found,
)

LIMIT = 1000


def test_there_are_enough_bugs():
    assert len(BUGS) >= 25


def listed_bugs():
    """Return the rows of the page: the number of schedules by the name of a bug."""
    page = (Path(__file__).parents[2] / "docs" / "simulation.md").read_text()
    page, _ = page.split(
        "The [stages](workers.md#stages)"
    )  # whose bugs are those of test_stages_world
    rows = re.findall(r"^\| ([a-z ]+) \| (\d+) \| ", page, re.MULTILINE)
    return [(name.replace(" ", "_"), int(count)) for name, count in rows]


def test_the_page_lists_every_bug():
    assert sorted(name for name, _ in listed_bugs()) == sorted(BUGS)


def check_page(bug, num_schedules, broken):
    assert broken is not None, f"{bug} was not found in {LIMIT} schedules: an oracle is blind"
    listed = dict(listed_bugs())[bug]
    is_near = num_schedules <= 20 + 4 * listed and listed <= 20 + 4 * num_schedules
    assert is_near, (
        f"docs/simulation.md says {listed}: {num_schedules}; update its table with `python -m tests.simulation --bugs`"
    )
    # A bug that no longer fits the code it replaces is no test of the oracles.
    assert not any(name in broken for name in ("TypeError", "AttributeError", "NameError")), broken


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug):
    """The listed schedule finds it again; if random choices have changed, a search from the first one does."""
    num_schedules = dict(listed_bugs())[bug]
    with planted(bug):
        broken = explore_seeds([num_schedules - 1], BUGS[bug].draw).broken
    if broken is None:
        num_schedules, broken = num_schedules_until_found(bug, LIMIT)
    check_page(bug, num_schedules, broken)


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS)
def test_a_search_takes_the_listed_schedules(bug):
    check_page(bug, *num_schedules_until_found(bug, LIMIT))
