"""Are the oracles awake?  Every planted bug must be found, and fast."""

import re
from pathlib import Path

import pytest

from .bugs import BUGS
from .explore import num_schedules_until_found  # which has every kind of bug registered

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


# It takes hundreds of schedules.
LONG = {
    "a_step_takes_twice_its_seconds", "order_overtakes_the_plans", "block_is_stored_after_its_answer",
    "file_has_no_sum", "files_are_counted_from_zero", "tokens_are_sent_before_they_are_written",
    "choice_that_has_ended_goes_on", "cursor_counts_events",
}  # fmt: skip


@pytest.mark.parametrize(
    "bug", [pytest.param(bug, marks=pytest.mark.slow) if bug in LONG else bug for bug in BUGS]
)
def test_a_planted_bug_is_found(bug, record_property):
    num_schedules, broken = num_schedules_until_found(bug, LIMIT)
    record_property("schedules", num_schedules)
    assert broken is not None, f"{bug} was not found in {LIMIT} schedules: an oracle is blind"
    listed = dict(listed_bugs())[bug]
    is_near = num_schedules <= 20 + 4 * listed and listed <= 20 + 4 * num_schedules
    assert is_near, (
        f"docs/simulation.md says {listed}: {num_schedules}; update its table with `python -m tests.simulation --bugs`"
    )
    # A bug that no longer fits the code it replaces is no test of the oracles.
    assert not any(name in broken for name in ("TypeError", "AttributeError", "NameError")), broken
