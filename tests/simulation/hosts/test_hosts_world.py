"""Machines in drawn schedules: no fault as they are, and each planted bug is found."""

import pytest

from tests.simulation.turns import first_found
from trouper.actors.executor.devices.supervision import Death
from trouper.actors.executor.workers.machines import authentication, coordinator, worker_group
from trouper.errors import GenerationError

from .hosts_world import HostsWorld

NUM_SCHEDULES = 100
# What requests end with, and what breaks when two hosts have one number.
FAULTS = GenerationError, KeyError, BlockingIOError


def is_found(first):
    return first_found(HostsWorld, range(first, first + NUM_SCHEDULES), *FAULTS) is not None


def test_schedules_end_with_tokens_that_each_request_has_alone():
    worlds = [HostsWorld(seed) for seed in range(10, 22)]
    for world in worlds:
        world.run()
    assert sum(world.num_restarts for world in worlds) > 10


def the_system_is_not_asked_to_look_for_the_other_side(patch):
    patch.setattr(authentication, "tune", lambda connection: None)
    patch.setattr(coordinator, "tune", lambda connection: None)


def a_host_that_has_come_is_not_told(patch):
    right = coordinator.Coordinator._serve_host

    async def faulty(self, *args):
        waiting = list(self._arrived)
        self._arrived.clear()
        await right(self, *args)
        self._arrived.extend(waiting)

    patch.setattr(coordinator.Coordinator, "_serve_host", faulty)


def a_host_that_is_gone_is_kept(patch):
    right = coordinator.Coordinator._serve_host

    async def faulty(self, hello, *args):
        await right(self, hello, *args)
        if hello.num_nodes == self._num_nodes and hello.node not in self._hosts:
            self._hosts[hello.node] = self.last

    def note(self, *args):
        made(self, *args)
        coordinator.Coordinator.last = self

    made = coordinator.HostLink.__init__
    patch.setattr(coordinator.HostLink, "__init__", note)
    patch.setattr(coordinator.Coordinator, "last", None, raising=False)
    patch.setattr(coordinator.Coordinator, "_serve_host", faulty)


def two_hosts_of_a_number_are_taken(patch):
    right = coordinator.Coordinator._refusal

    def faulty(self, hello):
        refusal = right(self, hello)
        return refusal if refusal is None or refusal.is_final else None

    patch.setattr(coordinator.Coordinator, "_refusal", faulty)


def an_order_that_is_given_up_is_not_told(patch):
    patch.setattr(coordinator.HostLink, "give_up", lambda self, order: None)


def any_proof_will_do(patch):
    right = authentication.ListenerProof.judge

    def faulty(self, answer):
        _, verdict = right(self, answer)
        return True, verdict

    patch.setattr(authentication.ListenerProof, "judge", faulty)


def a_stranger_may_take_its_time(patch):
    patch.setattr(coordinator, "PROOF_S", 10**6)


def a_lost_machine_is_a_requests_fault(patch):
    patch.setattr(Death, "is_from_outside", False)


def frames_that_wait_are_not_sent_on(patch):
    class NoScope:
        def cancel(self):
            pass

    right = worker_group.RemotePeer.send

    def faulty(self, data, file):
        reading, self._reading = self._reading, NoScope()
        try:
            right(self, data, file)
        finally:
            self._reading = reading

    patch.setattr(worker_group.RemotePeer, "send", faulty)


BUGS = [  # with the schedule to begin with, which shows it as schedules are drawn now
    (the_system_is_not_asked_to_look_for_the_other_side, 17), (a_host_that_has_come_is_not_told, 0),
    (a_host_that_is_gone_is_kept, 9), (two_hosts_of_a_number_are_taken, 1),
    (an_order_that_is_given_up_is_not_told, 35), (any_proof_will_do, 5),
    (a_stranger_may_take_its_time, 7), (a_lost_machine_is_a_requests_fault, 13),
    (frames_that_wait_are_not_sent_on, 3),
]  # fmt: skip


@pytest.mark.parametrize(("plant", "first"), BUGS)
def test_a_planted_bug_is_found(monkeypatch, plant, first):
    plant(monkeypatch)
    assert is_found(first)
