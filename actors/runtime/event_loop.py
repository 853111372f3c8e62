"""Access to the event loop from other threads, and ways not to block it.

Waking a task from another thread needs the loop's own thread-safe call, which asyncio and trio name
differently. Blocking work runs in threads, for which tests and simulations substitute their own.
"""

import asyncio
import os
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, TypeVarTuple

import anyio.lowlevel
import anyio.to_thread


class EventLoop:
    """The event loop that runs when this object is created.

    Other threads use it to run functions on the loop; trio and asyncio have different means for this.
    """

    def __init__(self) -> None:
        self._token: Any = anyio.lowlevel.current_token().native_token
        self._process_id = os.getpid()
        is_asyncio = isinstance(self._token, asyncio.AbstractEventLoop)
        self._call_soon: Callable[[Callable[[], object]], object] = (
            self._token.call_soon_threadsafe if is_asyncio else self._token.run_sync_soon
        )

    def call_soon(self, act: Callable[[], object]) -> None:
        """Schedule `act` on the loop, from any thread.

        Raises:
            RuntimeError: the loop has ended, or belongs to the process from which this one was forked.
        """
        if os.getpid() != self._process_id:
            raise RuntimeError("the loop runs in another process")
        self._call_soon(act)

    def check_current(self) -> None:
        """Raise RuntimeError in another thread, loop or process, whose events would never wake tasks of this
        loop.
        """
        try:
            is_current = anyio.lowlevel.current_token().native_token is self._token
        except RuntimeError:  # no loop runs here
            is_current = False
        if not is_current or os.getpid() != self._process_id:
            raise RuntimeError(
                "an engine belongs to its event loop: use it in the loop and thread that started it"
            )


# The number of items after which a loop over many requests lets other tasks run.  Creating a request, opening it or
# reading its result takes 5 to 10 µs, so the event loop is held for less than 1 ms.
ITEMS_PER_TURN = 64


T = TypeVar("T")
Args = TypeVarTuple("Args")


class Threads(Protocol):
    """Runs blocking functions outside the event loop.

    A protocol lets simulations replace threads by deterministic execution.
    """

    async def run(self, function: Callable[[*Args], T], *args: *Args) -> T:
        """Call `function` in another thread and return its result or raise its exception.

        The calling task waits; other tasks of the event loop continue.
        """
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

        A cancelled caller still waits for the end of the call, because a thread cannot be interrupted.

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
