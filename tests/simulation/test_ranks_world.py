"""Ranks in drawn orders: no fault as they are, and each planted bug is found."""

import pytest

from tests.simulation.ranks_world import RankRules, RanksWorld
from tests.simulation.stages_world import SimulationFault

NUM_SCHEDULES = 500
BUGS = {
    "one sum buffer": RankRules(num_places=1),
    "wrong KV replica": RankRules(head_of=lambda rank, num_ranks, num_heads: rank % num_heads),
    "mask recomputed by a rank": RankRules(skips_by_itself=True),
    "tokens for one rank alone": RankRules(tells_rank_0_alone=True),
    "told before it is written": RankRules(writes_late=True),
}


def schedules(rules=None, num=NUM_SCHEDULES):
    for seed in range(num):
        world = RanksWorld(seed, rules)
        world.run()
        yield world


def first_found(rules):
    """The schedule that shows a bug."""
    for seed in range(NUM_SCHEDULES):
        try:
            RanksWorld(seed, rules).run()
        except (SimulationFault, RuntimeError):
            return seed + 1
    return None


def test_schedules_end_with_the_tokens_that_each_request_has_alone():
    worlds = list(schedules(num=80))
    statistics = [world.policy.statistics() for world in worlds]
    assert any(s.num_preemptions for s in statistics)
    assert any(s.prefix_cache_hits for s in statistics)


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name):
    assert first_found(BUGS[name])
