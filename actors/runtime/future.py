"""The answer to one question: a cell that is filled once and waited for by one task."""

from typing import Generic, TypeVar, cast

import anyio

from trouper.actors.runtime.shielded import insist

T = TypeVar("T")


class Answer(Generic[T]):
    """Opened by who asks, lent in a message, filled by the actor that did the work.

    Filling never waits and never fails; whoever has stopped waiting simply does not look.
    """

    def __init__(self) -> None:
        self._is_there = anyio.Event()
        self._value: T | None = None
        self._error: BaseException | None = None

    @property
    def is_there(self) -> bool:
        return self._is_there.is_set()

    def set(self, value: T) -> None:
        self._value = value
        self._is_there.set()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._is_there.set()

    async def wait(self) -> T:
        """Raises what `fail` was given."""
        await self._is_there.wait()
        return self.result()

    async def insist(self) -> BaseException | None:
        """Wait until it is there, whatever cancels; the cancellation is the caller's to raise."""
        return await insist(self._is_there.wait, self._is_there.is_set)

    def result(self) -> T:
        """Of an answer that is there.  Raises what `fail` was given."""
        if self._error is not None:
            raise self._error
        return cast("T", self._value)
