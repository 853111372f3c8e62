"""Find reasoning, tool calls and stop strings in the text of a choice, and group the answer into blocks of these kinds.  Pure.

The engine's text passes through a chain of parsers before the adapter of an API renders it.  The parts that parsers return do not depend on
how the text was split into chunks, after adjacent parts of one kind are joined.  So a parser withholds text only while that text may still
become a mark.

The Responses API renders blocks as output items, the Messages API as content blocks.  Laws:
1. Only the last block can be open.
2. White space forms no text block, because models write some between reasoning and calls, unless the answer contains nothing else.
3. No text block follows truncated reasoning.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

from trouper.frontends.dialects.calls import (
    Arguments,
    CallEnded,
    CallStarted,
    Content,
    ParserEvent,
    Reasoning,
)
from trouper.frontends.dialects.core import AnswerParser, ReasoningTokens
from trouper.frontends.server.generation.logprobs import ChatToken

# Characters withheld for a late stop string: more than the longest token.
LATE_CHARS = 256
Part = ParserEvent
# Why the answer ends with these parts: the model or a stop string ended it (whole), or a limit did (cut).  None before the end.
End = Literal["whole", "cut"] | None


def texts_of(parts: Sequence[Part]) -> tuple[str, str]:
    """Return the content and the reasoning among the parts."""
    content = [part.text for part in parts if isinstance(part, Content)]
    reasoning = [part.text for part in parts if isinstance(part, Reasoning)]
    return "".join(content), "".join(reasoning)


class Parser(Protocol):
    """Process the parts of one choice, as a link of the chain.  Parts of other kinds pass through unchanged."""

    def feed(self, parts: Sequence[Part], end: End = None) -> Sequence[Part]:
        """Return the parts that are certain so far, and at the end of the answer all of them.

        Text is withheld while it can still become a mark or a stop string.
        """
        ...


class CallsAndReasoning:
    """Find reasoning and tool calls in the text of one choice, with the parser of the model's dialect."""

    def __init__(self, parser: AnswerParser) -> None:
        self._parser = parser

    def feed(self, parts: Sequence[Part], end: End = None) -> Sequence[Part]:
        events: list[ParserEvent] = []
        for part in parts:
            events += self._parser.feed(part.text) if isinstance(part, Content) else [part]
        return events if end is None else events + self._parser.end(is_cut=end == "cut")

    @property
    def num_calls(self) -> Mapping[str, int]:
        """The number of calls by outcome, for the metrics."""
        return self._parser.num_calls


class StopStrings:
    """Truncate the content at the first stop string, and drop the rest.

    Args:
        stop: the stop strings.
        is_included: whether the stop string stays in the content.
        is_late: whether stop strings count only after `min_tokens`.  Then only the stop string found by the engine counts, at the end.
    """

    def __init__(self, stop: Sequence[str], *, is_included: bool, is_late: bool) -> None:
        self._stop = tuple(stop)
        self._is_included = is_included
        self._is_late = is_late
        self._reach = (
            max(map(len, self._stop)) - 1
        )  # characters before the end at which a match may start
        self._num_kept = LATE_CHARS if is_late else 0 if is_included else self._reach
        # The end of the content in which a match may start.
        self._tail = ""
        # The characters of the tail that were already passed on.
        self._num_given = 0
        self.found: str | None = None
        # The stop string found by the engine.
        self.engine_stop: str | None = None

    def feed(self, parts: Sequence[Part], end: End = None) -> Sequence[Part]:
        given: list[Part] = []
        for part in parts:
            if self.found is not None:
                return given
            if isinstance(part, Content):
                self._take(part.text, given)
            else:
                self._give(given, 0)
                given.append(part)
        if end is not None and self.found is None:
            if self._is_late and self.engine_stop in self._stop:
                self.found = self.engine_stop
                self._cut(self._tail.rfind(self.found) + len(self.found))
            self._give(given, 0)
        return given

    def _take(self, text: str, given: list[Part]) -> None:
        self._tail += text
        matches = [
            (place + len(stop), number, stop)
            for number, stop in enumerate(self._stop)
            if (place := self._tail.find(stop)) >= 0
        ]
        if matches and not self._is_late:
            # The match that ends first wins.
            end, _, self.found = min(matches)
            self._cut(end)
            self._give(given, 0)
        else:
            self._give(given, self._num_kept)

    def _cut(self, end: int) -> None:
        """Cut the tail at a stop string that ends at `end`."""
        place = end if self._is_included else end - len(self.found or "")
        self._tail = self._tail[: max(place, self._num_given)]

    def _give(self, given: list[Part], num_kept: int) -> None:
        end = max(self._num_given, len(self._tail) - num_kept)
        if text := self._tail[self._num_given : end]:
            given.append(Content(text))
        start = max(0, min(end, len(self._tail) - self._reach))
        self._tail, self._num_given = self._tail[start:], end - start


class VisibleContent:
    """Extract the visible part of an answer, so that the engine finds stop strings only in that part.

    A stop string in reasoning or in a call's arguments would otherwise end the answer too early.
    """

    def __init__(self, parser: AnswerParser) -> None:
        self._parser = parser

    def feed(self, text: str, *, is_last: bool = False) -> str:
        events = self._parser.feed(text)
        if is_last:
            events += self._parser.end()
        return "".join([event.text for event in events if isinstance(event, Content)])


class WithoutReasoning:
    """The link that drops the reasoning (`include_reasoning: false`).

    The model still generates it, and its tokens count as usage.
    """

    def feed(self, parts: Sequence[Part], end: End = None) -> Sequence[Part]:
        return [part for part in parts if not isinstance(part, Reasoning)]


class OneCall:
    """The link that drops all calls but the first (`parallel_tool_calls: false`).

    Later calls are not shown, although the model has generated them.
    """

    def feed(self, parts: Sequence[Part], end: End = None) -> Sequence[Part]:
        calls = (CallStarted, Arguments, CallEnded)
        return [part for part in parts if not isinstance(part, calls) or part.index == 0]


class ParserChain:
    """The parsers of one choice; each is fed with the parts from its predecessor.

    Args:
        reasoning_tokens: counts the reasoning tokens of the choice, or None if the model does not reason.
    """

    def __init__(
        self, parsers: Iterable[Parser] = (), reasoning_tokens: ReasoningTokens | None = None
    ) -> None:
        self._parsers = tuple(parsers)
        self._reasoning_tokens = reasoning_tokens
        links = (link for link in self._parsers if isinstance(link, StopStrings))
        self._stops = next(links, None)

    @property
    def stop(self) -> str | None:
        """The stop string at which the content was cut.

        None if the answer ended for another reason.  The reply's `stop_reason` shows it.
        """
        return None if self._stops is None else self._stops.found

    @property
    def is_empty(self) -> bool:
        """Whether text passes unchanged.

        The driver then passes the engine's text through without any copying.
        """
        return not self._parsers

    def feed(
        self, text: str, end: End = None, stop_reason: int | str | None = None
    ) -> Sequence[Part]:
        """Return the parts known so far.  `stop_reason` comes from the engine with the last text.

        With an `end` other than None, every link hands out what it has held back.
        """
        if self._stops is not None and isinstance(stop_reason, str):
            self._stops.engine_stop = stop_reason
        parts: Sequence[Part] = (Content(text),) if text else ()
        for parser in self._parsers:
            parts = parser.feed(parts, end)
        return parts

    @property
    def num_calls(self) -> Mapping[str, int]:
        """Calls so far, by their outcome.

        Empty without a link that finds calls.
        """
        links = (link for link in self._parsers if isinstance(link, CallsAndReasoning))
        nothing: Mapping[str, int] = {}
        return next((link.num_calls for link in links), nothing)

    def count_reasoning(self, token_ids: Sequence[int]) -> int | None:
        """Return how many of the next tokens are reasoning, or None if reasoning is not counted.

        The usage of a reply shows their sum as `reasoning_tokens`.
        """
        return None if self._reasoning_tokens is None else self._reasoning_tokens.add(token_ids)


def no_parsers(output: object) -> ParserChain:
    """Return a chain that passes the text of a choice unchanged."""
    return ParserChain()


Kind = Literal["reasoning", "text", "call"]


class AnswerBlock:
    """Hold one span of the answer, which grows until a part of another kind begins.

    A call is a block of its own, with its name, its id and its arguments.
    """

    def __init__(self, index: int, kind: Kind, name: str = "", call_id: str = "") -> None:
        self.index = index
        self.kind: Kind = kind
        self.name = name  # of the called tool
        self.call_id = call_id
        self._pieces: list[str] = []
        # Tokens with logprobs, if the client wants them.
        self.tokens: list[ChatToken] = []

    def __repr__(self) -> str:
        return f"<AnswerBlock {self.index}: {self.kind} {self.name}>"

    @property
    def text(self) -> str:
        """The text so far.  For a call, these are its arguments."""
        return "".join(self._pieces)

    def grow(self, text: str) -> None:
        self._pieces.append(text)


class BlockStarted(NamedTuple):
    """A new block, still without text.

    Its text follows in `BlockGrown` events.  Clients can already show that the model is, for example, reasoning.
    """

    block: AnswerBlock


class BlockGrown(NamedTuple):
    """More text of the open block.

    `text` is only the new part.  `tokens` carries logprobs if the request wants them.
    """

    block: AnswerBlock
    text: str
    tokens: Sequence[ChatToken] = ()  # of the text


class BlockEnded(NamedTuple):
    """A finished block.  A cut one was open when the answer reached its limit.

    Blocks end in the order in which they started, and a new one begins only after the end of its predecessor.
    """

    block: AnswerBlock
    is_cut: bool = False


BlockEvent = BlockStarted | BlockGrown | BlockEnded


class AnswerBlocks:
    """All blocks of one answer.

    Args:
        call_id: makes the id of a call from its index and name.
        tokens_of: returns the tokens of the next part of the text, with their logprobs.
    """

    def __init__(
        self,
        call_id: Callable[[int, str], str],
        tokens_of: Callable[[str], list[ChatToken]] = lambda piece: [],
    ) -> None:
        self._call_id = call_id
        self._tokens_of = tokens_of
        self.all: list[AnswerBlock] = []
        self._open: AnswerBlock | None = None
        self._blanks = ""  # of a text that may become a block
        self._num_calls = 0

    def __repr__(self) -> str:
        return f"<AnswerBlocks {self.all!r}>"

    @property
    def has_calls(self) -> bool:
        return self._num_calls > 0

    def feed(self, parts: Sequence[ParserEvent], *, is_last: bool = False) -> list[BlockEvent]:
        """Take parsed parts.  With the last parts, the open block stays open until `end`.

        White space between blocks is dropped, unless text follows it.
        """
        events: list[BlockEvent] = []
        for part in parts:
            match part:
                case Content(text):
                    self._take_text(text, events)
                case Reasoning(text):
                    self._grow("reasoning", text, events)
                case CallStarted(_, name):
                    self._start("call", events, name)
                case Arguments(_, text):
                    self._grow("call", text, events)
                case CallEnded() if not is_last:
                    self._close(events)
                case _:
                    pass
        return events

    def end(self, *, is_cut: bool = False) -> list[BlockEvent]:
        """Close the last block.  An empty or blank answer gets a text block, unless it has reasoning.

        `is_cut` marks the block as incomplete, because the answer reached a limit of length.
        """
        events: list[BlockEvent] = []
        if not self.all:
            self._start("text", events)
            if self._blanks:
                self._grow("text", self._blanks, events)
        self._close(events, is_cut=is_cut)
        return events

    def _take_text(self, text: str, events: list[BlockEvent]) -> None:
        if self._open is None or self._open.kind != "text":
            text = self._blanks + text
            if text.isspace():
                self._blanks = text
                return
        self._blanks = ""
        self._grow("text", text, events)

    def _grow(self, kind: Kind, text: str, events: list[BlockEvent]) -> None:
        if self._open is None or self._open.kind != kind:
            self._start(kind, events)
        block = self.all[-1]
        block.grow(text)
        tokens = self._tokens_of(text)
        block.tokens += tokens
        events.append(BlockGrown(block, text, tokens))

    def _start(self, kind: Kind, events: list[BlockEvent], name: str = "") -> None:
        self._close(events)
        call_id = self._call_id(self._num_calls, name) if kind == "call" else ""
        head = (len(self.all), kind, name, call_id)
        self._num_calls += kind == "call"
        self._open = AnswerBlock(*head)
        self.all.append(self._open)
        events.append(BlockStarted(AnswerBlock(*head)))

    def _close(self, events: list[BlockEvent], *, is_cut: bool = False) -> None:
        if self._open is not None:
            events.append(BlockEnded(self._open, is_cut))
            self._open = None
