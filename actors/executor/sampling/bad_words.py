"""The token sequences that one request forbids, made for a lookup whose cost does not grow with their number."""

from collections.abc import Sequence

import numpy as np


class _Node:
    """One token of the sequences' beginnings, which are read from their ends."""

    __slots__ = ("before", "last")

    def __init__(self) -> None:
        self.before: dict[int, _Node] = {}  # by the token that stands before
        self.last: list[int] = []  # forbidden behind the tokens on the way here


class BadWords:
    """A tree over all tokens of each sequence but its last, from the right to the left.

    A step walks from the newest token backwards for as long as some sequence agrees with the output: one look
    for nearly every step, and never more than the longest sequence has tokens.
    """

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        self._root = _Node()
        self._longest = max(map(len, sequences)) - 1
        for *beginning, last in sequences:
            node = self._root
            for token in reversed(beginning):
                node = node.before.setdefault(token, _Node())
            node.last.append(last)

    def next_after(self, outputs: np.ndarray) -> list[int]:
        """List the tokens that would complete a sequence after `outputs`."""
        node = self._root
        found = [*node.last]
        for token in reversed(outputs[max(0, len(outputs) - self._longest) :].tolist()):
            if (node := node.before.get(token)) is None:
                break
            found += node.last
        return found
