"""Bound the work of a step in seconds and in tokens.

The same number of tokens takes 20 ms on one machine and seconds on another, and a new request waits for the step in flight.  So
`StepBudget` allows a step just enough seconds of prompt work to make the share of its fixed costs small.

`PoolingTime` does this for whole texts: a step takes as many texts as the budget allows, and at least one.  So a new text waits for one
short step or for one text, not for a step with a full token budget.

`TokenBudget` halves the tokens of a step when the device runs out of memory, and doubles them again after many successful steps.
"""

from collections.abc import Sequence
from typing import Any

from trouper.actors.scheduling.step_time import ROUNDING, StepTimes, StepWork

# The share of fixed costs in a step with prompts.
LOSS = 0.08
# The same when nothing streams and no request came recently.  A newcomer may wait for one such step, so it is only as long as batch
# work needs to keep 98 % of its pace.
QUIET_LOSS = 0.012
# Seconds of steps without a new request after which `QUIET_LOSS` applies.
QUIET_S = 45.0
# While outputs are streamed, prompts get at least this multiple of the time of the rows: four fifths of the step.
ROWS_FACTOR = 4.0
# Prompt work in a step, over the time that a short prompt takes without company.  A newcomer waits for half a step on average and
# then takes one of its own, so a short one has its first token after about twice its time without company.  Large models on a CPU are below this
# limit anyway.  Small models and GPUs have large fixed costs: the limit makes work with long prompts up to 20 % slower.
SHORT_STEPS = 2.5
MIN_S = 0.01
# No plan is made behind a plan of this estimate until its answer: a newcomer waits for the plans in flight.
LONG_S = 0.05
# The same for plans with a prompt.  The answer and the next plan cross in 0.3 ms, which the device waits.
LONG_PROMPT_S = 0.01


def remaining_s(flights_s: Sequence[float], elapsed_s: float) -> float:
    """Estimate the remaining seconds of the plans in flight.

    Args:
        flights_s: the estimate of each plan, the eldest first.
        elapsed_s: seconds since the first one became the eldest.
    """
    if not flights_s:
        return 0.0
    return sum(flights_s) - min(elapsed_s, flights_s[0])


class StepBudget:
    """Compute the budget of one device from its learnt step times.

    Args:
        max_step_ms: limit of a whole step in milliseconds.  None means that the budget follows from the step times.
        short_tokens: length of a short prompt, to which the steps are kept in proportion.  0 means that the fixed costs decide.
    """

    def __init__(self, times: StepTimes, max_step_ms: int | None, short_tokens: int = 0) -> None:
        self.last_s = 0.0  # for metrics
        self._times = times
        self._short_tokens = short_tokens
        self._max_step_s = None if max_step_ms is None else max_step_ms / 1000
        self.quiet_s = 0.0  # seconds of steps since the last new request

    def prompt_s(self, rows: StepWork, *, has_streams: bool) -> float | None:
        """Return the seconds of prompt work in a step with these rows.  Returns None before the first fit.

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
            self.last_s = max(self._busy_s(fixed_s), ROWS_FACTOR * alone_s)
        elif self.quiet_s < QUIET_S:
            self.last_s = self._busy_s(fixed_s)
        else:
            self.last_s = max(fixed_s / QUIET_LOSS, MIN_S)
        return self.last_s

    def _busy_s(self, fixed_s: float) -> float:
        """Return the seconds of prompt work while requests come."""
        busy_s = fixed_s / LOSS
        if self._short_tokens:
            short_s = fixed_s + self._times.cost(0, self._short_tokens)
            busy_s = min(busy_s, SHORT_STEPS * short_s)
        return max(busy_s, MIN_S)

    def seconds_until(self, work_s: float, rows: StepWork, *, has_streams: bool) -> float:
        """Estimate the seconds of this much prompt work in steps with these rows, including the fixed costs of each step."""
        step_s = self._times.seconds(rows._replace(has_chunk=1))
        budget_s = self.prompt_s(rows, has_streams=has_streams)
        num_steps = max(1.0, work_s / budget_s) if budget_s else 1.0
        return work_s + num_steps * step_s


# Successful steps before a larger one is tried.
PATIENCE = 64


class TokenBudget:
    """A number of tokens, at least one and at most `most`.

    It adapts to the memory of the device: a failure halves it, and a series of successes doubles it again.
    """

    def __init__(self, most: int) -> None:
        self.num_tokens = most
        self._most = most
        self._num_passed = 0

    def __repr__(self) -> str:
        return f"<TokenBudget {self.num_tokens} of {self._most}>"

    def shrink(self, num_tokens: int) -> bool:
        """Halve the budget, because a step of `num_tokens` ran out of memory.  Returns False if no step can be smaller."""
        if num_tokens <= 1:
            return False
        self.num_tokens = min(self.num_tokens, num_tokens // 2)
        self._num_passed = 0
        return True

    def passed(self) -> None:
        """Note a step with enough memory.

        After enough of them in a row the budget is doubled, up to `most`.
        """
        self._num_passed += 1
        if self._num_passed >= PATIENCE:
            self.num_tokens = min(self._most, 2 * self.num_tokens)
            self._num_passed = 0


# Tokens of the steps before the first estimates, by turns.  The second size has at least two texts.
FIRST_TOKENS = 128, 512
# One of this many full steps may take twice the budget, or twice its first text.  Otherwise texts of one length would give steps of
# one size.  A fit could not separate fixed costs from costs per token, would find none, and steps would shrink to one text.
EXPLORE = 8
NO_ROWS = StepWork(0, 0, 0, 0.0, 0)


class PoolingTime:
    """Own the step times and the budget of one pooling policy.

    Args:
        max_step_ms: limit of a step in milliseconds.  None learns the budget from the step times.
    """

    def __init__(self, max_step_ms: int | None) -> None:
        self.times = StepTimes()
        self.budget = StepBudget(self.times, max_step_ms)
        self._is_learnt = max_step_ms is None
        # Steps after which texts still waited.
        self.num_full = 0
        self._ratios: list[float] = []

    def __repr__(self) -> str:
        return f"<PoolingTime {self.times!r}>"

    def count_fitting(self, lengths: Sequence[int]) -> int:
        """Count the leading texts that one step has the time for: at least one.

        Before the first fit, steps of fixed sizes are used, from which the times are learnt.
        """
        self.times.refresh()
        prompt_s = self.budget.prompt_s(NO_ROWS, has_streams=False)
        if prompt_s is None:
            is_large = self.times.num_chunks % 2 == 1
            return _count_within(lengths, FIRST_TOKENS[is_large], 1 + is_large)
        costs = [self.times.cost(0, length) for length in lengths]
        taken = _count_within(costs, prompt_s, 1)
        if taken < len(lengths) and self._is_learnt:
            self.num_full += 1
            if self.num_full % EXPLORE == 0:
                taken = _count_within(costs, 2 * max(prompt_s, costs[0]), 1)
        return taken

    def estimate_s(self, work: StepWork) -> float:
        """Estimate the seconds of a step.  Returns 0 while step times are unknown.

        It is compared with the measured time when the answer arrives.
        """
        return self.times.seconds(work) if self.times.is_known else 0.0

    def expect(
        self, lengths: Sequence[int], flights_s: Sequence[float], elapsed_s: float
    ) -> float | None:
        """Estimate the seconds until these texts are computed behind the plans in flight.  Returns None before the first fit."""
        self.times.refresh()
        if not self.times.is_known:
            return None
        work_s = sum(self.times.cost(0, length) for length in lengths)
        until_s = self.budget.seconds_until(work_s, NO_ROWS, has_streams=False)
        return remaining_s(flights_s, elapsed_s) + until_s

    def note_step(self, work: StepWork, estimate_s: float, seconds: float) -> None:
        """Learn from a step.  A device that measures no time gives 0 seconds.

        The error of the estimate becomes a metric.
        """
        if seconds <= 0:
            return
        self.budget.quiet_s += seconds
        self.times.note(work, seconds)
        if estimate_s:
            self._ratios.append(estimate_s / seconds)

    def statistics(self) -> dict[str, Any]:
        """Describe the state in the fields of `SchedulerStats`.

        It is the seconds of work that the last step was allowed to have.
        """
        return {"step_prompt_budget_s": self.budget.last_s}

    def take_ratios(self) -> tuple[float, ...]:
        """Take the ratios of estimated to measured time of the steps since the last call.

        A ratio of 1 is a perfect estimate.
        """
        ratios = tuple(self._ratios)
        self._ratios.clear()
        return ratios


def _count_within(costs: Sequence[float], most: float, least: int) -> int:
    """Count the leading costs with a sum of at most `most`; `least` are taken in any case."""
    taken, total = 0, 0.0
    for cost in costs:
        total += cost
        if total > most * (1 + ROUNDING) and taken >= least:
            break
        taken += 1
    return taken
