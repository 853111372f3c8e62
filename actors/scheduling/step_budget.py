"""The seconds of prompt work that a step may have: as long as it takes for its fixed part to be a small loss, and no longer.  Pure."""

from collections.abc import Sequence

from trouper.actors.scheduling.step_time import StepTimes, StepWork

LOSS = 0.08  # share of a step with prompts that its fixed part may be
# The same where nothing streams and no request has come for long.  A newcomer may meet one such step, so it is no longer than batch
# work needs to keep .98 of its pace.
QUIET_LOSS = 0.014
QUIET_S = 45.0  # of steps without a new request
ROWS_FACTOR = 4.0  # times what the rows of a step take: prompts get four fifths of it at least
MIN_S = 0.02
LONG_S = 0.05  # a plan that takes as long is not followed by another before its answer


def remaining_s(flights_s: Sequence[float], elapsed_s: float) -> float:
    """Estimate how long the plans in flight still take, the eldest of which became the eldest `elapsed_s` ago."""
    if not flights_s:
        return 0.0
    return sum(flights_s) - min(elapsed_s, flights_s[0])


class StepBudget:
    """The budget of one device.

    Args:
        max_step_ms: what a step may take, in place of what is learnt; None: learnt.
    """

    def __init__(self, times: StepTimes, max_step_ms: int | None) -> None:
        self.last_s = 0.0  # the last one, for people
        self._times = times
        self._max_step_s = None if max_step_ms is None else max_step_ms / 1000
        self.quiet_s = 0.0  # of steps since the last request has come

    def prompt_s(self, rows: StepWork, *, has_streams: bool) -> float | None:
        """Return the seconds of prompt work beside these rows; None: nothing is known yet.

        Args:
            has_streams: whether a client reads the tokens of one of the rows as they come.
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
