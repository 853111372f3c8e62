"""The messages of a conversation: which turns still fit the context, the saved file, and the figures of an answer.

A conversation grows with each turn, but a model's context is limited. When it is full, several of the oldest turns
are dropped at once: after each drop the rest must be computed again, because the prefix has changed.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple, cast

import anyio
import msgspec
import typer

from trouper.errors import TrouperClientError, TrouperValidationError

# A low estimate, so that lengths are overestimated rather than underestimated.
BYTES_PER_TOKEN = 3
# A quarter of the context is reserved for the answer.
ROOM_SHARE = 4
# Turns are dropped until they fill at most half of the context.
KEPT_SHARE = 2
# Maximum size of a saved conversation, in bytes.
MAX_FILE = 64 * 2**20
Messages = list[dict[str, Any]]


# The head of a `data:` URL of a recording, up to its format.
AUDIO_HEAD = "data:audio/"


class ContextFullError(TrouperClientError):
    """The messages have more tokens than the model's context.

    The session then drops its oldest turns and asks again, so the user need not begin a new conversation.
    """


class ChatTurn(NamedTuple):
    """A question, its answer, and the number of tokens of both in the prompt.

    A turn is dropped as a whole when the context is full, because models are trained on pairs of question and answer.
    """

    question: str
    answer: str
    num_tokens: int
    # `data:` URLs of the images and recordings in front of the question.
    images: tuple[str, ...] = ()


class Conversation:
    """A system message and the turns so far; only the session changes it, between answers.

    An answer becomes part of it only when it is complete; an interrupted one is added with the text so far.
    """

    def __init__(self, system: str | None = None, images: Sequence[str] = ()) -> None:
        """Begin a conversation.

        Args:
            images: `data:` URLs of images and recordings, which go with the first question.
        """
        self.system = system
        self._images = tuple(images)
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
            messages.append(_asked(turn.question, turn.images))
            messages.append({"role": "assistant", "content": turn.answer})
        if question is not None:
            messages.append(_asked(question, self._images))
        return messages

    def append(
        self,
        question: str,
        answer: str,
        num_tokens: int | None,
        images: tuple[str, ...] | None = None,
    ) -> None:
        """Add a turn.

        Args:
            images: URLs of the question's images; None for the images passed to the constructor.
            num_tokens: tokens of the whole conversation including this turn; None to estimate them.
        """
        if num_tokens is None:
            own = estimate(question) + estimate(answer)
        else:
            own = max(1, num_tokens - self.num_tokens)
        if images is None:
            images, self._images = self._images, ()
        self.turns.append(ChatTurn(question, answer, own, images))

    def num_too_old(self, question: str, limit: int | None, max_tokens: int | None) -> int:
        """Return how many of the oldest turns to drop, so that a question and its answer fit.

        Args:
            limit: length of the model's context in tokens; None if it is unknown.
            max_tokens: maximum length of the answer; None if only the context limits it.
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
        """Return the content of a JSON file with the conversation and the sampling parameters."""
        saved = _SavedConversation(messages=self.messages(), parameters=parameters)
        return msgspec.json.format(msgspec.json.encode(saved), indent=2) + b"\n"


def _asked(question: str, images: Sequence[str]) -> dict[str, Any]:
    """Return a message of the user, with its images and recordings in front of the text."""
    if not images:
        return {"role": "user", "content": question}
    parts = [_part(url) for url in images]
    return {"role": "user", "content": [*parts, {"type": "text", "text": question}]}


def _part(url: str) -> dict[str, Any]:
    """Return OpenAI's part for a `data:` URL of an image or a recording."""
    head, _, data = url.partition(";base64,")
    if head.startswith(AUDIO_HEAD):
        form = head.removeprefix(AUDIO_HEAD)
        return {"type": "input_audio", "input_audio": {"data": data, "format": form}}
    return {"type": "image_url", "image_url": {"url": url}}


class _SavedConversation(msgspec.Struct):
    messages: Messages
    parameters: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])


def estimate(text: str) -> int:
    """Estimate the number of tokens of a text from its length in bytes.

    It counts bytes and not characters, because characters of many scripts take more than one token.
    """
    return -(-len(text.encode("utf-8", "replace")) // BYTES_PER_TOKEN)


def num_dropped(sizes: Sequence[int], fixed: int, most: int, wanted: int) -> int:
    """Return how many of the oldest turns to drop.

    Args:
        sizes: tokens of each turn, oldest first.
        fixed: tokens of the question and the system message.
        most: if everything fits in this many tokens, nothing is dropped.
        wanted: otherwise turns are dropped until at most this many tokens remain.
    """
    total = sum(sizes) + fixed
    if total <= most:
        return 0
    num = 0
    while num < len(sizes) and total > wanted:
        total -= sizes[num]
        num += 1
    return num


def next_dropped(num: int, num_turns: int) -> int:
    """Return how many turns to drop next, after the conversation without the oldest `num` was still too long.

    It drops half of the remaining turns, so a few attempts suffice for a conversation of any length.
    """
    return num + max(1, (num_turns - num) // 2)


def load(data: bytes) -> tuple[Conversation, dict[str, Any]]:
    """Parse a saved conversation or a plain JSON list of messages; return it with its sampling parameters.

    Raises:
        TrouperValidationError: the data is not an optional system message followed by questions with answers.
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
        question, images = _question(asked)
        conversation.append(question, _content(answered), None, images)
    return conversation, saved.parameters


def _question(message: dict[str, Any]) -> tuple[str, tuple[str, ...]]:
    """Return the text of a saved question, and its images and recordings as URLs."""
    images: list[str] = []
    texts: list[str] = []
    content: Any = message.get("content")
    for part in cast("list[Any]", content) if isinstance(content, list) else ():
        match part:
            case {"type": "image_url", "image_url": {"url": str(url)}}:
                images.append(url)
            case {"type": "input_audio", "input_audio": {"data": str(data), "format": str(form)}}:
                images.append(f"{AUDIO_HEAD}{form};base64,{data}")
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case _:
                raise _no_conversation("each part must be a text, an image_url or an input_audio")
    if isinstance(content, list):
        return "\n".join(texts), tuple(images)
    return _content(message), ()


def _content(message: dict[str, Any]) -> str:
    content = message.get("content")
    if not isinstance(content, str):
        raise _no_conversation("each content must be text")
    return content


def _no_conversation(why: str) -> TrouperValidationError:
    return TrouperValidationError(f"is not a saved conversation: {why}", parameter="file")


StatsOption = Annotated[
    bool, typer.Option("--stats", help="Print tokens and times of each answer on stderr.")
]
# Fields that request the numbers of tokens from a server.
WITH_USAGE = {"stream_options": {"include_usage": True}}


class AnswerUsage(msgspec.Struct):
    """The numbers of tokens of one answer and its prompt."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class AnswerEnd(NamedTuple):
    """How an answer ended; `usage` is None if the server does not report it.

    `finish_reason` is the server's or the engine's: `stop` for a complete answer, `length` for one that was cut.
    """

    usage: AnswerUsage | None = None
    finish_reason: str | None = None


class Stopwatch:
    """Measures one answer, starting at construction; `add` passes each part of its text on to `show`.

    The time to the first part is spent on the prompt; the rate of the others is the generation speed.
    """

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._began = anyio.current_time()
        self._first_s: float | None = None

    def add(self, text: str) -> None:
        self._show(text)
        if text and self._first_s is None:
            self._first_s = anyio.current_time() - self._began

    def report(self, usage: AnswerUsage | None) -> None:
        print(stats_line(usage, self._first_s, anyio.current_time() - self._began), file=sys.stderr)


def stats_line(usage: AnswerUsage | None, first_s: float | None, whole_s: float) -> str:
    """Format the figures of one answer.

    Args:
        usage: None if the answer was interrupted or the server reports no usage.
        first_s: seconds until the first text; None if the answer has no text.
        whole_s: seconds until the end.
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
