"""Foretell when a request will have its first token, and keep record of how right that was.  Pure."""

import math
from collections import deque
from collections.abc import Iterable, Sequence

from trouper.actors.messages.outputs import Expected
from trouper.actors.scheduling.prompt_turns import PromptTurns
from trouper.actors.scheduling.sequences import Sequence as Grown
from trouper.actors.scheduling.step_time import StepWork

LONG = 2048  # tokens to compute; later requests pass such a prompt, so what is foretold is a lower bound
NUM_KEPT = 256  # comparisons
NUM_NEEDED = 64  # of these, before the error is known
RANK = 0.9  # of the error that a deadline is compared with


def foretell(
    turns: PromptTurns, sequence: Grown, flights_s: Sequence[float], elapsed_s: float
) -> tuple[float, bool] | None:
    """Return the seconds until the first token of a sequence, and whether it is a lower bound; None: nothing is known.

    Args:
        flights_s: estimates of the plans in flight, the eldest first.
        elapsed_s: since the first of them became the eldest.
    """
    turns.refresh()
    times = turns.times
    if not times.is_known:
        return None
    left_s = max(0.0, sum(flights_s) - min(elapsed_s, *flights_s[:1])) if flights_s else 0.0
    job = turns.fluid.open.get(sequence.id)
    if job is None:  # its end is in a plan in flight
        return left_s, False
    ahead_s = 0.0
    for other in turns.fluid.order():
        start = turns.start_of(other)
        ahead_s += times.cost(start, other.num_tokens)
        if other is job:
            break
    rows = turns.rows()
    context = sum(row.num_computed for row in rows)
    step_s = times.seconds(StepWork(1, 0, len(rows), 0.0, context))
    budget_s = turns.prompt_s(rows)
    num_steps = max(1.0, ahead_s / budget_s) if budget_s else 1.0
    return left_s + ahead_s + num_steps * step_s, job.num_tokens > LONG


class FirstTokens:
    """Predictions of first tokens that have not come yet, and the errors of those that have."""

    def __init__(self) -> None:
        # By sequence: when it was foretold, and what.  Those that end without a token leave, too.
        self._open: dict[int, tuple[float, float]] = {}
        self._errors: deque[float] = deque(maxlen=NUM_KEPT)  # |foretold / true - 1|
        self.ratios: list[float] = []  # foretold / true, until they are taken for the metrics

    def __len__(self) -> int:
        return len(self._open)

    @property
    def error(self) -> float | None:
        """The relative error that nine of ten are within; None before enough have been compared."""
        if len(self._errors) < NUM_NEEDED:
            return None
        return sorted(self._errors)[int(RANK * len(self._errors))]

    def note(self, expected: Expected, now: float) -> None:
        """Keep a prediction, to compare it; a lower bound is not compared."""
        if not expected.is_least:
            self._open[expected.id] = now, expected.seconds

    def compare(self, ids: Iterable[tuple[int, bool]], now: float) -> None:
        """Compare with what has come: sequences of an output, and whether it has a token."""
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
        """Take the ratios of foretold to true since the last call."""
        ratios, self.ratios = tuple(self.ratios), []
        return ratios
