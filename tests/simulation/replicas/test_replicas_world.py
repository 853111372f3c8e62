"""Replicas in drawn orders: no fault as they are, and each planted bug is found."""

import pytest

from tests.simulation.turns import first_found, played
from trouper.actors.scheduling.culprit_search import Quarantine
from trouper.actors.scheduling.policy import Policy
from trouper.actors.scheduling.replicas import Replicas
from trouper.actors.scheduling.routing import Router
from trouper.actors.scheduling.state.sequence_table import SequenceTable

from .replicas_world import ReplicasWorld

NUM_SCHEDULES = 500


def test_schedules_end_with_tokens_that_each_request_has_alone():
    worlds = played(ReplicasWorld, range(100))
    statistics = [policy.statistics() for world in worlds for policy in world.policies]
    assert any(s.num_preemptions for s in statistics)
    assert any(s.prefix_cache_hits for s in statistics)
    assert sum(s.num_accepted_tokens for s in statistics) > 100
    assert any(s.num_accepted_tokens < s.num_draft_tokens for s in statistics)
    assert sum(world.num_moves for world in worlds) > 50


def evacuated_twice(patch):
    right = SequenceTable.take_out

    def faulty(self, kept, **options):
        requests, sequences = dict(self.requests), dict(self.sequences)
        found = right(self, kept, **options)
        self.requests, self.sequences = requests, sequences
        return found

    patch.setattr(SequenceTable, "take_out", faulty)


def adopted_without_outputs(patch):
    right = Policy.enter

    def faulty(self, request, *more):
        for sequence in request.sequences:
            sequence.output, sequence.num_tokens = [], sequence.num_prompt
        right(self, request, *more)

    patch.setattr(Policy, "enter", faulty)


def siblings_stay_behind(patch):
    patch.setattr(
        SequenceTable,
        "_queue",
        lambda self, request, unfinished: self.waiting.fresh.push(unfinished[0]),
    )


def abort_to_the_first_replica(patch):
    patch.setattr(Replicas, "abort", lambda self, id: self.policies[0].abort(id))


def stop_to_the_first_replica(patch):
    patch.setattr(Replicas, "stop", lambda self, ids: self.policies[0].stop(ids))


def pause_to_the_first_replica(patch):
    patch.setattr(Replicas, "set_pause", lambda self, pause: self.policies[0].set_pause(pause))


def dead_replica_chosen(patch):
    patch.setattr(Policy, "is_available", property(lambda self: True))


def replica_under_a_search_chosen(patch):
    patch.setattr(Policy, "is_available", property(lambda self: not self.is_device_lost))


def suspects_are_evacuated(patch):
    patch.setattr(Policy, "evacuate", lambda self, **o: self.table.take_out(frozenset(), **o))


def nothing_is_evacuated(patch):
    patch.setattr(Replicas, "note_loss", lambda self, replica: None)


def a_returned_replica_takes_nothing(patch):
    patch.setattr(Replicas, "rebalance", lambda self: False)


def a_replica_takes_nothing_when_its_search_ends(patch):
    right = Policy.return_device

    def note(self):
        right(self)
        self._is_back = True

    def rebalance(self):
        is_back = [vars(policy).pop("_is_back", False) for policy in self.policies]
        return any(is_back) and rebalance.right(self)

    rebalance.right = Replicas.rebalance
    patch.setattr(Policy, "return_device", note)
    patch.setattr(Replicas, "rebalance", rebalance)


def a_replica_that_has_failed_keeps_its_requests(patch):
    patch.setattr(Replicas, "note_failure", lambda self, replica: None)


def a_replica_that_has_failed_is_chosen(patch):
    right = Policy.fail_device

    def faulty(self, message):
        right(self, message)
        self.has_device_failed = False

    patch.setattr(Policy, "fail_device", faulty)


def each_replica_has_outputs_of_its_own(patch):
    right = Policy.__init__
    patch.setattr(
        Policy, "__init__", lambda self, config, blocks, shared=None: right(self, config, blocks)
    )


def the_named_replica_is_only_a_hint(patch):
    right = Router.choose
    patch.setattr(
        Router, "choose", lambda self, *args, rank=None, **more: right(self, *args, **more)
    )


def a_reset_stops_at_the_first_that_refuses(patch):
    def faulty(self, reset_running=False):
        return all(policy.reset_prefix_cache(reset_running) for policy in self.policies)

    patch.setattr(Replicas, "reset_prefix_cache", faulty)


def the_search_forgets_whom_it_suspects(patch):
    patch.setattr(Quarantine, "requests", property(lambda self: frozenset()))


BUGS = [
    evacuated_twice, adopted_without_outputs, siblings_stay_behind,
    abort_to_the_first_replica, stop_to_the_first_replica, pause_to_the_first_replica,
    dead_replica_chosen, replica_under_a_search_chosen, suspects_are_evacuated, nothing_is_evacuated,
    a_returned_replica_takes_nothing,
    pytest.param(a_replica_takes_nothing_when_its_search_ends, marks=pytest.mark.slow),
    a_replica_that_has_failed_keeps_its_requests, a_replica_that_has_failed_is_chosen, each_replica_has_outputs_of_its_own, the_named_replica_is_only_a_hint,
    a_reset_stops_at_the_first_that_refuses, the_search_forgets_whom_it_suspects,
]  # fmt: skip


@pytest.mark.parametrize("plant", BUGS, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found(monkeypatch, plant):
    plant(monkeypatch)
    # A simulated device raises ValueError for a plan without the blocks that it reads.
    assert first_found(ReplicasWorld, range(NUM_SCHEDULES), KeyError, ValueError) is not None
