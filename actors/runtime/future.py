"""Waits between tasks: for a value that another task delivers, and for an end despite cancellation.

Actors answer messages through futures instead of reply channels, so an answer never blocks the actor and
never fails if the waiting task was cancelled. Cleaning up often needs one last answer from another actor;
leaving early would leave work that nothing owns.
"""

import math
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar, cast

import anyio


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
