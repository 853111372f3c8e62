"""Let threads and tasks wait for each other without blocking the event loop.

Waking a task from another thread needs the loop's own thread-safe call, which asyncio and trio name differently
(`EventLoop`). Blocking work runs in threads, for which tests and simulations substitute their own (`Threads`).

Actors answer messages through `Future`s instead of reply channels, so an answer never blocks the actor and never fails if the
waiting task was cancelled. Cleaning up often needs one last answer from another actor; leaving early would leave work that
nothing owns, so `wait_shielded` waits for it despite cancellation.

Observability must never slow the engine, so a `Reporter` that finds its channel full loses statistics instead of blocking an
actor.
"""

import asyncio
import ctypes
import math
import os
import weakref
from collections.abc import Awaitable, Callable, Iterable
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar, TypeVarTuple, cast

import anyio
import anyio.lowlevel
import anyio.to_thread
from anyio.streams.memory import MemoryObjectSendStream

from trouper.actors.messages.controls import ObserverInbox


async def wait_shielded(
    attempt: Callable[[], Awaitable[object]],
    is_over: Callable[[], bool],
    *,
    limit_s: float = math.inf,
) -> BaseException | None:
    """Await attempts until `is_over`. Returns the cancellation received meanwhile, which the caller must raise,
    or None.

    A shielded anyio scope blocks cancellation by other scopes, but not of an asyncio task, as by `wait_for`,
    `timeout`, a `TaskGroup` and Ctrl-C. This function catches that cancellation too.

    Args:
        limit_s: seconds after which the wait is given up.
    """
    cancelled: BaseException | None = None
    with anyio.CancelScope(shield=True, deadline=anyio.current_time() + limit_s) as scope:
        while not is_over() and not scope.cancel_called:
            try:
                await attempt()
            # The caller raises the caught cancellation afterwards.
            except anyio.get_cancelled_exc_class() as error:  # noqa: ASYNC103
                if scope.cancel_called:
                    raise
                cancelled = error
    return cancelled


T = TypeVar("T")


class Future(Generic[T]):
    """Created by the task that asks, sent in a message, and set once by the actor that did the work.

    Setting never waits and never fails, even if the asking task no longer waits.
    """

    def __init__(self) -> None:
        self._done = anyio.Event()
        self._value: T | None = None
        self._error: BaseException | None = None

    @property
    def is_done(self) -> bool:
        """Whether a value or an error was delivered."""
        return self._done.is_set()

    @property
    def error(self) -> BaseException | None:
        """Error passed to `fail`, else None."""
        return self._error

    def set(self, value: T) -> None:
        """Deliver the value.

        It wakes all waiting tasks and never waits itself, so an actor can call it at any time. Waiting afterwards
        returns at once.
        """
        self._value = value
        self._done.set()

    def fail(self, error: BaseException) -> None:
        """Deliver an error instead of a value. Each waiting task raises it.  Like `set`, this never waits."""
        self._error = error
        self._done.set()

    async def wait(self) -> T:
        """Wait for the value and return it, or raise the error passed to `fail`.

        Several tasks may wait for one future, and waiting after the result returns at once.
        """
        await self._done.wait()
        return self.result()

    async def wait_shielded(self) -> BaseException | None:
        """Wait until the future is done, even if cancelled. Returns the cancellation, which the caller must
        raise, or None.
        """
        return await wait_shielded(self._done.wait, self._done.is_set)

    def result(self) -> T:
        """Return the value of a finished future, or raise the error passed to `fail`."""
        if self._error is not None:
            raise self._error
        return cast("T", self._value)


class Reporter:
    """Sends statistics to the observer, or discards them if statistics are disabled. `num_dropped` counts those
    that found the channel full.
    """

    def __init__(self, observer: MemoryObjectSendStream[ObserverInbox] | None) -> None:
        self._observer = observer
        self.num_dropped = 0

    @property
    def is_on(self) -> bool:
        """Whether statistics are collected.

        Callers skip the collection of numbers when it is False, which saves time in each step.
        """
        return self._observer is not None

    def report(self, stats: ObserverInbox) -> bool:
        """Send statistics without waiting. Returns whether the channel had room.

        A dropped message only makes a metric incomplete, while waiting would delay tokens.
        """
        if self._observer is None:
            return False
        try:
            self._observer.send_nowait(stats)
        except (anyio.WouldBlock, anyio.BrokenResourceError, anyio.ClosedResourceError):
            self.num_dropped += 1
            return False
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._observer is not None:
            self._observer.close()


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


# The bytes that a pipe of Linux holds.
PIPE_SIZE = 2**16


class WakeupPipe:
    """Wakes one task of the event loop from other threads, which keep the GIL meanwhile.

    `EventLoop.call_soon` ends in a system call without the GIL. The loop's thread then takes the GIL, and the caller waits
    until the loop has nothing more to do: 0.5 ms between two steps of 8 ms. The caller of `notify` goes on at once, and
    the loop's thread runs when the caller computes without the GIL.
    """

    def __init__(self) -> None:
        self._ends = os.pipe()
        for end in self._ends:
            os.set_blocking(end, False)
        self._close = weakref.finalize(self, _close_all, self._ends)
        self._is_open = True
        # Functions of a `PyDLL` keep the GIL.
        self._write = ctypes.PyDLL(None).write
        self._write.argtypes = ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t

    def notify(self) -> None:
        """Wake the task, from any thread. It wakes from a full pipe, too, so a write that fails loses nothing."""
        if self._is_open:
            self._write(self._ends[1], b"\0", 1)

    async def wait(self) -> None:
        """Wait for `notify`. Several calls of it since the last wait count as one.

        Raises:
            ClosedResourceError: the pipe is closed meanwhile.
        """
        await anyio.wait_readable(self._ends[0])
        os.read(self._ends[0], PIPE_SIZE)

    def close(self) -> None:
        """Close the pipe, on the event loop. Idempotent. A later `notify` does nothing."""
        if self._is_open:
            self._is_open = False
            anyio.notify_closing(self._ends[0])
            self._close()


def _close_all(files: Iterable[int]) -> None:
    for file in files:
        os.close(file)


# The number of items after which a loop over many requests lets other tasks run.  Creating a request, opening it or
# reading its result takes 5 to 10 µs, so the event loop is held for less than 1 ms.
ITEMS_PER_TURN = 64

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
