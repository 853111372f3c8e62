"""Answer the messages of a session, as a conversation (`trouper chat`) or as single prompts (`trouper complete`).

A subject answers one message and runs the commands that depend on its state. `ask` hides whether an engine in this
process or a server generates the answer. `commands.py` has the loop over messages.
"""

import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

from trouper.errors import TrouperClientError, TrouperValidationError
from trouper.frontends.cli import output
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
from trouper.frontends.cli.chat.remote import Show
from trouper.frontends.cli.chat.terminal import (
    Command,
    is_interactive,
    parameter_kinds,
    show,
    with_values,
)
from trouper.frontends.cli.options import SamplingOptions
from trouper.frontends.cli.running import Interrupts

# Called with the prompt, the options, whether to request usage, and the function that prints text.
Continue = Callable[[str, SamplingOptions, bool, Show], Awaitable[AnswerEnd]]
CUT = "[cut at max_tokens]"
COMMON_COMMANDS = frozenset({"help", "set", "show", "bye"})
CHAT_COMMANDS = COMMON_COMMANDS | {"reset", "system", "save", "load"}
LONGER = "start with a larger --max-model-len for longer conversations"


class Question(NamedTuple):
    """The messages of a conversation up to the newest question, and the options for its answer.

    It is independent of whether the model runs here or on a server.
    """

    messages: Messages
    sampling: SamplingOptions
    template_variables: dict[str, Any]
    wants_counts: bool


Ask = Callable[[Question, Show], Awaitable[AnswerEnd]]


class _ShownAnswer(NamedTuple):
    text: str
    # None if Ctrl-C stopped the answer.
    end: AnswerEnd | None


class CompletionSubject:
    """Independent prompts for the model to continue."""

    commands = COMMON_COMMANDS

    def __init__(
        self, sampling: SamplingOptions, *, shows_stats: bool, ask: Continue, facts: dict[str, str]
    ) -> None:
        self.sampling = sampling
        self.shows_stats = shows_stats
        self._ask = ask
        self.facts = facts

    async def answer(self, prompt: str, interrupts: Interrupts) -> None:
        """Print the continuation of a prompt as it arrives."""

        async def ask(on_text: Show) -> AnswerEnd:
            return await self._ask(prompt, self.sampling, self.shows_stats, on_text)

        # Most completions end at the limit, so in a pipe the note would follow nearly every one.
        cut = _cut_at_max_tokens if is_interactive() else None
        await _answered(ask, interrupts, shows_stats=self.shows_stats, cut=cut)

    def run_command(self, command: Command) -> None:
        """Never called, because completions have no commands of their own."""
        raise AssertionError(command)

    def described(self) -> dict[str, str]:
        return self.facts


class ChatSubject:
    """A conversation and the model that answers in it.

    `sampling`, `shows_stats` and `thinks` are changed by the session's commands, the conversation also by answers.
    """

    commands = CHAT_COMMANDS

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
        """Set up the subject; nothing is asked yet.

        Args:
            ask: generates the answer to a question, in this process or on a server.
            facts: what `/show` displays about the model.
            limit: length of the model's context in tokens; None if it is unknown.
            thinks: whether the model reasons before it answers; None means the chat template's default.
        """
        self.conversation = conversation
        self.sampling = sampling
        self.shows_stats = shows_stats
        self.thinks = thinks
        self._ask = ask
        self._limit = limit
        self.facts = facts
        # Files saved or loaded in this session, which `/save` may overwrite.
        self._own_files: set[str] = set()

    async def answer(self, question: str, interrupts: Interrupts) -> None:
        """Print the answer as it arrives, and add it to the conversation.

        If Ctrl-C interrupts the answer, the conversation contains its text so far. If the context is full, the oldest
        turns are dropped from the prompt. After an error the conversation is unchanged.

        Raises:
            TrouperClientError: the conversation cannot be rendered, or the message alone is too long.
            RemoteError: the server has failed.
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

        async def ask(on_text: Show) -> AnswerEnd:
            return await self._ask(asked, on_text)

        # Printed with the first text, because even this shorter prompt may be refused as too long.
        first = self._full_line(num_dropped) if num_dropped else None
        return await _answered(
            ask, interrupts, shows_stats=self.shows_stats, first_line=first, cut=self._cut
        )

    def _cut(self, end: AnswerEnd) -> str:
        """Return the note about what limited an answer: `max_tokens` or the context."""
        if self.sampling.max_tokens is not None or self._limit is None:
            return CUT
        total = end.usage and end.usage.prompt_tokens + end.usage.completion_tokens
        if total and total < self._limit:
            return CUT
        # Without usage, the server's own limit on answers cannot be distinguished from a full context.
        also = "" if total else ", or the server limits answers"
        return f"[cut: context full{also}; {LONGER}]"

    def _full_line(self, num: int) -> str:
        of = "" if self._limit is None else f" of {self._limit:,} tokens"
        turns = "oldest turn is" if num == 1 else f"{num} oldest turns are"
        return f"the context{of} is full: the {turns} dropped; /reset starts a new conversation, {LONGER}"

    def run_command(self, command: Command) -> None:
        """Run a command of chats: reset, system, save or load.  Raises TrouperValidationError for a bad argument.

        The file of `save` and `load` contains the messages and the sampling parameters as JSON.
        """
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


def _path(name: str) -> Path:
    """Convert a typed name to a path.  Raises TrouperValidationError if the system cannot have such a path."""
    try:
        path = Path(name).expanduser()
        # Raises an error for invalid names, such as overlong ones.
        path.exists()
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
    """Print an answer and notes about it.

    Args:
        first_line: note to print before the first text.
        cut: returns the note for an answer that ended at a length limit.
    """
    pieces: list[str] = []
    ends: list[AnswerEnd] = []
    watch = Stopwatch(show)

    def on_text(text: str) -> None:
        if not pieces and first_line is not None:
            output.note(first_line)
        watch.add(text)
        pieces.append(text)

    try:
        with interrupts.stoppable():
            ends.append(await ask(on_text))
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
