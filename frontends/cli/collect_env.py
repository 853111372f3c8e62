"""`trouper collect-env`: the facts about this machine that belong into a report of a defect."""

import json
from collections.abc import Iterator
from typing import Annotated, Any, cast

import typer

from trouper.frontends.cli.options import expand_options


@expand_options
def collect_env(
    ctx: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON in place of text.")] = False,
) -> None:
    """Show versions, processor, memory, limits and devices; nothing is sent.

    For example: trouper collect-env --json > environment.json

    Of the environment's variables only those are shown that set numbers of threads and the like.
    """
    from trouper.frontends.environment import collect

    facts = collect()
    print(json.dumps(facts, indent=2) if as_json else "\n".join(_lines(facts)))


def _lines(facts: dict[str, Any], indent: str = "") -> Iterator[str]:
    for name, value in facts.items():
        if isinstance(value, dict):
            yield f"{indent}{name}:"
            yield from _lines(cast("dict[str, Any]", value), indent + "  ")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            yield f"{indent}{name}:"
            for number, item in enumerate(cast("list[dict[str, Any]]", value)):
                yield f"{indent}  {number}:"
                yield from _lines(item, indent + "    ")
        else:
            yield f"{indent}{name.removesuffix('_bytes')}: {_text(name, value)}"


def _text(name: str, value: Any) -> str:
    match value:
        case None | []:
            return "none"
        case bool():
            return "yes" if value else "no"
        case list():
            return " ".join(cast("list[str]", value))
        case int() if name.endswith("_bytes"):
            return f"{value / 2**30:.1f} GiB"
        case _:
            return str(value)
