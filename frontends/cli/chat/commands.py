"""`trouper chat`: a conversation in the terminal, with an engine in this process or with a server.

`trouper complete`: completion of prompts by a server.
"""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec.structs import asdict

from trouper.config.args import EngineArgs
from trouper.errors import TrouperClientError
from trouper.frontends.cli import output
from trouper.frontends.cli.arguments.misplaced import check_generates
from trouper.frontends.cli.arguments.options import (
    DEFAULT_MAX_TOKENS,
    SamplingOptions,
    expand_options,
)
from trouper.frontends.cli.arguments.values import LoraOption, chosen_adapter
from trouper.frontends.cli.chat.conversation import (
    ASKED,
    AnswerEnd,
    AnswerUsage,
    ContextFullError,
    Conversation,
    StatsOption,
)
from trouper.frontends.cli.chat.remote import CONNECTING, RemoteOptions, RemoteServer, Show
from trouper.frontends.cli.chat.session import (
    Ask,
    ChatSubject,
    CompletionSubject,
    Question,
    Session,
)
from trouper.frontends.cli.chat.terminal import backend, quick_message, terminal_kept
from trouper.frontends.cli.running import Interrupts, resolve_offline, run_engine, run_open
from trouper.inputs import ChatPrompt
from trouper.lora import LoRARequest
from trouper.params import RequestOutputKind

if TYPE_CHECKING:
    from trouper.frontends.python.async_engine import AsyncLLMEngine


Converse = Callable[[Ask, dict[str, str], int | None, Interrupts], Awaitable[None]]


@expand_options
def chat(
    ctx: typer.Context,
    named_model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            show_default=False,
            help="Folder, hub id or GGUF file; with --url a model of the server.",
        ),
    ] = None,
    quick: Annotated[
        str | None,
        typer.Option(
            "--quick",
            "-q",
            metavar="MESSAGE",
            help="Answer this one message, followed by the text on stdin; - is stdin only.",
        ),
    ] = None,
    system_prompt: Annotated[
        str | None, typer.Option(help="System message at the beginning of the conversation.")
    ] = None,
    think: Annotated[
        bool | None,
        typer.Option(
            help="Let the model reason before it answers, or not; its chat template must have enable_thinking.",
            show_default=False,
        ),
    ] = None,
    lora: LoraOption = None,
    stats: StatsOption = False,
    *,
    remote: RemoteOptions,
    sampling: SamplingOptions,
    engine_args: EngineArgs,
) -> None:
    """Talk to a model that has a chat template, here or at a server.

    For example: trouper chat --url http://127.0.0.1:8000 --system-prompt "Be brief."

    /help lists the commands. Ctrl-C stops an answer or clears the line, Ctrl-D ends.
    """
    _take_model(named_model, remote, engine_args)
    message = quick_message(quick)

    async def converse(
        ask: Ask, facts: dict[str, str], limit: int | None, interrupts: Interrupts
    ) -> None:
        conversation = Conversation(system_prompt)
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
            rule = "needs an engine here: a server's adapter is a --model-name"
            raise typer.BadParameter(rule, param_hint="--lora")
        else:
            _with_server(converse, remote, engine_args, backend(quick))


def _take_model(name: str | None, remote: RemoteOptions, engine_args: EngineArgs) -> None:
    """Let the argument name the model, of the engine here or of the server."""
    if name is None:
        return
    if " " in name and not Path(name).exists():
        rule = f'no model has such a name; give a message with -q: trouper chat -q "{name}"'
        raise typer.BadParameter(rule, param_hint="MODEL")
    is_remote = remote.url is not None
    if (remote.model_name if is_remote else engine_args.model) is not None:
        option = "--model-name" if is_remote else "--model"
        raise typer.BadParameter("give it once", param_hint=f"MODEL and {option}")
    if is_remote:
        remote.model_name = name
    else:
        engine_args.model = name


def _with_server(
    converse: Converse, remote: RemoteOptions, engine_args: EngineArgs, loop: str
) -> None:
    if engine_args != EngineArgs():
        message = "takes no options of an engine: the server has its own"
        raise typer.BadParameter(message, param_hint="--url")

    async def act(server: RemoteServer, interrupts: Interrupts) -> None:
        async def ask(question: Question, show: Show) -> AnswerEnd:
            fields = question.sampling.given() | (ASKED if question.wants_counts else {})
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
    adapter = chosen_adapter(lora, engine_args)
    config = resolve_offline(engine_args)
    check_generates(config)
    model = config.model
    defaults = {"max_tokens": None, **model.default_sampling}  # None: up to the model's length
    params = sampling.params(defaults)  # a wrong option is named before the weights are loaded
    output.tell_sampling(model, asdict(params))

    async def act(engine: "AsyncLLMEngine", interrupts: Interrupts) -> None:
        async def ask(question: Question, show: Show) -> AnswerEnd:
            return await _ask_engine(engine, defaults, adapter, question, show)

        config = engine.config
        facts = {"model": config.model.name, "dtype": str(config.dtype)}
        await converse(ask, facts, config.max_model_len, interrupts)

    run_engine(engine_args, act, backend=loop)


async def _ask_engine(
    engine: "AsyncLLMEngine",
    defaults: dict[str, Any],
    adapter: LoRARequest | None,
    question: Question,
    show: Show,
) -> AnswerEnd:
    """Pass an answer to `show`.  Raises ContextFullError, or what the engine raises."""
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
    except TrouperClientError as error:
        if "(max_model_len)" in str(error):
            raise ContextFullError(output.explain(error)[1]) from error
        raise
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
            help="Complete this one prompt, followed by the text on stdin; - is stdin only.",
        ),
    ] = None,
    stats: StatsOption = False,
    *,
    remote: RemoteOptions,
    sampling: SamplingOptions,
) -> None:
    """Complete each line of stdin at an OpenAI-compatible server.

    For example: trouper complete --url http://127.0.0.1:8000 -q "def f("

    At a terminal /help lists the commands. Ctrl-C stops a text or clears the line, Ctrl-D ends.
    """
    prompt = quick_message(quick)

    async def act(server: RemoteServer, interrupts: Interrupts) -> None:
        async def ask(
            prompt: str, sampling: SamplingOptions, wants_counts: bool, show: Show
        ) -> AnswerEnd:
            asked = ASKED if wants_counts else {}
            fields = {"max_tokens": DEFAULT_MAX_TOKENS, **sampling.given(), **asked}
            return await server.complete(fields, prompt, show)

        completions = CompletionSubject(sampling, shows_stats=stats, ask=ask, facts=server.facts)
        if prompt is not None:
            await completions.answer(prompt, interrupts)
        else:
            await Session(completions, interrupts).answer_all("complete")

    with terminal_kept():
        run_open(RemoteServer(remote), act, CONNECTING, backend=backend(quick))
