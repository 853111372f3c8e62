"""A piece of work for a device's thread, and the way of its result back to the event loop."""

from collections.abc import Callable
from typing import Generic, TypeVar

import anyio

from trouper.actors.executor.device import PendingResult
from trouper.actors.runtime.event_loop import EventLoop

Result = TypeVar("Result")


class DeviceTask(Generic[Result]):
    """Made and awaited on the event loop, run by the device's thread.

    `note_done` is called on the event loop.  The work returns its result, or a `PendingResult`: then it is launched, and `finish` brings the result.
    """

    def __init__(
        self,
        work: Callable[[], Result | PendingResult[Result]],
        loop: EventLoop,
        note_done: Callable[[], None] = lambda: None,
    ) -> None:
        self._work = work
        self._loop = loop
        self._note_done = note_done
        self._done = anyio.Event()
        self._pending: PendingResult[Result] | None = None
        self._result: Result | None = None
        self._error: BaseException | None = None

    @property
    def is_launched(self) -> bool:
        return self._pending is not None

    @property
    def calls_back(self) -> bool:
        """Whether a launched task says when it is ready."""
        return self._pending is not None and self._pending.when_ready is not None

    def when_ready(self, act: Callable[[], None]) -> None:
        """Have `act` called when a launched task is ready, if anything says so."""
        if self._pending is not None and self._pending.when_ready is not None:
            self._pending.when_ready(act)

    def is_ready(self) -> bool:
        """Whether `finish` of a launched task would not wait."""
        assert self._pending is not None
        try:
            return self._pending.is_ready()
        except Exception:
            return True  # `finish` meets the error, too, and passes it on

    def run(self) -> None:
        """Do the work, or launch it."""
        self._settle(self._work)

    def finish(self) -> None:
        """Wait for the result of a launched task."""
        assert self._pending is not None
        pending, self._pending = self._pending, None
        self._settle(pending.finish)

    def _settle(self, work: Callable[[], Result | PendingResult[Result]]) -> None:
        try:
            result = work()
        except BaseException as error:  # noqa: ASYNC103  # a thread: it belongs to the waiter
            self._error = error
        else:
            if isinstance(result, PendingResult):
                self._pending = result
                return
            self._result = result
        try:
            self._loop.call_soon(self._end)
        except RuntimeError:  # the loop has ended, and with it every waiter
            pass

    def _end(self) -> None:
        self._done.set()
        self._note_done()

    @property
    def is_done(self) -> bool:
        """Whether `wait` would not wait."""
        return self._done.is_set()

    async def wait(self) -> Result:
        """Wait until the work is done; a cancelled wait can be repeated.

        Raises:
            BaseException: what the work raised.
        """
        await self._done.wait()
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]  # set, since there is no error
