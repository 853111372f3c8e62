"""Parse command lines with vLLM's dotted options: `--pooler-config.task embed` means `--pooler-config '{"task": "embed"}'`.

`FlexibleArgumentParser` serves programs that accept an engine's options next to their own.  Pure.
"""

import argparse
import json
from collections.abc import Iterable, Sequence
from typing import Any, cast

from trouper.errors import TrouperValidationError


def join_dotted(arguments: Iterable[str]) -> list[str]:
    """Replace dotted options by one JSON option each.  Other arguments keep their order.

    Raises:
        TrouperValidationError: an option has no value, or a key has both a value and keys of its own.
    """
    kept: list[str] = []
    values: list[str] = []  # after a `--`
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
    """Parse a value as JSON, or return it as a text if it is not JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return text


class FlexibleArgumentParser(argparse.ArgumentParser):
    """`argparse.ArgumentParser` that accepts `--max_model_len` for `--max-model-len`, and dots for nested JSON.

    `--pooler-config.task embed` means `--pooler-config '{"task": "embed"}'`.
    """

    def parse_known_args(  # type: ignore[override]  # the overloads of argparse
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        import sys

        given = sys.argv[1:] if args is None else args
        return super().parse_known_args(join_dotted(map(_with_dashes, given)), namespace)


def _with_dashes(argument: str) -> str:
    """Replace underscores in the name of an option by dashes.  Its value, and keys after a dot, do not change."""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    head, dot, keys = name.partition(".")
    return f"{head.replace('_', '-')}{dot}{keys}{equals}{value}"
