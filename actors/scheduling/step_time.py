"""How long a step takes, learnt from the steps before.  Pure: the seconds come with the device's answers.

    seconds = base + chunk · [has a chunk] + token · P + row · D + pair · A + context · C

P tokens of chunks, D rows that decode (a draft counts as one), A pairs of a chunk's token and a position that it attends to, and
C positions that the rows read.  A drift is one factor on all of it: a machine that has other work is slower in every part.
"""

import math
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

NUM_KEPT = 192  # steps of each kind, with and without a chunk, that a fit reads
REFIT = 16  # steps between two fits
FIRST_FITS = frozenset((4, 6, 8, 12))  # steps with a chunk after which the first fits come
RIDGE = 1e-6
NOTHING = 1e-12  # what is divided by, where all are 0
ROUNDING = 1e-9
# Sizes that are always equal cannot show what is fixed and what is per token: it goes to the tokens, for a step that seems to
# have a large fixed part would be given a large budget.
DAMPING = 1.003
DRIFT_STEP = 0.125  # exponent of one step's ratio
DRIFT_BOUNDS = 0.125, 8.0
DRIFT_REFIT = 2 / 3, 3 / 2  # outside of it the coefficients are looked at again
NUM_RECENT = 8  # steps whose median ratio is the drift after a fit
LEAST_S, MOST_S = 1e-6, 1e4  # what is outside is no measurement of a step
MOST_TOKENS = 1 << 30
FloatArray = npt.NDArray[np.float64]


class StepWork(NamedTuple):
    """The work of one step."""

    has_chunk: int
    num_tokens: int  # of chunks
    num_rows: int
    num_pairs: float
    num_context: int

    @classmethod
    def of(cls, counts: Sequence[int], starts: Sequence[int], num_drafts: int = 0) -> "StepWork":
        """Describe a plan by the tokens and the first position of each entry; one token is a row."""
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
        """Describe whole texts, which are computed without a cache."""
        return cls(1, sum(lengths), 0, sum(length * length / 2 for length in lengths), 0)


class StepTimes:
    """The coefficients of one device, and the steps that they are learnt from."""

    def __init__(self) -> None:
        self.coefficients: tuple[float, ...] = (0.0,) * 6
        self.drift = 1.0
        self.num_chunks = 0  # steps with a chunk that were noted
        self._kept: tuple[deque[tuple[StepWork, float]], ...] = (
            deque(maxlen=NUM_KEPT), deque(maxlen=NUM_KEPT)
        )  # fmt: skip
        self._recent: deque[tuple[StepWork, float]] = deque(maxlen=NUM_RECENT)
        self._shapes: set[tuple[int, int]] = (
            set()
        )  # that have been computed; some 30 of chunks, one a number of rows
        self._num_new = 0  # steps since the last fit
        self._fitted_at = 0  # steps with a chunk at the last fit
        self.is_known = False

    def __repr__(self) -> str:
        return f"<StepTimes {self.coefficients}, drift {self.drift:.2f}>"

    def seconds(self, work: StepWork) -> float:
        """Estimate a step."""
        base, chunk, token, row, pair, context = self.coefficients
        has_chunk, num_tokens, num_rows, num_pairs, num_context = work
        seconds = base + row * num_rows + context * num_context
        if has_chunk:
            seconds += chunk + token * num_tokens + pair * num_pairs
        return self.drift * seconds

    def cost(self, start: int, count: int) -> float:
        """Estimate what `count` prompt tokens behind position `start` add to a step that has a chunk anyway."""
        _, _, token, _, pair, _ = self.coefficients
        return self.drift * count * (token + pair * (start + count / 2))

    def tokens_in(self, seconds: float, start: int) -> int:
        """Count the prompt tokens behind position `start` whose cost is at most `seconds`."""
        _, _, token, _, pair, _ = self.coefficients
        square, linear = self.drift * pair / 2, self.drift * (token + pair * start)
        if seconds <= 0:
            return 0
        # The root of square · n² + linear · n = seconds, in the form that loses no digits.
        root = linear + math.sqrt(linear * linear + 4 * square * seconds)
        return min(MOST_TOKENS, int(2 * seconds / root + 1e-9)) if root > 0 else MOST_TOKENS

    def note(self, work: StepWork, seconds: float) -> None:
        """Take what a step has taken.

        The first of a shape is left out: it may have compiled, captured or recorded something.
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
        self._kept[work.has_chunk].append((work, seconds))
        self._recent.append((work, seconds))
        self.num_chunks += work.has_chunk
        self._num_new += 1

    def refresh(self) -> None:
        """Fit again if there is reason to.  Called where an estimate of prompts is wanted: a step that decodes needs none."""
        is_off = self._num_new >= NUM_RECENT and not DRIFT_REFIT[0] < self.drift < DRIFT_REFIT[1]
        first = max((n for n in FIRST_FITS if n <= self.num_chunks), default=0)
        if self.num_chunks and (first > self._fitted_at or self._num_new >= REFIT or is_off):
            self._num_new, self._fitted_at = 0, self.num_chunks
            self._fit()

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
        self.drift = 1.0
        ratios = [
            seconds / estimate
            for work, seconds in self._recent
            if (estimate := self.seconds(work)) > 0
        ]
        least, most = DRIFT_BOUNDS
        self.drift = min(most, max(least, median(ratios))) if ratios else 1.0


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
