"""Find drafts in earlier text, and decide how many of their tokens are worth a row of a step.

`positions_after_match` searches for the last tokens of a text in earlier text. Requests of one application often get similar
answers, so `RecentAnswers` keeps answers of other sequences too. They are shared within a family only, the requests with one
cache salt and adapter, like cached prefixes.

`best_length` compares the chance that each token of a draft is right with the cost of one more row:

    the last three tokens match            the chance of the first draft is 0.73, of the second 0.73 · 0.82, …
    three drafts                           1.84 saved tokens, worth half a step each, for 0.12 of a step more

Laws:
  * A sequence learns nothing about another family, not even from the time its own answer takes.
  * A length is a function of the number of matching tokens and of how earlier drafts of the slot fared.
"""

from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from itertools import accumulate
from operator import mul
from typing import NamedTuple

import msgspec
import numpy as np

# The tokens of all families together: 1 MiB as int64, and the same for the joined answers.  Searching all takes 0.1 ms.
MOST_TOKENS = 2**17
SEPARATOR = -1  # between answers; not a token


class _Answer(NamedTuple):
    family: str
    token_ids: np.ndarray


class RecentAnswers:
    """The newest answers, by family.

    Args:
        most: the number of answers to keep; 0 keeps none.
        most_tokens: the largest number of tokens of all answers.
    """

    def __init__(self, most: int, most_tokens: int = MOST_TOKENS) -> None:
        self._most, self._most_tokens, self._num_tokens = most, most_tokens, 0
        self._answers: deque[_Answer] = deque()  # the oldest first
        # Joined answers of families read since their last change.
        self._joined: dict[str, np.ndarray] = {}

    def __repr__(self) -> str:
        return f"<RecentAnswers, {len(self._answers)} of {self._num_tokens} tokens>"

    def add(self, family: str, token_ids: np.ndarray) -> None:
        """Store an answer for later searches. The oldest answers are dropped beyond limits of number and tokens."""
        own = np.append(token_ids[-self._most_tokens + 1 :], SEPARATOR)
        self._answers.append(_Answer(family, own))
        self._joined.pop(family, None)
        self._num_tokens += len(own)
        while self._num_tokens > self._most_tokens or len(self._answers) > self._most:
            oldest = self._answers.popleft()
            self._joined.pop(oldest.family, None)
            self._num_tokens -= len(oldest.token_ids)

    def of(self, family: str) -> np.ndarray:
        """Return the answers of a family, the oldest first, with a separator behind each."""
        joined = self._joined.get(family)
        if joined is None:
            own = [a.token_ids for a in self._answers if a.family == family]
            if not own:
                return np.zeros(0, dtype=np.int64)
            joined = self._joined[family] = np.concatenate(own)
        return joined


def positions_after_match(
    text_M: np.ndarray, token_L: np.ndarray, longest: int
) -> Iterator[np.ndarray]:
    """Yield the positions in a text behind matches of the last token, then of the last two tokens, and so on.

    Stops at `longest` tokens, or without further matches.

    Args:
        text_M: the text to search.  Its end is not a match, because nothing follows it.
        token_L: the tokens to find, at least one.
    """
    ends, num_matching = np.flatnonzero(text_M[:-1] == token_L[-1]) + 1, 1
    while len(ends):
        yield ends
        if num_matching >= min(longest, len(token_L)):
            return
        ends = ends[ends > num_matching]
        ends = ends[text_M[ends - 1 - num_matching] == token_L[-1 - num_matching]]
        num_matching += 1


# The time of a step with this many drafts, in steps without drafts.  On two cores with integers of four bits, four rows are
# bound by memory like one, and further rows by the products.
STEP_COSTS = (1.0, 1.05, 1.11, 1.12, 1.3, 1.42, 1.49, 1.51)
# The value of a saved token, in steps without drafts: where drafts are right, a step yields two tokens anyway.
WORTH_IN_TEXT = 0.5
# The chance that the next token is right if this many tokens match: from a small model that edits functions, over 6,500 tokens.
CHANCES = (0.0, 0.25, 0.55, 0.73, 0.82, *[0.85] * 2, *[0.91] * 3, *[0.93] * 6, *[0.96] * 8, 0.98)
# The chance that a second model is right, for any number of matching tokens.
CHANCES_OF_MODEL = (0.7,)
# The table counts like this many drafts of the slot.
WEIGHT = 6.0
# The weight of a draft decreases by this factor with each later one.
FADING = 0.97
# After this many runs a slot's drafts must have saved more than they cost.
RUNS = 16
# The number of tokens without drafts if they have not; it doubles each time in a row.
PAUSE, LONGEST_PAUSE = 32, 512


class Shares:
    """How often cases of each kind came true: an assumption, corrected by observations.

    Args:
        weight: the weight of the assumption, in observed cases.
        fading: the factor by which each later case of its kind reduces the weight of a case.
    """

    def __init__(self, weight: float, fading: float = 1.0) -> None:
        self._weight, self._fading = weight, fading
        self._seen: dict[Hashable, tuple[float, float]] = {}  # by kind: came true, all

    def __repr__(self) -> str:
        return f"<Shares {self._seen}>"

    def chance(self, kind: Hashable, prior: float) -> float:
        """Estimate the chance of a case of this kind, with the assumption `prior`."""
        right, tried = self._seen.get(kind, (0.0, 0.0))
        return (self._weight * prior + right) / (self._weight + tried)

    def note(self, kind: Hashable, *, was_right: bool) -> None:
        """Record whether a case of this kind came true.

        Older observations lose weight, so the estimate follows changes of the text. The weights decay with each
        observation.
        """
        right, tried = self._seen.get(kind, (0.0, 0.0))
        self._seen[kind] = self._fading * right + was_right, self._fading * tried + 1


def best_length(chances: Iterable[float], worth: float, draft_cost: float = 0.0) -> int:
    """Return the number of drafted tokens with the largest expected saving, or 0 if no token is worth its row.

    Args:
        chances: the chance that the draft is right up to each of its tokens.
        worth: the value of a saved token, in steps without drafts.
        draft_cost: the cost of drafting a token, in the same unit.
    """
    gains = [
        worth * saved - _cost(count, draft_cost)
        for count, saved in enumerate(accumulate(chances, initial=0.0))
    ]
    return gains.index(max(gains))


def _cost(num_drafted: int, draft_cost: float) -> float:
    return STEP_COSTS[num_drafted] - 1 + draft_cost * num_drafted


class Pace(msgspec.Struct):
    """The lengths of the drafts of one slot, and how they fared."""

    most: int
    # The cost of drafting a token, in steps without drafts.
    draft_cost: float = 0.0
    # By the number of matching tokens; the last one also covers larger numbers.
    chances: tuple[float, ...] = CHANCES
    # The shortest draft, also if it is not worth its cost: a second model is only rated while it drafts.
    least: int = 0
    pause: int = 0
    next_pause: int = PAUSE
    num_runs: int = 0
    earned: float = 0.0  # steps saved by the runs so far
    shares: Shares = msgspec.field(default_factory=lambda: Shares(WEIGHT, FADING))

    def rests(self) -> bool:
        """Return whether this step has no draft, and count the pause down.

        A pause follows drafts that cost more than they earned. Text without repetitions then costs almost nothing.
        """
        if not self.pause:
            return False
        self.pause -= 1
        return True

    def length(self, num_matching: int, room: int) -> int:
        """Return the most profitable length of a draft behind `num_matching` matching tokens, at most `room`.

        Each further token costs a row and has a smaller chance.
        """
        room = min(room, self.most)
        each = (self.chance(num_matching + i) for i in range(room))
        length = best_length(accumulate(each, mul), WORTH_IN_TEXT, self.draft_cost)
        return max(length, min(room, self.least))

    def chance(self, num_matching: int) -> float:
        """Return the chance of the next token behind this many matching tokens.

        It is a weighted mean of a prior and of the slot's own experience.
        """
        prior = self._prior(num_matching)
        return self.shares.chance(prior, prior)

    def note(self, num_matching: int, num_drafted: int, num_right: int) -> None:
        """Record how many tokens of a draft were right.

        After a series of drafts at a loss, drafting pauses, each time for longer. A good series ends the pauses.
        """
        for i in range(min(num_right + 1, num_drafted)):
            self.shares.note(self._prior(num_matching + i), was_right=i < num_right)
        self.num_runs += 1
        self.earned += num_right - _cost(num_drafted, self.draft_cost)
        if self.num_runs == RUNS:
            if self.earned < 0:
                self.pause = self.next_pause
                self.next_pause = min(2 * self.next_pause, LONGEST_PAUSE)
            else:
                self.next_pause = PAUSE
            self.num_runs, self.earned = 0, 0.0

    def _prior(self, num_matching: int) -> float:
        return self.chances[min(num_matching, len(self.chances) - 1)]
