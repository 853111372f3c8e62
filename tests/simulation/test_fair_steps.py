"""The theorem of the fluid order under drawn schedules, and bugs that the oracles must find."""

from unittest.mock import patch

import pytest

from trouper.actors.scheduling.policy import Policy
from trouper.actors.scheduling.prompt_turns import PromptTurns, _Filling, _Starting
from trouper.actors.scheduling.state.fluid import Fluid, _Level
from trouper.actors.scheduling.step_time import StepTimes

from .clients import Broken
from .fair_scenario import play_fairly

NUM_SEEDS = 60


@pytest.mark.parametrize("first", range(0, 240, 60))
def test_no_prompt_is_planned_later_than_in_fluid(first):
    for seed in range(first, first + 60):
        play_fairly(seed)


def test_late_prompt_is_excused_by_work_computed_ahead():
    assert play_fairly(125_997) == 1


# The machine became slower, and a fit mixed the two paces.
@pytest.mark.parametrize("seed", [301_831, 307_731])
def test_estimates_follow_machine_that_became_slower(seed):
    play_fairly(seed)


# A prompt took the place of a row that was preempted for it, and its seconds were not counted.
@pytest.mark.parametrize("seed", [10807, 60119])
def test_schedules_that_broke_stay_whole(seed):
    play_fairly(seed)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_no_prompt_is_late_in_many_schedules():
    for seed in range(1000, 1500):
        play_fairly(seed)


def keys_are_forgotten(right):
    return lambda self, id, key, *rest: right(self, id, "", *rest)


def the_fluid_stands_still(right):
    return lambda self, num_tokens: 0.0


def the_fluid_runs_twice_as_fast(right):
    return lambda self, num_tokens: right(self, 2 * num_tokens) / 2


def in_order_of(key):
    return lambda right: lambda self: iter(sorted(right(self), key=key))


def newcomers_first(right):
    return lambda self, starting: iter(
        sorted(right(self, starting), key=lambda each: each[0].request_slot >= 0)
    )


def running_first(right):
    return lambda self, starting: iter(
        sorted(right(self, starting), key=lambda each: each[0].request_slot < 0)
    )


def prompts_of_who_has_gone_stay(right):
    def faulty(self, id):
        if id not in self.open or self.open[id].num_planned:
            right(self, id)

    return faulty


def a_preempted_one_keeps_its_rest(right):
    def faulty(self, sequence):
        return right(self, sequence) if sequence.num_preemptions == 0 else sequence.num_tokens - 32

    return faulty


def lower_priorities_take_room(right):
    def faulty(self, sequence):
        self._blocked_rank = None
        return right(self, sequence)

    return faulty


def a_full_step_behind_an_end(right):
    def faulty(self, sequence, count):
        right(self, sequence, count)
        self._has_end = False

    return faulty


def drift_is_applied_twice(right):
    return lambda self, work: self.drift * right(self, work)


def steps_that_raised_are_noted(right):
    def faulty(self, step, *args, **more):
        for _ in range(4):
            self.turns.note_step(self.in_flight[0], 1e-4)
        right(self, step, *args, **more)

    return faulty


BUGS = {
    "keys are forgotten": (Fluid, "enter", keys_are_forgotten),
    "the fluid stands still": (_Level, "advance", the_fluid_stands_still),
    "the fluid runs twice as fast": (_Level, "advance", the_fluid_runs_twice_as_fast),
    "newcomers first": (PromptTurns, "_candidates", newcomers_first),
    "running first": (PromptTurns, "_candidates", running_first),
    "shortest rest first": (Fluid, "order", in_order_of(lambda job: (job.num_tokens, job.order))),
    "order of arrival": (Fluid, "order", in_order_of(lambda job: job.order)),
    "prompts of who has gone stay": (Fluid, "leave", prompts_of_who_has_gone_stay),
    "a preempted one keeps its rest": (PromptTurns, "_rest", a_preempted_one_keeps_its_rest),
    "lower priorities take room": (_Starting, "may_start", lower_priorities_take_room),
    "a second long plan": (Policy, "_waits_for_answer", lambda right: lambda self: False),
    "a full step behind an end": (_Filling, "note", a_full_step_behind_an_end),
    "drift is applied twice": (StepTimes, "seconds", drift_is_applied_twice),
    "steps that raised are noted": (Policy, "fail_step", steps_that_raised_are_noted),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug, record_property):
    owner, name, make = BUGS[bug]
    with patch.object(owner, name, make(getattr(owner, name))):
        for seed in range(NUM_SEEDS):
            try:
                play_fairly(seed)
            except (Broken, KeyError):
                record_property("schedules", seed + 1)
                return
    pytest.fail(f"{bug} was not found in {NUM_SEEDS} schedules")
