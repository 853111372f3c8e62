"""Engines that start themselves, for programs of asyncio that have neither a block nor a `start`.

The engine's actors need a task that enters and leaves them.  Where the program gives none, a task of its own holds
the engine until `close` or `shutdown`, or until asyncio cancels what is left at the program's end.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Generic, Self, TypeVar

from trouper.actors.engine.generation import Generation

Output = TypeVar("Output", bound=Any)


def can_start() -> bool:
    """Tell whether a task can be made here that belongs to no block: asyncio has them, trio has none."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class HoldingTask:
    """A task that is inside a block from `wait_started` to `stop`."""

    def __init__(self, block: AbstractAsyncContextManager[Any]) -> None:
        self._block = block
        self._started = asyncio.get_running_loop().create_future()
        self._stopping = asyncio.Event()
        self._task = asyncio.create_task(self._hold(), name="trouper-engine")

    async def wait_started(self) -> None:
        """Wait until the block has been entered.  Raises what entering it raised."""
        await asyncio.shield(self._started)

    def stop(self) -> None:
        """Leave the block soon."""
        self._stopping.set()

    async def aclose(self) -> None:
        """Leave the block, and wait until it has been left.  Raises what ended it, unless `wait_started` did."""
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
            self._started.cancel()  # nothing, where the block has been entered
            raise
        except BaseException as error:  # noqa: ASYNC103  # a cancellation is raised above
            if self._started.done():
                raise
            self._started.set_exception(error)  # for the callers that wait for the start


class StartingGeneration(Generic[Output]):
    """Request of an engine that is started before the request is made; used like a `Generation`."""

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
        """End the request, which aborts it; one that has not begun never will."""
        self._is_closed = True
        if self._generation is not None:
            self._generation.close()

    async def _started(self) -> Generation[Output]:
        if self._generation is None:
            await self._start()
            self._generation = self._make()
        return self._generation
