"""Recent answers of other sequences, and the search for the last tokens of a text in earlier text.

Requests of one application often get similar answers, so a recent answer predicts the next one.  Answers are shared
within a family only, the requests with one cache salt and adapter, like cached prefixes.

Law: a sequence learns nothing about another family, not even from the time its own answer takes.
"""

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

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
