"""Answers that other sequences have given lately, for drafts: of one cache salt and adapter, as cached prefixes are.

Law: a sequence finds nothing of another family, not even by how long its own answer takes.

Finds where the last tokens of a text stood before, or stand in another.
"""

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

# Of all families together; int64, so 1 MiB, and as much for the joined ones.  To look for a match in all takes 0.1 ms.
MOST_TOKENS = 2**17
SEPARATOR = -1  # between answers; no token


class _Answer(NamedTuple):
    family: str
    token_ids: np.ndarray


class RecentAnswers:
    """The newest answers, by family.

    Args:
        most: answers that are kept; 0 = none.
        most_tokens: of all of them.
    """

    def __init__(self, most: int, most_tokens: int = MOST_TOKENS) -> None:
        self._most, self._most_tokens, self._num_tokens = most, most_tokens, 0
        self._answers: deque[_Answer] = deque()  # the oldest first
        # Of families that were looked at since they changed.
        self._joined: dict[str, np.ndarray] = {}

    def __repr__(self) -> str:
        return f"<RecentAnswers, {len(self._answers)} of {self._num_tokens} tokens>"

    def add(self, family: str, token_ids: np.ndarray) -> None:
        """Keep an answer; the oldest make room."""
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
    """Yield the positions in a text behind the last token, then behind the last two, … at most `longest`, while there are any.

    Args:
        text_M: of which the end is no such place: nothing follows it.
        token_L: the tokens, at least one.
    """
    ends, num_matching = np.flatnonzero(text_M[:-1] == token_L[-1]) + 1, 1
    while len(ends):
        yield ends
        if num_matching >= min(longest, len(token_L)):
            return
        ends = ends[ends > num_matching]
        ends = ends[text_M[ends - 1 - num_matching] == token_L[-1 - num_matching]]
        num_matching += 1
