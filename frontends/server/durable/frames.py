"""The format of a journal's file: a head, and frames behind it.  Pure.

    head     magic (8 bytes), id of the segment (16), fingerprint of the model (32)
    frame    magic u16, kind u8, 0, length u32, number u64, sum (8 bytes), payload, zeros up to a multiple of 8

The sum covers the segment's id, the number, the kind and the payload.  So a frame counts only if it is whole, in the file to which it was
written, and behind its predecessors: torn writes, flipped bits and old contents of a disk's sectors are recognised.  A reader continues
behind a bad frame at the next multiple of 8 at which a good one begins, so one flipped bit costs one frame.
"""

import hashlib
import struct
from collections.abc import Iterator
from typing import NamedTuple

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
