"""What the actors need from outside, as small Protocols: a test or a simulation brings its own."""

from collections.abc import Callable
from typing import Protocol, TypeVar, TypeVarTuple

import anyio
import anyio.to_thread

T = TypeVar("T")
Args = TypeVarTuple("Args")


class Threads(Protocol):
    """A place where blocking work runs while the event loop goes on."""

    async def run(self, function: Callable[[*Args], T], *args: *Args) -> T:
        """Call `function` elsewhere and wait for its result or its exception."""
        ...


class WorkerThreads:
    """At most `limit` calls at a time, apart from everybody else's threads.

    A call is never abandoned: cancellation waits for it, so nothing goes on behind our back.
    """

    def __init__(self, limit: int) -> None:
        self._limiter = anyio.CapacityLimiter(limit)

    async def run(self, function: Callable[[*Args], T], *args: *Args) -> T:
        return await anyio.to_thread.run_sync(function, *args, limiter=self._limiter)
