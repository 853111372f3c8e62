"""A device that runs out of memory gets smaller steps, and larger ones again when that is long ago."""

import pytest

from trouper.actors.scheduling.step_time import PATIENCE, TokenBudget

from .test_policy import Desk

OOM = {"is_out_of_memory": True}


def reasons(desk):
    return {id: reason for id, (reason, _) in desk.ends().items()}


def sizes(desk, times):
    found = []
    for _ in range(times):
        found.append(sum(desk.plan().num_scheduled_tokens))
        desk.land()
    return found


def test_steps_are_halved_until_they_fit_and_nobody_ends():
    desk = Desk(max_num_scheduled_tokens=64)
    desk.admit(prompt=range(1, 101), max_tokens=3)
    desk.plan()
    desk.fail(**OOM)
    assert sum(desk.plan().num_scheduled_tokens) == 32
    desk.fail(**OOM)
    assert sizes(desk, 9) == [16] * 6 + [4, 1, 1]
    assert reasons(desk) == {0: "length"}


def test_later_step_in_flight_is_not_counted_twice():
    desk = Desk(max_num_scheduled_tokens=64, max_steps_in_flight=2)
    desk.admit(prompt=range(1, 301))
    assert [sum(desk.plan().num_scheduled_tokens) for _ in range(2)] == [64, 64]
    desk.fail(**OOM)
    desk.fail()
    assert sum(desk.plan().num_scheduled_tokens) == 32
    desk.land()


def test_more_sequences_than_tokens_take_turns():
    desk = Desk(max_num_scheduled_tokens=8, enable_chunked_prefill=False)
    for id in range(4):
        desk.admit(id, prompt=(1, 2, 3), max_tokens=2)
    desk.plan()
    desk.fail(**OOM)
    while desk.policy.table.sequences:
        assert sum(desk.plan().num_scheduled_tokens) <= 4
        desk.land()
    assert reasons(desk) == dict.fromkeys(range(4), "length")


def test_who_needs_too_much_for_one_token_fails_alone():
    desk = Desk(max_num_scheduled_tokens=8)
    desk.admit(0, prompt=(1, 2))
    desk.admit(1, prompt=(3, 4), max_tokens=1)
    while desk.policy.table.sequences:
        plan = desk.plan()
        if 0 in desk.owners(plan):
            desk.fail("no memory", **OOM)
        else:
            desk.land()
    assert reasons(desk) == {0: "error", 1: "length"}


def test_larger_step_is_tried_when_many_have_passed():
    budget_of_steps = TokenBudget(64)
    assert budget_of_steps.shrink(50)
    assert budget_of_steps.num_tokens == 25
    for budget in (50, 64, 64):
        for _ in range(PATIENCE):
            assert budget_of_steps.num_tokens < budget or budget == 64
            budget_of_steps.passed()
        assert budget_of_steps.num_tokens == budget


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_one_token_cannot_be_halved(num_tokens):
    budget_of_steps = TokenBudget(64)
    assert not budget_of_steps.shrink(num_tokens)
    assert budget_of_steps.num_tokens == 64
