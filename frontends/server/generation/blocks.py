"""The answer of a model as blocks in order: spans of reasoning, of text, and tool calls.  Pure.

Responses show blocks as output items, Messages as content blocks.

Laws.  At most one block is open, the last.  White space alone makes no block of text, unless the answer has nothing
else: models leave some between reasoning and calls, and behind reasoning that is cut nothing follows.
"""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from trouper.frontends.dialects.events import (
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
    """One span of the answer."""

    def __init__(self, index: int, kind: Kind, name: str = "", call_id: str = "") -> None:
        self.index = index
        self.kind: Kind = kind
        self.name = name  # of the tool that is called
        self.call_id = call_id
        self._pieces: list[str] = []
        self.tokens: list[ChatToken] = []  # with their logprobs, where the client wants those

    def __repr__(self) -> str:
        return f"<AnswerBlock {self.index}: {self.kind} {self.name}>"

    @property
    def text(self) -> str:
        """The text so far; of a call its arguments."""
        return "".join(self._pieces)

    def grow(self, text: str) -> None:
        self._pieces.append(text)


class BlockStarted(NamedTuple):
    """A block as it begins, without text."""

    block: AnswerBlock


class BlockGrown(NamedTuple):
    """More text of the open block."""

    block: AnswerBlock
    text: str
    tokens: Sequence[ChatToken] = ()  # of the text


class BlockEnded(NamedTuple):
    """A block that gets no more; one that is cut was open when the answer reached its limit."""

    block: AnswerBlock
    is_cut: bool = False


BlockEvent = BlockStarted | BlockGrown | BlockEnded


class AnswerBlocks:
    """All blocks of one answer.

    Args:
        call_id: gives the id of the call with that index and name.
        tokens_of: gives the tokens of the next piece of the answer, to be shown with their logprobs.
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
        """Take what has been parsed; the block that is open at the end of the last parts is left to `end`."""
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
        """Take the end of the answer.  One that is empty or blank gets a text; behind reasoning none is made up."""
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
