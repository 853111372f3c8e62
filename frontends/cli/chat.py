"""`trouper chat`: a conversation in the terminal."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import anyio
import anyio.to_thread
import typer

from trouper.config import EngineArgs
from trouper.errors import TrouperClientError
from trouper.frontends.cli import output
from trouper.frontends.cli.options import SamplingOptions, expand_options
from trouper.frontends.cli.running import Interrupts, run_engine
from trouper.inputs import ChatPrompt
from trouper.params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from trouper.frontends.async_engine import AsyncLLMEngine

PROMPT = "> "
HELP = "/reset forgets the conversation, /exit or Ctrl-D ends it, Ctrl-C stops an answer"


@expand_options
def chat(
    ctx: typer.Context,
    quick: Annotated[
        str | None,
        typer.Option("--quick", "-q", metavar="MESSAGE", help="Answer one message, and end."),
    ] = None,
    system_prompt: Annotated[str | None, typer.Option(help="What to tell the model first.")] = None,
    *,
    sampling: SamplingOptions,
    engine_args: EngineArgs,
) -> None:
    """Talk to a model that has a chat template.

    Ctrl-C stops an answer; at the prompt it ends the program, as Ctrl-D does.
    """
    if sampling.seed is not None:
        engine_args.seed = sampling.seed
    model = engine_args.resolve(offline=True).model
    defaults = {"max_tokens": None, **model.default_sampling}  # None: up to the model's length
    params = sampling.params(defaults, output_kind=RequestOutputKind.DELTA)
    conversation = Conversation(params, system_prompt)
    with _terminal_kept():
        run_engine(
            engine_args, partial(_quick if quick is not None else _talk, conversation, quick)
        )


class Conversation:
    """The messages so far, and how they are answered."""

    def __init__(self, params: SamplingParams, system_prompt: str | None) -> None:
        self._params = params
        self._system = (
            [{"role": "system", "content": system_prompt}] if system_prompt is not None else []
        )
        self.messages: list[dict[str, Any]] = [*self._system]

    def reset(self) -> None:
        self.messages = [*self._system]

    async def answer(self, engine: "AsyncLLMEngine", message: str, interrupts: Interrupts) -> None:
        """Print the answer as it comes.  What Ctrl-C cut off stays in the history as far as it came.

        Raises:
            TrouperClientError: the conversation cannot be rendered; it is as it was before.
        """
        before = self.messages
        self.messages = [*before, {"role": "user", "content": message}]
        prompt = ChatPrompt(messages=self.messages)
        text = ""
        try:
            with interrupts.stoppable():
                async with engine.generate(prompt, self._params) as stream:
                    async for result in stream:
                        print(result.outputs[0].text, end="", flush=True)
                        text += result.outputs[0].text
                        if result.error is not None:
                            raise result.error.to_exception()
        except BaseException:
            self.messages = before
            raise
        print()
        answer = {"role": "assistant", "content": text}
        self.messages = [*self.messages, answer] if text else before


async def _quick(
    conversation: Conversation, message: str, engine: "AsyncLLMEngine", interrupts: Interrupts
) -> None:
    await conversation.answer(engine, message, interrupts)


async def _talk(
    conversation: Conversation, _: None, engine: "AsyncLLMEngine", interrupts: Interrupts
) -> None:
    if output.is_terminal(sys.stdin):
        print(HELP, file=sys.stderr)
    while (line := await _read_line()) is not None:
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
                    await conversation.answer(engine, message, interrupts)
                except TrouperClientError as error:
                    output.complain(output.explain(error)[1])


async def _read_line() -> str | None:
    """The next line, None at the end.  Abandoned when the command ends: a read cannot be taken back."""
    return await anyio.to_thread.run_sync(
        _input, abandon_on_cancel=True, limiter=anyio.CapacityLimiter(1)
    )


def _input() -> str | None:
    if output.is_terminal(sys.stdin) and output.is_terminal(sys.stdout):
        try:
            return input(PROMPT)
        except EOFError:
            print()
            return None
    return sys.stdin.readline() or None


@contextmanager
def _terminal_kept() -> Iterator[None]:
    """Line editing puts the terminal into another mode; put it back if the read is abandoned."""
    if not output.is_terminal(sys.stdin):
        yield
        return
    import readline  # noqa: F401  # input() has history and arrow keys with it
    import termios

    fd = sys.stdin.fileno()
    mode = termios.tcgetattr(fd)
    try:
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, mode)
