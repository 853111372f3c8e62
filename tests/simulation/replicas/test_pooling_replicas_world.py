"""Replicas that pool in drawn orders: no fault as they are, and each planted bug is found."""

import pytest

from tests.simulation.turns import first_found, played
from trouper.actors.scheduling.pooling_policy import PoolingPolicy
from trouper.actors.scheduling.replicas import Replicas

from .pooling_replicas_world import PoolingReplicasWorld

NUM_SCHEDULES = 500


def test_schedules_end_with_vector_that_each_text_has_alone():
    worlds = played(PoolingReplicasWorld, range(150))
    assert sum(world.num_moves for world in worlds) > 50
    errors = [error for world in worlds for error in world._errors.values()]
    assert any(error.startswith("poisoned_request") for error in errors)
    assert any(error.startswith("device_failed") for error in errors)
    assert any(policy._num_prompt_tokens for world in worlds for policy in world.policies[1:])


def evacuated_twice(patch):
    right = PoolingPolicy.evacuate

    def faulty(self, **options):
        unfinished, waiting = dict(self.unfinished), list(self.waiting)
        found = right(self, **options)
        self.unfinished, self.waiting = unfinished, waiting
        return found

    patch.setattr(PoolingPolicy, "evacuate", faulty)


def texts_in_flight_are_evacuated(patch):
    right = PoolingPolicy.evacuate

    def faulty(self, **options):
        flights = [admit for flight in self.in_flight for admit in flight.group]
        found = [self._take(a.id) for a in flights if a.id in self.unfinished]
        return found + right(self, **options)

    patch.setattr(PoolingPolicy, "evacuate", faulty)


def texts_to_be_retried_are_lost(patch):
    right = PoolingPolicy.evacuate

    def faulty(self, **options):
        self.retries.clear()
        return right(self, **options)

    patch.setattr(PoolingPolicy, "evacuate", faulty)


def what_has_begun_counts_as_new(patch):
    right = PoolingPolicy.enter
    patch.setattr(
        PoolingPolicy,
        "enter",
        lambda self, request, *args: right(self, request._replace(has_begun=False), *args),
    )


def what_has_begun_waits_for_a_pause_to_end(patch):
    right = PoolingPolicy.num_started.fget
    patch.setattr(
        PoolingPolicy, "num_started", property(lambda self: right(self) - len(self.returning))
    )


def suspects_are_evacuated(patch):
    right = PoolingPolicy.evacuate

    def faulty(self, **options):
        suspects, self._suspects = self._suspects, {}
        found = right(self, **options)
        self._suspects = {id: n for id, n in suspects.items() if id in self.unfinished}
        return found

    patch.setattr(PoolingPolicy, "evacuate", faulty)


def dead_replica_chosen(patch):
    patch.setattr(PoolingPolicy, "is_available", property(lambda self: True))


def replica_under_a_search_chosen(patch):
    patch.setattr(PoolingPolicy, "is_available", property(lambda self: not self.is_device_lost))


def a_replica_that_has_failed_is_chosen(patch):
    right = PoolingPolicy.fail_device

    def faulty(self, message):
        right(self, message)
        self.has_device_failed = False

    patch.setattr(PoolingPolicy, "fail_device", faulty)


def each_replica_has_outputs_of_its_own(patch):
    right = PoolingPolicy.__init__
    patch.setattr(PoolingPolicy, "__init__", lambda self, config, shared=None: right(self, config))


def abort_to_the_first_replica(patch):
    patch.setattr(Replicas, "abort", lambda self, id: self.policies[0].abort(id))


def a_text_gets_the_vector_of_its_neighbour(patch):
    right = PoolingPolicy.plan

    def faulty(self):
        plan = right(self)
        if plan is not None and self.retries:
            self.in_flight[-1].group.reverse()
        return plan

    patch.setattr(PoolingPolicy, "plan", faulty)


BUGS = [
    evacuated_twice, texts_in_flight_are_evacuated, texts_to_be_retried_are_lost,
    what_has_begun_counts_as_new, what_has_begun_waits_for_a_pause_to_end, suspects_are_evacuated,
    dead_replica_chosen, replica_under_a_search_chosen, a_replica_that_has_failed_is_chosen,
    each_replica_has_outputs_of_its_own, abort_to_the_first_replica,
    a_text_gets_the_vector_of_its_neighbour,
]  # fmt: skip


@pytest.mark.parametrize("plant", BUGS, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found(monkeypatch, plant):
    plant(monkeypatch)
    assert first_found(PoolingReplicasWorld, range(NUM_SCHEDULES)) is not None
