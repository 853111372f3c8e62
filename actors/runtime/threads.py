"""Threads for blocking work, so that the event loop goes on. Tests and simulations substitute their own."""

from collections.abc import Callable
from typing import Protocol, TypeVar, TypeVarTuple

import anyio
import anyio.to_thread

T = TypeVar("T")
Args = TypeVarTuple("Args")


class Threads(Protocol):
    """Runs blocking functions outside the event loop."""

    async def run(self, function: Callable[[*Args], T], *args: *Args) -> T:
        """Call `function` in another thread and return its result or raise its exception."""
        ...


class WorkerThreads:
    """Threads that the caller's program does not share. The caller bounds the number of concurrent calls.

    Cancelling the waiter does not abandon a call, so no work continues unnoticed. After `timeout_s` the
    waiter gives up, while the thread stays busy until its call ends. Work that may never end must therefore
    not run here: chat templates and grammar trials have processes of their own, and all other work is bounded
    by the size of its input.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    async def run(self, function: Callable[[*Args], T], *args: *Args) -> T:
        """Call `function` in a thread.

        Raises:
            TimeoutError: the call takes longer than `timeout_s`.
        """
        deadline = anyio.current_time() + self._timeout_s
        with anyio.CancelScope(shield=True, deadline=deadline):
            return await anyio.to_thread.run_sync(
                function,
                *args,
                # Only the deadline can cancel inside this shield.
                abandon_on_cancel=True,
                limiter=anyio.CapacityLimiter(1),
            )
        raise TimeoutError(f"took longer than {self._timeout_s:g} s")
