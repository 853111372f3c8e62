"""The messages of a conversation, the turns that no longer fit, and its file.  All of it is pure.

A conversation grows with each turn, and a model reads a limited number of tokens.  When it is full the oldest turns
give way, several at once: each time they do, the rest is computed anew, since its beginning has changed.

`--stats`: tokens and seconds of each answer.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple

import anyio
import msgspec
import typer

from trouper.errors import TrouperClientError, TrouperValidationError

BYTES_PER_TOKEN = 3  # a low guess, so that lengths are rather over- than underestimated
ROOM_SHARE = 4  # a fourth of the context is kept free for the answer
KEPT_SHARE = 2  # turns give way until half of the context is free
MAX_FILE = 64 * 2**20  # bytes of a saved conversation
Messages = list[dict[str, Any]]


class ContextFullError(TrouperClientError):
    """The messages have more tokens than the model reads."""


class ChatTurn(NamedTuple):
    """A question with its answer, and the tokens that both take in the prompt."""

    question: str
    answer: str
    num_tokens: int


class Conversation:
    """The system message and the turns so far."""

    def __init__(self, system: str | None = None) -> None:
        self.system = system
        self.turns: list[ChatTurn] = []

    def __repr__(self) -> str:
        return f"<Conversation of {len(self.turns)} turns>"

    @property
    def num_tokens(self) -> int:
        return sum(turn.num_tokens for turn in self.turns)

    def messages(self, question: str | None = None, *, num_dropped: int = 0) -> Messages:
        """Return the messages to send, without the oldest `num_dropped` turns."""
        messages: Messages = []
        if self.system is not None:
            messages.append({"role": "system", "content": self.system})
        for turn in self.turns[num_dropped:]:
            messages.append({"role": "user", "content": turn.question})
            messages.append({"role": "assistant", "content": turn.answer})
        if question is not None:
            messages.append({"role": "user", "content": question})
        return messages

    def append(self, question: str, answer: str, num_tokens: int | None) -> None:
        """Add a turn.

        Args:
            num_tokens: the tokens of the whole conversation with it; None if they are not known.
        """
        if num_tokens is None:
            own = estimate(question) + estimate(answer)
        else:
            own = max(1, num_tokens - self.num_tokens)
        self.turns.append(ChatTurn(question, answer, own))

    def num_too_old(self, question: str, limit: int | None, max_tokens: int | None) -> int:
        """Return how many of the oldest turns give way to a question.

        Args:
            limit: the tokens that the model reads and writes; None if they are not known.
            max_tokens: the longest answer; None if there is no limit of its own.
        """
        if limit is None:
            return 0
        room = limit // ROOM_SHARE
        if max_tokens is not None:
            room = min(room, max_tokens)
        fixed = estimate(question) + estimate(self.system or "")
        return num_dropped(
            [t.num_tokens for t in self.turns], fixed, limit - room, limit // KEPT_SHARE
        )

    def dumped(self, parameters: dict[str, Any]) -> bytes:
        """Return the conversation as a JSON file."""
        saved = _SavedConversation(messages=self.messages(), parameters=parameters)
        return msgspec.json.format(msgspec.json.encode(saved), indent=2) + b"\n"


class _SavedConversation(msgspec.Struct):
    messages: Messages
    parameters: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])


def estimate(text: str) -> int:
    """Return about how many tokens a text has."""
    return -(-len(text.encode("utf-8", "replace")) // BYTES_PER_TOKEN)


def num_dropped(sizes: Sequence[int], fixed: int, most: int, wanted: int) -> int:
    """Return how many of the oldest turns must go: none if all fit into `most`, else until `wanted` is kept."""
    total = sum(sizes) + fixed
    if total <= most:
        return 0
    num = 0
    while num < len(sizes) and total > wanted:
        total -= sizes[num]
        num += 1
    return num


def next_dropped(num: int, num_turns: int) -> int:
    """Return how many turns to drop after a model has refused the conversation without the oldest `num`."""
    return num + max(1, (num_turns - num) // 2)


def load(data: bytes) -> tuple[Conversation, dict[str, Any]]:
    """Return a saved conversation and its parameters; a plain list of messages is one, too.

    Raises:
        TrouperValidationError: it is no conversation of a system message and of questions with their answers.
    """
    try:
        if data.lstrip().startswith(b"["):
            saved = _SavedConversation(msgspec.json.decode(data, type=Messages))
        else:
            saved = msgspec.json.decode(data, type=_SavedConversation)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise _no_conversation(str(error)) from None
    messages = list(saved.messages)
    conversation = Conversation()
    if messages and messages[0].get("role") == "system":
        conversation.system = _content(messages.pop(0))
    if len(messages) % 2:
        raise _no_conversation("a question has no answer")
    for asked, answered in zip(messages[::2], messages[1::2], strict=True):
        if (asked.get("role"), answered.get("role")) != ("user", "assistant"):
            raise _no_conversation("the roles user and assistant must alternate")
        conversation.append(_content(asked), _content(answered), None)
    return conversation, saved.parameters


def _content(message: dict[str, Any]) -> str:
    content = message.get("content")
    if not isinstance(content, str):
        raise _no_conversation("each content must be text")
    return content


def _no_conversation(why: str) -> TrouperValidationError:
    return TrouperValidationError(f"no saved conversation: {why}", parameter="file")


StatsOption = Annotated[
    bool, typer.Option("--stats", help="Print tokens and times of each answer on stderr.")
]
ASKED = {"stream_options": {"include_usage": True}}  # fields that request the counts from a server


class AnswerUsage(msgspec.Struct):
    """The tokens of one answer and its prompt."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class AnswerEnd(NamedTuple):
    """How an answer ended.  Servers that send no counts leave `usage` out."""

    usage: AnswerUsage | None = None
    finish_reason: str | None = None


class Stopwatch:
    """Times of one answer, from the construction on; `hear` passes each piece of it to `show`."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._began = anyio.current_time()
        self._first_s: float | None = None

    def hear(self, text: str) -> None:
        self._show(text)
        if text and self._first_s is None:
            self._first_s = anyio.current_time() - self._began

    def report(self, usage: AnswerUsage | None) -> None:
        print(stats_line(usage, self._first_s, anyio.current_time() - self._began), file=sys.stderr)


def stats_line(usage: AnswerUsage | None, first_s: float | None, whole_s: float) -> str:
    """Return the line of one answer.

    Args:
        usage: None when the answer was cut off or the server sends no counts.
        first_s: None when the answer has no text.
    """
    times = f"{whole_s:.2f} s"
    if first_s is not None:
        times += f", first text after {first_s:.2f} s"
    if usage is None:
        return times
    num_tokens = usage.completion_tokens
    if first_s is not None and num_tokens > 1 and whole_s > first_s:
        times += f", then {(num_tokens - 1) / (whole_s - first_s):.1f} tokens/s"
    return f"{usage.prompt_tokens} prompt tokens, {num_tokens} tokens in {times}"
