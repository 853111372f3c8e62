"""A device that dies of a request: how the request is found, and what becomes of the others."""

import math

import pytest

from trouper.actors.messages.controls import Pause
from trouper.actors.messages.outputs import total
from trouper.actors.messages.requests import RequestId
from trouper.actors.messages.steps import DeviceLost

from .test_policy import Desk


class Ward(Desk):
    """A desk whose device dies when the step that it runs holds a poisonous sequence."""

    def __init__(self, **config):
        super().__init__(**{"max_steps_in_flight": 2, "max_num_seqs": 16, **config})
        self.num_losses = self.num_explained = 0

    def lose(self, *, is_from_outside=False, is_idle=False, keeps_memory=False):
        step = self.flights[0].step if self.flights and not is_idle else None
        self.flights.clear()
        self.num_losses += 1
        self.num_explained += self.policy.lose_device(DeviceLost("it died", step, is_from_outside))
        assert self.policy.plan() is None
        self.policy.return_device(keeps_memory=keeps_memory)
        self.take()

    def run(self, is_deadly):
        """Until all is done; `is_deadly` is asked of the sequences of each step that is about to run."""
        for _ in range(1000):
            while self.plan() is not None:
                pass
            if not self.flights:
                return
            if is_deadly(self.owners(self.flights[0]), self.flights[0]):
                self.lose()
            else:
                self.land()
        raise AssertionError("it does not end")

    def assert_all_but(self, poison, num_sequences, num_tokens):
        for id in range(num_sequences):
            tokens = [t for e in self.news if e.id == id for t in e.token_ids]
            assert id == poison or tokens == [7] * num_tokens
        ends = self.ends()
        assert [id for id, end in ends.items() if end != ("length", None)] == (
            [] if poison is None else [poison]
        )
        self.assert_idle()


def test_loss_in_passing_ends_nothing_and_doubles_nothing():
    ward = Ward()
    for id in range(5):
        ward.admit(id, max_tokens=4)
    ward.step()
    dies = iter([True])
    ward.run(lambda owners, plan: next(dies, False))
    ward.assert_all_but(None, 5, 4)
    assert ward.num_explained == 0


def test_sequence_whose_plan_device_never_had_is_no_suspect():
    ward = Ward()
    ward.admit(0, max_tokens=2)
    for _ in range(3):
        ward.plan()
        ward.lose(is_idle=True)
    ward.run(lambda owners, plan: False)
    ward.assert_all_but(None, 1, 2)


def test_suspect_preempted_does_not_start_again_before_its_result():
    ward = Ward()
    ward.admit(0, max_tokens=3)
    ward.plan()
    ward.lose()
    assert ward.plan() is not None
    ward.policy.preempt_all()
    assert ward.plan() is None
    ward.run(lambda owners, plan: False)
    ward.assert_all_but(None, 1, 3)


def test_what_a_loss_costs_is_counted_in_tokens():
    ward = Ward()
    ward.admit(0, prompt=range(8), max_tokens=3)
    ward.step()
    ward.lose()
    ward.plan()
    assert ward.policy.statistics().num_lost_tokens == 8


def test_kept_memory_costs_less_than_a_block():
    ward = Ward()
    ward.admit(0, prompt=range(10), max_tokens=3)
    ward.step()
    ward.lose(keeps_memory=True)
    assert ward.plan().num_computed_tokens == (8,)
    assert ward.policy.statistics().num_lost_tokens == 2


def test_device_searched_for_culprit_is_there_and_takes_no_request():
    ward = Ward()
    for id in range(3):
        ward.admit(id, max_tokens=4)
    ward.plan()
    assert ward.policy.statistics().is_available
    ward.lose()
    found = ward.policy.statistics()
    assert (found.is_device_lost, found.is_available) == (False, False)
    well = Ward().policy.statistics()
    assert total([found, well]).is_available
    assert not total([found, found]).is_available
    ward.run(lambda owners, plan: False)
    assert ward.policy.statistics().is_available


def test_an_idle_loss_forgets_the_prefixes():
    ward = Ward()
    ward.admit(0, prompt=range(8), max_tokens=1)
    ward.step()
    assert ward.blocks.prefixes()
    assert ward.policy.statistics().num_lost_tokens == 0
    ward.lose()
    assert not ward.blocks.prefixes()
    ward.admit(1, prompt=range(8), max_tokens=1)
    plan = ward.plan()
    assert plan is not None
    assert plan.num_computed_tokens == (0,)


def test_poisonous_newcomer_costs_two_losses_and_both_are_explained():
    ward = Ward()
    for id in range(15):
        ward.admit(id, max_tokens=6)
    ward.step()
    ward.admit(15, max_tokens=6)
    ward.run(lambda owners, plan: 15 in owners)
    ward.assert_all_but(15, 16, 6)
    assert ward.num_losses == ward.num_explained == 2
    assert [str(e.error) for e in ward.news if e.error] == ["poisoned_request: it died"]


@pytest.mark.parametrize("num_sequences", [1, 2, 3, 5, 8, 16])
def test_any_other_poison_is_found_in_log_n_losses(num_sequences):
    for poison in range(num_sequences):
        ward = Ward()
        for id in range(num_sequences):
            ward.admit(id, max_tokens=6)
        ward.step()
        ward.step()
        ward.run(lambda owners, plan, poison=poison: poison in owners)
        ward.assert_all_but(poison, num_sequences, 6)
        assert ward.num_losses == ward.num_explained <= 2 + math.ceil(math.log2(num_sequences))


def test_request_that_survives_a_step_is_cleared():
    ward = Ward()
    ward.admit(0, max_tokens=9)
    ward.step()
    dies_at = iter([True, False, False, True, False, False, True])
    ward.run(lambda owners, plan: next(dies_at, False))
    ward.assert_all_but(None, 1, 9)


def test_siblings_of_a_poisonous_request_end_with_it():
    ward = Ward()
    ward.admit(0, n=4, max_tokens=6)
    ward.run(lambda owners, plan: True)
    assert ward.num_losses == 2
    assert {end for end, _ in ward.ends().values()} == {"error"}
    ward.assert_idle()


def test_few_blocks_do_not_hold_up_the_search():
    ward = Ward(num_usable=6, max_num_scheduled_tokens=4)
    for id in range(6):
        ward.admit(id, prompt=range(6), max_tokens=6)
    ward.step()
    ward.step()
    dies = iter([False, True])
    ward.run(lambda owners, plan: next(dies, False))
    ward.assert_all_but(None, 6, 6)


def test_suspect_that_is_aborted_is_not_waited_for():
    ward = Ward()
    for id in range(3):
        ward.admit(id, max_tokens=6)
    ward.step()
    ward.plan()
    ward.lose()
    for id in range(3):
        ward.policy.abort(RequestId(id))
    ward.admit(3, max_tokens=2)
    ward.run(lambda owners, plan: False)
    assert ward.ends()[3] == ("length", None)
    ward.assert_idle()


def test_a_loss_from_outside_makes_no_suspects():
    ward = Ward()
    ward.admit(0, max_tokens=6)
    ward.step()
    for _ in range(3):
        ward.plan()
        ward.lose(is_from_outside=True)
    ward.run(lambda owners, plan: False)
    ward.assert_all_but(None, 1, 6)


@pytest.mark.parametrize("leaves", ["before the loss", "under suspicion", "under test"])
@pytest.mark.parametrize("how", ["abort", "stop"])
def test_killer_whose_client_hangs_up_is_found_all_same(leaves, how):
    ward = Ward()
    for id in range(4):
        ward.admit(id, max_tokens=6)
    ward.step()
    deaths = 0

    def leave():
        if how == "abort":
            ward.policy.abort(RequestId(2))
        else:
            ward.policy.stop((2,))

    def is_deadly(owners, plan):
        nonlocal deaths
        if 2 not in owners:
            return False
        deaths += 1
        if deaths == {"before the loss": 1, "under test": 2}.get(leaves):
            leave()
        return True

    ward.plan()
    if leaves == "under suspicion":
        ward.lose()
        deaths += 1
        leave()
    ward.run(is_deadly)
    assert ward.num_explained == ward.num_losses
    assert deaths >= 2
    ends = ward.ends()
    assert [ends[id] for id in (0, 1, 3)] == [("length", None)] * 3
    assert ends.get(2) == (("abort", None) if how == "abort" else None)
    assert not ward.policy.is_searching
    ward.assert_idle()


def test_ghost_that_kills_nothing_goes_when_it_has_passed():
    ward = Ward()
    for id in range(3):
        ward.admit(id, max_tokens=4)
    ward.step()
    ward.plan()
    for id in range(3):
        ward.policy.abort(RequestId(id))
    ward.lose()
    ward.run(lambda owners, plan: False)
    assert {end for end, _ in ward.ends().values()} == {"abort"}
    assert ward.num_losses == 1
    assert ward.num_explained == 0
    ward.assert_idle()


def test_nothing_that_has_ended_runs_again_during_pause():
    ward = Ward()
    ward.admit(0, max_tokens=4)
    ward.step()
    ward.plan()
    ward.policy.set_pause(Pause.NO_NEW_REQUESTS)
    ward.policy.abort(RequestId(0))
    ward.lose()
    assert ward.plan() is None
    ward.assert_idle()


def test_of_several_completions_only_one_in_question_becomes_ghost():
    ward = Ward()
    ward.admit(0, max_tokens=4, n=2, temperature=1.0)
    ward.step()
    ward.step()
    ward.plan()
    ward.policy.stop((1,))
    ward.lose()
    ward.run(lambda owners, plan: False)
    assert ward.ends() == {0: ("length", None)}
    ward.assert_idle()
