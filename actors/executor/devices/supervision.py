"""Decide how to handle the loss of a worker: its cause, whether the device restarts, and when. Pure.

    STARTING -> UP -> LOST -> STARTING ...      FAILED once the budget is spent, CLOSED when the engine ends

A loss need not end the engine: the running sequences are recomputed and their streams continue. Only unexplained
losses count against a budget. A loss is explained when the request that caused it has been found.
"""

import signal
from collections import deque
from collections.abc import Sequence
from enum import Enum
from itertools import pairwise

import msgspec

from trouper.actors.messages.steps import LossCause
from trouper.errors import DeviceStartError

# Seconds before the first, second and every later consecutive restart.  The first 10 ms give the scheduler time to explain the loss,
# so that it does not count if the new workers die at once.
BACKOFF_S = (0.01, 1.0, 4.0)
# The most losses, explained or not, within the window; more if the budget allows more unexplained ones.
MAX_LOSSES = 16
# A worker killed by one of these signals may have corrupted any memory, also the KV cache that outlives it.
WILD_SIGNALS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGABRT, signal.SIGFPE)

# Minimum deadlines of a step. The first step of a size gets more time, because it may compile kernels.
MIN_STEP_S, FIRST_STEP_S = 10.0, 120.0
# The deadline of a step is this multiple of the slowest recent step of its size.
DEADLINE_FACTOR = 20.0
# The deadline of a call is this multiple of the load time, because a wake reads the weights again.
CALL_FACTOR = 4.0
# Recorded durations for each size of step.
NUM_STEPS_KEPT = 100


class WorkerState(Enum):
    """Name the state that all workers of a device share, because no rank can continue without the others."""

    STARTING = "starting"
    UP = "up"
    LOST = "lost"
    FAILED = "failed"
    CLOSED = "closed"


class WorkerEvent(Enum):
    """Name an event that changes a `WorkerState`."""

    LOADED = "loaded"
    LOSS = "loss"
    RESTART = "restart"
    BUDGET_SPENT = "budget spent"
    CLOSE = "close"


_TRANSITIONS = {
    (WorkerState.STARTING, WorkerEvent.LOADED): WorkerState.UP,
    (WorkerState.STARTING, WorkerEvent.LOSS): WorkerState.LOST,
    (WorkerState.UP, WorkerEvent.LOSS): WorkerState.LOST,
    (WorkerState.LOST, WorkerEvent.RESTART): WorkerState.STARTING,
    (WorkerState.LOST, WorkerEvent.BUDGET_SPENT): WorkerState.FAILED,
    **{(state, WorkerEvent.CLOSE): WorkerState.CLOSED for state in WorkerState},
}


def next_state(state: WorkerState, event: WorkerEvent) -> WorkerState:
    """Return the state that follows an event, by the table of transitions.

    Raises:
        RuntimeError: the event cannot happen in this state, which is a bug of the caller.
    """
    following = _TRANSITIONS.get((state, event))
    if following is None:
        raise RuntimeError(f"a worker that is {state.value} cannot take {event.value!r}")
    return following


class WorkerKilledError(DeviceStartError):
    """Report that another process killed a worker before it was ready, so another start may succeed."""


class RestartBudget:
    """Count the losses of one device, and decide whether and when it restarts.

    Args:
        max_restarts: unexplained losses allowed within the window; with 0 the first loss ends the device.
        window_s: length of the window in seconds.
    """

    def __init__(self, max_restarts: int, window_s: float) -> None:
        self._max_restarts, self._window_s = max_restarts, window_s
        self._max_losses = max(MAX_LOSSES, max_restarts)
        # The time of each loss, and whether it is explained or under investigation; at most `_max_losses` + 1.
        self._losses: deque[list[float | bool]] = deque(maxlen=self._max_losses + 1)
        self._num_in_a_row = 0
        self._num_suspects = 0

    def __repr__(self) -> str:
        return (
            f"<RestartBudget: {len(self._losses)} losses, {self._max_restarts} unexplained allowed>"
        )

    def note_loss(self, now: float, num_suspects: int = 0) -> float | None:
        """Count a loss in a step of `num_suspects` requests; 0 means that no request can be the cause.

        A loss with at most half the suspects of the previous one is a step of the bisection for the request that
        kills workers. It does not count, because the bisection would otherwise spend the budget before it succeeds.
        At most log2(suspects) such losses follow one that counts.

        Returns:
            Seconds to wait before the restart, or None if the budget is spent.
        """
        while self._losses and self._losses[0][0] <= now - self._window_s:
            self._losses.popleft()
        is_narrower = 0 < num_suspects < self._num_suspects
        is_search = is_narrower and 2 * num_suspects <= self._num_suspects + 1
        self._num_suspects = num_suspects
        self._losses.append([now, is_search])
        num_unexplained = sum(not is_explained for _, is_explained in self._losses)
        if num_unexplained > self._max_restarts or len(self._losses) > self._max_losses:
            return None
        wait_s = BACKOFF_S[min(self._num_in_a_row, len(BACKOFF_S) - 1)]
        self._num_in_a_row += 1
        return wait_s

    def note_progress(self) -> None:
        """Record that a step was answered, so that the next restart follows without a long delay.

        Consecutive losses without progress increase the delay before a restart.
        """
        self._num_in_a_row = 0

    def explain(self, num_losses: int) -> None:
        """Mark the last `num_losses` losses as explained: their cause was found, and they no longer count."""
        for loss in list(self._losses)[-num_losses:] if num_losses > 0 else ():
            loss[1] = True


class StepDeadlines:
    """Learn from the durations of earlier steps how long a step may take before its worker counts as hung.

    Steps with similar numbers of tokens (within a power of two) share their durations.

    Args:
        fixed_s: the `step_timeout` option, which replaces the learned deadlines.
    """

    def __init__(self, fixed_s: float | None = None) -> None:
        self._fixed_s = fixed_s
        self._taken: dict[int, deque[float]] = {}  # one deque for each power of two, at most 32

    def deadline_s(self, num_tokens: int) -> float:
        """Return the seconds allowed for a step of this size, counted from when it becomes the oldest unanswered step.

        The first step of a size gets more time, because it may compile kernels.
        """
        if self._fixed_s is not None:
            return self._fixed_s
        taken = self._taken.get(num_tokens.bit_length())
        if not taken:
            return FIRST_STEP_S
        slow_end = sorted(taken)[-1 - len(taken) // NUM_STEPS_KEPT]
        return max(MIN_STEP_S, DEADLINE_FACTOR * slow_end)

    def note(self, num_tokens: int, seconds: float) -> None:
        """Record the duration of a step, from which the deadlines of later steps of similar size are estimated."""
        kept = self._taken.setdefault(num_tokens.bit_length(), deque(maxlen=NUM_STEPS_KEPT))
        kept.append(seconds)


def call_deadline_s(load_s: float) -> float:
    """Return the seconds that an idle worker may take to answer a call.

    The limit grows with the load time, because a wake reads the same weights.
    """
    return max(FIRST_STEP_S, CALL_FACTOR * load_s)


def is_memory_sound(
    statuses: Sequence[int | None], *, was_out_of_memory: bool, is_broken: bool
) -> bool:
    """Return whether the KV memory of ended workers can be trusted and reused.

    It can if each worker was killed, closed its connection or exited, but not after a crash or an error, which may
    have corrupted it.  If the machine is out of memory, the KV memory must be freed in any case, so that the next
    workers find memory.

    Args:
        statuses: the exit statuses of all workers of the device, as in `subprocess`.
        is_broken: whether a worker ended itself with an error, or sent an invalid or unexpected frame.
    """
    is_wild = any(status is not None and -status in WILD_SIGNALS for status in statuses)
    return not (is_wild or was_out_of_memory or is_broken)


class Death(msgspec.Struct, frozen=True):
    """Record how and why a worker ended, for the log, the metrics and the search for a request that kills workers.

    `step` is the oldest unanswered step, `exit_status` is as in `subprocess` (negative for a signal), and
    `hung_s` is the time in seconds after which a hung worker was killed. `broken` is the error that the worker or the
    engine reported, and `stderr` has the last lines of its stderr.
    """

    rank: int
    step: int | None = None
    exit_status: int | None = None
    hung_s: float | None = None
    # Whether Linux's counter of out-of-memory kills grew while the worker ran.
    was_out_of_memory: bool = False
    # Whether the worker's machine was lost.
    was_machine_lost: bool = False
    broken: str | None = None
    stderr: tuple[str, ...] = ()
    # If a device of several workers hangs, it is unknown which one does, so a report names all of them.
    num_workers: int = 1
    first_rank: int = 0

    @property
    def cause(self) -> LossCause:
        """Return the cause of the death: one of a fixed set of labels for the metric `trouper:worker_restarts_total`."""
        if self.hung_s is not None:
            return "hang"
        if self.was_out_of_memory:
            return "out_of_memory"
        if self.broken is not None:
            return "error"
        if self.exit_status is None:
            return "closed"
        return "signal" if self.exit_status < 0 else "exit"

    @property
    def is_from_outside(self) -> bool:
        """Return whether no request can be the cause: the machine was lost, or another process sent SIGKILL."""
        return self.was_machine_lost or (
            self.cause == "signal" and self.exit_status == -signal.SIGKILL
        )

    def describe(self) -> str:
        """Describe the death in one line, such as "worker 0 died of SIGSEGV in step 812: …" with the most
        informative line of stderr.
        """
        where = "" if self.step is None else f" in step {self.step}"
        words = self.broken or _last_words(self.stderr)
        subject = f"worker {self.rank}"
        if self.cause == "hang" and self.num_workers > 1:
            last_rank = self.first_rank + self.num_workers - 1
            subject = f"one of workers {self.first_rank} to {last_rank}"
        return f"{subject} {self._verb()}{where}" + (f": {words}" if words else "")

    def _verb(self) -> str:
        match self.cause:
            case "hang":
                return f"was killed after {self.hung_s:.0f} s without an answer"
            case "out_of_memory":
                return "was killed by the operating system, which was out of memory,"
            case "error":
                return "failed"
            case "closed":
                return "closed its connection"
            case "exit":
                return f"exited with status {self.exit_status}"
            case _:
                return f"died of {_signal_name(-(self.exit_status or 0))}"


def _last_words(lines: Sequence[str]) -> str:
    """Return the most informative line of stderr: faulthandler's report with its location, else the last non-empty line."""
    texts = [line.strip() for line in lines]
    fault = next((text for text in texts if text.startswith("Fatal Python error:")), None)
    if fault is None:
        return next((text for text in reversed(texts) if text), "")
    locations = [after for before, after in pairwise(texts) if before.startswith("Current thread")]
    return ", ".join([fault, *locations[-1:]])


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
