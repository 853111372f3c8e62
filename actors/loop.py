"""What actors need of the event loop they run on, looked for once: anyio asks at every call which backend it is."""

import threading
from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel


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
        self.now: Callable[[], float]
        if hasattr(token, "time"):
            self.now = token.time
        else:
            import trio  # it runs this very loop

            self.now = trio.current_time
        self.new_event: Callable[[], anyio.Event] = type(anyio.Event())
        self._thread_id = threading.get_ident()

    def check_thread(self) -> None:
        """Raises RuntimeError in any thread but the loop's: nothing would wake the loop."""
        if threading.get_ident() != self._thread_id:
            raise RuntimeError("an engine belongs to the thread of its event loop")
