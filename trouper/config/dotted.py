"""Dotted options: `--pooler-config.task embed` -> `--pooler-config '{"task": "embed"}'`.  Pure."""

import json
from collections.abc import Iterable
from typing import Any, cast

from trouper.errors import TrouperValidationError


def join_dotted(arguments: Iterable[str]) -> list[str]:
    """Replace dotted options by one JSON option each; the other arguments stay in their order.

    Raises:
        TrouperValidationError: an option without a value, or one key that has both a value and keys of its own.
    """
    kept: list[str] = []
    values: list[str] = []  # behind a `--`
    found: dict[str, dict[str, Any]] = {}
    rest = iter(arguments)
    for argument in rest:
        name, equals, value = argument.partition("=")
        option, *keys = name.split(".")
        if argument == "--":
            values = [argument, *rest]
        elif not keys or not option.startswith("--") or not all(keys):
            kept.append(argument)
        else:
            given = value if equals else next(rest, None)
            if given is None:
                raise TrouperValidationError("needs a value", parameter=name)
            _put(found.setdefault(option, {}), keys, _as_json(given), name)
    joined = [text for option, fields in found.items() for text in (option, json.dumps(fields))]
    return [*kept, *joined, *values]


def _put(fields: dict[str, Any], keys: list[str], value: Any, name: str) -> None:
    *path, last = keys
    for key in path:
        inner = fields.setdefault(key, {})
        if not isinstance(inner, dict):
            raise TrouperValidationError("a key has a value and keys of its own", parameter=name)
        fields = cast("dict[str, Any]", inner)
    if isinstance(fields.get(last), dict):
        raise TrouperValidationError("a key has a value and keys of its own", parameter=name)
    fields[last] = value


def _as_json(text: str) -> Any:
    """Read a value as JSON, and as a text where it is none."""
    try:
        return json.loads(text)
    except ValueError:
        return text
