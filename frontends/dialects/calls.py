"""Write down the calls that a parser finds, as events."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from trouper.frontends.dialects.events import Arguments, CallEnded, CallStarted, EventList
from trouper.frontends.dialects.reader import Reader
from trouper.frontends.dialects.value_types import ValueTypes, property_types

Schemas = Mapping[str, Mapping[str, Any]]  # JSON schema of the parameters, by name of the tool


# Marks, keys and values that are read one by one in an answer; what comes behind them is content.  At 15 µs each, the most
# hostile answer costs some 30 ms, however long it is.  JSON arguments and lists of numbers count as one.
MAX_STEPS = 2048
# Characters of a call's arguments that wait for its end: some 300 tokens, a few seconds.
MAX_HELD = 1024


class CallWriter:
    """Turns a name and pieces of arguments into events, one call after the other.

    A call is held back until it is complete, and dropped where its arguments are no JSON object: then it is content.  One
    with long arguments is given out before, since its reader must not wait for minutes.

    Args:
        reader: of the answer; what it holds is the text behind the last call that was given out.
        max_held: characters of arguments that are held back; 0 for calls that a grammar makes, which are right.
    """

    def __init__(
        self, events: EventList, schemas: Schemas, reader: Reader, max_held: int = MAX_HELD
    ) -> None:
        self.schemas = schemas
        self.num_started = 0  # calls that were given out
        self.is_dropped = False  # the last call, and it was the end of the calls
        self._reader = reader
        self._max_held = max_held
        self._num_steps = 0
        self._types: dict[tuple[str, str], ValueTypes] = {}  # of the keys that were read
        self._events = events
        self._name: str | None = None
        self._held: list[str] = []
        self._num_arguments = 0  # characters of the open call's
        self._is_given_out = False
        self.accepts: Callable[[str], bool] = bool  # whether a call of this name may start

    def __repr__(self) -> str:
        return f"<CallWriter: {self.num_started} calls, {'in one' if self.is_open else 'between'}>"

    @property
    def is_open(self) -> bool:
        """A call has begun and not ended."""
        return self._name is not None

    @property
    def has_named(self) -> bool:
        """A call has begun, at some time."""
        return self.is_open or self.num_started > 0

    @property
    def has_arguments(self) -> bool:
        """Arguments of the open call have come."""
        return self._num_arguments > 0

    def step(self) -> bool:
        """Count a mark, a key or a value that takes a step of its own; False: it is one too many for an answer."""
        self._num_steps += 1
        return self._num_steps <= MAX_STEPS

    def start(self, name: str) -> bool:
        """Begin a call; arguments may have come before.  Returns whether it may start."""
        if _NAME.fullmatch(name) is None or not self.accepts(name) or not self.step():
            return False
        self._name = name
        self.arguments("")
        return True

    def arguments(self, text: str) -> None:
        """Add a piece of the call's arguments."""
        self._num_arguments += len(text)
        if self._is_given_out:
            self._events.add(Arguments(self.num_started - 1, text))
            return
        self._held.append(text)
        if self._name is not None and (self._num_arguments > self._max_held or self._max_held == 0):
            self._give_out()

    def end(self, *, is_whole: bool) -> bool:
        """End the call, if one is open; one that is whole without arguments has `{}`.

        Args:
            is_whole: its arguments are complete.

        Returns:
            Whether it was a call; a call that is no more than cut is one.
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
        """Return the types that the open call's schema allows for a parameter."""
        place = (self._name or "", key)
        if place not in self._types:
            self._types[place] = property_types(self.schemas.get(place[0], {}), key)
        return self._types[place]


class ObjectWriter:
    """Writes the arguments of a call as a JSON object, key by key."""

    def __init__(self, calls: CallWriter) -> None:
        self._calls = calls
        self._num_keys = 0

    def step(self) -> bool:
        """Count as `CallWriter.step`."""
        return self._calls.step()

    def key(self, key: str) -> None:
        """Begin a member."""
        opening = ", " if self._num_keys else "{"
        self._num_keys += 1
        self._calls.arguments(f"{opening}{json.dumps(key, ensure_ascii=False)}: ")

    def value(self, text: str) -> None:
        """Add JSON as it stands."""
        self._calls.arguments(text)

    def string_piece(self, text: str) -> None:
        """Add a part of a string between its quotes."""
        self._calls.arguments(quoted(text))

    def end(self) -> None:
        """Close the object, which is complete; without a member there is none, and the call's `end` writes `{}`."""
        if self._num_keys:
            self._calls.arguments("}")


def json_object(text: str) -> str | None:
    """Return a text that holds a JSON object, raw line breaks in its strings escaped; "" if it is blank, None if it holds none."""
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
    """Write what matches `NUMBERS` with a blank behind each comma."""
    return numbers.replace(" ", "").replace(",", ", ")


def quoted(text: str) -> str:
    """Write a part of a string as JSON has it between the quotes; a lone surrogate stays an escape."""
    return json.dumps(text, ensure_ascii=not _is_encodable(text))[1:-1]


def _is_encodable(text: str) -> bool:
    return _SURROGATE.search(text) is None


# A number as JSON and Python both write it, and several of which each is followed by one.
NUMBER = re.compile(r"-?+(?:[1-9][0-9]{0,17}+|0)(?:\.[0-9]{1,17}+)?+")
NUMBERS = re.compile(f"(?:{NUMBER.pattern}, *+)+(?=[-0-9])")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")  # as tools may be called
_SURROGATE = re.compile("[\ud800-\udfff]")
