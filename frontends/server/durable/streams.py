"""The durable streams of a server: answers that outlive their connections, each found by its owner.  Synchronous, but for waiting readers.

Laws.
1. A cursor counts tokens of each choice, and then events.  It depends neither on the pace of readers nor on the server's restarts.
2. Only its owner finds a stream.
3. The events of a running stream stay in memory.  Those of an ended one are dropped when all together exceed a limit; the journal
   contains the tokens from which they are made again.
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

# The cursor behind the mark at the end of a stream.
END = "end"
CURSOR = re.compile(r"(\d{1,9}(?:\.\d{1,9})*)(?:-(\d{1,9}))?")
MAX_CURSOR = 4096
# In the text of an object; it differs in each process.
ADDRESS = re.compile(r" at 0x[0-9a-f]+")
# The parts of a fingerprint, for the reason of a lost stream.
PARTS = ("weights", "configuration", "tokenizer", "chat template")
# An entry takes its frame with a header of 33 bytes, a tuple of 64, and a cursor with its numbers of about 150.
ENTRY_BYTES = 256


def cursor_invalid() -> HTTPError:
    rule = "Last-Event-ID: must be the id of an event of this stream"
    return HTTPError(400, "cursor_invalid", rule, param="Last-Event-ID")


class Cursor(NamedTuple):
    """A place in a stream: `17` is behind the first event with 17 tokens, `17-1` behind the next event.  Choices are separated by dots."""

    tokens: tuple[int, ...]
    num_more: int = 0

    @classmethod
    def parse(cls, text: str, num_choices: int) -> Self:
        """Read the cursor of a client.

        Raises:
            HTTPError: it belongs to no stream with this number of choices.
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
        """Return whether a client with this cursor has an event.

        After damage the choices may advance in another order than before.  Then the tokens of the event's own choice decide.
        """
        if entry.cursor.tokens == self.tokens:
            return entry.cursor.num_more <= self.num_more
        return entry.cursor.tokens[entry.choice] <= self.tokens[entry.choice]

    def joined(self, other: "Cursor") -> "Cursor":
        """Return the cursor of a client with this one after an event at the other."""
        tokens = tuple(map(max, self.tokens, other.tokens))
        return Cursor(tokens, other.num_more)


class LoggedEvent(NamedTuple):
    """One event: its bytes, the last choice to advance, and its place.  The mark at the end has no place, because no reader needs it again."""

    frame: bytes
    choice: int
    cursor: Cursor
    is_end: bool = False


class HeldRecords(Protocol):
    """Records of one write."""

    @property
    def is_released(self) -> bool:
        """Whether what depends on them may be shown."""
        ...


class DurableStream:
    """The answer to one durable request, for readers that come and go while it grows.

    Args:
        id: of the reply.
        owner: the SHA-256 of the API key.
        key, digest: of the `Idempotency-Key` and of the request.
        at: seconds of the wall clock at which it was admitted.

    Attributes:
        error: how it has failed; readers get it behind the events.
        is_cold: whether it has ended and its events must be made again.
        is_cut: whether this process ended before the answer.
        notes_end: whether the journal does not contain its end yet.
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
        # Set when the request was written to the journal.
        self.is_admitted = False
        self.ended_at = 0.0
        # Sends the events of a background response, which its own store keeps.
        self.attach: Callable[[Any, Any], Awaitable[None]] | None = None
        # Makes the events again, from what the journal has kept.
        self.make_again: Callable[[StreamRecord], None] | None = None
        self.entries: list[LoggedEvent] = []
        # Batches before their release, with the number of events in front of each.  At most two: one is written while the next one
        # grows.
        self._held: deque[tuple[HeldRecords, int]] = deque()
        self.num_bytes = 0
        self.num_readers = 0
        # Set at the next event or at the end, if a reader waits for it.
        self._news: anyio.Event | None = None
        # Set when a reader comes and when the last one leaves.
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
        """Return the place behind the last event."""
        return Cursor(self._cursor.tokens, max(0, self._cursor.num_more))

    def restart(self, num_choices: int) -> None:
        """Begin with the first event, for an answer with this number of choices."""
        self.num_choices = num_choices
        self._choice, self._cursor = 0, Cursor((0,) * num_choices, -1)

    def advance(self, choice: int, num_tokens: int) -> None:
        """Note that the next events belong to further tokens of a choice."""
        if num_tokens:
            tokens = list(self._cursor.tokens)
            tokens[choice] += num_tokens
            self._choice, self._cursor = choice, Cursor(tuple(tokens), -1)

    def hold(self, batch: HeldRecords) -> bool:
        """Show the next events only when a batch is released.  Returns whether this is news: the batch must call `wake` then."""
        self._drop_released()
        is_new = not (self._held and self._held[-1][0] is batch)
        if is_new:
            self._held.append((batch, len(self.entries)))
        return is_new

    def begin(self, status: int, *, is_events: bool) -> None:
        """Note the head of the answer."""
        self.status, self.is_events = status, is_events
        self.wake()

    def add(self, frame: bytes, *, is_end: bool = False) -> None:
        """Append an event, or a part of a whole reply."""
        if not is_end:
            self._cursor = Cursor(self._cursor.tokens, self._cursor.num_more + 1)
        self.entries.append(LoggedEvent(frame, self._choice, self._cursor, is_end))
        self.num_bytes += len(frame) + ENTRY_BYTES
        if not self._held:
            self.wake()

    def end(self, at: float, error: Exception | None = None, *, is_cut: bool = False) -> None:
        """Take no more events.  The first end counts."""
        if not self.is_over:
            self.is_over, self.ended_at = True, at
            self.error, self.is_cut = error, is_cut
        self.wake()

    def cool(self) -> None:
        """Forget the events of an ended answer, which the journal can make again."""
        self.entries, self.num_bytes = [], 0
        self._held.clear()
        self.is_cold = True

    def warm(self) -> None:
        """Prepare to make the events of an ended answer again."""
        self.is_cold = self.is_over = False
        self.status = 0

    @contextmanager
    def read(self) -> Generator[None]:
        """Count a reader.  Without one, the answer is given up after some time."""
        self.num_readers += 1
        self._tell_turn()
        try:
            yield
        finally:
            self.num_readers -= 1
            self._tell_turn()

    @property
    def num_shown(self) -> int:
        """The number of events that readers may get."""
        self._drop_released()
        return self._held[0][1] if self._held else len(self.entries)

    def _drop_released(self) -> None:
        """Forget the batches whose events may be shown, also without a reader: a batch contains the records of all streams."""
        while self._held and self._held[0][0].is_released:
            self._held.popleft()

    async def wait(self, num_entries: int) -> int:
        """Wait for more events than these, or for the end.  Returns how many may be shown."""
        while (num := self.num_shown) <= num_entries:
            if self.is_over and num == len(self.entries):
                break
            await self._wait_news()
        return num

    async def wait_end(self) -> None:
        """Wait until there is nothing more to show."""
        num = 0
        while not (self.is_over and num == len(self.entries)):
            num = await self.wait(num)

    async def wait_head(self) -> None:
        """Wait for the head of the answer, or for its end."""
        while not self.status and not self.is_over:
            await self._wait_news()

    async def _wait_news(self) -> None:
        if self._news is None:
            self._news = anyio.Event()
        await self._news.wait()

    def wake(self) -> None:
        """Let readers look again."""
        if self._news is not None:
            self._news.set()
            self._news = None

    def _tell_turn(self) -> None:
        self.turn.set()
        self.turn = anyio.Event()


class DurableStreams:
    """All durable streams of a server, the oldest first.

    Args:
        max_bytes: of the events of ended streams that stay in memory.
        retain_s: seconds for which a stream is kept after its end.
    """

    def __init__(self, max_bytes: int, retain_s: float) -> None:
        self._max_bytes, self._retain_s = max_bytes, retain_s
        self._streams: dict[str, DurableStream] = {}
        self._keys: dict[tuple[bytes, bytes], DurableStream] = {}
        self.num_resumed = 0
        # By reason.
        self.num_lost: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<DurableStreams: {len(self._streams)}>"

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def num_bytes(self) -> int:
        return sum(stream.num_bytes for stream in self._streams.values())

    def has_room(self) -> bool:
        """Return whether the events of running streams leave room for another one.

        Those of running streams are bounded by this check and by what the open requests can still generate.
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
        """Forget and return the stream of an id, if there is one."""
        stream = self._streams.get(id)
        if stream is not None:
            self.forget(stream)
        return stream

    def count_lost(self, reason: str) -> None:
        """Count a stream that cannot go on: its `model` or its `request` has changed."""
        self.num_lost[reason] = self.num_lost.get(reason, 0) + 1

    def find(self, owner: bytes, id: str) -> DurableStream | None:
        """Return the stream of this id if it belongs to this owner."""
        stream = self._streams.get(id)
        return None if stream is None or stream.owner != owner else stream

    def repeated(self, owner: bytes, key: bytes) -> DurableStream | None:
        """Return the stream of an earlier request with this key."""
        return self._keys.get((owner, key))

    def note_begin(self, id: str) -> None:
        """Note that a background response is kept, and that its own store has it."""
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
        """Count the streams by their state."""
        found = {"running": 0, "completed": 0, "failed": 0}
        for stream in self._streams.values():
            found[stream.state] += 1
        return found

    def unread(self) -> list[str]:
        """List the ids of running streams without a reader."""
        return [s.id for s in self._streams.values() if not (s.is_over or s.num_readers)]

    async def wait_unread(self) -> None:
        """Wait until no running stream has a reader."""
        while read := [s for s in self._streams.values() if s.num_readers and not s.is_over]:
            turn = read[0].turn
            await turn.wait()

    def tidy(self, now: float) -> None:
        """Forget the streams whose time is over, and drop the events of the oldest ended streams beyond the limit.

        A stream with readers stays, however old it is.
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
    """Make the error of a stream that cannot go on."""
    return HTTPError(410, "stream_lost", f"stream_lost: {reason}, so this answer cannot go on")


def lost_reason(then: bytes, now: bytes) -> str | None:
    """Compare two fingerprints of models.  Returns what has changed, or None."""
    if then == now:
        return None
    size = PART_BYTES
    pairs = ((then[size * i : size * (i + 1)], now[size * i : size * (i + 1)]) for i in range(4))
    changed = [name for name, (a, b) in zip(PARTS, pairs, strict=True) if a != b]
    what = " and the ".join(changed)
    return f"the {what} of the model {'have' if len(changed) > 1 else 'has'} changed"


def answer_digest(params: SamplingParams, answers: AnswerFormat, max_model_len: int) -> bytes:
    """Return a digest of what decides about one answer besides its model, its prompt and its adapter.

    The server's own options give defaults for a request, so a later server may resolve the same body to something else.
    Fields with their defaults do not count, because a later version may have more of them.
    """
    tools, usual = None if answers.tools is None else answers.tools.name, type(params)()
    given = {name: value for name, value in asdict(params).items() if value != getattr(usual, name)}
    return digest_of((given, tools, answers.reasoning, max_model_len))


def _text_of(value: object) -> str:
    return ADDRESS.sub("", repr(value))


def digest_of(facts: object) -> bytes:
    """Return eight bytes of the SHA-256 of facts, which are the same in every process."""
    encoded = msgspec.json.encode(facts, order="deterministic", enc_hook=_text_of)
    return hashlib.sha256(encoded).digest()[:PART_BYTES]
