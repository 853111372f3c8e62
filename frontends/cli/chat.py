"""`trouper chat`: a conversation in the terminal, with an engine in this process or with a server."""

import sys
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trouper.config.args import EngineArgs
from trouper.errors import RemoteError, TrouperClientError
from trouper.frontends.cli import output
from trouper.frontends.cli.adapters import LoraOption, chosen_adapter
from trouper.frontends.cli.options import SamplingOptions, expand_options
from trouper.frontends.cli.remote import CONNECTING, RemoteOptions, RemoteServer, Show
from trouper.frontends.cli.running import Interrupts, resolve_offline, run_engine, run_open
from trouper.frontends.cli.stats import ASKED, AnswerUsage, StatsOption, Stopwatch
from trouper.frontends.cli.terminal import read_line, show, terminal_kept
from trouper.inputs import ChatPrompt
from trouper.lora import LoRARequest
from trouper.params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from trouper.frontends.python.async_engine import AsyncLLMEngine

HELP = "/reset forgets the conversation, /exit or Ctrl-D ends it, Ctrl-C stops an answer"

Messages = list[dict[str, Any]]
Ask = Callable[[Messages, Show], Awaitable[AnswerUsage | None]]
Converse = Callable[[Ask, Interrupts], Awaitable[None]]


@expand_options
def chat(
    ctx: typer.Context,
    quick: Annotated[
        str | None,
        typer.Option("--quick", "-q", metavar="MESSAGE", help="Answer this one message, and end."),
    ] = None,
    system_prompt: Annotated[
        str | None, typer.Option(help="System message at the beginning of the conversation.")
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

    Ctrl-C stops an answer; at the prompt it ends the program, as Ctrl-D does.
    """
    converse = partial(_converse, Conversation(system_prompt, shows_stats=stats), quick)
    with terminal_kept():
        if remote.url is not None:
            fields = sampling.given() | (ASKED if stats else {})
            if lora is not None:
                message = "needs an engine here: a server's adapter is a --model-name"
                raise typer.BadParameter(message, param_hint="--lora")
            _with_server(converse, remote, fields, engine_args)
        else:
            _with_engine(converse, remote, sampling, engine_args, lora)


def _with_server(
    converse: Converse, remote: RemoteOptions, fields: dict[str, Any], engine_args: EngineArgs
) -> None:
    if engine_args != EngineArgs():
        message = "takes no options of an engine: the server has its own"
        raise typer.BadParameter(message, param_hint="--url")

    async def act(server: RemoteServer, interrupts: Interrupts) -> None:
        await converse(partial(server.chat, fields), interrupts)

    run_open(RemoteServer(remote), act, CONNECTING)


def _with_engine(
    converse: Converse,
    remote: RemoteOptions,
    sampling: SamplingOptions,
    engine_args: EngineArgs,
    lora: str | None,
) -> None:
    if remote.model_name is not None:
        raise typer.BadParameter("needs --url", param_hint="--model-name")
    if sampling.seed is not None:
        engine_args.seed = sampling.seed
    adapter = chosen_adapter(lora, engine_args)
    model = resolve_offline(engine_args).model
    defaults = {"max_tokens": None, **model.default_sampling}  # None: up to the model's length
    params = sampling.params(defaults, output_kind=RequestOutputKind.DELTA)

    async def act(engine: "AsyncLLMEngine", interrupts: Interrupts) -> None:
        await converse(partial(_ask_engine, engine, params, adapter), interrupts)

    run_engine(engine_args, act)


async def _ask_engine(
    engine: "AsyncLLMEngine",
    params: SamplingParams,
    adapter: LoRARequest | None,
    messages: Messages,
    show: Show,
) -> AnswerUsage:
    usage = AnswerUsage(0, 0)
    prompt = ChatPrompt(messages=messages)
    async with engine.generate(prompt, params, lora_request=adapter) as stream:
        async for result in stream:
            usage.prompt_tokens = len(result.prompt_token_ids)
            usage.completion_tokens += len(result.outputs[0].token_ids)
            show(result.outputs[0].text)
            if result.error is not None:
                raise result.error.to_exception()
    return usage


class Conversation:
    """The messages so far of one conversation, and the way to answer the next one."""

    def __init__(self, system_prompt: str | None, *, shows_stats: bool) -> None:
        self._shows_stats = shows_stats
        self._system: Messages = (
            [{"role": "system", "content": system_prompt}] if system_prompt is not None else []
        )
        self.messages: Messages = [*self._system]

    def reset(self) -> None:
        self.messages = [*self._system]

    async def answer(self, ask: Ask, message: str, interrupts: Interrupts) -> None:
        """Print the answer as it comes.  An answer that Ctrl-C cuts off stays in the history as far as it came.

        Raises:
            TrouperClientError: the conversation cannot be rendered; it is as it was before.
            RemoteError: the server has failed; the same.
        """
        before = self.messages
        self.messages = [*before, {"role": "user", "content": message}]
        pieces: list[str] = []
        usage: AnswerUsage | None = None
        watch = Stopwatch(show)

        def hear(text: str) -> None:
            watch.hear(text)
            pieces.append(text)

        try:
            with interrupts.stoppable():
                usage = await ask(self.messages, hear)
        except BaseException:
            self.messages = before
            raise
        print()
        if self._shows_stats:
            watch.report(usage)
        answer = {"role": "assistant", "content": "".join(pieces)}
        self.messages = [*self.messages, answer] if answer["content"] else before


async def _converse(
    conversation: Conversation, quick: str | None, ask: Ask, interrupts: Interrupts
) -> None:
    if quick is not None:
        await conversation.answer(ask, quick, interrupts)
    else:
        await _talk(conversation, ask, interrupts)


async def _talk(conversation: Conversation, ask: Ask, interrupts: Interrupts) -> None:
    if output.is_terminal(sys.stdin):
        print(HELP, file=sys.stderr)
    while (line := await read_line()) is not None:
        match line.strip():
            case "":
                pass
            case "/exit":
                return
            case "/reset":
                conversation.reset()
            case command if command.startswith("/"):
                print(f"no such command: {command}; {HELP}", file=sys.stderr)
            case message:
                try:
                    await conversation.answer(ask, message, interrupts)
                except (TrouperClientError, RemoteError) as error:
                    output.complain(output.explain(error)[1])
