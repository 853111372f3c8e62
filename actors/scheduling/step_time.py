"""Estimate the seconds of a step, learnt from earlier steps, and bound its work by them.  Pure: measured seconds come with answers.

    seconds = base + chunk · [has a chunk] + token · P + row · D + pair · A + context · C

P is the number of chunk tokens, D of decoding rows (a draft counts as a row), A of pairs of a chunk token and a position that it attends
to, and C of positions that the rows read.  A drift multiplies the whole: other work on the machine slows every part.

The same number of tokens takes 20 ms on one machine and seconds on another, and a new request waits for the step in flight.  So
`StepBudget` allows a step just enough seconds of prompt work to make the share of its fixed costs small.  `PoolingTime` does this for
whole texts, at least one for each step.  `TokenBudget` halves the tokens of a step when the device runs out of memory, and doubles them
again after many successful steps.
"""

import math
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

# Steps of each kind, with and without a chunk, that a fit reads.
NUM_KEPT = 192
# Steps between two fits.
REFIT = 16
# Counts of steps with a chunk after which the first fits come.
FIRST_FITS = frozenset((4, 6, 8, 12))
RIDGE = 1e-6
# The divisor of a column of zeros.
NOTHING = 1e-12
ROUNDING = 1e-9
# Steps of equal size cannot separate fixed costs from costs per token.  Then the costs go to the tokens, because large fixed costs
# would give a large budget.
DAMPING = 1.003
# The exponent of one step's ratio in the drift.
DRIFT_STEP = 0.125
DRIFT_BOUNDS = 0.125, 8.0
# A drift outside these bounds asks for a new fit.
DRIFT_REFIT = 2 / 3, 3 / 2
# Steps whose median ratio is the drift after a fit.
NUM_RECENT = 8
# Seconds outside these bounds are no measurement of a step.
LEAST_S, MOST_S = 1e-6, 1e4
MOST_TOKENS = 1 << 30
FloatArray = npt.NDArray[np.float64]


class StepWork(NamedTuple):
    """The work of one step.

    Its numbers are the variables of the estimate, and each has a learnt coefficient in seconds.
    """

    has_chunk: int
    # Of all chunks.
    num_tokens: int
    num_rows: int
    num_pairs: float
    num_context: int

    @classmethod
    def of(cls, counts: Sequence[int], starts: Sequence[int], num_drafts: int = 0) -> "StepWork":
        """Describe a plan by the tokens and the first position of each entry.  An entry of one token is a row."""
        if not counts or max(counts) == 1:
            return cls(0, 0, len(counts) + num_drafts, 0.0, sum(starts))
        num_tokens = num_context = 0
        num_rows, num_pairs = num_drafts, 0.0
        for count, start in zip(counts, starts, strict=True):
            if count > 1:
                num_tokens += count
                num_pairs += count * (start + count / 2)
            else:
                num_rows += 1
                num_context += start
        return cls(1, num_tokens, num_rows, num_pairs, num_context)

    @classmethod
    def of_texts(cls, lengths: Sequence[int]) -> "StepWork":
        """Describe whole texts, which pooling computes without a KV cache.

        Attention makes the cost grow with the square of a length, so pairs are counted, too.
        """
        return cls(1, sum(lengths), 0, sum(length * length / 2 for length in lengths), 0)


class StepTimes:
    """Keep the measured steps of one device, and the coefficients fitted to them.

    A least-squares fit adapts to any machine, so no table of speeds is needed.
    """

    def __init__(self) -> None:
        self.coefficients: tuple[float, ...] = (0.0,) * 6
        self.drift = 1.0
        # Steps with a chunk.
        self.num_chunks = 0
        self._kept: tuple[deque[tuple[StepWork, float]], ...] = (
            deque(maxlen=NUM_KEPT), deque(maxlen=NUM_KEPT)
        )  # fmt: skip
        self._recent: deque[tuple[StepWork, float]] = deque(maxlen=NUM_RECENT)
        # Shapes of all earlier steps: some 30 of chunks, and one for each number of rows.
        self._shapes: set[tuple[int, int]] = set()
        # Steps since the last fit.
        self._num_new = 0
        # `num_chunks` at the last fit.
        self._fitted_at = 0
        self.is_known = False

    def __repr__(self) -> str:
        return f"<StepTimes {self.coefficients}, drift {self.drift:.2f}>"

    def seconds(self, work: StepWork) -> float:
        """Estimate the seconds of a step from the fitted coefficients.

        The result is corrected by the recent drift, since a machine may become slower or faster.
        """
        base, chunk, token, row, pair, context = self.coefficients
        has_chunk, num_tokens, num_rows, num_pairs, num_context = work
        seconds = base + row * num_rows + context * num_context
        if has_chunk:
            seconds += chunk + token * num_tokens + pair * num_pairs
        return self.drift * seconds

    def cost(self, start: int, count: int) -> float:
        """Estimate the seconds that `count` prompt tokens from position `start` add to a step with a chunk.

        Attention makes later positions more expensive.
        """
        _, _, token, _, pair, _ = self.coefficients
        return self.drift * count * (token + pair * (start + count / 2))

    def tokens_in(self, seconds: float, start: int) -> int:
        """Count the prompt tokens from position `start` with a cost of at most `seconds`.

        It is the inverse of `cost`, and returns at most `MOST_TOKENS`.
        """
        _, _, token, _, pair, _ = self.coefficients
        square, linear = self.drift * pair / 2, self.drift * (token + pair * start)
        if seconds <= 0:
            return 0
        # The root of square · n² + linear · n = seconds, in the form without cancellation.
        root = linear + math.sqrt(linear * linear + 4 * square * seconds)
        return min(MOST_TOKENS, int(2 * seconds / root + 1e-9)) if root > 0 else MOST_TOKENS

    def note(self, work: StepWork, seconds: float) -> None:
        """Learn the seconds of a step.

        The first step of a shape is ignored: it may include a compilation or a capture.
        """
        shape = (work.num_tokens.bit_length(), 0 if work.has_chunk else work.num_rows)
        if shape not in self._shapes:
            self._shapes.add(shape)
            return
        if not LEAST_S <= seconds <= MOST_S:
            return
        if self.is_known:
            estimate = self.seconds(work)
            ratio = min(2.0, max(0.5, seconds / estimate)) if estimate > 0 else 2.0
            least, most = DRIFT_BOUNDS
            self.drift = min(most, max(least, self.drift * ratio**DRIFT_STEP))
        step = work, seconds
        self._kept[work.has_chunk].append(step)
        self._recent.append(step)
        self.num_chunks += work.has_chunk
        self._num_new += 1

    def refresh(self) -> None:
        """Fit again if enough steps have been noted.  Called before estimates of prompts: decode-only steps need none."""
        is_off = self._num_new >= NUM_RECENT and not DRIFT_REFIT[0] < self.drift < DRIFT_REFIT[1]
        first = max((n for n in FIRST_FITS if n <= self.num_chunks), default=0)
        if self.num_chunks and (first > self._fitted_at or self._num_new >= REFIT or is_off):
            if is_off:
                self._rescale()
            self._num_new, self._fitted_at = 0, self.num_chunks
            self._fit()

    def _rescale(self) -> None:
        """Multiply the steps before the recent ones by the change of pace, as if they had been measured at the present pace.

        Without this, a fit on a machine that has become slower mixes two paces, and attributes the difference to the kind
        of work that came last.
        """
        pace = self._recent_pace()
        recent = set(map(id, self._recent))
        for steps in self._kept:
            for i, step in enumerate(steps):
                if id(step) not in recent:
                    steps[i] = step[0], step[1] * pace

    def _fit(self) -> None:
        """Find the coefficients ≥ 0 with the least squares of the relative errors."""
        steps = [step for kind in self._kept for step in kind]
        features = np.array([(1.0, *work) for work, _ in steps])
        largest = np.maximum(features.max(axis=0), NOTHING)
        # Divided by the seconds, so that errors are relative.
        scaled = features / largest / np.array([[seconds] for _, seconds in steps])
        gram, right = scaled.T @ scaled, scaled.sum(axis=0)
        gram += np.eye(len(gram)) * (RIDGE * gram.trace() / len(gram))
        gram[0, 0] *= DAMPING
        gram[1, 1] *= DAMPING
        self.coefficients = tuple((_non_negative(gram, right) / largest).tolist())
        self.is_known = self.num_chunks >= min(FIRST_FITS)
        least, most = DRIFT_BOUNDS
        self.drift = min(most, max(least, self._recent_pace()))

    def _recent_pace(self) -> float:
        """Return the median ratio of the recent steps' seconds to their estimates without a drift."""
        ratios = [
            seconds * self.drift / estimate
            for work, seconds in self._recent
            if (estimate := self.seconds(work)) > 0
        ]
        return median(ratios) if ratios else 1.0


def _non_negative(gram: FloatArray, right: FloatArray) -> FloatArray:
    """Solve least squares for x ≥ 0, from their normal equations, by Murty's pivoting: exact, and it always ends."""
    size = len(right)
    is_free = np.ones(size, dtype=bool)
    x = np.zeros(size)
    for _ in range(2**size):
        x[:] = 0.0
        chosen = np.flatnonzero(is_free)
        x[chosen] = np.linalg.solve(gram[np.ix_(chosen, chosen)], right[chosen])
        slope = gram @ x - right
        wrong = np.flatnonzero(np.where(is_free, x < -ROUNDING, slope < -ROUNDING))
        if not len(wrong):
            break
        is_free[wrong[-1]] ^= True
    return np.maximum(x, 0.0)


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
