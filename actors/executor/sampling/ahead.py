"""Follow a draft ahead of a sequence's output, with a copy of its grammar matcher, or freely while no grammar applies.

Drafting must know which tokens a grammar would allow behind tokens not sampled yet.

Law: nothing that happens here affects the sequence. A copy may exceed the limits of its grammar without harm.
"""

from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import Any

# The most tokens to read of a forced text: more than a step verifies, while such a text may have 100,000.
MOST_AHEAD = 32


class AheadMatcher:
    """Follows a draft with a copy of a matcher, which costs 1 µs.

    Args:
        matcher: has consumed the output so far.
        ends: tokens that end an output.
        forced: the tokens that must come next, as far as they are known.
    """

    def __init__(self, matcher: Any, ends: tuple[int, ...], forced: Iterable[int] = ()) -> None:
        self._ends = ends
        self._matcher = matcher.deep_copy()
        self._forced = deque(islice(forced, MOST_AHEAD))

    def forced(self) -> list[int]:
        """List the tokens that must come next, because the grammar allows no other.

        They can be drafted without a model, and are always accepted.
        """
        if not self._forced:
            self._forced.extend(forced_tokens(self._matcher)[:MOST_AHEAD])
        return list(self._forced)

    def take(self, token: int) -> bool:
        """Consume a token. Returns False without doing so if the grammar forbids it here, or if it ends the output."""
        if token in self._ends or self._matcher.validate_tokens([token]) != 1:
            return False
        if self._forced and self._forced.popleft() != token:
            self._forced.clear()
        return self._matcher.consume_token(token)


class FreeAhead:
    """Accepts any token: within reasoning, or behind it if the output has no grammar.

    Args:
        ends: tokens that end an output.
    """

    def __init__(self, ends: tuple[int, ...]) -> None:
        self._ends = ends

    def forced(self) -> list[int]:
        """Return an empty list: without a grammar no token is forced."""
        return []

    def take(self, token: int) -> bool:
        """Consume a token.

        Returns False if it ends the output. Every other token is allowed, because no grammar applies.
        """
        return token not in self._ends


Ahead = AheadMatcher | FreeAhead


def forced_tokens(matcher: Any) -> list[int]:
    """List the tokens that must come next: after each of them, the grammar's mask allows exactly one token.

    The matcher does not advance. The list is empty if there is a choice, also between several spellings of one text.
    """
    return matcher.compute_ff_tokens()
