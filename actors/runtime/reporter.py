"""The path from an actor to the observer: statistics are sent without waiting, or dropped.

Observability must never slow the engine, so a full channel loses statistics instead of blocking an actor.
"""

from types import TracebackType
from typing import Self

import anyio
from anyio.streams.memory import MemoryObjectSendStream

from trouper.actors.messages.controls import ObserverInbox


class Reporter:
    """Sends statistics to the observer, or discards them if statistics are disabled. `num_dropped` counts those
    that found the channel full.
    """

    def __init__(self, observer: MemoryObjectSendStream[ObserverInbox] | None) -> None:
        self._observer = observer
        self.num_dropped = 0

    @property
    def is_on(self) -> bool:
        """Whether statistics are collected.

        Callers skip the collection of numbers when it is False, which saves time in each step.
        """
        return self._observer is not None

    def report(self, stats: ObserverInbox) -> bool:
        """Send statistics without waiting. Returns whether the channel had room.

        A dropped message only makes a metric incomplete, while waiting would delay tokens.
        """
        if self._observer is None:
            return False
        try:
            self._observer.send_nowait(stats)
        except (anyio.WouldBlock, anyio.BrokenResourceError, anyio.ClosedResourceError):
            self.num_dropped += 1
            return False
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._observer is not None:
            self._observer.close()
