"""The parser chain between the text of a choice and the adapter that renders it.  Pure.

A parser takes parts and gives parts.  Law: however the text is cut into pieces, the parts are the same once
neighbours of one kind are joined; so a parser holds back only what may still turn out to be a mark.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, Protocol

from trouper.frontends.dialects.answer_format import ReasoningTokens
from trouper.frontends.dialects.core import AnswerParser
from trouper.frontends.dialects.events import (
    Arguments,
    CallEnded,
    CallStarted,
    Content,
    ParserEvent,
    Reasoning,
)

Part = ParserEvent
# Whether the answer ends with these parts, and how: as the model or a stop string ended it, or cut where it was.
End = Literal["whole", "cut"] | None


class Parser(Protocol):
    """One link of the chain, with the state of one choice."""

    def feed(self, parts: Sequence[Part], end: End = None) -> Sequence[Part]:
        """Return the parts that are certain by now; with the end of the answer nothing is held back."""
        ...


class CallsAndReasoning:
    """The link that finds reasoning and tool calls in the text of one choice."""

    def __init__(self, parser: AnswerParser) -> None:
        self._parser = parser

    def feed(self, parts: Sequence[Part], end: End = None) -> Sequence[Part]:
        events: list[ParserEvent] = []
        for part in parts:
            events += self._parser.feed(part.text) if isinstance(part, Content) else [part]
        return events if end is None else events + self._parser.end(is_cut=end == "cut")

    @property
    def num_calls(self) -> Mapping[str, int]:
        """Calls by their outcome."""
        return self._parser.num_calls


class WithoutReasoning:
    """The link that drops the reasoning, for a client that does not want it."""

    def feed(self, parts: Sequence[Part], end: End = None) -> Sequence[Part]:
        return [part for part in parts if not isinstance(part, Reasoning)]


class OneCall:
    """The link that drops all calls but the first, for a client that wants no parallel ones."""

    def feed(self, parts: Sequence[Part], end: End = None) -> Sequence[Part]:
        calls = (CallStarted, Arguments, CallEnded)
        return [part for part in parts if not isinstance(part, calls) or part.index == 0]


class ParserChain:
    """The parsers of one choice, each fed with what the one before it gives.

    Args:
        reasoning_tokens: counts the tokens of the choice that are reasoning; None: there is none.
    """

    def __init__(
        self, parsers: Iterable[Parser] = (), reasoning_tokens: ReasoningTokens | None = None
    ) -> None:
        self._parsers = tuple(parsers)
        self._reasoning_tokens = reasoning_tokens

    @property
    def is_empty(self) -> bool:
        """Text passes as it is."""
        return not self._parsers

    def feed(self, text: str, end: End = None) -> Sequence[Part]:
        parts: Sequence[Part] = (Content(text),) if text else ()
        for parser in self._parsers:
            parts = parser.feed(parts, end)
        return parts

    @property
    def num_calls(self) -> Mapping[str, int]:
        """Calls so far, by their outcome."""
        links = (link for link in self._parsers if isinstance(link, CallsAndReasoning))
        nothing: Mapping[str, int] = {}
        return next((link.num_calls for link in links), nothing)

    def count_reasoning(self, token_ids: Sequence[int]) -> int | None:
        """Return how many of the next tokens are reasoning; None: it is not looked for."""
        return None if self._reasoning_tokens is None else self._reasoning_tokens.add(token_ids)
