"""What actors need of the event loop they run on, looked for once: anyio asks at every call which backend it is."""

import asyncio
import sys
from collections.abc import Callable
from typing import Any, Protocol

import anyio.lowlevel


class Event(Protocol):
    """anyio's, or the backend's own, which it wraps: a wait for what is set already may be no checkpoint."""

    def set(self) -> object: ...

    async def wait(self) -> object: ...


Soon = Callable[[Callable[[], object]], object]  # calls it on the event loop, from any thread


class Loop:
    """Made on the loop, and closed there.

    soon:       has something called there, from any thread; RuntimeError once the loop has ended
    now:        its clock, in seconds
    new_event:  makes an event of its backend
    close:      gives back what it holds; the rest goes on by the backend's own means.  Idempotent
    """

    def __init__(self) -> None:
        self._token: Any = anyio.lowlevel.current_token().native_token
        self.soon: Soon
        self.now: Callable[[], float]
        self.new_event: Callable[[], Event]
        self.close: Callable[[], None] = lambda: None
        self._current: Callable[[], object]
        if isinstance(self._token, asyncio.AbstractEventLoop):
            self.soon, self.now = self._token.call_soon_threadsafe, self._token.time
            self.new_event, self._current = asyncio.Event, asyncio.get_running_loop
        else:
            import trio  # it runs this very loop

            self.soon, self.new_event = self._token.run_sync_soon, trio.Event
            self.now = trio.lowlevel.current_clock().current_time
            self._current = trio.lowlevel.current_trio_token
            if sys.platform == "linux":
                from trouper.actors.bell import Bell

                bell = Bell(self.soon)
                self.soon, self.new_event, self.close = bell.soon, bell.new_event, bell.close

    def check_current(self) -> None:
        """Raises RuntimeError in any other thread or loop: nothing would wake this one."""
        try:
            is_current = self._current() is self._token
        except RuntimeError:  # no loop runs here
            is_current = False
        if not is_current:
            raise RuntimeError("an engine belongs to its event loop, and to the thread of that")
