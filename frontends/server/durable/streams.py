"""Hold a server's durable streams: answers that survive their connections, so that a client can reconnect and continue reading.

Everything is synchronous except waiting readers.

Laws:
1. A cursor counts the tokens of each choice and then the events after them.  So it is the same at any reading speed and after a restart.
2. Only the owner of a stream, by API key, can find it.
3. The events of a running stream stay in memory.  Those of ended streams are evicted above a limit, oldest stream first, and rebuilt from
   the journal's tokens when a client asks.
"""

import hashlib
import re
from collections import deque
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, Self

import anyio
import msgspec
from msgspec.structs import asdict

from trouper.frontends.dialects.core import AnswerFormat
from trouper.frontends.server.durable.records import PART_BYTES, StreamRecord
from trouper.frontends.server.shared.errors import HTTPError
from trouper.params import SamplingParams

# The cursor of the last event, which marks the end of a stream.
END = "end"
CURSOR = re.compile(r"(\d{1,9}(?:\.\d{1,9})*)(?:-(\d{1,9}))?")
MAX_CURSOR = 4096
# An address in the `repr` of an object, which differs between processes.
ADDRESS = re.compile(r" at 0x[0-9a-f]+")
# The parts of a fingerprint in order, for error messages.
PARTS = ("weights", "configuration", "tokenizer", "chat template")
# The overhead of an event: 33 bytes for the bytes object, 64 for its tuple, and about 150 for its cursor.
ENTRY_BYTES = 256


def cursor_invalid() -> HTTPError:
    rule = "Last-Event-ID: must be the id of an event of this stream; leave it out to read from the beginning"
    return HTTPError(400, "cursor_invalid", rule, param="Last-Event-ID")


class Cursor(NamedTuple):
    """Name a position in a stream, as the `id` of an event.

    `17` is the position after the first event of token 17, and `17-1` after the next event.  With several choices, the numbers of tokens
    are separated by dots: `17.12-1`.
    """

    tokens: tuple[int, ...]
    num_more: int = 0

    @classmethod
    def parse(cls, text: str, num_choices: int) -> Self:
        """Parse a client's cursor.

        Raises:
            HTTPError: the cursor is malformed, or has another number of choices.
        """
        found = CURSOR.fullmatch(text) if len(text) <= MAX_CURSOR else None
        tokens = () if found is None else tuple(map(int, found[1].split(".")))
        if found is None or len(tokens) != num_choices:
            raise cursor_invalid()
        return cls(tokens, int(found[2] or 0))

    def __str__(self) -> str:
        places = ".".join(map(str, self.tokens))
        return f"{places}-{self.num_more}" if self.num_more else places

    def covers(self, entry: "LoggedEvent") -> bool:
        """Return whether a client with this cursor has received an event.

        Choices that are sampled again after data loss may advance in another order than before.  Then only the event's own choice counts.
        """
        if entry.cursor.tokens == self.tokens:
            return entry.cursor.num_more <= self.num_more
        return entry.cursor.tokens[entry.choice] <= self.tokens[entry.choice]

    def joined(self, other: "Cursor") -> "Cursor":
        """Return the cursor of a client with this cursor after it has received an event at `other`."""
        tokens = tuple(map(max, self.tokens, other.tokens))
        return Cursor(tokens, other.num_more)


class LoggedEvent(NamedTuple):
    """Hold one event: its bytes, the choice that advanced last, and its position.  The end marker has no position of its own."""

    frame: bytes
    choice: int
    cursor: Cursor
    is_end: bool = False


class HeldRecords(Protocol):
    """Represent a batch of records that is being written."""

    @property
    def is_released(self) -> bool:
        """Whether events that depend on these records may be sent."""
        ...


class DurableStream:
    """Buffer the answer to one durable request, for any number of readers that may connect and disconnect while it grows.

    Args:
        id: the id of the reply.
        owner: the SHA-256 of the API key.
        key, digest: the SHA-256 of the `Idempotency-Key`, and of path and body.
        at: the time of admission, in seconds of the wall clock.

    Attributes:
        error: the failure of the answer, which readers get after its events.
        is_cold: whether it has ended and its events were evicted.
        is_cut: whether this process stopped before the end of the answer.
        notes_end: whether its end must still be written to the journal.
    """

    def __init__(
        self, id: str, owner: bytes, route: str, key: bytes, digest: bytes, at: float
    ) -> None:
        self.id, self.owner, self.route = id, owner, route
        self.key, self.digest, self.at = key, digest, at
        self.num_choices = 1
        self.status, self.is_events = 0, False
        self.headers: tuple[tuple[bytes, bytes], ...] = ()
        self.error: Exception | None = None
        self.is_over = self.is_cold = self.is_cut = False
        self.notes_end = True
        # Whether the request was submitted to the journal.
        self.is_admitted = False
        self.ended_at = 0.0
        # For a background response: sends its events from the response store.
        self.attach: Callable[[Any, Any], Awaitable[None]] | None = None
        # Rebuilds the events from the journal's records.
        self.make_again: Callable[[StreamRecord], None] | None = None
        self.entries: list[LoggedEvent] = []
        # Unreleased batches, each with the number of events that do not depend on it.  At most two: one is being written while the next one
        # grows.
        self._held: deque[tuple[HeldRecords, int]] = deque()
        self.num_bytes = 0
        self.num_readers = 0
        # Set at the next event or at the end.  None if no reader waits.
        self._news: anyio.Event | None = None
        # Set, and replaced, whenever a reader connects or disconnects.
        self.turn = anyio.Event()
        self._choice, self._cursor = 0, Cursor((0,), -1)

    def __repr__(self) -> str:
        return f"<DurableStream {self.id}: {self.state}, {len(self.entries)} events, {self.num_readers} readers>"

    @property
    def state(self) -> str:
        if self.error is not None:
            return "failed"
        return "completed" if self.is_over else "running"

    @property
    def is_whole(self) -> bool:
        """Whether the answer is complete."""
        return self.is_over and self.error is None and not self.is_cut

    @property
    def cursor(self) -> Cursor:
        """The position after the last event."""
        return Cursor(self._cursor.tokens, max(0, self._cursor.num_more))

    def restart(self, num_choices: int) -> None:
        """Reset the position to the beginning, for an answer with this number of choices."""
        self.num_choices = num_choices
        self._choice, self._cursor = 0, Cursor((0,) * num_choices, -1)

    def advance(self, choice: int, num_tokens: int) -> None:
        """Count new tokens of a choice, to which the next events belong."""
        if num_tokens:
            tokens = list(self._cursor.tokens)
            tokens[choice] += num_tokens
            self._choice, self._cursor = choice, Cursor(tuple(tokens), -1)

    def hold(self, batch: HeldRecords) -> bool:
        """Withhold the next events until a batch is released.

        Returns True for the first call with a batch.  The caller must then arrange that the release calls `wake`.
        """
        self._drop_released()
        is_new = not (self._held and self._held[-1][0] is batch)
        if is_new:
            self._held.append((batch, len(self.entries)))
        return is_new

    def begin(self, status: int, *, is_events: bool) -> None:
        """Set the status and the kind of the answer, for which readers wait in `wait_head`."""
        self.status, self.is_events = status, is_events
        self.wake()

    def add(self, frame: bytes, *, is_end: bool = False) -> None:
        """Append an event, or a chunk of a reply without events."""
        if not is_end:
            self._cursor = Cursor(self._cursor.tokens, self._cursor.num_more + 1)
        self.entries.append(LoggedEvent(frame, self._choice, self._cursor, is_end))
        self.num_bytes += len(frame) + ENTRY_BYTES
        if not self._held:
            self.wake()

    def end(self, at: float, error: Exception | None = None, *, is_cut: bool = False) -> None:
        """End the answer, and wake its readers.  Only the first call has an effect."""
        if not self.is_over:
            self.is_over, self.ended_at = True, at
            self.error, self.is_cut = error, is_cut
        self.wake()

    def cool(self) -> None:
        """Evict the events of an ended answer, which can be rebuilt from the journal."""
        self.entries, self.num_bytes = [], 0
        self._held.clear()
        self.is_cold = True

    def warm(self) -> None:
        """Prepare to rebuild the evicted events of an ended answer."""
        self.is_cold = self.is_over = False
        self.status = 0

    @contextmanager
    def read(self) -> Generator[None]:
        """Count a reader during the block.  An answer without readers is aborted after `--stream-grace`."""
        self.num_readers += 1
        self._signal_turn()
        try:
            yield
        finally:
            self.num_readers -= 1
            self._signal_turn()

    @property
    def num_shown(self) -> int:
        """The number of events that readers may receive, because their records are written."""
        self._drop_released()
        return self._held[0][1] if self._held else len(self.entries)

    def _drop_released(self) -> None:
        """Drop released batches.  `hold` does this, too, because without readers a stream would retain the records of all streams."""
        while self._held and self._held[0][0].is_released:
            self._held.popleft()

    async def wait(self, num_entries: int) -> int:
        """Wait until more than `num_entries` events may be sent, or until the end.  Returns the number of sendable events."""
        while (num := self.num_shown) <= num_entries:
            if self.is_over and num == len(self.entries):
                break
            await self._wait_news()
        return num

    async def wait_end(self) -> None:
        """Wait until the answer has ended and all its events may be sent."""
        num = 0
        while not (self.is_over and num == len(self.entries)):
            num = await self.wait(num)

    async def wait_head(self) -> None:
        """Wait until the status of the answer is known, or until it ends without one."""
        while not self.status and not self.is_over:
            await self._wait_news()

    async def _wait_news(self) -> None:
        if self._news is None:
            self._news = anyio.Event()
        await self._news.wait()

    def wake(self) -> None:
        """Wake the waiting readers to check for new events."""
        if self._news is not None:
            self._news.set()
            self._news = None

    def _signal_turn(self) -> None:
        self.turn.set()
        self.turn = anyio.Event()


class DurableStreams:
    """Index all durable streams of a server by id and by `Idempotency-Key`, the oldest first.

    Args:
        max_bytes: the memory limit for the events of ended streams.
        retain_s: how long an ended stream remains readable, in seconds.
    """

    def __init__(self, max_bytes: int, retain_s: float) -> None:
        self._max_bytes, self._retain_s = max_bytes, retain_s
        self._streams: dict[str, DurableStream] = {}
        self._keys: dict[tuple[bytes, bytes], DurableStream] = {}
        self.num_resumed = 0
        # The number of lost streams by reason: "model" or "request".
        self.num_lost: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<DurableStreams: {len(self._streams)}>"

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def num_bytes(self) -> int:
        return sum(stream.num_bytes for stream in self._streams.values())

    def has_room(self) -> bool:
        """Return whether the events of running streams leave memory for another stream.

        Running streams are not evicted, so this check and the tokens that open requests can still generate bound their memory.
        """
        running = sum(s.num_bytes for s in self._streams.values() if not s.is_over)
        return running <= self._max_bytes

    def add(self, stream: DurableStream) -> None:
        self._streams[stream.id] = stream
        if stream.key:
            self._keys[stream.owner, stream.key] = stream

    def forget(self, stream: DurableStream) -> None:
        """Remove a stream.  Idempotent."""
        if self._streams.get(stream.id) is stream:
            del self._streams[stream.id]
        place = stream.owner, stream.key
        if self._keys.get(place) is stream:
            del self._keys[place]

    def remove(self, id: str) -> DurableStream | None:
        """Remove and return the stream with this id.  Returns None if it does not exist."""
        stream = self._streams.get(id)
        if stream is not None:
            self.forget(stream)
        return stream

    def count_lost(self, reason: str) -> None:
        """Count a stream that cannot be resumed because its `"model"` or its `"request"` has changed."""
        self.num_lost[reason] = self.num_lost.get(reason, 0) + 1

    def find(self, owner: bytes, id: str) -> DurableStream | None:
        """Return the stream with this id if it belongs to this owner, else None."""
        stream = self._streams.get(id)
        return None if stream is None or stream.owner != owner else stream

    def repeated(self, owner: bytes, key: bytes) -> DurableStream | None:
        """Return the stream of this owner's earlier request with the same `Idempotency-Key`, or None."""
        return self._keys.get((owner, key))

    def note_begin(self, id: str) -> None:
        """Note that a background response is in the response store, from which readers can follow it."""
        if id in self._streams:
            self._streams[id].begin(200, is_events=False)

    def note_end(self, id: str, at: float) -> None:
        """Note that a background response has ended."""
        if id in self._streams:
            self._streams[id].end(at)

    def of(self, owner: bytes) -> list[DurableStream]:
        """List the streams of an owner, the oldest first."""
        return [stream for stream in self._streams.values() if stream.owner == owner]

    def count(self) -> dict[str, int]:
        """Return the number of streams by state."""
        found = {"running": 0, "completed": 0, "failed": 0}
        for stream in self._streams.values():
            found[stream.state] += 1
        return found

    def unread(self) -> list[str]:
        """List the ids of running streams without readers."""
        return [s.id for s in self._streams.values() if not (s.is_over or s.num_readers)]

    async def wait_unread(self) -> None:
        """Wait until no running stream has a reader."""
        while read := [s for s in self._streams.values() if s.num_readers and not s.is_over]:
            turn = read[0].turn
            await turn.wait()

    def tidy(self, now: float) -> None:
        """Remove expired streams, and evict the events of the oldest ended streams above the memory limit.

        Streams with readers stay at any age.  `now` is in seconds of the wall clock.
        """
        idle = [s for s in self._streams.values() if s.is_over and not s.num_readers]
        for stream in idle:
            if stream.ended_at + self._retain_s < now:
                self.forget(stream)
        num_bytes = self.num_bytes
        for stream in idle:
            if num_bytes <= self._max_bytes:
                break
            if stream.error is None and stream.attach is None:
                num_bytes -= stream.num_bytes
                stream.cool()


def lost(reason: str) -> HTTPError:
    """Return the error (410) of an answer that cannot be resumed for this reason."""
    return HTTPError(
        410,
        "stream_lost",
        f"stream_lost: {reason}, so this answer cannot be resumed; send the request again",
    )


def lost_reason(then: bytes, now: bytes) -> str | None:
    """Return which parts of the model differ between two fingerprints, as a clause for `lost`, or None if they are equal."""
    if then == now:
        return None
    size = PART_BYTES
    pairs = ((then[size * i : size * (i + 1)], now[size * i : size * (i + 1)]) for i in range(4))
    changed = [name for name, (a, b) in zip(PARTS, pairs, strict=True) if a != b]
    what = " and the ".join(changed)
    return f"the {what} of the model {'have' if len(changed) > 1 else 'has'} changed"


def answer_digest(params: SamplingParams, answers: AnswerFormat, max_model_len: int) -> bytes:
    """Return a digest of everything that determines an answer besides its model, prompt and adapter.

    Defaults come from the server's options, so a later server may resolve the same body to other parameters.  Fields with default values
    are left out, so that new fields of a later version do not change the digest.
    """
    tools, usual = None if answers.tools is None else answers.tools.name, type(params)()
    given = {name: value for name, value in asdict(params).items() if value != getattr(usual, name)}
    return digest_of((given, tools, answers.reasoning, max_model_len))


def _text_of(value: object) -> str:
    return ADDRESS.sub("", repr(value))


def digest_of(facts: object) -> bytes:
    """Return eight bytes of the SHA-256 of JSON-like facts.  Equal facts have equal digests in every process."""
    encoded = msgspec.json.encode(facts, order="deterministic", enc_hook=_text_of)
    return hashlib.sha256(encoded).digest()[:PART_BYTES]
