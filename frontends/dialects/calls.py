"""Define the events of a model's answer: content, reasoning and calls.  `CallWriter` creates those of calls for all dialects.

`read_channels` parses the format of gpt-oss, `<|channel|>analysis<|message|>...<|end|>`: a message in the channel `analysis` is
reasoning, a message to a function is a call, and everything else is content.  An answer may begin inside the header of a message,
because the prompt ends with `<|start|>assistant`.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from trouper.frontends.dialects.reader import Parse, Reader, Sink
from trouper.frontends.dialects.value_types import ValueTypes, property_types


class Content(msgspec.Struct, frozen=True):
    """Text for the user.

    It is the answer without reasoning and calls, for the message's `content`.
    """

    text: str


class Reasoning(msgspec.Struct, frozen=True):
    """Text that the model wrote for itself before the answer.

    It goes into `reasoning_content` of chat messages, and is not part of the text that clients send back.
    """

    text: str


class CallStarted(msgspec.Struct, frozen=True):
    """A tool call begins; `index` counts the calls of one answer from 0.

    The function is known to be one of the request's tools.  Its arguments follow in `Arguments` events.
    """

    index: int
    name: str


class Arguments(msgspec.Struct, frozen=True):
    """A part of the arguments of call `index`: all parts in order are its JSON object.

    A part may end anywhere in the JSON text, even inside an escape sequence, so clients parse only the whole.
    """

    index: int
    text: str


class CallEnded(msgspec.Struct, frozen=True):
    """Call `index` is complete, or gets no more arguments.

    If the answer was cut off, the arguments so far may be invalid JSON.
    """

    index: int


ParserEvent = Content | Reasoning | CallStarted | Arguments | CallEnded


class EventList:
    """Collects events, and merges adjacent events of one kind.

    The parser reads many small parts of a text, and clients should get one chunk for them.
    """

    def __init__(self) -> None:
        self._events: list[ParserEvent] = []
        # The texts of the last event, which are joined once, so that many are cheap.
        self._pieces: list[str] = []

    def add(self, event: ParserEvent) -> None:
        """Append the event, or append its text to the last event of the same kind."""
        if isinstance(event, CallStarted | CallEnded):
            self._close()
            self._events.append(event)
        elif event.text:
            if not self._pieces or not _are_alike(event, self._events[-1]):
                self._close()
                self._events.append(event)
            self._pieces.append(event.text)

    def take(self) -> list[ParserEvent]:
        """Return the events since the last call."""
        self._close()
        events, self._events = self._events, []
        return events

    def _close(self) -> None:
        if len(self._pieces) > 1:
            last = self._events[-1]
            self._events[-1] = msgspec.structs.replace(last, text="".join(self._pieces))
        self._pieces = []


def _are_alike(event: ParserEvent, last: ParserEvent) -> bool:
    if isinstance(event, Arguments):
        return isinstance(last, Arguments) and event.index == last.index
    return type(event) is type(last)


# JSON schemas of the parameters, by the name of the tool.
Schemas = Mapping[str, Mapping[str, Any]]


# The number of marks, keys and values that are read one by one in an answer; everything after them is content.  At 15 µs
# each, the most hostile answer costs about 30 ms, regardless of its length.  JSON arguments and lists of numbers count as one.
MAX_STEPS = 2048
# The number of characters of a call's arguments that wait for its end: about 300 tokens, a few seconds.
MAX_HELD = 1024


class CallWriter:
    """Converts names and arguments to events, one call after the other.

    A call is held back until it is complete, and becomes content if its arguments are not a JSON object.  A call with long
    arguments is released earlier, so that its recipient does not wait for minutes.

    Args:
        reader: the reader of the answer; it holds the text behind the last released call.
        max_held: number of characters of arguments to hold back; 0 for calls by a grammar, which are always valid.
    """

    def __init__(
        self, events: EventList, schemas: Schemas, reader: Reader, max_held: int = MAX_HELD
    ) -> None:
        self.schemas = schemas
        self.num_started = 0  # released calls
        # Whether the last call was dropped, which ends the calls of the answer.
        self.is_dropped = False
        self._reader = reader
        self._max_held = max_held
        self._num_steps = 0
        self._types: dict[tuple[str, str], ValueTypes] = {}  # by tool and key
        self._events = events
        self._name: str | None = None
        self._held: list[str] = []
        self._num_arguments = 0  # characters of the open call
        self._is_given_out = False
        # Decides whether a call with this name may start.
        self.accepts: Callable[[str], bool] = bool

    def __repr__(self) -> str:
        return f"<CallWriter: {self.num_started} calls, {'in one' if self.is_open else 'between'}>"

    @property
    def is_open(self) -> bool:
        """Whether a call has started and not ended."""
        return self._name is not None

    @property
    def has_named(self) -> bool:
        """Whether the answer has started any call."""
        return self.is_open or self.num_started > 0

    @property
    def has_arguments(self) -> bool:
        """Whether the open call has received arguments."""
        return self._num_arguments > 0

    def step(self) -> bool:
        """Count a mark, key or value as a step.  Returns False if the answer has more than `MAX_STEPS`.

        Without this limit, the cost of an answer that consists only of marks would grow with every token.
        """
        self._num_steps += 1
        return self._num_steps <= MAX_STEPS

    def start(self, name: str) -> bool:
        """Begin a call, which may already have arguments.  Returns whether the call may start.

        An invalid name, or one of a tool that the request does not offer, does not start a call; the text becomes
        content.
        """
        if _NAME.fullmatch(name) is None or not self.accepts(name) or not self.step():
            return False
        self._name = name
        self.arguments("")
        return True

    def arguments(self, text: str) -> None:
        """Append text to the call's arguments.

        Before the name is known they are held back; afterwards they become events at once.
        """
        self._num_arguments += len(text)
        if self._is_given_out:
            self._events.add(Arguments(self.num_started - 1, text))
            return
        self._held.append(text)
        if self._name is not None and (self._num_arguments > self._max_held or self._max_held == 0):
            self._give_out()

    def end(self, *, is_whole: bool) -> bool:
        """End the open call, if there is one.  A complete call without arguments gets `{}`.

        Args:
            is_whole: whether its arguments are complete.

        Returns:
            Whether it was a call.  This includes a valid call that is cut off by the end of the answer.
        """
        is_call = self._name is not None and self._is_call(is_whole=is_whole)
        if is_call:
            if is_whole and not self._num_arguments:
                self.arguments("{}")
            if not self._is_given_out:
                self._give_out()
            self._events.add(CallEnded(self.num_started - 1))
            self._reader.hold()
        self.is_dropped = not is_call
        self._name, self._held, self._num_arguments, self._is_given_out = None, [], 0, False
        return is_call

    def _is_call(self, *, is_whole: bool) -> bool:
        if self._is_given_out:
            return True
        if not is_whole:
            return self._reader.is_cut
        return not self._num_arguments or _is_object("".join(self._held))

    def _give_out(self) -> None:
        self._events.add(CallStarted(self.num_started, self._name or ""))
        self.num_started += 1
        self._is_given_out = True
        for text in self._held:
            self._events.add(Arguments(self.num_started - 1, text))
        self._held = []
        self._reader.hold()

    def types_of(self, key: str) -> ValueTypes:
        """Return the types that the schema of the open call allows for a parameter.

        The answer is cached for the request, because a bare value cannot be converted without it.
        """
        place = (self._name or "", key)
        if place not in self._types:
            self._types[place] = property_types(self.schemas.get(place[0], {}), key)
        return self._types[place]


class ObjectWriter:
    """Writes the arguments of a call as a JSON object, key by key.

    Dialects without JSON use it: they deliver keys and values one by one, and clients expect a JSON text.
    """

    def __init__(self, calls: CallWriter) -> None:
        self._calls = calls
        self._num_keys = 0

    def step(self) -> bool:
        """Count a step; see `CallWriter.step`."""
        return self._calls.step()

    def key(self, key: str) -> None:
        """Begin a member."""
        opening = ", " if self._num_keys else "{"
        self._num_keys += 1
        self._calls.arguments(f"{opening}{json.dumps(key, ensure_ascii=False)}: ")

    def value(self, text: str) -> None:
        """Append JSON text."""
        self._calls.arguments(text)

    def string_piece(self, text: str) -> None:
        """Append a part of a string, which is quoted.

        A long string can thus be streamed, although its end has not arrived.
        """
        self._calls.arguments(quoted(text))

    def end(self) -> None:
        """Close the object.  An object without members is not written, because the call's `end` writes `{}`."""
        if self._num_keys:
            self._calls.arguments("}")


def json_object(text: str) -> str | None:
    """Return the JSON object in a text, with raw line breaks in strings escaped.

    Returns "" for a blank text, and None if it does not contain a JSON object.
    """
    if not text.strip() or _is_object(text):
        return text.strip()
    try:
        found = json.loads(text, strict=False, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return None
    return json.dumps(found) if isinstance(found, dict) else None


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text, parse_constant=_no_constant), dict)
    except (ValueError, RecursionError):
        return False


def _no_constant(word: str) -> None:
    raise ValueError(f"{word} is not valid JSON")


def spaced(numbers: str) -> str:
    """Write a text that matches `NUMBERS` with a blank behind each comma."""
    return numbers.replace(" ", "").replace(",", ", ")


def quoted(text: str) -> str:
    """Escape a part of a string like JSON does between quotes.  A lone surrogate remains an escape."""
    return json.dumps(text, ensure_ascii=not _is_encodable(text))[1:-1]


def _is_encodable(text: str) -> bool:
    return _SURROGATE.search(text) is None


# A number in the syntax that JSON and Python share, and several of them, each followed by another one.
NUMBER = re.compile(r"-?+(?:[1-9][0-9]{0,17}+|0)(?:\.[0-9]{1,17}+)?+")
NUMBERS = re.compile(f"(?:{NUMBER.pattern}, *+)+(?=[-0-9])")
# The names that tools may have.
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_SURROGATE = re.compile("[\ud800-\udfff]")


CHANNEL, MESSAGE, START = "<|channel|>", "<|message|>", "<|start|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
MAX_HEADER = 512


def read_channels(reader: Reader, calls: CallWriter, content: Sink, reason: Sink) -> Parse[None]:
    """Read messages up to the end of the answer.

    A header without a message is treated as content, so no text of the answer is lost.
    """
    marks = (CHANNEL, START, *ENDS)
    while calls.step() and (mark := (yield from reader.until(marks, content))):
        if mark in ENDS:
            continue
        text, found = yield from reader.until_soon((MESSAGE, *ENDS), MAX_HEADER)
        if found == MESSAGE:
            yield from _message(reader, mark, text, calls, content, reason)
        # The text is not a header.
        elif mark == CHANNEL or not found:
            content(mark + text + found)
    yield from reader.rest(content)


def _message(
    reader: Reader, mark: str, header: str, calls: CallWriter, content: Sink, reason: Sink
) -> Parse[None]:
    channel = header.rpartition(CHANNEL)[2].split(maxsplit=1)[0] if header.strip() else ""
    recipient = header.partition("to=functions.")[2]
    if recipient and calls.schemas:
        name = recipient.split("<", 1)[0].split(maxsplit=1)
        reader.hold()
        if name and calls.start(name[0]):
            is_whole = yield from _arguments(reader, calls)
            is_call = calls.end(is_whole=is_whole)
            text = reader.give_back()
            if not is_call:
                content(mark + header + MESSAGE + text)
            return
        reader.rewind()
    yield from reader.until((*ENDS, START), reason if channel == "analysis" else content)


def _arguments(reader: Reader, calls: CallWriter) -> Parse[bool]:
    """Read arguments, which may be absent, and the mark behind them.  Returns whether they are complete.

    If the text is not valid arguments, everything up to the mark is read.
    """
    yield from reader.skip_blanks()
    is_whole = (yield from reader.peek()) != "{" or (yield from reader.json_value(calls.arguments))
    yield from reader.skip_blanks()
    if not (yield from reader.peek()):
        return is_whole and not (reader.is_cut and not calls.has_arguments)
    is_alone = (yield from reader.accept(*ENDS)) or (yield from reader.accept(START))
    if not is_alone:
        yield from reader.until((*ENDS, START), lambda _: None)
    return is_whole and bool(is_alone)
