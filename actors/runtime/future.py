"""A value that is there later: set once by one task, waited for by another."""

from typing import Generic, TypeVar, cast

import anyio

from trouper.actors.runtime.shielded import wait_shielded

T = TypeVar("T")


class Future(Generic[T]):
    """Opened by the task that asks, lent in a message, set by the actor that did the work.

    Setting never waits and never fails, also when the task that asked has stopped waiting.
    """

    def __init__(self) -> None:
        self._done = anyio.Event()
        self._value: T | None = None
        self._error: BaseException | None = None

    @property
    def is_done(self) -> bool:
        """Whether there is a value or an error."""
        return self._done.is_set()

    @property
    def error(self) -> BaseException | None:
        """Error that `fail` was given, if it was."""
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
        """Wait for the value.  Raises what `fail` was given."""
        await self._done.wait()
        return self.result()

    async def wait_shielded(self) -> BaseException | None:
        """Wait until it is done, whatever cancels; returns the cancellation, which the caller raises."""
        return await wait_shielded(self._done.wait, self._done.is_set)

    def result(self) -> T:
        """Return the value of a future that is done.  Raises what `fail` was given."""
        if self._error is not None:
            raise self._error
        return cast("T", self._value)
