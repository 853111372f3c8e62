"""Arguments of calls earlier in a conversation, as clients send them back -> a JSON object for the chat template.  Pure."""

import json
from typing import Any

from trouper.actors.rendering.template_orders import is_object
from trouper.errors import invalid

MAX_TRIES = 64  # places at which a cut text may be closed


def past_arguments(given: Any, place: str) -> dict[str, Any]:
    """Return the arguments of a past call as an object.

    None and an empty text are an object without members.  A text that was cut, as an answer is by `max_tokens`, ends behind
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
    """Return what a text says; the text itself where that is no JSON, even if it is closed."""
    text = text.strip()
    if not text:
        return None
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        pass
    return _closed(text) if text.startswith("{") else text


def _closed(text: str) -> Any:
    """Read a text that was cut: what is open is closed, and what has no value yet is left out."""
    for end, closing in _ends(text):
        if not closing:  # it was complete, and something else follows
            return text
        try:
            return json.loads(text[:end] + closing, strict=False)
        except (ValueError, RecursionError):
            continue
    return text


def _ends(text: str) -> list[tuple[int, str]]:
    """Return where the text may end, the last place first, and the brackets that are open there."""
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
