"""The parser chain between the text of a choice and the adapter that renders it.  Pure.

A parser takes parts and gives parts.  Law: however the text is cut into pieces, the parts are the same once
neighbours of one kind are joined; so a parser holds back only what may still turn out to be a mark.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

from trouper.frontends.dialects.events import Content, ParserEvent

Part = ParserEvent


class Parser(Protocol):
    """One link of the chain, with the state of one choice."""

    def feed(self, parts: Sequence[Part], *, is_last: bool) -> Sequence[Part]:
        """Return the parts that are certain by now; after the last call nothing is held back."""
        ...


class ParserChain:
    """The parsers of one choice, each fed with what the one before it gives."""

    def __init__(self, parsers: Iterable[Parser] = ()) -> None:
        self._parsers = tuple(parsers)

    @property
    def is_empty(self) -> bool:
        """Text passes as it is."""
        return not self._parsers

    def feed(self, text: str, *, is_last: bool) -> Sequence[Part]:
        parts: Sequence[Part] = (Content(text),) if text else ()
        for parser in self._parsers:
            parts = parser.feed(parts, is_last=is_last)
        return parts
