"""The protocol between the engine and the processes that render its chat templates.

An order is a frame of JSON: [number, arguments of a ChatTemplate or null, messages, options].  A template is sent
once and named by its number from then on.  The answer is a frame, too: {"pieces": ...} or an error.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeGuard, cast

# Stands around the number of a part that is no text; a code point of no character, dropped from other text.
MARK = "\U0010fffe"


def is_object(value: Any) -> TypeGuard[dict[str, Any]]:
    """Tell whether plain data are a JSON object."""
    return isinstance(value, dict)


def is_array(value: Any) -> TypeGuard[list[Any]]:
    """Tell whether plain data are a JSON array."""
    return isinstance(value, list)


def plain_data(value: Any) -> Any:
    """Copy `value` with nothing but json types in it, so that a template can call nothing."""
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
