"""What the actors need from outside, as small Protocols: a test or a simulation brings its own."""

import ctypes
import sys
import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar, TypeVarTuple

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
    """Threads apart from everybody else's; whoever calls bounds how many there are.

    A call is not abandoned when its waiter is cancelled, so nothing goes on behind our back.  But after
    `timeout_s` it is given up, for its waiter must not be stuck; it is interrupted at its next line of
    Python, so that the thread comes back too.  (Native code that never returns keeps its thread.)
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    async def run(self, function: Callable[[*Args], T], *args: *Args) -> T:
        """Raises TimeoutError when the call takes longer than `timeout_s`."""
        call = _Call(lambda: function(*args))
        deadline = anyio.current_time() + self._timeout_s
        with anyio.CancelScope(shield=True, deadline=deadline):
            return await anyio.to_thread.run_sync(
                call.run,
                abandon_on_cancel=True,  # only the deadline cancels in here
                limiter=anyio.CapacityLimiter(1),
            )
        call.interrupt()
        raise TimeoutError(f"took longer than {self._timeout_s:g} s")


class _Interrupted(BaseException):
    """Raised inside a call that is given up; a BaseException, so that the call does not handle it."""


class _Call(Generic[T]):
    """A function in a thread that others use after it: the interruption hits the function or nothing."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._lock = threading.Lock()  # over what follows
        self._thread_id: int | None = None
        self._is_over = self._is_interrupted = False

    def run(self) -> T:
        with self._lock:
            self._thread_id = threading.get_ident()
            if self._is_interrupted:  # before it began
                raise _Interrupted
        try:
            return self._function()
        finally:
            with self._lock:
                self._is_over = True
            if self._is_interrupted and sys.exc_info()[0] is not _Interrupted:
                for _ in range(1000):  # the interruption is on its way: it comes at a jump back
                    pass

    def interrupt(self) -> None:
        with self._lock:
            if self._is_over:
                return
            self._is_interrupted = True
            if self._thread_id is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(self._thread_id), ctypes.py_object(_Interrupted)
                )
