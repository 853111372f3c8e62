"""Text typed in a session: when a message is complete, and whether it is a command.

All of it is pure.  The rules are those of Ollama and llama-cli: `\"\"\"` begins and ends a message of several lines, a
backslash at the end of a line continues it, and `/word` is a command.  A path is no command.
"""

import dataclasses
import difflib
import re
import shlex
from typing import Any, NamedTuple, get_args, get_origin

from trouper.errors import TrouperValidationError
from trouper.frontends.cli.arguments.options import MATCHED, SamplingOptions

QUOTES = '"""'
QUOTED = re.compile(rf"\s*(?:/system\s+|/set\s+system\s+)?(?={QUOTES})")  # what may precede quotes
WORD = re.compile(r"/([A-Za-z]+|\?)(?=\s|$)")
# Each command with its arguments and its line of help.
COMMANDS = {
    "help": ("", "list the commands"),
    "reset": ("", "forget the conversation; the system message stays"),
    "system": ("[TEXT]", "set the system message; without TEXT show it"),
    "set": (
        "parameter [NAME [VALUE]]",
        "set a sampling parameter; without VALUE show it, without NAME all",
    ),
    "show": ("[info|system|parameters]", "show the model, the context, the settings"),
    "save": ("FILE", "save the conversation as JSON"),
    "load": ("FILE", "continue a saved conversation"),
    "bye": ("", "end the session, as Ctrl-D does"),
}
ALIASES = {"?": "help", "clear": "reset", "exit": "bye", "quit": "bye"}
SWITCHES = ("verbose", "quiet", "history", "nohistory")  # of /set
# Ollama's names of parameters.
PARAMETER_ALIASES = {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
LENGTHS = ("num_ctx", "max_model_len")
TRUTHS = {"true": True, "on": True, "1": True, "false": False, "off": False, "0": False}


class Command(NamedTuple):
    """A command by its own name, never an alias."""

    name: str
    argument: str


class Unknown(NamedTuple):
    """A word that looks like a command, and the line that helps."""

    hint: str


def continued(text: str) -> str | None:
    """Return the text to which the next line is appended, or None if the message is complete."""
    if (begin := QUOTED.match(text)) is not None:
        rest = text[begin.end() + len(QUOTES) :].rstrip()
        return None if rest.endswith(QUOTES) else text + "\n"
    num_backslashes = len(text) - len(text.rstrip("\\"))
    return text[:-1] + "\n" if num_backslashes % 2 else None


def unquoted(text: str) -> str:
    """Return the text between `\"\"\"` and `\"\"\"`; a text without them as it is."""
    stripped = text.strip()
    if not stripped.startswith(QUOTES):
        return text
    inner = stripped.removeprefix(QUOTES).removesuffix(QUOTES)
    return inner.removeprefix("\n").removesuffix("\n")


def parse(text: str, known: frozenset[str]) -> str | Command | Unknown:
    """Return a message, a command, or the hint for an unknown command.

    A text that begins with white space, or whose first word is a path such as `/usr/bin`, is a message.
    """
    found = WORD.match(text)
    if found is None:
        return unquoted(text)
    name = ALIASES.get(found[1], found[1])
    if name in known:
        return Command(name, unquoted(text[found.end() :]).strip())
    names = [*known, *(alias for alias, name in ALIASES.items() if name in known)]
    near = difflib.get_close_matches(name, names, n=1)
    guess = f"did you mean /{near[0]}? " if near else ""
    hint = "/help lists the commands; a message that begins with a space is sent as it is"
    return Unknown(f"no such command: {found[0]}; {guess}{hint}")


def help_lines(known: frozenset[str]) -> list[str]:
    lines = [
        f"/{name} {arguments}".ljust(32) + text
        for name, (arguments, text) in COMMANDS.items()
        if name in known
    ]
    if "system" in known:
        lines.insert(3, "/set system TEXT".ljust(32) + "the same as /system TEXT")
        lines.append(
            "/set think|nothink".ljust(32) + "let the model reason before it answers, or not"
        )
    return [
        *lines,
        "/set format json|noformat".ljust(32) + "make each answer a JSON object, or not",
        "/set verbose|quiet".ljust(32) + "show tokens and times of each answer, or not",
        "/set history|nohistory".ljust(32) + "keep what is typed for later sessions, or not",
        f"{QUOTES} begins and ends a message of several lines; \\ at the end of a line continues it.",
        "Ctrl-C stops an answer or clears the line; Ctrl-D ends the session.",
    ]


def parameter_kinds() -> dict[str, Any]:
    """Return the sampling parameters that can be set, with their types."""
    kinds: dict[str, Any] = {}
    for field in dataclasses.fields(SamplingOptions):
        declared: Any = get_args(field.type)[0]
        kind = next((k for k in get_args(declared) if k is not type(None)), declared)
        if field.name not in (*MATCHED, "json_schema"):
            kinds[field.name] = kind
    return kinds


def with_parameter(options: SamplingOptions, name: str, text: str) -> SamplingOptions:
    """Return the options with one parameter changed.

    Raises:
        TrouperValidationError: there is no such parameter, or the value is out of its range.
    """
    name = parameter_name(name)
    return with_values(options, {name: _value(name, parameter_kinds()[name], text)})


def with_values(options: SamplingOptions, values: dict[str, Any]) -> SamplingOptions:
    """Return the options with these parameters changed.  Raises TrouperValidationError."""
    for name in values:
        parameter_name(name)
    return _changed(options, values)


def with_format(options: SamplingOptions, text: str) -> SamplingOptions:
    """Return the options for answers in a format: `json`, or an empty text for any.  Raises TrouperValidationError."""
    if text not in ("", "json"):
        rule = "must be json; for a schema give --json-schema FILE or JSON at start"
        raise TrouperValidationError(rule, parameter="format", value=text)
    return _changed(options, {"json_object": bool(text)})


def _changed(options: SamplingOptions, values: dict[str, Any]) -> SamplingOptions:
    changed = dataclasses.replace(options, **values)
    try:
        changed.params({})  # checks types and ranges
    except TypeError as error:
        raise TrouperValidationError(f"cannot be used: {error}", parameter="parameters") from None
    return changed


def is_parameter(name: str) -> bool:
    """Whether a word is the name of a sampling parameter, or Ollama's name of one."""
    name = name.replace("-", "_").lower()
    return PARAMETER_ALIASES.get(name, name) in (*parameter_kinds(), *LENGTHS)


def parameter_name(name: str) -> str:
    """Return the name of a sampling parameter, also for Ollama's.  Raises TrouperValidationError."""
    name = name.replace("-", "_").lower()
    if name in LENGTHS:
        rule = "the context's length is set at start, by --max-model-len"
        raise TrouperValidationError(rule, parameter=name)
    name = PARAMETER_ALIASES.get(name, name)
    if name not in parameter_kinds():
        raise TrouperValidationError(
            f"no such parameter; there are {', '.join(parameter_kinds())}", parameter=name
        )
    return name


def _value(name: str, kind: Any, text: str) -> Any:
    try:
        if get_origin(kind) is list:
            return [part.replace("\\n", "\n").replace("\\t", "\t") for part in shlex.split(text)]
        return TRUTHS[text.lower()] if kind is bool else kind(text)
    except (ValueError, KeyError):
        wanted = {int: "an integer", float: "a number", bool: "true or false"}.get(kind, "text")
        raise TrouperValidationError(f"must be {wanted}", parameter=name, value=text) from None
