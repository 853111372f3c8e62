"""Estimate the seconds of a step, learnt from earlier steps.  Pure: the measured seconds come with the device's answers.

    seconds = base + chunk · [has a chunk] + token · P + row · D + pair · A + context · C

P is the number of chunk tokens, D of decoding rows (a draft counts as a row), A of pairs of a chunk token and a position that it attends
to, and C of positions that the rows read.  A drift multiplies the whole: other work on the machine slows every part.
"""

import math
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

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
