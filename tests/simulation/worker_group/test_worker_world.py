"""An engine whose worker process ends in every way that is drawn, and before each byte that it writes."""

from collections import Counter

import pytest

from tests.simulation import run
from tests.simulation.explore import cancel_everywhere, explore_seeds, num_schedules_until_found
from tests.simulation.run import simulate

from . import worker_bugs
from .worker_scenario import Fate, draw_with_runs, draw_workers

LIMIT = 500  # schedules in which each planted bug is found; in scenarios of its own it shows sooner


def kill_everywhere(seed, stride):
    """Kill the first worker before its n-th byte, for every n; returns how many runs that took."""
    scenario = draw_workers(seed)
    scenario.killers, scenario.fates = (), (Fate(end="byte", at=10**9),)
    unharmed = simulate(scenario)
    for number, count in enumerate(range(0, 10**6, stride), 1):
        scenario.fates = (Fate(end="byte", at=count),)
        verdict = simulate(scenario)
        assert verdict.broken is None, f"seed {seed}, byte {count}: {verdict.broken}"
        if verdict.digest == unharmed.digest:  # it has not written so many
            return number
    raise AssertionError("it writes without end")


def test_every_oracle_holds_while_workers_end():
    found = explore_seeds(range(80), draw_workers)
    assert found.broken is None, f"{found.where}: {found.broken}"


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 3000, 250))
def test_every_oracle_holds_under_many_ends(first):
    found = explore_seeds(range(first, first + 250), draw_workers)
    assert found.broken is None, f"{found.where}: {found.broken}"


def test_every_oracle_holds_while_workers_end_in_accepted_runs(monkeypatch):
    """Each way to end in one, among aborts, preemptions, right drafts and wrong ones."""
    worlds, make_world = [], run.make_world

    def made(*args):
        worlds.append(make_world(*args))
        return worlds[-1]

    monkeypatch.setattr(run, "make_world", made)
    found = explore_seeds(range(150), draw_with_runs)
    assert found.broken is None, f"{found.where}: {found.broken}"
    ends = sum((world.ends_of_runs for world in worlds), Counter())
    assert min(ends[place] for place in ("before", "within", "behind")) >= 10
    statistics = [world.policy.statistics() for world in worlds if world.policy is not None]
    num_accepted = sum(s.num_accepted_tokens for s in statistics)
    assert 0 < num_accepted < sum(s.num_draft_tokens for s in statistics)
    assert sum(s.num_preemptions for s in statistics) > sum(ends.values())
    assert sum(case.was_aborted for world in worlds for case in world.cases) > 10
    assert sum(world.num_kept for world in worlds) > 10


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 2000, 250))
def test_every_oracle_holds_under_many_ends_of_runs(first):
    found = explore_seeds(range(first, first + 250), draw_with_runs)
    assert found.broken is None, f"{found.where}: {found.broken}"


def test_worker_may_be_killed_before_some_of_its_bytes():
    assert kill_everywhere(9, stride=29) > 10


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [9, 11, 12])
def test_worker_may_be_killed_before_every_third_of_its_bytes(seed):
    assert kill_everywhere(seed, stride=3) > 40


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20, 26))
def test_program_may_be_cancelled_before_any_step_of_loss(seed):
    found = cancel_everywhere(draw_workers(seed), None, stride=3)
    assert found.broken is None, f"seed {seed}, {found.where}: {found.broken}"


def test_the_same_seed_plays_the_same_run_again():
    assert [simulate(draw_workers(seed)) for seed in range(10)] == [
        simulate(draw_workers(seed)) for seed in range(10)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", worker_bugs.NAMES)
def test_planted_bug_is_found_among_all_drawn(name):
    num_schedules, broken = num_schedules_until_found(name, LIMIT, draw_workers)
    assert broken is not None, f"{name} was not found in {num_schedules} schedules"
