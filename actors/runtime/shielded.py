"""Waiting to the end, whatever cancels."""

import math
from collections.abc import Awaitable, Callable

import anyio


async def wait_shielded(
    attempt: Callable[[], Awaitable[object]],
    is_over: Callable[[], bool],
    *,
    limit_s: float = math.inf,
) -> BaseException | None:
    """Await attempts until it is over; returns the cancellation that came meanwhile, which the caller raises.

    A shield of anyio keeps out the cancellation of scopes, but not that of an asyncio task, which `wait_for`,
    `timeout`, a `TaskGroup` and Ctrl-C use.

    Args:
        limit_s: after which it is given up, over or not.
    """
    cancelled: BaseException | None = None
    with anyio.CancelScope(shield=True, deadline=anyio.current_time() + limit_s) as scope:
        while not is_over() and not scope.cancel_called:
            try:
                await attempt()
            except anyio.get_cancelled_exc_class() as error:  # noqa: ASYNC103  # it is raised afterwards
                if scope.cancel_called:
                    raise  # its own
                cancelled = error
    return cancelled
