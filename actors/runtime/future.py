"""A single-use future between two tasks: one task waits for a value that another delivers.

Actors answer messages through futures instead of reply channels, so an answer never blocks the actor and
never fails if the waiting task was cancelled.
"""

from typing import Generic, TypeVar, cast

import anyio

from trouper.actors.runtime.shielded import wait_shielded

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
        """Deliver the value."""
        self._value = value
        self._done.set()

    def fail(self, error: BaseException) -> None:
        """Deliver an error instead."""
        self._error = error
        self._done.set()

    async def wait(self) -> T:
        """Wait for the value and return it, or raise the error passed to `fail`."""
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
