"""A handle on the engine's event loop for other threads, other event loops and forked processes.

Waking a task from another thread needs the loop's own thread-safe call, which asyncio and trio name
differently.
"""

import asyncio
import os
from collections.abc import Callable
from typing import Any

import anyio.lowlevel


class EventLoop:
    """The event loop that runs when this object is created."""

    def __init__(self) -> None:
        self._token: Any = anyio.lowlevel.current_token().native_token
        self._process_id = os.getpid()
        is_asyncio = isinstance(self._token, asyncio.AbstractEventLoop)
        self._call_soon: Callable[[Callable[[], object]], object] = (
            self._token.call_soon_threadsafe if is_asyncio else self._token.run_sync_soon
        )

    def call_soon(self, act: Callable[[], object]) -> None:
        """Schedule `act` on the loop, from any thread.

        Raises:
            RuntimeError: the loop has ended, or belongs to the process from which this one was forked.
        """
        if os.getpid() != self._process_id:
            raise RuntimeError("the loop runs in another process")
        self._call_soon(act)

    def check_current(self) -> None:
        """Raise RuntimeError in another thread, loop or process, whose events would never wake tasks of this
        loop.
        """
        try:
            is_current = anyio.lowlevel.current_token().native_token is self._token
        except RuntimeError:  # no loop runs here
            is_current = False
        if not is_current or os.getpid() != self._process_id:
            raise RuntimeError(
                "an engine belongs to its event loop: use it in the loop and thread that started it"
            )
