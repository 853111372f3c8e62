"""The event loop of an engine, as other threads and other loops meet it."""

import asyncio
from collections.abc import Callable
from typing import Any

import anyio.lowlevel


class EventLoop:
    """The loop that is running; make it there.

    call_soon:  has a function called on the loop, from any thread; raises RuntimeError once the loop has ended
    """

    def __init__(self) -> None:
        self._token: Any = anyio.lowlevel.current_token().native_token
        self.call_soon: Callable[[Callable[[], object]], object]
        is_asyncio = isinstance(self._token, asyncio.AbstractEventLoop)
        self.call_soon = (
            self._token.call_soon_threadsafe if is_asyncio else self._token.run_sync_soon
        )

    def check_current(self) -> None:
        """Raise RuntimeError in any other thread or loop: nothing would wake this one."""
        try:
            is_current = anyio.lowlevel.current_token().native_token is self._token
        except RuntimeError:  # no loop runs here
            is_current = False
        if not is_current:
            raise RuntimeError("an engine belongs to its event loop, and to the thread of that")
