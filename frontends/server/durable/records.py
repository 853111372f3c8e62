"""The records of a journal: their format in a file, and how a later process joins them to streams.  Pure.

A *stream* is one request with an answer that must survive the server.  Its records may be lost at the end, be there twice, or have a gap; each
names its position, so only what follows without a gap counts.  What is lost is sampled again: sampling is a function of the prompt, the
seed and the position.

A file has a head, and frames behind it, each with one record:

    head     magic (8 bytes), id of the segment (16), fingerprint of the model (32)
    frame    magic u16, kind u8, 0, length u32, number u64, sum (8 bytes), payload, zeros up to a multiple of 8

The sum covers the segment's id, the number, the kind and the payload.  So a frame counts only if it is whole, in the file to which it was
written, and behind its predecessors: torn writes, flipped bits and old contents of a disk's sectors are recognised.  A reader continues
behind a bad frame at the next multiple of 8 at which a good one begins, so one flipped bit costs one frame.
"""

import hashlib
import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import msgspec

from trouper.outputs import LogprobsOnePosition

MAGIC = b"TRJRNL\0\1"
FRAME_MAGIC = 0x7254
# The parts of a fingerprint have eight bytes each.
PART_BYTES = 8
ID_BYTES, FINGERPRINT_BYTES, SUM_BYTES = 16, 32, 8
HEAD_BYTES = len(MAGIC) + ID_BYTES + FINGERPRINT_BYTES
FRAME_HEAD = struct.Struct("<HBxIQ8s")
ALIGNMENT = 8


class Frame(NamedTuple):
    """The content of one whole frame."""

    kind: int
    payload: bytes


class SegmentHead(NamedTuple):
    """The head of a file: its own id, and the fingerprint of its model."""

    id: bytes
    fingerprint: bytes


def encode_head(head: SegmentHead) -> bytes:
    """Return the first bytes of a file."""
    return MAGIC + head.id + head.fingerprint


def decode_head(data: bytes) -> SegmentHead | None:
    """Read the first bytes of a file.  Returns None if it is no journal, or one of another version."""
    if len(data) < HEAD_BYTES or not data.startswith(MAGIC):
        return None
    first = len(MAGIC)
    return SegmentHead(
        bytes(data[first : first + ID_BYTES]), bytes(data[first + ID_BYTES : HEAD_BYTES])
    )


def encode_frame(segment: bytes, number: int, frame: Frame) -> bytes:
    """Encode a frame for its place.

    Args:
        segment: the id of the file.
        number: rises within the file.
    """
    total = _sum(segment, number, frame)
    head = FRAME_HEAD.pack(FRAME_MAGIC, frame.kind, len(frame.payload), number, total)
    data = head + frame.payload
    return data + bytes(-len(data) % ALIGNMENT)


def scan(data: bytes) -> Iterator[Frame]:
    """Yield the whole frames of a file, in order."""
    head = decode_head(data)
    if head is None:
        return
    place, last = HEAD_BYTES, -1
    while place + FRAME_HEAD.size <= len(data):
        magic, kind, length, number, total = FRAME_HEAD.unpack_from(data, place)
        end = place + FRAME_HEAD.size + length
        is_whole = magic == FRAME_MAGIC and end <= len(data) and number > last
        frame = Frame(kind, bytes(data[end - length : end])) if is_whole else None
        if frame is None or total != _sum(head.id, number, frame):
            place += ALIGNMENT
            continue
        yield frame
        last = number
        place = end + -end % ALIGNMENT


def _sum(segment: bytes, number: int, frame: Frame) -> bytes:
    found = hashlib.blake2b(segment, digest_size=SUM_BYTES)
    found.update(struct.pack("<QB", number, frame.kind))
    found.update(frame.payload)
    return found.digest()


class Admitted(msgspec.Struct, frozen=True):
    """A request was accepted.

    Attributes:
        owner: the SHA-256 of its API key; empty on a server without keys.
        request: what its API needs to begin it again.
        route: the path of its API; empty for a background response.
        key: the SHA-256 of its `Idempotency-Key`; empty without one.
        digest: the SHA-256 of its path and body.
        model: the fingerprint of the model that has begun it.
        at: seconds of the wall clock.
    """

    id: str
    owner: bytes
    request: bytes
    route: str = ""
    key: bytes = b""
    digest: bytes = b""
    model: bytes = b""
    at: float = 0.0


class Tokens(msgspec.Struct, omit_defaults=True):
    """Some tokens of the answer, written before they are sent.

    Attributes:
        position: the number of tokens of this choice before them.
        prompt, prompt_token_ids, num_cached, media: given with the first tokens of a choice only.
        choice: the place among all choices of the answer.
        media: the places of images and sounds in the prompt.
    """

    id: str
    position: int
    token_ids: list[int]
    logprobs: list[LogprobsOnePosition] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt: str | None = None
    prompt_token_ids: list[int] = []
    num_cached: int | None = None
    choice: int = 0
    media: dict[str, list[tuple[int, int]]] | None = None


class StreamEnded(msgspec.Struct, frozen=True):
    """The answer is complete, or the request has ended in another way.

    Attributes:
        at: seconds of the wall clock, for the time for which it is kept.
        failure: the end as its API shows it; empty if the tokens contain it.
    """

    id: str
    at: float
    failure: bytes = b""


class Gone(msgspec.Struct, frozen=True):
    """The stream was deleted, or kept long enough."""

    id: str


class Whole(msgspec.Struct, frozen=True):
    """This segment contains all earlier ones, so they no longer count."""


# A frame without its payload: its head and padding, and the longer head of a grown list.
FRAME_BYTES = 48
# The longest encoding of a token id.
TOKEN_BYTES = 5
Record = Admitted | Tokens | StreamEnded | Gone | Whole
KINDS: tuple[type[Any], ...] = (Admitted, Tokens, StreamEnded, Gone, Whole)
# The kind of a frame with the tokens of several answers.  One frame for each step of the engine has one checksum.
STEP = len(KINDS)
# Records in such a frame, because one flipped bit costs them all.
MAX_IN_FRAME = 256
_encoder = msgspec.msgpack.Encoder()
_decoders = [msgspec.msgpack.Decoder(kind) for kind in KINDS]
_step_decoder = msgspec.msgpack.Decoder(list[Tokens])


def encode_record(record: Record) -> Frame:
    """Encode a record; the kind of the frame is that of the record."""
    return Frame(KINDS.index(type(record)), _encoder.encode(record))


def encode_records(records: Iterable[Record]) -> Iterator[Frame]:
    """Encode records, with neighbouring `Tokens` in one frame."""
    for kind, found in groupby(records, type):
        if kind is not Tokens:
            yield from map(encode_record, found)
            continue
        several = list(found)
        for start in range(0, len(several), MAX_IN_FRAME):
            yield Frame(STEP, _encoder.encode(several[start : start + MAX_IN_FRAME]))


def decode_frame(frame: Frame) -> Sequence[Record]:
    """Decode the records of a frame.  Returns nothing for a kind of another version."""
    try:
        if frame.kind == STEP:
            return _step_decoder.decode(frame.payload)
        if frame.kind < STEP:
            return [_decoders[frame.kind].decode(frame.payload)]
    except msgspec.MsgspecError:
        pass
    return []


def num_bytes(record: Record, *, is_joined: bool = False) -> int:
    """Bound the bytes that a record takes where all are repeated, alone or joined to the one before."""
    if is_joined and isinstance(record, Tokens):
        return TOKEN_BYTES * len(record.token_ids) + len(_encoder.encode(record.logprobs))
    return FRAME_BYTES + len(_encoder.encode(record))


class StreamRecord(msgspec.Struct):
    """The records of one stream.

    Attributes:
        tokens: its token records in the order of writing; those of each choice join without a gap.
    """

    admitted: Admitted
    tokens: list[Tokens] = []
    ended: StreamEnded | None = None
    # The known tokens of each choice, and the choices whose last token is known.
    counts: dict[int, int] = {}
    finished: set[int] = set()

    @property
    def num_tokens(self) -> int:
        """Count the known tokens of all choices."""
        return sum(self.counts.values())

    def records(self) -> list[Record]:
        """List the records from which this stream is found again."""
        ended: list[Record] = [] if self.ended is None else [self.ended]
        return [self.admitted, *self.tokens, *ended]

    def add(self, tokens: Tokens) -> bool:
        """Take tokens that join on.  Others are copies, or follow a gap.

        Returns whether they were joined to the record before: those of one choice are one record then, so that many steps are repeated
        and found again as fast as one.  An end without tokens has an event of its own, so it stays a record of its own.
        """
        choice = tokens.choice
        num_known = self.counts.get(choice, 0)
        fits = tokens.position == num_known and choice not in self.finished
        # An end without tokens may come first, so the first record is known by its prompt.
        if not fits or not (choice in self.counts or tokens.prompt_token_ids):
            return False
        self.counts[choice] = num_known + len(tokens.token_ids)
        if tokens.finish_reason is not None:
            self.finished.add(choice)
        last = self.tokens[-1] if self.tokens else None
        if last is None or last.choice != choice or not (last.token_ids and tokens.token_ids):
            # The lists of the record belong to an output that is still read.
            copy = msgspec.structs.replace(tokens, token_ids=[*tokens.token_ids])
            copy.logprobs = None if tokens.logprobs is None else [*tokens.logprobs]
            self.tokens.append(copy)
            return False
        last.token_ids.extend(tokens.token_ids)
        if last.logprobs is not None:
            last.logprobs.extend(tokens.logprobs or ())
        last.finish_reason, last.stop_reason = tokens.finish_reason, tokens.stop_reason
        return True


def join(streams: dict[str, StreamRecord], record: Record) -> bool:
    """Add one record to the streams.  Records must come in the order of writing.

    Returns whether this one was joined to the one before.
    """
    match record:
        case Admitted(id):
            streams.setdefault(id, StreamRecord(record))
        case Gone(id):
            streams.pop(id, None)
        case Tokens(id):
            return id in streams and streams[id].add(record)
        case StreamEnded(id):
            if id in streams:
                streams[id].ended = record
        case Whole():
            pass
    return False


def recover(segments: Iterable[Iterable[Frame]]) -> dict[str, StreamRecord]:
    """Find the streams in the frames of all segments, the oldest segment first.

    A segment that repeats everything replaces those before it, so what was deleted there stays deleted.
    """
    streams: dict[str, StreamRecord] = {}
    for segment in segments:
        records = [record for frame in segment for record in decode_frame(frame)]
        if any(isinstance(record, Whole) for record in records):
            streams = {}
        for record in records:
            join(streams, record)
    return streams
