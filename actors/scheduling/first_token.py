"""Foretell when a request will have its first token, and keep record of how right that was.  Pure."""

import math
from collections import deque
from collections.abc import Iterable, Sequence

from trouper.actors.messages.outputs import Expected
from trouper.actors.scheduling.prompt_turns import PromptTurns
from trouper.actors.scheduling.sequences import Sequence as Grown
from trouper.actors.scheduling.step_budget import remaining_s

LONG = 2048  # tokens to compute; later requests pass such a prompt, so what is foretold is a lower bound
NUM_KEPT = 256  # comparisons
NUM_NEEDED = 64  # of these, before the error is known
# Open prompts of a replica that a new request is compared with, at a microsecond each.  Behind more, replicas are chosen by tokens.
MOST_COMPARED = 512
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
    left_s = remaining_s(flights_s, elapsed_s)
    job = turns.fluid.open.get(sequence.id)
    if job is None:  # its end is in a plan in flight
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
        flights_s, elapsed_s: as `foretell` takes them.
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
