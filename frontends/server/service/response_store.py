"""Store responses in memory, so that follow-up requests can refer to them by id.  Synchronous, except waiting readers.

Laws:
1. The counted bytes never exceed the limit: the least recently used response is evicted first.
2. Only the owner of a response, by API key, can find it.
3. Running responses are never evicted.  If nothing else can be evicted, the new response is not stored.
4. The events of a background response count, too.  Without room they are dropped, and the response stays.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence

import anyio
import msgspec

# Overhead of an entry in bytes: the struct and its fields 200, the id 90, two slots of dicts 200.
ENTRY_BYTES = 512
# Overhead of an array of items in bytes: its header 33, its reference count 130.
PIECE_BYTES = 168
# Bytes of a reference to an array, in each entry that shares it.
REFERENCE_BYTES = 8
# Overhead of an event in bytes: its header 33, its slot in the list 8.
EVENT_BYTES = 48
# Maximum number of events that a reader gets at once.
AT_ONCE = 64


class StoredResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Hold a response, and the conversation up to its end.

    Attributes:
        owner: the tenant of its API key.
        status: the status field of the response.
        body: the response as JSON.
        pieces: the items of the conversation as JSON arrays; a follow-up shares the arrays of its predecessors.
        num_input_pieces: the number of arrays before its own output.
        model, cache_salt, priority: fields that follow-ups inherit.
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
        """The bytes of the entry without its arrays, which the store counts once for all entries that share them."""
        return ENTRY_BYTES + len(self.body) + REFERENCE_BYTES * len(self.pieces)


class EventLog:
    """Store the encoded events of one response, for readers that may connect and disconnect while it grows.

    Attributes:
        num_bytes: the memory of the events.
        is_dropped: whether the store removed the events, for lack of room or together with the response.
        is_cut: whether this process stops before the end of the response, which a later one will resume.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self.is_dropped = self.is_cut = False
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
        """End the log.  Readers return after the last event."""
        self._is_over = True
        self._wake()

    def drop(self) -> None:
        """Forget all events."""
        self._frames.clear()
        self.num_bytes = 0
        self.is_dropped = True
        self.close()

    async def read(self, start: int) -> Sequence[bytes]:
        """Wait for events from number `start` on, and return up to `AT_ONCE` of them, or none after the end."""
        while start >= len(self._frames) and not self._is_over:
            await self._news.wait()
        return self._frames[start : start + AT_ONCE]

    def _wake(self) -> None:
        self._news.set()
        self._news = anyio.Event()


class ResponseStore:
    """Store responses by id within a memory limit, in order of their last use.  A limit of 0 bytes turns the store off."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._entries: OrderedDict[str, StoredResponse] = OrderedDict()
        # Reference counts of the arrays, by `id()` of the array.
        self._holders: Counter[int] = Counter()
        self._logs: dict[str, EventLog] = {}

    def __repr__(self) -> str:
        return f"<ResponseStore {len(self)} responses, {self.num_bytes} of {self.max_bytes} bytes>"

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def is_on(self) -> bool:
        return self.max_bytes > 0

    def get(self, name: str, owner: str) -> StoredResponse | None:
        """Return a response and mark it as recently used.  Returns None if this owner has no response with this id."""
        found = self._entries.get(name)
        if found is None or found.owner != owner:
            return None
        self._entries.move_to_end(name)
        return found

    def put(self, name: str, stored: StoredResponse) -> bool:
        """Store a response in place of an earlier version, whose events stay.  Returns whether there was room for it."""
        self._take(name)
        unshared_bytes = stored.own_bytes + sum(PIECE_BYTES + len(piece) for piece in stored.pieces)
        if unshared_bytes > self.max_bytes:
            self._drop_log(name)
            # Evictions could not make enough room.
            return False
        self._entries[name] = stored
        self.num_bytes += stored.own_bytes
        for piece in stored.pieces:
            self._holders[id(piece)] += 1
            if self._holders[id(piece)] == 1:
                self.num_bytes += PIECE_BYTES + len(piece)
        self._evict(name)
        return name in self._entries

    def remove(self, name: str) -> None:
        """Remove a response and its events, if it exists."""
        self._take(name)
        self._drop_log(name)

    def log(self, name: str) -> EventLog | None:
        """Return the events of a response, or None if they were not stored or have been dropped for lack of memory."""
        return self._logs.get(name)

    def open_log(self, name: str) -> None:
        """Start storing the events of a response that is already stored."""
        self._logs[name] = EventLog()

    def append(self, name: str, frame: bytes) -> None:
        """Append an event.  Without room for it, all events of this response are dropped.

        Readers of a dropped log are disconnected, but can still get the finished response by its id.
        """
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
        """Remove an entry but not its events."""
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
        """Make room: evict finished responses, then the newest entry's events, then the entry itself."""
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
