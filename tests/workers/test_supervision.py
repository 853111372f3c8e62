"""A worker's death: its cause in words, the budget of restarts, the deadline of a step."""

import signal

import pytest

from trouper.actors.executor.devices.supervision import (
    BACKOFF_S,
    FIRST_STEP_S,
    MAX_LOSSES,
    MIN_STEP_S,
    Death,
    RestartBudget,
    StepDeadlines,
    WorkerEvent,
    WorkerState,
    is_memory_sound,
    next_state,
)


@pytest.mark.parametrize(
    ("death", "cause", "line"),
    [
        (
            Death(0, 812, -11, stderr=("Fatal Python error", "  in forward", "")),
            "signal",
            "worker 0 died of SIGSEGV in step 812: in forward",
        ),
        (Death(1, None, -9), "signal", "worker 1 died of SIGKILL"),
        (Death(0, 3, 70), "exit", "worker 0 exited with status 70 in step 3"),
        (
            Death(0, 3, -9, was_out_of_memory=True),
            "out_of_memory",
            "worker 0 was killed by the operating system, which was out of memory, in step 3",
        ),
        (
            Death(2, 9, -9, hung_s=10.0),
            "hang",
            "worker 2 was killed after 10 s without an answer in step 9",
        ),
        (
            Death(0, 4, 1, broken="CUDA error: an illegal memory access"),
            "error",
            "worker 0 failed in step 4: CUDA error: an illegal memory access",
        ),
        (Death(0), "closed", "worker 0 closed its connection"),
        (Death(0, None, -99), "signal", "worker 0 died of signal 99"),
    ],
)
def test_a_death_is_told_in_one_line(death, cause, line):
    assert death.cause == cause
    assert death.describe() == line


@pytest.mark.parametrize(
    ("statuses", "is_sound"),
    [
        ([-signal.SIGKILL], True),
        ([-signal.SIGTERM], True),
        ([3], True),
        ([None], True),
        ([-signal.SIGKILL, -signal.SIGKILL], True),
        ([-signal.SIGKILL, -signal.SIGSEGV], False),
        ([-signal.SIGBUS], False),
        ([-signal.SIGILL], False),
        ([-signal.SIGABRT], False),
    ],
)
def test_memory_is_sound_unless_written_wildly(statuses, is_sound):
    assert is_memory_sound(statuses, was_out_of_memory=False, is_broken=False) == is_sound
    assert not is_memory_sound(statuses, was_out_of_memory=True, is_broken=False)
    assert not is_memory_sound(statuses, was_out_of_memory=False, is_broken=True)


def test_restarts_back_off_until_a_step_is_answered():
    budget = RestartBudget(max_restarts=10, window_s=300.0)
    assert [budget.note_loss(float(now)) for now in range(4)] == [*BACKOFF_S, BACKOFF_S[-1]]
    budget.note_progress()
    assert budget.note_loss(5.0) == BACKOFF_S[0]


def test_unexplained_losses_within_the_window_spend_the_budget():
    budget = RestartBudget(max_restarts=3, window_s=300.0)
    assert None not in [budget.note_loss(now) for now in (0.0, 1.0, 2.0)]
    assert budget.note_loss(3.0) is None
    budget = RestartBudget(max_restarts=3, window_s=300.0)
    assert None not in [budget.note_loss(now) for now in (0.0, 1.0, 2.0, 301.5, 302.5)]


def test_losses_of_request_found_cost_nothing_but_are_bounded_too():
    budget = RestartBudget(max_restarts=3, window_s=300.0)
    for now in range(MAX_LOSSES):
        assert budget.note_loss(float(now)) is not None
        budget.explain(1)
    assert budget.note_loss(20.0) is None


def test_option_sets_number_of_survived_losses():
    budget = RestartBudget(max_restarts=2 * MAX_LOSSES, window_s=300.0)
    assert None not in [budget.note_loss(float(now)) for now in range(2 * MAX_LOSSES)]
    assert budget.note_loss(100.0) is None


def test_poison_search_spends_no_loss_budget():
    budget = RestartBudget(max_restarts=1, window_s=300.0)
    searched = (17, 9, 5, 3, 2, 1)
    assert None not in [budget.note_loss(float(n), n) for n in searched]
    assert budget.note_loss(20.0, 1) is None  # the same number again is no search
    for after in (10, 0):  # not halved; idle
        budget = RestartBudget(max_restarts=1, window_s=300.0)
        budget.note_loss(0.0, 17)
        assert budget.note_loss(1.0, after) is None


def test_no_restart_is_allowed_with_budget_of_none():
    assert RestartBudget(max_restarts=0, window_s=300.0).note_loss(0.0) is None


def test_deadline_is_learnt_from_steps_of_about_as_many_tokens():
    deadlines = StepDeadlines()
    assert deadlines.deadline_s(100) == FIRST_STEP_S
    for _ in range(99):
        deadlines.note(100, 1.0)
    deadlines.note(100, 50.0)  # one in a hundred may be an outlier
    assert deadlines.deadline_s(127) == 20.0
    assert deadlines.deadline_s(1) == FIRST_STEP_S
    deadlines.note(1, 0.01)
    assert deadlines.deadline_s(1) == MIN_STEP_S
    assert StepDeadlines(fixed_s=3.0).deadline_s(1) == 3.0


def test_only_transitions_of_the_table_are_taken():
    assert next_state(WorkerState.UP, WorkerEvent.LOSS) is WorkerState.LOST
    assert next_state(WorkerState.FAILED, WorkerEvent.CLOSE) is WorkerState.CLOSED
    with pytest.raises(RuntimeError, match="failed"):
        next_state(WorkerState.FAILED, WorkerEvent.RESTART)


def test_last_words_are_fault_and_its_place():
    stderr = (
        "loading",
        "Fatal Python error: Illegal instruction",
        "",
        "Current thread 0x1:",
        "  File a.py",
        "",
        "Extension modules: x",
    )
    death = Death(0, 8, -4, stderr=stderr)
    assert death.describe() == (
        "worker 0 died of SIGILL in step 8: Fatal Python error: Illegal instruction, File a.py"
    )
