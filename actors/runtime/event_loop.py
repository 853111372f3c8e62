"""The event loop of an engine, as other threads, other loops and forked processes meet it."""

import asyncio
import os
from collections.abc import Callable
from typing import Any

import anyio.lowlevel


class EventLoop:
    """The loop that is running; make it there."""

    def __init__(self) -> None:
        self._token: Any = anyio.lowlevel.current_token().native_token
        self._process_id = os.getpid()
        is_asyncio = isinstance(self._token, asyncio.AbstractEventLoop)
        self._call_soon: Callable[[Callable[[], object]], object] = (
            self._token.call_soon_threadsafe if is_asyncio else self._token.run_sync_soon
        )

    def call_soon(self, act: Callable[[], object]) -> None:
        """Have `act` called on the loop, from any thread.

        Raises:
            RuntimeError: the loop has ended, or runs in the process that this one was forked from.
        """
        if os.getpid() != self._process_id:
            raise RuntimeError("the loop runs in another process")
        self._call_soon(act)

    def check_current(self) -> None:
        """Raise RuntimeError in any other thread, loop or process: nothing would wake this one."""
        try:
            is_current = anyio.lowlevel.current_token().native_token is self._token
        except RuntimeError:  # no loop runs here
            is_current = False
        if not is_current or os.getpid() != self._process_id:
            raise RuntimeError("an engine belongs to its event loop, and to the thread of that")
