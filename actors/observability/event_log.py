"""The last events of an engine: losses of workers, preemptions, refusals, and changes of its state.

Metrics count events, and the log has them as text.  A page that shows a running engine needs the last few of them as data, in
order and without parsing.  Texts of requests never get in: an event has only numbers and words from fixed lists.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Literal

import msgspec

# Events are rare or merged, so these are minutes to days; at 200 bytes each the log takes 40 kB.
MAX_EVENTS = 200
# Equal events within this time are one event with a count, so that an overload does not push out what has caused it.
MERGE_S = 1.0

EventKind = Literal[
    "loss", "return", "failure", "recompute", "preemption", "refusal", "state", "overload"
]


class EngineEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One event, or several equal ones within a second.

    Attributes:
        id: names the event; later counts of the same event have the same id.
        revision: rises with every change of the log, so a reader can ask for what is new.
        at: the time of the first one, in seconds since 1970.
        detail: the cause of a loss, `kept` if the KV cache has outlived it, the limit behind a refusal, or the new state.
        count: how many equal events these are; of `recompute`, tokens.
        sequences: sequences that a loss interrupts.
    """

    id: int
    revision: int
    at: float
    kind: EventKind
    replica: int = 0
    detail: str = ""
    count: int = 1
    step: int | None = None
    seconds: float = 0.0
    sequences: int = 0


class RecentEvents:
    """The last events of one engine, the oldest first.  Only the event loop of the engine writes it.

    Args:
        now: the time in seconds since 1970; tests give their own.
    """

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self.revision = 0
        self._now = now
        self._events: deque[EngineEvent] = deque(maxlen=MAX_EVENTS)
        self._next_id = 1

    def __repr__(self) -> str:
        return f"<RecentEvents of {len(self._events)}, revision {self.revision}>"

    def note(
        self,
        kind: EventKind,
        detail: str = "",
        *,
        replica: int = 0,
        count: int = 1,
        step: int | None = None,
        seconds: float = 0.0,
        sequences: int = 0,
    ) -> None:
        """Add an event, or raise the count of an equal event of the last second.

        Losses and returns are never merged, because each has its own numbers.
        """
        self.revision += 1
        now = self._now()
        if kind in ("recompute", "preemption", "refusal") and self._merge(
            kind, detail, replica, count, now
        ):
            return
        self._events.append(
            EngineEvent(
                id=self._next_id,
                revision=self.revision,
                at=now,
                kind=kind,
                replica=replica,
                detail=detail,
                count=count,
                step=step,
                seconds=seconds,
                sequences=sequences,
            )
        )
        self._next_id += 1

    def since(self, revision: int) -> list[EngineEvent]:
        """Return the events added or changed after this revision, the oldest first.  Revision 0 returns all."""
        return [event for event in self._events if event.revision > revision]

    def _merge(self, kind: str, detail: str, replica: int, count: int, now: float) -> bool:
        """Add to an equal event of the last second.  Returns whether there was one.

        Only as many events as kinds, details and replicas exist can be younger than a second, so the search is short.
        """
        for place in range(len(self._events) - 1, -1, -1):
            event = self._events[place]
            if event.at <= now - MERGE_S:
                return False
            if (event.kind, event.detail, event.replica) == (kind, detail, replica):
                self._events[place] = msgspec.structs.replace(
                    event, revision=self.revision, count=event.count + count
                )
                return True
        return False
