"""Read messages typed at a terminal or sent through a pipe, interpret them, and print answers.

The rules are those of Ollama and llama-cli: three double quotes begin and end a message of several lines, a backslash at the end of a line
continues the message, and `/word` is a command. A path such as `/usr/bin` is not.

This module also handles three problems: a model's text may contain control characters, which could change the terminal; stdin may be
an open pipe without data, for which the command would wait without an explanation; and a read of stdin cannot be cancelled.
"""

import dataclasses
import difflib
import re
import select
import shlex
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, NamedTuple, get_args, get_origin

import anyio
import anyio.to_thread
import typer

from trouper.errors import TrouperValidationError
from trouper.frontends.cli import output
from trouper.frontends.cli.batch.prompts import SURROGATES, text_stdin
from trouper.frontends.cli.options import MATCHED, SamplingOptions

QUOTES = '"""'
# Only these commands may precede the quotes.
QUOTED = re.compile(rf"\s*(?:/system\s+|/set\s+system\s+)?(?={QUOTES})")
WORD = re.compile(r"/([A-Za-z]+|\?)(?=\s|$)")
# The arguments and the help of each command.
COMMANDS = {
    "help": ("", "list the commands"),
    "reset": ("", "forget the conversation but keep the system message"),
    "system": ("[TEXT]", "set the system message; without TEXT, show it"),
    "set": (
        "parameter [NAME [VALUE]]",
        "set a sampling parameter; without VALUE, show it; without NAME, show all",
    ),
    "show": ("[info|system|parameters]", "show the model, the context, the settings"),
    "save": ("FILE", "save the conversation as JSON"),
    "load": ("FILE", "continue a saved conversation"),
    "bye": ("", "end the session, like Ctrl-D"),
}
ALIASES = {"?": "help", "clear": "reset", "exit": "bye", "quit": "bye"}
# Arguments of /set.
SWITCHES = ("verbose", "quiet", "history", "nohistory")
# Ollama's names of parameters.
PARAMETER_ALIASES = {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
LENGTHS = ("num_ctx", "max_model_len")
TRUTHS = {"true": True, "on": True, "1": True, "false": False, "off": False, "0": False}


class Command(NamedTuple):
    """A command, with the name in `COMMANDS` even if an alias was typed.

    `argument` is the rest of the line without surrounding white space, and may be empty.
    """

    name: str
    argument: str


class Unknown(NamedTuple):
    """A hint for the user about a word that looks like a command but is not one.

    Text that begins with a slash is usually a typing error; sending it to the model would hide that.
    """

    hint: str


def continued(text: str) -> str | None:
    """Return the text to append the next line to, or None if the message is complete."""
    if (begin := QUOTED.match(text)) is not None:
        rest = text[begin.end() + len(QUOTES) :].rstrip()
        return None if rest.endswith(QUOTES) else text + "\n"
    num_backslashes = len(text) - len(text.rstrip("\\"))
    return text[:-1] + "\n" if num_backslashes % 2 else None


def unquoted(text: str) -> str:
    """Return the text between `\"\"\"` and `\"\"\"`, or an unquoted text unchanged."""
    stripped = text.strip()
    if not stripped.startswith(QUOTES):
        return text
    inner = stripped.removeprefix(QUOTES).removesuffix(QUOTES)
    return inner.removeprefix("\n").removesuffix("\n")


def parse(text: str, known: frozenset[str]) -> str | Command | Unknown:
    """Return a message, a command, or the hint for an unknown command.

    A text that begins with white space or a path such as `/usr/bin` is a message.
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
    hint = "/help lists the commands; begin a message with a space to send it unchanged"
    return Unknown(f"no such command: {found[0]}; {guess}{hint}")


def help_lines(known: frozenset[str]) -> list[str]:
    """Return the lines of /help for a session with these commands."""
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
        "/set verbose|quiet".ljust(32) + "show the tokens and times of each answer, or not",
        "/set history|nohistory".ljust(32) + "save your input for later sessions, or not",
        f"{QUOTES} begins and ends a message of several lines; \\ at the end of a line continues it.",
        "Ctrl-C stops an answer or clears the line; Ctrl-D ends the session.",
    ]


def parameter_kinds() -> dict[str, Any]:
    """Return the type of each sampling parameter that /set can change."""
    kinds: dict[str, Any] = {}
    for field in dataclasses.fields(SamplingOptions):
        declared: Any = get_args(field.type)[0]
        kind = next((k for k in get_args(declared) if k is not type(None)), declared)
        if field.name not in (*MATCHED, "json_schema"):
            kinds[field.name] = kind
    return kinds


def with_parameter(options: SamplingOptions, name: str, text: str) -> SamplingOptions:
    """Return a copy of the options with one parameter set to a typed value.

    Raises:
        TrouperValidationError: the parameter does not exist, or the value is invalid.
    """
    name = parameter_name(name)
    return with_values(options, {name: _value(name, parameter_kinds()[name], text)})


def with_values(options: SamplingOptions, values: dict[str, Any]) -> SamplingOptions:
    """Return a copy of the options with these values.  Raises TrouperValidationError for an invalid name or value.

    The original is not changed, so an invalid value leaves the session as it was.
    """
    for name in values:
        parameter_name(name)
    return _changed(options, values)


def with_format(options: SamplingOptions, text: str) -> SamplingOptions:
    """Return a copy of the options for answers in JSON (`json`) or in any format (an empty text).

    Raises TrouperValidationError for another format.
    """
    if text not in ("", "json"):
        rule = "must be json; for a schema, start with --json-schema FILE or JSON"
        raise TrouperValidationError(rule, parameter="format", value=text)
    return _changed(options, {"json_object": bool(text)})


def _changed(options: SamplingOptions, values: dict[str, Any]) -> SamplingOptions:
    changed = dataclasses.replace(options, **values)
    try:
        # Checks types and ranges.
        changed.params({})
    except TypeError as error:
        raise TrouperValidationError(f"cannot be used: {error}", parameter="parameters") from None
    return changed


def is_parameter(name: str) -> bool:
    """Return whether a word is the name of a sampling parameter, here or in Ollama.

    Ollama writes `/set parameter NAME VALUE`, and this distinguishes a name from a text.
    """
    name = name.replace("-", "_").lower()
    return PARAMETER_ALIASES.get(name, name) in (*parameter_kinds(), *LENGTHS)


def parameter_name(name: str) -> str:
    """Return trouper's name of a sampling parameter, given that name or Ollama's.

    Raises TrouperValidationError for any other name.
    """
    name = name.replace("-", "_").lower()
    if name in LENGTHS:
        rule = "the context length can only be set at the start, with --max-model-len"
        raise TrouperValidationError(rule, parameter=name)
    name = PARAMETER_ALIASES.get(name, name)
    if name not in parameter_kinds():
        raise TrouperValidationError(
            f"no such parameter; supported: {', '.join(parameter_kinds())}", parameter=name
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


# All control characters except tab and newline.
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
STDIN = "-"
# Explain the wait for stdin after this many seconds.
SLOW_S = 2.0
# In characters; no model has such a long context.
MAX_STDIN = 64 * 2**20


def show(text: str) -> None:
    """Print a part of an answer immediately, without control characters if stdout is a terminal.

    A model's text could otherwise move the cursor or change the colours.  Pipes get the text unchanged.
    """
    if output.is_terminal(sys.stdout):
        text = CONTROLS.sub("", text)
    print(text, end="", flush=True)


def is_interactive() -> bool:
    return output.is_terminal(sys.stdin) and output.is_terminal(sys.stdout)


def backend(quick: str | None) -> str:
    """Return the event loop for a session: asyncio if it uses the line editor, which needs it, else trio.

    The line editor is built on asyncio.  Without it there is no reason to prefer asyncio, and trio's cancellation is
    stricter.
    """
    return "asyncio" if quick is None and is_interactive() else "trio"


def quick_message(quick: str | None) -> str | None:
    """Return the message of `--quick`, followed by the text on stdin if that is a file or a pipe.

    With `-` the message is only the text on stdin. Returns None without `--quick`.

    Raises:
        typer.BadParameter: the message is empty.
    """
    if quick is None:
        return None
    parts = [] if quick == STDIN else [quick]
    if sys.stdin is not None and (quick == STDIN or not output.is_terminal(sys.stdin)):
        parts.append(_read_stdin())
    message = "\n\n".join(part for part in parts if part.strip())
    if not message:
        raise typer.BadParameter("the message is empty", param_hint="--quick")
    return message


def _read_stdin() -> str:
    _note_wait()
    try:
        text = sys.stdin.read(MAX_STDIN + 1)
    except UnicodeDecodeError:
        raise TrouperValidationError("stdin is not text in UTF-8", parameter="quick") from None
    if len(text) > MAX_STDIN:
        raise TrouperValidationError(
            f"stdin has more than {MAX_STDIN} characters", parameter="quick"
        )
    return text.removesuffix("\n")


def _note_wait() -> None:
    """Print why the command waits, if stdin is a pipe without data. Some programs start commands with such a pipe."""
    try:
        is_ready = bool(select.select([sys.stdin.fileno()], [], [], SLOW_S)[0])
    except (OSError, ValueError):
        # Stdin has no descriptor, or one that `select` does not support.
        return
    if not is_ready:
        output.note(
            "waiting for the end of stdin, which is added to the message; add < /dev/null to avoid this"
        )


class PipeReader:
    """Reads messages from a pipe or a file; with `joins_lines`, quotes and backslashes continue a message.

    Without `joins_lines`, each line is one message.
    """

    def __init__(self, *, joins_lines: bool) -> None:
        self._joins_lines = joins_lines
        self._stdin = text_stdin()
        self._limiter = anyio.CapacityLimiter(1)

    async def read(self) -> str | None:
        """Return the next message, or None at the end.

        Raises:
            TrouperValidationError: the message is not text in UTF-8; reading can continue with the next one.
        """
        text = ""
        while line := await self._line():
            text += line.rstrip("\r\n")
            more = continued(text) if self._joins_lines else None
            if more is None:
                break
            text = more
        else:
            if not text:
                return None
        if SURROGATES.search(text):
            raise TrouperValidationError("a line of stdin is not text in UTF-8", parameter="prompt")
        return text

    async def _line(self) -> str:
        # A read cannot be cancelled, so its thread is abandoned when the command ends.
        return await anyio.to_thread.run_sync(
            self._stdin.readline, abandon_on_cancel=True, limiter=self._limiter
        )


@contextmanager
def terminal_kept() -> Generator[None]:
    """Restore the terminal's mode after the block, because the line editor changes it and may be killed before it restores it."""
    if not output.is_terminal(sys.stdin):
        yield
        return
    import termios

    fd = sys.stdin.fileno()
    mode = termios.tcgetattr(fd)
    try:
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, mode)
