"""Waiting until something has ended, even if the waiting task is cancelled meanwhile.

Cleaning up often needs one last answer from another actor; leaving early would leave work that nothing owns.
"""

import math
from collections.abc import Awaitable, Callable

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
