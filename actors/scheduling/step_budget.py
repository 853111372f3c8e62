"""Bound the prompt work of a step in seconds.  Pure.

A number of tokens takes 20 ms on one machine and seconds on another.  So a step gets just enough seconds of prompt work to make the loss to
its fixed costs small.
"""

from collections.abc import Sequence

from trouper.actors.scheduling.step_time import StepTimes, StepWork

# The share of fixed costs in a step with prompts.
LOSS = 0.08
# The same when nothing streams and no request came recently.  A newcomer may wait for one such step, so it is only as long as batch
# work needs to keep 98 % of its pace.
QUIET_LOSS = 0.012
# Seconds of steps without a new request after which `QUIET_LOSS` applies.
QUIET_S = 45.0
# Beside streams prompts get at least this multiple of the time of the rows: four fifths of the step.
ROWS_FACTOR = 4.0
MIN_S = 0.02
# No plan is made behind a plan of this estimate until its answer.
LONG_S = 0.05


def remaining_s(flights_s: Sequence[float], elapsed_s: float) -> float:
    """Estimate how long the plans in flight still take, the eldest of which became the eldest `elapsed_s` ago."""
    if not flights_s:
        return 0.0
    return sum(flights_s) - min(elapsed_s, flights_s[0])


class StepBudget:
    """Compute the budget of one device from its learnt step times.

    Args:
        max_step_ms: limit of a whole step in milliseconds.  None means that the budget follows from the step times.
    """

    def __init__(self, times: StepTimes, max_step_ms: int | None) -> None:
        self.last_s = 0.0  # for metrics
        self._times = times
        self._max_step_s = None if max_step_ms is None else max_step_ms / 1000
        self.quiet_s = 0.0  # seconds of steps since the last new request

    def prompt_s(self, rows: StepWork, *, has_streams: bool) -> float | None:
        """Return the seconds of prompt work beside these rows.  Returns None before the first fit.

        Args:
            has_streams: whether any of the rows is streamed to its client.
        """
        times = self._times
        if not times.is_known:
            return None
        alone_s = times.seconds(rows)
        fixed_s = times.seconds(StepWork(1, 0, 0, 0.0, 0))
        if self._max_step_s is not None:
            chunk_s = fixed_s - times.seconds(StepWork(0, 0, 0, 0.0, 0))
            self.last_s = max(self._max_step_s - alone_s - chunk_s, 0.0)
        elif has_streams:
            self.last_s = max(fixed_s / LOSS, ROWS_FACTOR * alone_s, MIN_S)
        else:
            is_quiet = self.quiet_s >= QUIET_S
            self.last_s = max(fixed_s / (QUIET_LOSS if is_quiet else LOSS), MIN_S)
        return self.last_s

    def seconds_until(self, work_s: float, rows: StepWork, *, has_streams: bool) -> float:
        """Estimate how long this much prompt work takes beside these rows: in whole steps, each with its fixed part."""
        step_s = self._times.seconds(rows._replace(has_chunk=1))
        budget_s = self.prompt_s(rows, has_streams=has_streams)
        num_steps = max(1.0, work_s / budget_s) if budget_s else 1.0
        return work_s + num_steps * step_s
