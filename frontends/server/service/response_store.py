"""The responses that clients may come back to, in memory.  Pure.

Laws.  The bytes that are counted never exceed the limit: what has not been used for longest goes first.  A response is
found under its own id and by its owner only.  One that is running is not evicted; where nothing else could go, what is
new is not kept.  The events of a response that streams in background count, too; where they find no room, they are dropped
and the response stays.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence

import anyio
import msgspec

# An entry beside its content: the struct and its fields 200, the id 90, two slots of dicts 200 bytes.
ENTRY_BYTES = 512
# A piece beside its content: its header 33, the count of its holders 130 bytes.
PIECE_BYTES = 168
REFERENCE_BYTES = 8  # of each piece in each entry
# An event costs its content, a header of 33 bytes and a place of 8 bytes in the list.
EVENT_BYTES = 48
# The most events that a reader takes at a time.
AT_ONCE = 64


class StoredResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A response, and the conversation up to its end.

    Attributes:
        owner: the API key that it was made with.
        status: as in the response.
        body: the response as JSON.
        pieces: the items of the conversation, each piece a JSON array; follow-ups share those of what they follow.
        num_input_pieces: the pieces before its own output.
        model, cache_salt, priority: what follow-ups inherit.
    """

    owner: str
    status: str
    body: bytes
    pieces: tuple[bytes, ...] = ()
    num_input_pieces: int = 0
    model: str = ""
    cache_salt: str | None = None
    priority: int | None = None

    @property
    def is_running(self) -> bool:
        return self.status in ("queued", "in_progress")

    @property
    def own_bytes(self) -> int:
        """The bytes that it costs without its pieces."""
        return ENTRY_BYTES + len(self.body) + REFERENCE_BYTES * len(self.pieces)


class EventLog:
    """Keep the encoded events of one response for readers that come and go while it grows.

    Attributes:
        num_bytes: what the events cost.
        is_dropped: the events are gone, because the store had no room for them or has forgotten the response.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self.is_dropped = False
        self._frames: list[bytes] = []
        self._is_over = False
        self._news = anyio.Event()

    def __repr__(self) -> str:
        return f"<EventLog {len(self._frames)} events, {self.num_bytes} bytes>"

    def add(self, frame: bytes) -> None:
        self._frames.append(frame)
        self.num_bytes += EVENT_BYTES + len(frame)
        self._wake()

    def close(self) -> None:
        """Take no more events; readers end behind the last one."""
        self._is_over = True
        self._wake()

    def drop(self) -> None:
        """Forget all events."""
        self._frames.clear()
        self.num_bytes = 0
        self.is_dropped = True
        self.close()

    async def read(self, start: int) -> Sequence[bytes]:
        """Wait for events from number `start` on, and return them.  An empty result means that no more will come."""
        while start >= len(self._frames) and not self._is_over:
            await self._news.wait()
        return self._frames[start : start + AT_ONCE]

    def _wake(self) -> None:
        self._news.set()
        self._news = anyio.Event()


class ResponseStore:
    """Responses by id, the one that was used last at the end.  A limit of 0 keeps none."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._entries: OrderedDict[str, StoredResponse] = OrderedDict()
        self._holders: Counter[int] = Counter()  # entries with a piece, by the piece's identity
        self._logs: dict[str, EventLog] = {}

    def __repr__(self) -> str:
        return f"<ResponseStore {len(self)} responses, {self.num_bytes} of {self.max_bytes} bytes>"

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def is_on(self) -> bool:
        return self.max_bytes > 0

    def get(self, name: str, owner: str) -> StoredResponse | None:
        """Return the response of that id, which counts as used; None: there is none of this owner's."""
        found = self._entries.get(name)
        if found is None or found.owner != owner:
            return None
        self._entries.move_to_end(name)
        return found

    def put(self, name: str, stored: StoredResponse) -> bool:
        """Keep a response in place of the one with its id, and return whether there is room for it.

        Its events stay.
        """
        self._take(name)
        alone = stored.own_bytes + sum(PIECE_BYTES + len(piece) for piece in stored.pieces)
        if alone > self.max_bytes:
            self._drop_log(name)
            return False  # nothing is evicted in vain
        self._entries[name] = stored
        self.num_bytes += stored.own_bytes
        for piece in stored.pieces:
            self._holders[id(piece)] += 1
            if self._holders[id(piece)] == 1:
                self.num_bytes += PIECE_BYTES + len(piece)
        self._evict(name)
        return name in self._entries

    def remove(self, name: str) -> None:
        """Forget a response and its events, if it is there."""
        self._take(name)
        self._drop_log(name)

    def log(self, name: str) -> EventLog | None:
        """Return the events of a response, if they are kept."""
        return self._logs.get(name)

    def open_log(self, name: str) -> None:
        """Keep the events of a response that is there."""
        self._logs[name] = EventLog()

    def append(self, name: str, frame: bytes) -> None:
        """Append an event, if there is room; else all events of this response are dropped."""
        log = self._logs.get(name)
        if log is None:
            return
        before = log.num_bytes
        log.add(frame)
        self.num_bytes += log.num_bytes - before
        self._evict_finished(name)
        if self.num_bytes > self.max_bytes:
            self._drop_log(name)

    def _drop_log(self, name: str) -> None:
        log = self._logs.pop(name, None)
        if log is not None:
            self.num_bytes -= log.num_bytes
            log.drop()

    def _take(self, name: str) -> None:
        """Take an entry out, without its events."""
        gone = self._entries.pop(name, None)
        if gone is None:
            return
        self.num_bytes -= gone.own_bytes
        for piece in gone.pieces:
            self._holders[id(piece)] -= 1
            if not self._holders[id(piece)]:
                del self._holders[id(piece)]
                self.num_bytes -= PIECE_BYTES + len(piece)

    def _evict(self, newest: str) -> None:
        """Make room by forgetting what is not running, then the newest entry's events, then the entry."""
        self._evict_finished(newest)
        if self.num_bytes > self.max_bytes:
            self._drop_log(newest)
        if self.num_bytes > self.max_bytes:
            self.remove(newest)

    def _evict_finished(self, kept: str) -> None:
        if self.num_bytes <= self.max_bytes:
            return
        finished = [name for name, each in self._entries.items() if not each.is_running]
        for name in finished:
            if name != kept:
                self.remove(name)
            if self.num_bytes <= self.max_bytes:
                break
