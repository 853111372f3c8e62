"""Run a command over an engine or a client, and stop it in order when a signal arrives.

The first Ctrl-C cancels the innermost `stoppable` block (the current answer of a chat) or else the whole command:
requests are aborted, the current step finishes and memory is released. SIGTERM always stops the command. A second
signal during this shutdown kills the process immediately. One task listens for signals, so no handler interrupts
arbitrary code.
"""

import os
import signal
from collections.abc import Awaitable, Callable, Generator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack, contextmanager
from typing import TYPE_CHECKING, TypeVar

import anyio
from anyio.abc import TaskStatus

from trouper.actors.runtime.startup import collections_paused, load_ahead
from trouper.config.args import EngineArgs
from trouper.config.engine_config import EngineConfig
from trouper.config.generation import Frontend
from trouper.config.resolve import resolve
from trouper.frontends.cli import output

if TYPE_CHECKING:
    from trouper.frontends.python.async_engine import AsyncLLMEngine

LOADING = "loading …"
# With more completions of one prompt the default limit is kept.
MAX_COMPLETIONS = 7
T = TypeVar("T")
Act = Callable[[T, "Interrupts"], Awaitable[None]]


class Interrupts:
    """Decides what a signal cancels; `number` is the signal that ended the command, if one did.

    `keeps_session` makes Ctrl-C outside a `stoppable` block do nothing, for sessions that end with Ctrl-D.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self.keeps_session = False
        self._stoppable: anyio.CancelScope | None = None

    @contextmanager
    def stoppable(self) -> Generator[anyio.CancelScope]:
        """Let Ctrl-C cancel only this block; the command continues after it.

        It is used around one answer of a session.  A second Ctrl-C, or one outside of such a block, ends the command.
        """
        with anyio.CancelScope() as scope:
            self._stoppable = scope
            try:
                yield scope
            finally:
                self._stoppable = None

    async def listen(
        self,
        command: anyio.CancelScope,
        *,
        task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED,
    ) -> None:
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            task_status.started()
            async for number in signals:
                self._hit(number, command)

    def _hit(self, number: int, command: anyio.CancelScope) -> None:
        scope = self._stoppable
        if scope is not None and number == signal.SIGINT and not scope.cancel_called:
            scope.cancel()
        elif self.keeps_session and number == signal.SIGINT:
            # Pressing Ctrl-C once too often must not lose a conversation.
            return
        elif self.number is None:
            self.number = number
            command.cancel()
        else:
            os._exit(output.EXIT_SIGNALLED + number)


def size_for_one_prompt(engine_args: EngineArgs, num_completions: int = 1) -> None:
    """Limit an engine to the sequences of a single prompt, unless the user has set a limit.

    A step of few sequences is bound by reading the weights. With fewer than 8 sequences the engine therefore stores
    bfloat16 weights losslessly in 12 bits, if the processor supports it.
    """
    if engine_args.max_num_seqs is None and 1 <= num_completions <= MAX_COMPLETIONS:
        engine_args.max_num_seqs = num_completions


def resolve_offline(engine_args: EngineArgs, frontend: Frontend = "terminal") -> EngineConfig:
    """Resolve the arguments of a command, so that mistakes are reported before torch is imported.

    torch's shared libraries are loaded in a background thread at the same time, which shortens the start.
    """
    load_ahead()
    return resolve(engine_args, offline=True, frontend=frontend)


def run_engine(config: EngineConfig, act: "Act[AsyncLLMEngine]", *, backend: str = "trio") -> None:
    """Start an engine, call `act` with it, and close it.  Raises the errors that `run_open` lists.

    Garbage collection is paused while the model is loaded, because collections would only examine objects that stay.
    """
    with ExitStack() as starting:
        starting.enter_context(collections_paused(is_frozen=True))
        with output.status(LOADING):
            from trouper.frontends.python.async_engine import AsyncLLMEngine

        async def act_started(engine: "AsyncLLMEngine", interrupts: Interrupts) -> None:
            starting.close()
            await act(engine, interrupts)

        engine = AsyncLLMEngine(config)
        run_open(engine, act_started, LOADING, backend=backend)


def run_open(
    unopened: AbstractAsyncContextManager[T], act: Act[T], status: str, *, backend: str = "trio"
) -> None:
    """Open an engine or a client on a new event loop, call `act` with it, and close it.

    Args:
        status: text to show on the terminal while it opens.
        backend: `trio`, or `asyncio` for the line editor.

    Raises:
        Interrupted: a signal ended the command.
        Exception: the error of `act`, of opening or of closing, not wrapped in a group.
    """
    anyio.run(_run, unopened, act, status, backend=backend)


async def _run(unopened: AbstractAsyncContextManager[T], act: Act[T], status: str) -> None:
    error: Exception | None = None
    interrupts = Interrupts()
    async with anyio.create_task_group() as tg:
        await tg.start(interrupts.listen, tg.cancel_scope, name="signals")
        try:
            async with AsyncExitStack() as stack:
                with output.status(status):
                    opened = await stack.enter_async_context(unopened)
                await act(opened, interrupts)
        except Exception as raised:
            # Raised after the task group, which would wrap it in an exception group.
            error = raised
        tg.cancel_scope.cancel()
    if interrupts.number is not None:
        raise output.Interrupted(interrupts.number)
    if error is not None:
        raise error
