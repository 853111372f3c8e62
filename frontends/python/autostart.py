"""Start an engine at its first request, for asyncio programs that use it without a block, as vLLM's do.

The engine's `async with` block must be entered and left by one task. Without a block in the program, a background
task holds the engine open until `close`, `shutdown` or the end of the event loop, which cancels the task.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Generic, Self, TypeVar

from trouper.actors.engine.generation import Generation

Output = TypeVar("Output", bound=Any)


def can_start() -> bool:
    """Return whether background tasks exist here: asyncio allows them, trio does not.

    In trio, and without an event loop, the engine must be used inside its `async with` block.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class BackgroundTask:
    """A task that enters an async context manager at once and leaves it after `stop`.

    Cancel scopes belong to the task that enters them, so a block entered in one request's task could not be left by
    another.
    """

    def __init__(self, block: AbstractAsyncContextManager[Any]) -> None:
        self._block = block
        self._started = asyncio.get_running_loop().create_future()
        self._stopping = asyncio.Event()
        self._task = asyncio.create_task(self._hold(), name="trouper-engine")

    async def wait_started(self) -> None:
        """Wait until the block is entered.  Raises the error of entering it, to every waiter."""
        await asyncio.shield(self._started)

    def stop(self) -> None:
        """Ask the task to leave the block, without waiting."""
        self._stopping.set()

    async def aclose(self) -> None:
        """Leave the block, and wait until it has ended.  Further calls do nothing.

        Raises the error that ended the block, unless `wait_started` has already raised it.
        """
        self.stop()
        await asyncio.wait([self._task])
        if not self._task.cancelled():
            self._task.result()

    async def _hold(self) -> None:
        try:
            async with self._block:
                self._started.set_result(None)
                await self._stopping.wait()
        except asyncio.CancelledError:
            # Has no effect once the block is entered.
            self._started.cancel()
            raise
        except BaseException as error:  # noqa: ASYNC103  # a cancellation is raised above
            if self._started.done():
                raise
            self._started.set_exception(error)


class LazyGeneration(Generic[Output]):
    """A request that starts its engine first; its interface is that of `Generation`.

    Entering or iterating it starts the engine and then makes the real request, so creating one costs nothing.
    """

    def __init__(
        self, start: Callable[[], Awaitable[None]], make: Callable[[], Generation[Output]]
    ) -> None:
        self._start = start
        self._make = make
        self._generation: Generation[Output] | None = None
        self._is_closed = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Output:
        if self._is_closed and self._generation is None:
            raise StopAsyncIteration
        return await anext(await self._started())

    async def __aenter__(self) -> Self:
        generation = await self._started()
        await generation.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def aclose(self) -> None:
        self.close()

    def close(self) -> None:
        """Abort the request.  If it has not begun, it never will."""
        self._is_closed = True
        if self._generation is not None:
            self._generation.close()

    async def _started(self) -> Generation[Output]:
        if self._generation is None:
            await self._start()
            self._generation = self._make()
        return self._generation
