"""The loop of an interactive or piped session: read a message or a command, and let the subject answer or run it.

The commands that every session has (`/set`, `/show`, `/help`, `/bye`) run here; others belong to the subject.
"""

import sys
from typing import Any, Protocol

from trouper.errors import RemoteError, TrouperClientError, TrouperValidationError
from trouper.frontends.cli import output
from trouper.frontends.cli.chat.input import (
    SWITCHES,
    Command,
    Unknown,
    help_lines,
    is_parameter,
    parameter_kinds,
    parameter_name,
    parse,
    unquoted,
    with_format,
    with_parameter,
)
from trouper.frontends.cli.chat.subjects import ChatSubject, CompletionSubject
from trouper.frontends.cli.chat.terminal import PipeReader, is_interactive
from trouper.frontends.cli.running import Interrupts

EXAMPLE = "/set parameter temperature 0.2"
DEFAULT = "the model's default"
WELCOME = "/help lists the commands, Ctrl-C stops an answer, Ctrl-D ends the session"


class _MessageReader(Protocol):
    async def read(self) -> str | None: ...


def _first_word(text: str) -> tuple[str, str]:
    """Split a text into its first word and the rest."""
    word, *rest = text.split(maxsplit=1) or [""]
    return word, rest[0] if rest else ""


class Session:
    """Reads messages from the terminal or a pipe until the end, and answers each with the subject.

    An error of one message is printed in one line, and the session continues with the next message.
    """

    def __init__(self, subject: ChatSubject | CompletionSubject, interrupts: Interrupts) -> None:
        self._subject = subject
        self._interrupts = interrupts
        self._is_interactive = is_interactive()
        self._editor: Any = None

    async def answer_all(self, name: str) -> None:
        """Answer messages until the end of input or `/bye`; `name` selects the history file.

        Ctrl-C during an answer stops only this answer.
        """
        reader = self._reader(name)
        if self._is_interactive:
            output.note(WELCOME)
        self._interrupts.keeps_session = output.is_terminal(sys.stdin)
        while True:
            try:
                text = await reader.read()
                if text is None or not await self._take(text):
                    return
            except (TrouperClientError, RemoteError) as error:
                output.complain(output.explain(error)[1])

    def _reader(self, name: str) -> _MessageReader:
        if not self._is_interactive:
            return PipeReader(joins_lines=isinstance(self._subject, ChatSubject))
        from trouper.frontends.cli.chat.line_editor import LineEditor, MessageHistory, history_path

        self._editor = LineEditor(MessageHistory(history_path(name)), output.note)
        return self._editor

    async def _take(self, text: str) -> bool:
        """Answer a message or run a command.  Returns False if the session is over."""
        # Piped lines for completion are never commands, because a line of any file may begin with `/set`.
        known = self._subject.commands
        has_commands = self._is_interactive or isinstance(self._subject, ChatSubject)
        match parse(text, known) if has_commands else text:
            case Unknown(hint):
                output.note(hint)
            case Command("bye", _):
                return False
            case Command("help", _):
                output.note("\n".join(help_lines(known)))
            case Command("set", argument):
                self._set(argument)
            case Command("show", argument):
                self._show(argument)
            case Command() as command:
                self._subject.run_command(command)
            case message if message.strip():
                await self._subject.answer(message, self._interrupts)
            case _:
                pass
        return True

    def _set(self, argument: str) -> None:
        """Run `/set`.  Raises TrouperValidationError for an unknown name or an invalid value."""
        subject = self._subject
        what, rest = _first_word(argument)
        match what:
            case "parameter":
                self._set_parameter(*_first_word(rest))
            case "system" if "system" in subject.commands:
                subject.run_command(Command("system", unquoted(rest).strip()))
            case "format" if rest:
                subject.sampling = with_format(subject.sampling, rest)
            case "noformat":
                subject.sampling = with_format(subject.sampling, "")
            case "think" | "nothink" if isinstance(subject, ChatSubject):
                subject.thinks = what == "think"
            case "verbose" | "quiet":
                subject.shows_stats = what == "verbose"
            case "history" | "nohistory":
                if self._editor is not None:
                    self._editor.history.is_kept = what == "history"
            case _:
                of_chats = "system, think, nothink, " if isinstance(subject, ChatSubject) else ""
                known = (
                    f"parameter NAME VALUE, format json, noformat, {of_chats}{', '.join(SWITCHES)}"
                )
                meant = f"/set parameter {argument}" if is_parameter(what) else EXAMPLE
                raise TrouperValidationError(f"did you mean {meant}? /set takes {known}")

    def _set_parameter(self, name: str, value: str) -> None:
        """Set a sampling parameter; without a value show it; without a name show all.

        Raises TrouperValidationError for an unknown name or an invalid value.
        """
        subject, given = self._subject, self._parameters()
        if value:
            subject.sampling = with_parameter(subject.sampling, name, value)
        elif name:
            output.note(given.get(parameter_name(name), DEFAULT))
        else:
            output.note(
                "\n".join(f"{each:<20} {given.get(each, DEFAULT)}" for each in parameter_kinds())
            )

    def _show(self, argument: str) -> None:
        """Run `/show`.  Raises TrouperValidationError for an unknown argument."""
        subject = self._subject
        parts: dict[str, dict[str, str]] = {"info": subject.described()}
        if isinstance(subject, ChatSubject):
            parts["system"] = {"system": subject.conversation.system or "none"}
            parts["info"] |= {} if subject.thinks is None else {"think": str(subject.thinks)}
        parts["parameters"] = self._parameters() or {"parameters": "the model's defaults"}
        if argument and argument not in parts:
            raise TrouperValidationError(f"/show takes {', '.join(parts)}, not {argument!r}")
        for name, facts in parts.items():
            if argument in ("", name):
                output.note("\n".join(f"{fact:<20} {value}" for fact, value in facts.items()))

    def _parameters(self) -> dict[str, str]:
        return {name: str(value) for name, value in self._subject.sampling.given().items()}
