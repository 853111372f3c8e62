"""Iteration over many requests on the event loop that gives other tasks a turn now and then."""

from collections.abc import Iterable
from typing import Generic, Self, TypeVar

import anyio.lowlevel

PER_TURN = 64  # items of 5 to 10 µs each: to make a request, to open it, to take its result
T = TypeVar("T")


class InTurns(Generic[T]):
    """`async for item in InTurns(items)`: a checkpoint after every `PER_TURN` items.

    It is not an async generator, because those must be closed where a loop is left early.
    """

    def __init__(self, items: Iterable[T]) -> None:
        self._items = iter(items)
        self._num = 0

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        if self._num == PER_TURN:
            self._num = 0
            await anyio.lowlevel.checkpoint()
        self._num += 1
        try:
            return next(self._items)
        except StopIteration:
            raise StopAsyncIteration from None
