"""Goes along a draft ahead of the outputs: by a copy of a matcher, or freely where no grammar is followed.

Law: what it meets there says nothing of the sequence; it may run into the limits of its grammar without harm.
"""

from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import Any

MOST_AHEAD = 32  # tokens of a forced text: more than a step verifies; a text may have 100,000


class AheadMatcher:
    """A copy of a matcher, which costs 1 µs.

    Args:
        matcher: of the outputs so far.
        ends: tokens that end an output.
        forced: those that must come next, as far as they are known.
    """

    def __init__(self, matcher: Any, ends: tuple[int, ...], forced: Iterable[int] = ()) -> None:
        self._ends = ends
        self._matcher = matcher.deep_copy()
        self._forced = deque(islice(forced, MOST_AHEAD))

    def forced(self) -> list[int]:
        """List the tokens that must come next."""
        if not self._forced:
            self._forced.extend(forced_tokens(self._matcher)[:MOST_AHEAD])
        return list(self._forced)

    def take(self, token: int) -> bool:
        """Go past a token, if it may stand next and ends nothing."""
        if token in self._ends or self._matcher.validate_tokens([token]) != 1:
            return False
        if self._forced and self._forced.popleft() != token:
            self._forced.clear()
        return self._matcher.consume_token(token)


class FreeAhead:
    """Takes any token, in reasoning or behind it where the output may be anything.

    Args:
        ends: tokens that end an output.
    """

    def __init__(self, ends: tuple[int, ...]) -> None:
        self._ends = ends

    def forced(self) -> list[int]:
        """List the tokens that must come next, which are not foreseen here."""
        return []

    def take(self, token: int) -> bool:
        """Go past a token, unless it ends the output."""
        return token not in self._ends


Ahead = AheadMatcher | FreeAhead


def forced_tokens(matcher: Any) -> list[int]:
    """List the tokens that must come next, each of which is all that the mask behind those before it would allow.

    The matcher stays where it is.  Empty where there is a choice, and where the vocabulary spells a text in several ways.
    """
    return matcher.compute_ff_tokens()
