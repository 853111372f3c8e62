"""Convert conversations to plain JSON data, and repair the arguments of their tool calls.  Pure.

The data goes to the processes that render chat templates.  An order to such a process is a frame of JSON: [number, arguments of a
ChatTemplate or null, messages, options].  A template is sent once and referred to by its number afterwards.  The answer is a frame
with {"pieces": ...} or an error.

Clients send the arguments of earlier tool calls back as text, sometimes truncated, while chat templates expect a JSON object.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard, cast

from trouper.errors import invalid

# Surrounds the number of a part other than text; a code point of no character, dropped from other text.
MARK = "\U0010fffe"
# Replaces an image or a recording in the text of a template that shows texts only.
IMAGE_MARK = f"{MARK}image{MARK}"


def is_object(value: Any) -> TypeGuard[dict[str, Any]]:
    """Return whether plain data is a JSON object."""
    return isinstance(value, dict)


def is_array(value: Any) -> TypeGuard[list[Any]]:
    """Return whether plain data is a JSON array."""
    return isinstance(value, list)


def plain_data(value: Any) -> Any:
    """Copy a value using JSON's types only.

    A template could otherwise call methods of the caller's objects.  Subclasses of strings and numbers become plain
    ones.
    """
    if value is None or type(value) in (str, int, float, bool):
        return value
    for base in (str, int, float):  # subclasses may carry methods
        if isinstance(value, base):
            return base(value)
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        return {plain_data(key): plain_data(item) for key, item in items}
    if isinstance(value, list | tuple):
        return [plain_data(item) for item in cast("list[Any]", value)]
    dump: Callable[[], Any] | None = getattr(value, "model_dump", None)
    if callable(dump):
        return plain_data(dump())
    return f"<{type(value).__name__}>"


MAX_TRIES = 64  # places at which a cut text may be closed


def past_arguments(given: Any, place: str) -> dict[str, Any]:
    """Return the arguments of a past call as an object.

    None and an empty text are an object without members.  A text cut short, like an answer by `max_tokens`, ends behind
    its last whole value; one that holds a text of JSON is read twice.

    Raises:
        TrouperValidationError: they are anything else, naming the place.
    """
    found = given
    for _ in range(2):
        if isinstance(found, str):
            found = _read(found)
    if found is None:
        return {}
    if not is_object(found):
        raise invalid(place, "must be a JSON object, or its text")
    return found


def _read(text: str) -> Any:
    """Return the value of a JSON text, or the text itself if it is not JSON even after closing its brackets."""
    text = text.strip()
    if not text:
        return None
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        pass
    return _closed(text) if text.startswith("{") else text


def _closed(text: str) -> Any:
    """Read a truncated text: close open brackets, and drop keys without a value."""
    for end, closing in _ends(text):
        if not closing:  # it was complete, and something else follows
            return text
        try:
            return json.loads(text[:end] + closing, strict=False)
        except (ValueError, RecursionError):
            continue
    return text


def _ends(text: str) -> list[tuple[int, str]]:
    """Return the positions at which the text may end, last first, with the brackets open there."""
    ends: list[tuple[int, str]] = []
    open_brackets: list[str] = []
    in_string = is_escaped = False
    for i, char in enumerate(text):
        if in_string:
            in_string = is_escaped or char != '"'
            is_escaped = char == "\\" and not is_escaped
        elif char == '"':
            in_string = True
        elif char in "{[":
            open_brackets.append("}" if char == "{" else "]")
            ends.append((i + 1, "".join(reversed(open_brackets))))
        elif char in "}]" and open_brackets:
            open_brackets.pop()
            ends.append((i + 1, "".join(reversed(open_brackets))))
        elif char == ",":
            ends.append((i, "".join(reversed(open_brackets))))
        ends = ends[-MAX_TRIES:]
    quote = '"' if in_string and not is_escaped else ""
    ends.append((len(text), quote + "".join(reversed(open_brackets))))
    return ends[::-1]
