"""Encode the records of a journal to its file format, and restore streams from them in a later process.  Pure.

A *stream* is one request with an answer that must survive the server.  After a crash its last records may be lost, repeated, or missing in
the middle.  Every token record has its position, so recovery uses tokens up to the first gap and ignores duplicates.  Lost tokens are
sampled again with the same result, because sampling is a function of the prompt, the seed and the position.

A file is a header followed by frames.  A frame contains one record, or the token records of one engine step:

    header   magic (8 bytes), id of the segment (16), fingerprint of the model (32)
    frame    magic u16, kind u8, 0, length u32, number u64, checksum (8 bytes), payload, zeros up to a multiple of 8

The checksum covers the segment's id, the number, the kind and the payload.  So a reader detects torn writes, flipped bits, stale disk
sectors, and frames of another file or out of order.  After a bad frame it resumes at the next multiple of 8 at which a valid frame begins,
so one flipped bit loses one frame.
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
    """Hold the content of one frame with a correct checksum."""

    kind: int
    payload: bytes


class SegmentHead(NamedTuple):
    """Hold the header of a file: its random id and the fingerprint of its model."""

    id: bytes
    fingerprint: bytes


def encode_head(head: SegmentHead) -> bytes:
    """Return the first bytes of a segment file."""
    return MAGIC + head.id + head.fingerprint


def decode_head(data: bytes) -> SegmentHead | None:
    """Read the header of a file.  Returns None if the file is not a journal of this version."""
    if len(data) < HEAD_BYTES or not data.startswith(MAGIC):
        return None
    first = len(MAGIC)
    return SegmentHead(
        bytes(data[first : first + ID_BYTES]), bytes(data[first + ID_BYTES : HEAD_BYTES])
    )


def encode_frame(segment: bytes, number: int, frame: Frame) -> bytes:
    """Encode a frame for one position in one file.

    Args:
        segment: the id of the file.
        number: the number of the frame, which increases within the file.
    """
    total = _sum(segment, number, frame)
    head = FRAME_HEAD.pack(FRAME_MAGIC, frame.kind, len(frame.payload), number, total)
    data = head + frame.payload
    return data + bytes(-len(data) % ALIGNMENT)


def scan(data: bytes) -> Iterator[Frame]:
    """Yield the valid frames of a file in order, and skip damaged ones."""
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
    """Record that a request was accepted, with everything from which a later process can restart it.

    Attributes:
        owner: the SHA-256 of its API key; empty on a server without keys.
        request: the API's own encoding of the request.
        route: the path of the API; empty for a background response.
        key: the SHA-256 of its `Idempotency-Key`; empty without one.
        digest: the SHA-256 of its path and body.
        model: the fingerprint of the model of the first process.
        at: the time of admission, in seconds of the wall clock.
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
    """Record new tokens of one choice, before they are sent to the client.

    Attributes:
        position: the number of earlier tokens of this choice.
        prompt, prompt_token_ids, num_cached, media: set only with the first tokens of a choice.
        choice: the index among all choices of the answer.
        media: the positions of images and sounds in the prompt.
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
    """Record that the answer is complete or has failed.

    Attributes:
        at: the time of the end, in seconds of the wall clock, at which the retention time starts.
        failure: the error in the API's format; empty if the tokens contain the end.
    """

    id: str
    at: float
    failure: bytes = b""


class Gone(msgspec.Struct, frozen=True):
    """Record that a stream was deleted or has expired."""

    id: str


class Whole(msgspec.Struct, frozen=True):
    """Record that this segment repeats all live records of earlier ones, so recovery ignores those."""


# An upper bound of a frame's header, its padding, and the longer header of a list that has grown.
FRAME_BYTES = 48
# The longest encoding of a token id.
TOKEN_BYTES = 5
Record = Admitted | Tokens | StreamEnded | Gone | Whole
KINDS: tuple[type[Any], ...] = (Admitted, Tokens, StreamEnded, Gone, Whole)
# The kind of a frame with tokens of several answers: one frame, and so one checksum, for each engine step.
STEP = len(KINDS)
# Limited, because one flipped bit loses all records of a frame.
MAX_IN_FRAME = 256
_encoder = msgspec.msgpack.Encoder()
_decoders = [msgspec.msgpack.Decoder(kind) for kind in KINDS]
_step_decoder = msgspec.msgpack.Decoder(list[Tokens])


def encode_record(record: Record) -> Frame:
    """Encode a record as a frame of its kind."""
    return Frame(KINDS.index(type(record)), _encoder.encode(record))


def encode_records(records: Iterable[Record]) -> Iterator[Frame]:
    """Encode records, with up to `MAX_IN_FRAME` consecutive `Tokens` in one frame."""
    for kind, found in groupby(records, type):
        if kind is not Tokens:
            yield from map(encode_record, found)
            continue
        several = list(found)
        for start in range(0, len(several), MAX_IN_FRAME):
            yield Frame(STEP, _encoder.encode(several[start : start + MAX_IN_FRAME]))


def decode_frame(frame: Frame) -> Sequence[Record]:
    """Decode the records of a frame.  Returns an empty list for frames of an unknown version."""
    try:
        if frame.kind == STEP:
            return _step_decoder.decode(frame.payload)
        if frame.kind < STEP:
            return [_decoders[frame.kind].decode(frame.payload)]
    except msgspec.MsgspecError:
        pass
    return []


def num_bytes(record: Record, *, is_joined: bool = False) -> int:
    """Return an upper bound of a record's size in a new segment, in bytes.

    Pass `is_joined` for tokens that extend the record before them, so that they need no frame of their own.
    """
    if is_joined and isinstance(record, Tokens):
        return TOKEN_BYTES * len(record.token_ids) + len(_encoder.encode(record.logprobs))
    return FRAME_BYTES + len(_encoder.encode(record))


class StreamRecord(msgspec.Struct):
    """Collect the records of one stream in memory.

    Attributes:
        tokens: token records in the order of writing, without gaps between those of a choice.
    """

    admitted: Admitted
    tokens: list[Tokens] = []
    ended: StreamEnded | None = None
    # The number of tokens by choice, and the finished choices.
    counts: dict[int, int] = {}
    finished: set[int] = set()

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of all choices."""
        return sum(self.counts.values())

    def records(self) -> list[Record]:
        """List the records from which `recover` restores this stream."""
        ended: list[Record] = [] if self.ended is None else [self.ended]
        return [self.admitted, *self.tokens, *ended]

    def add(self, tokens: Tokens) -> bool:
        """Append tokens if they continue their choice; ignore duplicates and tokens after a gap.

        Returns True if the tokens were merged into the record before.  Merging makes a new segment and recovery cost one record instead of
        one for each step.  An end without tokens stays separate, because it has its own event.
        """
        choice = tokens.choice
        num_known = self.counts.get(choice, 0)
        fits = tokens.position == num_known and choice not in self.finished
        # A choice may end without tokens, so the prompt identifies its first record.
        if not fits or not (choice in self.counts or tokens.prompt_token_ids):
            return False
        self.counts[choice] = num_known + len(tokens.token_ids)
        if tokens.finish_reason is not None:
            self.finished.add(choice)
        last = self.tokens[-1] if self.tokens else None
        if last is None or last.choice != choice or not (last.token_ids and tokens.token_ids):
            # Copied, because the lists belong to an output that the handler is still reading.
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
    """Apply one record to the streams.  Call it in the order of writing.

    Returns whether the record was merged into the one before, as `StreamRecord.add` does.
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
    """Restore the streams by id from the frames of all segments, the oldest segment first.

    A segment with a `Whole` record replaces all earlier ones, so that deleted streams stay deleted.
    """
    streams: dict[str, StreamRecord] = {}
    for segment in segments:
        records = [record for frame in segment for record in decode_frame(frame)]
        if any(isinstance(record, Whole) for record in records):
            streams = {}
        for record in records:
            join(streams, record)
    return streams
