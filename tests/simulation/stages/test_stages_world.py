"""Pipelines in drawn orders: no fault as they are, and each planted bug is found."""

import pytest

from tests.simulation.turns import first_found, played
from trouper.actors.scheduling.state import step_builder
from trouper.actors.scheduling.state.state_snapshots import StateSnapshots
from trouper.actors.stages import Feedback, TokenWrite

from .stages_world import Rules, StagesWorld

NUM_SCHEDULES = 500


class Unchecked(Feedback):
    """Writes a token into its row, whatever sequence has it by now."""

    def take(self, step, token_ids):
        _, entries = self._expected.popleft()
        return [
            TokenWrite(entry[0], entry[1], token_id)
            for entry, token_id in zip(entries, token_ids, strict=True)
            if entry is not None
        ]


RULES = {
    "the mask is made by the last stage itself": Rules(masks_by_itself=True),
    "the first stage waits every step": Rules(waits_every_step=True),
    "the ring of tokens is one short": Rules(num_token_entries=-1),
    "the ring of tokens is drained only to read": Rules(drains_only_to_read=True),
    "rows have no generation": Rules(feedback=Unchecked),
    "the last stage saves the state behind the step": Rules(saves_at_ends=True),
}


def is_found(rules=None):
    seeds = range(NUM_SCHEDULES)
    return first_found(lambda seed: StagesWorld(seed, rules), seeds, RuntimeError) is not None


def test_schedules_end_with_tokens_that_each_request_has_alone():
    worlds = played(StagesWorld, range(80))
    statistics = [world.policy.statistics() for world in worlds]
    assert any(s.num_preemptions for s in statistics)
    assert any(s.prefix_cache_hits for s in statistics)
    assert any(s.prefix_cache_hits for s in statistics if s.num_state_hits)


# one takes hundreds of schedules
EACH_RULE = [
    pytest.param(name, marks=pytest.mark.slow if name == "rows have no generation" else ())
    for name in RULES
]


@pytest.mark.parametrize("name", EACH_RULE)
def test_a_planted_rule_is_found(name):
    assert is_found(RULES[name])


def test_a_quota_of_no_row_is_found(monkeypatch):
    monkeypatch.setattr(step_builder, "decode_quota", lambda num, num_stages: num // num_stages)
    assert is_found()


def test_sequence_planned_one_step_early_is_found(monkeypatch):
    monkeypatch.setattr(step_builder, "is_due", lambda since, num_stages: since >= num_stages - 2)
    assert is_found()


def test_plan_that_does_not_say_what_it_reads_is_found(monkeypatch):
    plain = step_builder.StepPlan
    monkeypatch.setattr(step_builder, "StepPlan", lambda **fields: plain(**{**fields, "reads": 0}))
    assert is_found()


def test_snapshot_under_an_earlier_name_is_found(monkeypatch):
    right = StateSnapshots._name

    def wrong(self, sequence, end):
        return right(self, sequence, max(self._block_size, end - self._block_size))

    monkeypatch.setattr(StateSnapshots, "_name", wrong)
    assert is_found()


def test_row_that_is_not_given_back_is_found(monkeypatch):
    monkeypatch.setattr(StateSnapshots, "leave", lambda self, sequence: None)
    assert is_found()
