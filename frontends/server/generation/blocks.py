"""Group the answer of a model into blocks: reasoning, text, and tool calls, in order.  Pure.

The Responses API shows blocks as output items, the Messages API as content blocks.

Laws.  Only the last block can be open.  White space forms no text block of its own, because models write some between reasoning
and calls; only an answer without anything else gets a block of it.  No text block follows cut reasoning.
"""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from trouper.frontends.dialects.calls import (
    Arguments,
    CallEnded,
    CallStarted,
    Content,
    ParserEvent,
    Reasoning,
)
from trouper.frontends.server.generation.logprobs import ChatToken

Kind = Literal["reasoning", "text", "call"]


class AnswerBlock:
    """One span of the answer.

    It grows until another kind of part begins.  A call is one block with its name, id and arguments.
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
