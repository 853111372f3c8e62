"""What actors need of the event loop they run on, looked for once: anyio asks at every call which backend it is."""

from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel
import trio


class Loop:
    """Made on the loop.

    soon:       has something called there, from any thread; RuntimeError once the loop has ended
    now:        its clock, in seconds
    new_event:  an event of its backend
    """

    def __init__(self) -> None:
        token: Any = anyio.lowlevel.current_token().native_token  # asyncio's is the loop itself
        self.soon: Callable[[Callable[[], object]], object] = (
            getattr(token, "run_sync_soon", None) or token.call_soon_threadsafe
        )
        self.now: Callable[[], float] = getattr(token, "time", trio.current_time)
        self.new_event: Callable[[], anyio.Event] = type(anyio.Event())
