"""Ranks in drawn orders: no fault as they are, and each planted bug is found."""

import pytest

from tests.simulation.turns import first_found, played

from .ranks_world import RankRules, RanksWorld

NUM_SCHEDULES = 500
BUGS = {
    "one sum buffer": RankRules(num_places=1),
    "wrong KV replica": RankRules(head_of=lambda rank, num_ranks, num_heads: rank % num_heads),
    "mask recomputed by a rank": RankRules(skips_by_itself=True),
    "tokens for one rank alone": RankRules(tells_rank_0_alone=True),
    "told before it is written": RankRules(writes_late=True),
}


def test_schedules_end_with_tokens_that_each_request_has_alone():
    worlds = played(RanksWorld, range(80))
    statistics = [world.policy.statistics() for world in worlds]
    assert any(s.num_preemptions for s in statistics)
    assert any(s.prefix_cache_hits for s in statistics)


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name):
    def world(seed):
        return RanksWorld(seed, BUGS[name])

    assert first_found(world, range(NUM_SCHEDULES)) is not None
