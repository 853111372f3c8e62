"""Bound the steps of a pooling engine in seconds.  Pure.

Texts are pooled whole, so a step cannot stop within one.  It takes as many texts as the `StepBudget` has seconds for, and at
least one.  So a new text waits for one short step or for one text, not for a step that is full to its token budget.
"""

from collections.abc import Sequence

from trouper.actors.scheduling.step_budget import LONG_S, StepBudget, remaining_s
from trouper.actors.scheduling.step_time import ROUNDING, StepTimes, StepWork

# Tokens of the steps before the first estimates, by turns.  The second size has at least two texts.
FIRST_TOKENS = 128, 512
# One of this many full steps may take twice the budget, or twice its first text.  Otherwise texts of one length would give steps of
# one size.  A fit could not separate fixed costs from costs per token, would find none, and steps would shrink to one text.
EXPLORE = 8
NO_ROWS = StepWork(0, 0, 0, 0.0, 0)


class PoolingTime:
    """The step times and the budget of one pooling policy, which is the only writer.

    Args:
        max_step_ms: limit of a step in milliseconds; None means that the budget is learnt.
        has_one_stage: whether a step is computed by one worker, and not by the stages of a pipeline.
    """

    def __init__(self, max_step_ms: int | None, *, has_one_stage: bool) -> None:
        self.times = StepTimes()
        self.budget = StepBudget(self.times, max_step_ms)
        self._is_learnt = max_step_ms is None
        self._has_one_stage = has_one_stage
        self.num_full = 0  # steps that left texts waiting
        self._ratios: list[float] = []

    def __repr__(self) -> str:
        return f"<PoolingTime {self.times!r}>"

    def count_fitting(self, lengths: Sequence[int]) -> int:
        """Count the leading texts that one step has the time for: at least one."""
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
        """Estimate the seconds of a step.  Returns 0 while step times are unknown."""
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

    def is_long(self, estimate_s: float) -> bool:
        """Whether the step behind a step of this estimate is planned only after its answer, with the texts that have come until then."""
        return self._has_one_stage and estimate_s >= LONG_S

    def note_step(self, work: StepWork, estimate_s: float, seconds: float) -> None:
        """Learn from a step.  A device that measures no time gives 0 seconds."""
        if seconds <= 0:
            return
        self.budget.quiet_s += seconds
        self.times.note(work, seconds)
        if estimate_s:
            self._ratios.append(estimate_s / seconds)

    def take_ratios(self) -> tuple[float, ...]:
        """Take the ratios of estimated to measured time of the steps since the last call."""
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
