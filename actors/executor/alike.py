"""Finds where the last tokens of a text stood before, or stand in another."""

from collections.abc import Iterator

import numpy as np


def places_alike(text_M: np.ndarray, token_L: np.ndarray, longest: int) -> Iterator[np.ndarray]:
    """Yield the positions in a text behind the last token, then behind the last two, … at most `longest`, while there are any.

    Args:
        text_M: of which the end is no such place: nothing follows it.
        token_L: the tokens, at least one.
    """
    ends, num_alike = np.flatnonzero(text_M[:-1] == token_L[-1]) + 1, 1
    while len(ends):
        yield ends
        if num_alike >= min(longest, len(token_L)):
            return
        ends = ends[ends > num_alike]
        ends = ends[text_M[ends - 1 - num_alike] == token_L[-1 - num_alike]]
        num_alike += 1
