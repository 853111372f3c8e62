"""A session of `chat` or `complete`: read a message, answer it or obey it, until the end.

The conversation, the commands and the line editor have modules of their own; this one prints and waits.
"""

import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from trouper.errors import RemoteError, TrouperClientError, TrouperValidationError
from trouper.frontends.cli import output
from trouper.frontends.cli.arguments.options import SamplingOptions
from trouper.frontends.cli.chat.conversation import (
    MAX_FILE,
    AnswerEnd,
    ContextFullError,
    Conversation,
    Messages,
    Stopwatch,
    load,
    next_dropped,
)
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
    with_values,
)
from trouper.frontends.cli.chat.remote import Show
from trouper.frontends.cli.chat.terminal import PipeReader, is_interactive, show
from trouper.frontends.cli.running import Interrupts

# Called with the prompt, and whether counts of tokens are wanted.
Continue = Callable[[str, SamplingOptions, bool, Show], Awaitable[AnswerEnd]]
CUT = "[cut at max_tokens]"
EXAMPLE = "/set parameter temperature 0.2"
DEFAULT = "the model's default"
WELCOME = "/help lists the commands, Ctrl-C stops an answer, Ctrl-D ends the session"
GENERAL = frozenset({"help", "set", "show", "bye"})
OF_CHATS = GENERAL | {"reset", "system", "save", "load"}
LONGER = "--max-model-len at start takes longer ones"


class Question(NamedTuple):
    """The messages of a conversation up to the newest, and how to answer them."""

    messages: Messages
    sampling: SamplingOptions
    template_variables: dict[str, Any]
    wants_counts: bool


Ask = Callable[[Question, Show], Awaitable[AnswerEnd]]


class _MessageReader(Protocol):
    async def read(self) -> str | None: ...


class _ShownAnswer(NamedTuple):
    text: str
    end: AnswerEnd | None  # None if Ctrl-C stopped it


class CompletionSubject:
    """Prompts that a model continues, each for itself."""

    commands = GENERAL

    def __init__(
        self, sampling: SamplingOptions, *, shows_stats: bool, ask: Continue, facts: dict[str, str]
    ) -> None:
        self.sampling = sampling
        self.shows_stats = shows_stats
        self._ask = ask
        self.facts = facts

    async def answer(self, prompt: str, interrupts: Interrupts) -> None:
        async def ask(hear: Show) -> AnswerEnd:
            return await self._ask(prompt, self.sampling, self.shows_stats, hear)

        # Most completions end so; in a pipe it would be a line for each of them.
        cut = _cut_at_max_tokens if is_interactive() else None
        await _answered(ask, interrupts, shows_stats=self.shows_stats, cut=cut)

    def obey(self, command: Command) -> None:
        """Run a command that only this kind of session has."""
        raise AssertionError(command)

    def described(self) -> dict[str, str]:
        return self.facts


class ChatSubject:
    """A conversation, and the model that answers in it."""

    commands = OF_CHATS

    def __init__(
        self,
        conversation: Conversation,
        sampling: SamplingOptions,
        *,
        shows_stats: bool,
        ask: Ask,
        facts: dict[str, str],
        limit: int | None,
        thinks: bool | None = None,
    ) -> None:
        """Make one.

        Args:
            facts: what `/show` shows of the model.
            limit: the tokens that the model reads and writes; None if they are not known.
            thinks: whether the model reasons before it answers; None leaves it to the chat template.
        """
        self.conversation = conversation
        self.sampling = sampling
        self.shows_stats = shows_stats
        self.thinks = thinks
        self._ask = ask
        self._limit = limit
        self.facts = facts
        self._own_files: set[str] = set()  # that this session saved or loaded

    async def answer(self, question: str, interrupts: Interrupts) -> None:
        """Print the answer as it comes.  An answer that Ctrl-C cuts off is kept as far as it came.

        Raises:
            TrouperClientError: the conversation cannot be rendered, or the message is too long; the
                conversation is as it was before.
            RemoteError: the server has failed; the same.
        """
        question = question.strip()
        turns = self.conversation.turns
        num = self.conversation.num_too_old(question, self._limit, self.sampling.max_tokens)
        while True:
            try:
                answer = await self._answered(question, num, interrupts)
                break
            except ContextFullError as error:
                if num == len(turns):
                    message = f"{error}; the message is too long: {LONGER}"
                    raise TrouperClientError(message) from None
                num = next_dropped(num, len(turns))
        if answer.text:
            usage = answer.end and answer.end.usage
            total = usage and usage.prompt_tokens + usage.completion_tokens
            self.conversation.turns = turns[num:]
            self.conversation.append(question, answer.text, total or None)

    async def _answered(
        self, question: str, num_dropped: int, interrupts: Interrupts
    ) -> _ShownAnswer:
        messages = self.conversation.messages(question, num_dropped=num_dropped)
        variables = {} if self.thinks is None else {"enable_thinking": self.thinks}
        asked = Question(messages, self.sampling, variables, self.shows_stats)

        async def ask(hear: Show) -> AnswerEnd:
            return await self._ask(asked, hear)

        # It is said with the first text: before, the model may refuse these messages, too.
        first = self._full_line(num_dropped) if num_dropped else None
        return await _answered(
            ask, interrupts, shows_stats=self.shows_stats, first_line=first, cut=self._cut
        )

    def _cut(self, end: AnswerEnd) -> str:
        """Say what cut an answer: its own limit, or the end of the context."""
        if self.sampling.max_tokens is not None or self._limit is None:
            return CUT
        total = end.usage and end.usage.prompt_tokens + end.usage.completion_tokens
        if total and total < self._limit:
            return CUT
        # Without counts a server's own limit on answers cannot be told from the end of the context.
        also = "" if total else ", or the server limits answers"
        return f"[cut: context full{also}; {LONGER}]"

    def _full_line(self, num: int) -> str:
        of = "" if self._limit is None else f" of {self._limit:,} tokens"
        turns = "oldest turn is" if num == 1 else f"{num} oldest turns are"
        return f"the context{of} is full: the {turns} left out; /reset begins anew, {LONGER}"

    def obey(self, command: Command) -> None:
        """Run a command.  Raises TrouperValidationError."""
        match command:
            case ("reset", ""):
                self.conversation.turns = []
            case ("reset", rest):
                raise TrouperValidationError(f"/reset takes no text, not {rest!r}")
            case ("system", ""):
                output.note(self.conversation.system or "no system message")
            case ("system", text):
                self.conversation.system = text
            case (name, ""):
                raise TrouperValidationError(f"/{name} needs the name of a file")
            case ("save", name):
                self._save(name)
            case (_, name):
                self._load(name)

    def described(self) -> dict[str, str]:
        limit = "" if self._limit is None else f" of {self._limit:,}"
        context = f"about {self.conversation.num_tokens:,}{limit} tokens"
        turns = _turns(self.conversation)
        return {**self.facts, "context": f"{context} in {turns}"}

    def _save(self, name: str) -> None:
        path = Path(name).expanduser()
        if path.exists() and os.path.realpath(path) not in self._own_files:
            raise TrouperValidationError(
                "exists; choose another name", parameter="file", value=name
            )
        try:
            newest = path.with_name(f"{path.name}.{os.getpid()}")
            file = os.open(newest, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(file, "wb") as stream:
                stream.write(self.conversation.dumped(self._parameters()))
            newest.replace(path)
        except OSError as error:
            raise _unusable("written", error, name) from None
        self._own_files.add(os.path.realpath(path))
        output.note(f"saved {_turns(self.conversation)} in {name}")

    def _parameters(self) -> dict[str, Any]:
        kinds = parameter_kinds()
        return {name: value for name, value in self.sampling.given().items() if name in kinds}

    def _load(self, name: str) -> None:
        path = _path(name)
        try:
            with path.open("rb") as file:
                data = file.read(MAX_FILE + 1)
        except OSError as error:
            raise _unusable("read", error, name) from None
        if len(data) > MAX_FILE:
            raise TrouperValidationError(f"has more than {MAX_FILE} bytes", parameter="file")
        conversation, parameters = load(data)
        self.sampling = with_values(self.sampling, parameters)
        self.conversation = conversation
        self._own_files.add(os.path.realpath(path))
        output.note(f"loaded {_turns(conversation)} from {name}")


def _cut_at_max_tokens(_: AnswerEnd) -> str:
    return CUT


def _turns(conversation: Conversation) -> str:
    num = len(conversation.turns)
    return "1 turn" if num == 1 else f"{num} turns"


def _first_word(text: str) -> tuple[str, str]:
    """Return the first word of a text and the rest of it."""
    word, *rest = text.split(maxsplit=1) or [""]
    return word, rest[0] if rest else ""


def _path(name: str) -> Path:
    """Return the path that a user has typed.  Raises TrouperValidationError."""
    try:
        path = Path(name).expanduser()
        path.exists()  # refuses what no system takes as a name
    except (OSError, ValueError, RuntimeError) as error:
        raise _unusable("used", error, name) from None
    return path


def _unusable(verb: str, error: Exception, name: str) -> TrouperValidationError:
    reason = getattr(error, "strerror", None) or error
    return TrouperValidationError(f"cannot be {verb}: {reason}", parameter="file", value=name)


async def _answered(
    ask: Callable[[Show], Awaitable[AnswerEnd]],
    interrupts: Interrupts,
    *,
    shows_stats: bool,
    first_line: str | None = None,
    cut: Callable[[AnswerEnd], str] | None,
) -> _ShownAnswer:
    """Print an answer, and the line of `cut` if its length ended it."""
    pieces: list[str] = []
    ends: list[AnswerEnd] = []
    watch = Stopwatch(show)

    def hear(text: str) -> None:
        if not pieces and first_line is not None:
            output.note(first_line)
        watch.hear(text)
        pieces.append(text)

    try:
        with interrupts.stoppable():
            ends.append(await ask(hear))
    except BaseException:
        if pieces and output.is_terminal(sys.stdout):
            print()
        raise
    print(flush=True)
    end = ends[0] if ends else None
    if cut is not None and end is not None and end.finish_reason == "length":
        output.note(cut(end))
    if shows_stats:
        watch.report(end and end.usage)
    return _ShownAnswer("".join(pieces), end)


class Session:
    """The loop over what is typed, or comes through a pipe."""

    def __init__(self, subject: ChatSubject | CompletionSubject, interrupts: Interrupts) -> None:
        self._subject = subject
        self._interrupts = interrupts
        self._is_interactive = is_interactive()
        self._editor: Any = None

    async def answer_all(self, name: str) -> None:
        """Answer messages until the end; `name` is that of the history file."""
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
        """Answer or obey a text.  Returns whether the session goes on."""
        # A filter that completes lines takes them as they are: `/set` may begin a line of any file.
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
                self._subject.obey(command)
            case message if message.strip():
                await self._subject.answer(message, self._interrupts)
            case _:
                pass
        return True

    def _set(self, argument: str) -> None:
        """Obey `/set`.  Raises TrouperValidationError."""
        subject = self._subject
        what, rest = _first_word(argument)
        match what:
            case "parameter":
                self._set_parameter(*_first_word(rest))
            case "system" if "system" in subject.commands:
                subject.obey(Command("system", unquoted(rest).strip()))
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
        """Set a sampling parameter; without a value show it, and without a name all.  Raises TrouperValidationError."""
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
        """Obey `/show`.  Raises TrouperValidationError."""
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
