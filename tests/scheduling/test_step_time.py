"""Step times: what is learnt, and the budget that follows from it."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trouper.actors.scheduling.step_time import LOSS, QUIET_S, StepBudget, StepTimes, StepWork
from trouper.bench.virtual_time import MACHINES, teach

TRUE = MACHINES["cpu-135m"]
ROWS = StepWork(0, 0, 16, 0.0, 16_000)
NO_ROWS = StepWork(0, 0, 0, 0.0, 0)


def taught(noise=0.1, num_rounds=4):
    times = StepTimes()
    for seed in range(num_rounds):
        teach(times, TRUE, seed=seed, noise=noise)
    return times


def test_a_step_is_described_by_chunks_and_rows():
    assert StepWork.of((100, 1, 1), (50, 10, 20)) == (1, 100, 2, 100 * 100.0, 30)
    assert StepWork.of((1, 1), (10, 20), 3) == (0, 0, 5, 0.0, 30)


def test_without_noise_the_coefficients_are_found():
    times = taught(noise=0.0)
    assert times.drift == pytest.approx(1, abs=0.01)
    assert times.coefficients == pytest.approx(TRUE.coefficients, rel=0.01, abs=1e-9)


def test_with_noise_steps_are_foreseen():
    times = taught()
    works = [ROWS, StepWork.of([256], [0]), StepWork.of([512], [6000]), StepWork.of([64], [1000])]
    for work in works:
        assert times.seconds(work) == pytest.approx(TRUE.seconds(work), rel=0.1)


def test_a_machine_that_gets_slower_is_followed():
    times, dice = taught(), random.Random(1)
    work = StepWork.of([256], [1000])
    for _ in range(12):
        times.note(work, 3 * TRUE.seconds(work) * math.exp(dice.gauss(0, 0.03)))
        times.refresh()
    assert times.seconds(work) == pytest.approx(3 * TRUE.seconds(work), rel=0.2)


def test_change_of_pace_is_that_of_every_kind_of_step():
    times = taught(noise=0.0)
    chunk, rows = StepWork.of([256], [1000]), StepWork.of([1] * 4, [500] * 4)
    for _ in range(24):
        times.note(chunk, 3 * TRUE.seconds(chunk))
        times.refresh()
    assert times.seconds(rows) == pytest.approx(3 * TRUE.seconds(rows), rel=0.02)
    assert times.seconds(chunk) == pytest.approx(3 * TRUE.seconds(chunk), rel=0.02)
    # The steps of the new pace are not multiplied once more.
    assert times.drift == pytest.approx(1, abs=0.02)


def test_first_step_of_shape_is_no_measurement():
    times = StepTimes()
    for _ in range(2):
        times.note(StepWork.of([64], [0]), 30.0)
    assert times.num_chunks == 1


def test_equal_steps_have_no_large_fixed_part():
    times = StepTimes()
    for _ in range(40):
        times.note(StepWork.of([512], [0]), 0.45)
        times.refresh()
    fixed = times.seconds(StepWork(1, 0, 0, 0.0, 0))
    assert fixed < 0.25 * times.seconds(StepWork.of([512], [0]))


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 100_000), st.integers(0, 200_000))
def test_tokens_in_cost_of_some_are_as_many(count, start):
    times = StepTimes()
    times.coefficients, times.drift = TRUE.coefficients, 1.7
    assert times.tokens_in(times.cost(start, count), start) in (count, count - 1)


COUNTS = st.lists(st.integers(1, 10**6), min_size=1, max_size=4)
SECONDS = st.one_of(st.sampled_from((0.0, 1e-9, 1e6, math.inf, math.nan)), st.floats(0, 10))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(COUNTS, SECONDS), max_size=60))
def test_no_step_makes_estimate_that_is_no_time(steps):
    times = StepTimes()
    budget = StepBudget(times, None)
    for counts, seconds in steps:
        times.note(StepWork.of(counts, [0] * len(counts)), seconds)
        times.refresh()
    assert all(0 <= each < math.inf for each in times.coefficients)
    assert 0 <= times.seconds(ROWS) < math.inf
    prompt_s = budget.prompt_s(ROWS, has_streams=True)
    assert prompt_s is None or prompt_s >= 0.01
    assert prompt_s is None or times.tokens_in(prompt_s, 0) >= 0


def test_fixed_part_is_tenth_of_step_with_prompts():
    times = taught(noise=0.0)
    prompt_s = StepBudget(times, None).prompt_s(NO_ROWS, has_streams=False)
    assert prompt_s == pytest.approx(0.028 / LOSS, rel=0.02)


def test_short_prompt_meets_step_like_its_own():
    times, machine = StepTimes(), MACHINES["cpu-1m"]
    for seed in range(4):
        teach(times, machine, seed=seed, noise=0.0)
    short_s = machine.alone_s(256)
    bounded = StepBudget(times, None, short_tokens=256)
    assert bounded.prompt_s(NO_ROWS, has_streams=False) == pytest.approx(2.5 * short_s, rel=0.03)
    assert StepBudget(times, None).prompt_s(NO_ROWS, has_streams=False) > 5 * short_s
    large = StepBudget(taught(noise=0.0), None, short_tokens=256)
    assert large.prompt_s(NO_ROWS, has_streams=False) == pytest.approx(0.028 / LOSS, rel=0.02)


def test_with_streams_rows_have_fifth_of_step_at_most():
    times = taught(noise=0.0)
    many = StepWork(0, 0, 200, 0.0, 200_000)
    prompt_s = StepBudget(times, None).prompt_s(many, has_streams=True)
    assert prompt_s == pytest.approx(4 * TRUE.seconds(many), rel=0.02)


def test_steps_grow_when_nobody_has_come_for_long():
    budget = StepBudget(taught(), None)
    before = budget.prompt_s(NO_ROWS, has_streams=False)
    budget.quiet_s = QUIET_S
    after = budget.prompt_s(NO_ROWS, has_streams=False)
    assert budget.prompt_s(NO_ROWS, has_streams=True) == before < after
    budget.quiet_s = 0.0
    assert budget.prompt_s(NO_ROWS, has_streams=False) == before


def test_limit_of_user_is_what_whole_step_may_take():
    times = taught(noise=0.0)
    prompt_s = StepBudget(times, 500).prompt_s(ROWS, has_streams=True)
    assert prompt_s + times.seconds(ROWS) + 0.024 == pytest.approx(0.5, rel=0.01)
    assert StepBudget(times, 1).prompt_s(ROWS, has_streams=True) == 0


def test_nothing_is_said_of_device_that_nobody_has_seen():
    assert StepBudget(StepTimes(), None).prompt_s(ROWS, has_streams=True) is None
