"""The commands `trouper chat` and `trouper complete`, and the session that both run.

`chat` holds a conversation with an engine in this process or with a server; `complete` lets a server continue single prompts. Both
build a subject (`subjects.py`), which answers one message. The session reads messages and commands in a loop. It runs the commands
that every session has (`/set`, `/show`, `/help`, `/bye`) and passes others to the subject.
"""

import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer
from msgspec.structs import asdict

from trouper.config.args import EngineArgs
from trouper.errors import (
    ContextLengthError,
    RemoteError,
    TrouperClientError,
    TrouperValidationError,
)
from trouper.frontends.cli import output
from trouper.frontends.cli.chat.conversation import (
    WITH_USAGE,
    AnswerEnd,
    AnswerUsage,
    ContextFullError,
    Conversation,
    StatsOption,
)
from trouper.frontends.cli.chat.remote import CONNECTING, RemoteOptions, RemoteServer, Show
from trouper.frontends.cli.chat.subjects import Ask, ChatSubject, CompletionSubject, Question
from trouper.frontends.cli.chat.terminal import (
    SWITCHES,
    Command,
    PipeReader,
    Unknown,
    backend,
    help_lines,
    is_interactive,
    is_parameter,
    parameter_kinds,
    parameter_name,
    parse,
    quick_message,
    terminal_kept,
    unquoted,
    with_format,
    with_parameter,
)
from trouper.frontends.cli.options import DEFAULT_MAX_TOKENS, SamplingOptions, expand_options
from trouper.frontends.cli.other_programs import check_generates
from trouper.frontends.cli.running import (
    Interrupts,
    resolve_offline,
    run_engine,
    run_open,
    size_for_one_prompt,
)
from trouper.frontends.cli.values import (
    AudioOption,
    ImageOption,
    LoraOption,
    audio_url,
    chosen_adapter,
    image_url,
    media_files,
)
from trouper.inputs import ChatPrompt
from trouper.lora import LoRARequest
from trouper.params import RequestOutputKind

if TYPE_CHECKING:
    from trouper.frontends.python.async_engine import AsyncLLMEngine

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


Converse = Callable[[Ask, dict[str, str], int | None, Interrupts], Awaitable[None]]


@expand_options
def chat(
    ctx: typer.Context,
    named_model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            show_default=False,
            help="Folder, hub id or GGUF file; with --url, a model of the server.",
        ),
    ] = None,
    quick: Annotated[
        str | None,
        typer.Option(
            "--quick",
            "-q",
            metavar="MESSAGE",
            help="Answer this message, followed by the text on stdin, and exit; - reads stdin only.",
        ),
    ] = None,
    system_prompt: Annotated[
        str | None, typer.Option(help="System message at the start of the conversation.")
    ] = None,
    think: Annotated[
        bool | None,
        typer.Option(
            help="Let the model reason before it answers, or not; its chat template must support enable_thinking.",
            show_default=False,
        ),
    ] = None,
    image: ImageOption = None,
    audio: AudioOption = None,
    lora: LoraOption = None,
    stats: StatsOption = False,
    *,
    remote: RemoteOptions,
    sampling: SamplingOptions,
    engine_args: EngineArgs,
) -> None:
    """Chat with a model that has a chat template, local or on a server.

    For example: trouper chat --url http://127.0.0.1:8000 --system-prompt "Be brief."

    /help lists the commands. Ctrl-C stops an answer or clears the line; Ctrl-D ends the session.
    """
    _take_model(named_model, remote, engine_args)
    message = quick_message(quick)
    media = [image_url(data) for data in media_files(image)]
    media += [audio_url(data) for data in media_files(audio, "--audio")]

    async def converse(
        ask: Ask, facts: dict[str, str], limit: int | None, interrupts: Interrupts
    ) -> None:
        conversation = Conversation(system_prompt, media)
        subject = ChatSubject(
            conversation,
            sampling,
            shows_stats=stats,
            ask=ask,
            facts=facts,
            limit=limit,
            thinks=think,
        )
        if message is not None:
            await subject.answer(message, interrupts)
        else:
            await Session(subject, interrupts).answer_all("chat")

    with terminal_kept():
        if remote.url is None:
            _with_engine(converse, remote, sampling, engine_args, lora, backend(quick))
        elif lora is not None:
            rule = "works only with a local model; for an adapter of a server, use --model-name"
            raise typer.BadParameter(rule, param_hint="--lora")
        else:
            _with_server(converse, remote, engine_args, backend(quick))


def _take_model(name: str | None, remote: RemoteOptions, engine_args: EngineArgs) -> None:
    """Use the argument as the model of the local engine or of the server."""
    if name is None:
        return
    if " " in name and not Path(name).exists():
        rule = f'is not the name of a model; give a message with -q: trouper chat -q "{name}"'
        raise typer.BadParameter(rule, param_hint="MODEL")
    is_remote = remote.url is not None
    if (remote.model_name if is_remote else engine_args.model) is not None:
        option = "--model-name" if is_remote else "--model"
        raise typer.BadParameter("give only one of them", param_hint=f"MODEL and {option}")
    if is_remote:
        remote.model_name = name
    else:
        engine_args.model = name


def _with_server(
    converse: Converse, remote: RemoteOptions, engine_args: EngineArgs, loop: str
) -> None:
    if engine_args != EngineArgs():
        message = "cannot be combined with options of a local engine: the server has its own"
        raise typer.BadParameter(message, param_hint="--url")

    async def act(server: RemoteServer, interrupts: Interrupts) -> None:
        async def ask(question: Question, show: Show) -> AnswerEnd:
            fields = question.sampling.given() | (WITH_USAGE if question.wants_counts else {})
            if question.template_variables:
                fields["chat_template_kwargs"] = question.template_variables
            return await server.chat(fields, question.messages, show)

        await converse(ask, server.facts, server.max_model_len, interrupts)

    run_open(RemoteServer(remote), act, CONNECTING, backend=loop)


def _with_engine(
    converse: Converse,
    remote: RemoteOptions,
    sampling: SamplingOptions,
    engine_args: EngineArgs,
    lora: str | None,
    loop: str,
) -> None:
    if remote.model_name is not None:
        raise typer.BadParameter("needs --url", param_hint="--model-name")
    if sampling.seed is not None:
        engine_args.seed = sampling.seed
    size_for_one_prompt(engine_args)
    adapter = chosen_adapter(lora, engine_args)
    config = resolve_offline(engine_args)
    check_generates(config)
    model = config.model
    # Answers may fill the rest of the context.
    defaults = {"max_tokens": None, **model.default_sampling}
    # Reports an invalid option before the weights are loaded.
    params = sampling.params(defaults)
    output.tell_sampling(model, asdict(params))

    async def act(engine: "AsyncLLMEngine", interrupts: Interrupts) -> None:
        async def ask(question: Question, show: Show) -> AnswerEnd:
            return await _ask_engine(engine, defaults, adapter, question, show)

        config = engine.config
        facts = {"model": config.model.name, "dtype": str(config.dtype)}
        await converse(ask, facts, config.max_model_len, interrupts)

    run_engine(config, act, backend=loop)


async def _ask_engine(
    engine: "AsyncLLMEngine",
    defaults: dict[str, Any],
    adapter: LoRARequest | None,
    question: Question,
    show: Show,
) -> AnswerEnd:
    """Generate an answer and pass its text to `show` as it arrives.

    Raises ContextFullError if the prompt exceeds the context, and the engine's other errors unchanged.
    """
    usage, reason = AnswerUsage(0, 0), None
    params = question.sampling.params(defaults, output_kind=RequestOutputKind.DELTA)
    variables = question.template_variables
    prompt = ChatPrompt(messages=question.messages, chat_template_kwargs=variables)
    try:
        async with engine.generate(prompt, params, lora_request=adapter) as stream:
            async for result in stream:
                usage.prompt_tokens = len(result.prompt_token_ids)
                usage.completion_tokens += len(result.outputs[0].token_ids)
                reason = result.outputs[0].finish_reason
                show(result.outputs[0].text)
                if result.error is not None:
                    raise result.error.to_exception()
    except ContextLengthError as error:
        raise ContextFullError(output.explain(error)[1]) from error
    return AnswerEnd(usage, reason)


@expand_options
def complete(
    ctx: typer.Context,
    quick: Annotated[
        str | None,
        typer.Option(
            "--quick",
            "-q",
            metavar="PROMPT",
            help="Complete this prompt, followed by the text on stdin, and exit; - reads stdin only.",
        ),
    ] = None,
    stats: StatsOption = False,
    *,
    remote: RemoteOptions,
    sampling: SamplingOptions,
) -> None:
    """Complete each line of stdin with an OpenAI-compatible server.

    For example: trouper complete --url http://127.0.0.1:8000 -q "def f("

    At a terminal, /help lists the commands. Ctrl-C stops a text or clears the line; Ctrl-D ends the session.
    """
    prompt = quick_message(quick)

    async def act(server: RemoteServer, interrupts: Interrupts) -> None:
        async def ask(
            prompt: str, sampling: SamplingOptions, wants_counts: bool, show: Show
        ) -> AnswerEnd:
            asked = WITH_USAGE if wants_counts else {}
            fields = {"max_tokens": DEFAULT_MAX_TOKENS, **sampling.given(), **asked}
            return await server.complete(fields, prompt, show)

        completions = CompletionSubject(sampling, shows_stats=stats, ask=ask, facts=server.facts)
        if prompt is not None:
            await completions.answer(prompt, interrupts)
        else:
            await Session(completions, interrupts).answer_all("complete")

    with terminal_kept():
        run_open(RemoteServer(remote), act, CONNECTING, backend=backend(quick))
