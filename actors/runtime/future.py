"""A value that is there later: set once by one task, waited for by another."""

from typing import Generic, TypeVar, cast

import anyio

from trouper.actors.messages.promise import Promise
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


class _Share(Generic[T]):
    """One of several promises that together keep another: its first error, or the last value."""

    def __init__(self, whole: Promise[T], num_open: list[int]) -> None:
        self._whole = whole
        self._num_open = num_open  # one number, which all shares have in common

    def set(self, value: T) -> None:
        self._num_open[0] -= 1
        if self._num_open[0] == 0:
            self._whole.set(value)

    def fail(self, error: BaseException) -> None:
        if self._num_open[0] > 0:
            self._num_open[0] = 0  # so the others that come say nothing
            self._whole.fail(error)


def shares(whole: Promise[T], count: int) -> list[Promise[T]]:
    """Divide a promise: it is kept when all parts are, and fails with the first of them."""
    if count == 1:
        return [whole]
    num_open = [count]
    return [_Share(whole, num_open) for _ in range(count)]
