"""Write down the calls that a parser finds, as events."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, cast

from trouper.frontends.dialects.events import Arguments, CallEnded, CallStarted, EventList

Schemas = Mapping[str, Mapping[str, Any]]  # JSON schema of the parameters, by name of the tool


# Marks, keys and values that are read one by one in an answer; what comes behind them is content.  At 15 µs each, the most
# hostile answer costs some 30 ms, however long it is.  JSON arguments and lists of numbers count as one.
MAX_STEPS = 2048


class CallWriter:
    """Turns a name and pieces of arguments into events, one call after the other.

    Arguments that come before the name are kept until it is known.
    """

    def __init__(self, events: EventList, schemas: Schemas) -> None:
        self.schemas = schemas
        self.num_started = 0
        self._num_steps = 0
        self._events = events
        self._name: str | None = None
        self._kept: list[str] = []
        self._has_arguments = False
        self.accepts: Callable[[str], bool] = bool  # whether a call of this name may start

    def __repr__(self) -> str:
        return f"<CallWriter: {self.num_started} calls, {'in one' if self.is_open else 'between'}>"

    @property
    def is_open(self) -> bool:
        """A call has begun and not ended."""
        return self._name is not None

    def step(self) -> bool:
        """Count a mark, a key or a value that takes a step of its own; False: it is one too many for an answer."""
        self._num_steps += 1
        return self._num_steps <= MAX_STEPS

    def start(self, name: str) -> bool:
        """Begin a call; arguments that were kept follow its name at once.  Returns whether it may start."""
        if _NAME.fullmatch(name) is None or not self.accepts(name) or not self.step():
            return False
        self._events.add(CallStarted(self.num_started, name))
        self._name = name
        self.num_started += 1
        kept, self._kept = self._kept, []
        for text in kept:
            self.arguments(text)
        return True

    def arguments(self, text: str) -> None:
        """Add a piece of the call's arguments."""
        if self._name is None:
            self._kept.append(text)
        elif text:
            self._has_arguments = True
            self._events.add(Arguments(self.num_started - 1, text))

    def end(self) -> None:
        """End the call, if one is open; a call without arguments has `{}`."""
        if self._name is not None:
            if not self._has_arguments:
                self.arguments("{}")
            self._events.add(CallEnded(self.num_started - 1))
        self._name, self._kept, self._has_arguments = None, [], False

    def type_of(self, key: str) -> str | None:
        """The JSON type that the open call's schema gives a parameter; None: it says nothing, or several."""
        return type_of(self.schemas.get(self._name or "", {}), key)


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
        """Close the object; without a member there is none, and the call's `end` writes `{}`."""
        if self._num_keys:
            self._calls.arguments("}")


def type_of(schema: Mapping[str, Any], key: str) -> str | None:
    """Return the JSON type that the schema of an object gives a property; None: it says nothing, or several."""
    kind: Any = _member(_member(schema.get("properties"), key), "type")
    if isinstance(kind, list):  # an optional one says "null" as well
        kinds = [each for each in cast("list[object]", kind) if each != "null"]
        kind = kinds[0] if len(kinds) == 1 else None
    return kind if isinstance(kind, str) else None


def as_json(text: str, kind: str | None) -> str:
    """Make JSON of a value that the model wrote bare, of the type that the tool's schema names.

    What is a literal of its type is passed on as it stands; everything else is a string.
    """
    stripped = text.strip()
    if kind != "string" and (literal := _LITERALS.get(stripped)) is not None:
        stripped = literal
    try:
        is_parsed = kind != "string" and len(stripped) <= MAX_PARSED
        value = json.loads(stripped, parse_constant=_no_constant) if is_parsed else None
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    if stripped == "null" and kind != "string":
        return stripped
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    is_fit = is_number or kind not in ("integer", "number")
    if value is not None and is_fit and isinstance(value, _TYPES.get(kind or "", object)):
        return stripped
    return json.dumps(text, ensure_ascii=False)


def spaced(numbers: str) -> str:
    """Write what matches `NUMBERS` with a blank behind each comma."""
    return numbers.replace(" ", "").replace(",", ", ")


def quoted(text: str) -> str:
    """Write a part of a string as JSON has it between the quotes; a lone surrogate stays an escape."""
    return json.dumps(text, ensure_ascii=not _is_encodable(text))[1:-1]


def _is_encodable(text: str) -> bool:
    return _SURROGATE.search(text) is None


def _no_constant(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


# A number as JSON and Python both write it, and several of which each is followed by one.
NUMBER = re.compile(r"-?+(?:[1-9][0-9]{0,17}+|0)(?:\.[0-9]{1,17}+)?+")
NUMBERS = re.compile(f"(?:{NUMBER.pattern}, *+)+(?=[-0-9])")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")  # as tools may be called
_SURROGATE = re.compile("[\ud800-\udfff]")
MAX_PARSED = 1 << 16  # characters of a value that is no string
_LITERALS = {"True": "true", "False": "false", "None": "null"}  # as Python writes them
_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
}


def _member(value: object, key: str) -> Any:
    """Return a member of a JSON object; None where the value is none, or has none of this name."""
    return cast("Mapping[str, Any]", value).get(key) if isinstance(value, Mapping) else None
