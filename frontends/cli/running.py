"""Running a command over an engine or a client: one task group, one task that listens for signals.

The first Ctrl-C ends what it points at (the answer of a chat, or else the command) in order: requests
are aborted, the step under way ends, memory goes back.  SIGTERM always ends the command.  A second
signal that comes before the first has done its work ends the process at once.
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
from trouper.config.generation import Frontend
from trouper.config.resolve import EngineConfig, resolve
from trouper.frontends.cli import output

if TYPE_CHECKING:
    from trouper.frontends.python.async_engine import AsyncLLMEngine

LOADING = "loading …"
T = TypeVar("T")
Act = Callable[[T, "Interrupts"], Awaitable[None]]


class Interrupts:
    """The target of signals: the innermost `stoppable` block for Ctrl-C, else the whole command."""

    def __init__(self) -> None:
        self.number: int | None = None  # the signal that ended the command
        self.keeps_session = False  # whether Ctrl-C outside of such a block is ignored
        self._stoppable: anyio.CancelScope | None = None

    @contextmanager
    def stoppable(self) -> Generator[anyio.CancelScope]:
        """Let Ctrl-C end this block alone, so that the command goes on after it."""
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
            return  # pressed twice, it must not cost the conversation; Ctrl-D ends a session
        elif self.number is None:
            self.number = number
            command.cancel()
        else:
            os._exit(output.EXIT_SIGNALLED + number)


def resolve_offline(engine_args: EngineArgs, frontend: Frontend = "terminal") -> EngineConfig:
    """Find mistakes before torch is imported; its libraries are loaded meanwhile, and beside the imports that follow."""
    load_ahead()
    return resolve(engine_args, offline=True, frontend=frontend)


def run_engine(
    engine_args: EngineArgs,
    act: "Act[AsyncLLMEngine]",
    *,
    backend: str = "trio",
    frontend: Frontend = "terminal",
) -> None:
    """Start an engine, let `act` use it, and close it; raises as `run_open` does."""
    with ExitStack() as starting:
        starting.enter_context(collections_paused(is_frozen=True))
        with output.status(LOADING):
            from trouper.frontends.python.async_engine import AsyncLLMEngine

        async def act_started(engine: "AsyncLLMEngine", interrupts: Interrupts) -> None:
            starting.close()
            await act(engine, interrupts)

        engine = AsyncLLMEngine(engine_args, offline=True, frontend=frontend)
        run_open(engine, act_started, LOADING, backend=backend)


def run_open(
    unopened: AbstractAsyncContextManager[T], act: Act[T], status: str, *, backend: str = "trio"
) -> None:
    """Open an engine or a client on the event loop `backend`, let `act` use it, and close it.

    `status` is shown while it opens.

    Raises:
        Interrupted: a signal ended the command.
        Exception: what `act` or the opened thing raised, as it is.
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
            # Carried out of the group, so that it is not wrapped in another.
            error = raised
        tg.cancel_scope.cancel()
    if interrupts.number is not None:
        raise output.Interrupted(interrupts.number)
    if error is not None:
        raise error
