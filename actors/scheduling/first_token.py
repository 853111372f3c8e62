"""Predict the first token of a request, and record the errors of predictions.  Pure."""

import math
from collections import deque
from collections.abc import Iterable, Sequence

from trouper.actors.messages.outputs import Expected
from trouper.actors.scheduling.prompt_turns import PromptTurns
from trouper.actors.scheduling.state.sequence import Sequence as Grown
from trouper.actors.scheduling.step_budget import remaining_s

# Later requests pass a prompt with more tokens to compute than this, so its prediction is a lower bound.
LONG = 2048
# The number of comparisons to keep, and the number needed before an error is known.
NUM_KEPT, NUM_NEEDED = 256, 64
# Open prompts of a replica that a new request is compared with, at a microsecond each.  Behind more, replicas are chosen by tokens.
MOST_COMPARED = 512
# The quantile of the errors that deadlines allow for.
RANK = 0.9


def predict_first_token(
    turns: PromptTurns, sequence: Grown, flights_s: Sequence[float], elapsed_s: float
) -> tuple[float, bool] | None:
    """Return the seconds until the first token of a sequence, and whether this is a lower bound.  Returns None before the first fit.

    Args:
        flights_s: estimates of the plans in flight, the eldest first.
        elapsed_s: seconds since the first of them became the eldest.
    """
    turns.refresh()
    times = turns.times
    if not times.is_known:
        return None
    left_s = remaining_s(flights_s, elapsed_s)
    job = turns.fluid.open.get(sequence.id)
    if job is None:  # a plan in flight has the end of its prompt
        return left_s, False
    work_s = 0.0
    for other in turns.in_order():
        work_s += times.cost(turns.start_of(other), other.num_tokens)
        if other is job:
            break
    return left_s + turns.seconds_until(work_s), job.num_tokens > LONG


def expect(
    turns: PromptTurns, sequence: Grown, start: int, flights_s: Sequence[float], elapsed_s: float
) -> float | None:
    """Return the seconds until the first token of a sequence that entered now.  Returns None before the first fit, or when too many prompts are open.

    Args:
        start: the first position that it would compute.
        flights_s, elapsed_s: as `predict_first_token` takes them.
    """
    turns.refresh()
    times = turns.times
    if not times.is_known or len(turns.fluid.open) > MOST_COMPARED:
        return None
    work_s = times.cost(start, sequence.num_tokens - start)
    for other in turns.ahead_of(sequence, sequence.num_tokens - start):
        work_s += times.cost(turns.start_of(other), other.num_tokens)
    return remaining_s(flights_s, elapsed_s) + turns.seconds_until(work_s)


class FirstTokens:
    """Keep the open predictions of first tokens, and the errors of the past ones.

    The scheduler promises a time to each client, and this measures how good the promises are.
    """

    def __init__(self) -> None:
        # By sequence: the time of the prediction, and the predicted seconds.  Each ends with its sequence.
        self._open: dict[int, tuple[float, float]] = {}
        # |predicted / true - 1|
        self._errors: deque[float] = deque(maxlen=NUM_KEPT)
        # predicted / true, until `take_ratios`
        self.ratios: list[float] = []

    def __len__(self) -> int:
        return len(self._open)

    @property
    def error(self) -> float | None:
        """The relative error of the worst in ten predictions.  None before enough have been compared.

        It accompanies later predictions, so a client can judge them.
        """
        if len(self._errors) < NUM_NEEDED:
            return None
        return sorted(self._errors)[int(RANK * len(self._errors))]

    def note(self, expected: Expected, now: float) -> None:
        """Keep a prediction for comparison.  Lower bounds are not compared.

        A lower bound is no claim about the time, so it would distort the error.
        """
        if not expected.is_least:
            self._open[expected.id] = now, expected.seconds

    def compare(self, ids: Iterable[tuple[int, bool]], now: float) -> None:
        """Compare predictions with the sequences of an output, each with whether it has a token.

        A sequence that ends without a token has no true time, and its prediction is dropped.
        """
        for id, has_token in ids:
            found = self._open.pop(id, None)
            if found is None or not has_token:
                continue
            began, seconds = found
            true_s = now - began
            if 0 < true_s < math.inf:
                self._errors.append(abs(seconds / true_s - 1))
                self.ratios.append(seconds / true_s)

    def take_ratios(self) -> tuple[float, ...]:
        """Take the ratios of predicted to true seconds since the last call.

        The observer shows them as a histogram; 1 is a perfect prediction.
        """
        ratios, self.ratios = tuple(self.ratios), []
        return ratios
