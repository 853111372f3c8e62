"""The way from an actor to the observer: statistics are sent without waiting, or dropped."""

from types import TracebackType
from typing import Self

import anyio
from anyio.streams.memory import MemoryObjectSendStream

from trouper.actors.messages.controls import ObserverInbox


class Reporter:
    """Owns a sending end, or none when statistics are off.  Statistics that find no room are dropped."""

    def __init__(self, observer: MemoryObjectSendStream[ObserverInbox] | None) -> None:
        self._observer = observer
        self.num_dropped = 0

    @property
    def is_on(self) -> bool:
        """Whether statistics are kept at all."""
        return self._observer is not None

    def report(self, stats: ObserverInbox) -> bool:
        """Send statistics; return whether there was room."""
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
