"""Threads for blocking work while the event loop goes on; a test or a simulation brings its own."""

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
    """Threads apart from those of the caller's program; the caller bounds how many calls are under way.

    A call is not abandoned when its waiter is cancelled, so nothing goes on unseen.  After `timeout_s` it is given up,
    so that its waiter goes on; its thread stays busy until the call ends.  So what may never end does not run here:
    chat templates have processes of their own, grammars are tried in such, and the rest is bounded by the size of its input.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    async def run(self, function: Callable[[*Args], T], *args: *Args) -> T:
        """Raises TimeoutError when the call takes longer than `timeout_s`."""
        deadline = anyio.current_time() + self._timeout_s
        with anyio.CancelScope(shield=True, deadline=deadline):
            return await anyio.to_thread.run_sync(
                function,
                *args,
                abandon_on_cancel=True,  # only the deadline cancels in here
                limiter=anyio.CapacityLimiter(1),
            )
        raise TimeoutError(f"took longer than {self._timeout_s:g} s")
