"""The records of a journal, and how a later process joins them to streams.  Pure.

A *stream* is one request with an answer that must survive the server.  Its records may be lost at the end, be there twice, or have a gap; each
names its position, so only what follows without a gap counts.  What is lost is sampled again: sampling is a function of the prompt, the
seed and the position.
"""

from collections.abc import Iterable
from typing import Any

import msgspec

from trouper.frontends.server.durable.frames import Frame
from trouper.outputs import LogprobsOnePosition


class Admitted(msgspec.Struct, frozen=True):
    """A request was accepted.

    Attributes:
        owner: the SHA-256 of its API key; empty on a server without keys.
        request: what its API needs to begin it again.
    """

    id: str
    owner: bytes
    request: bytes


class Tokens(msgspec.Struct, frozen=True):
    """Some tokens of the answer, written before they are sent.

    Attributes:
        position: the number of tokens before them.
        prompt, prompt_token_ids, num_cached: given with the first tokens only.
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


Record = Admitted | Tokens | StreamEnded | Gone | Whole
KINDS: tuple[type[Any], ...] = (Admitted, Tokens, StreamEnded, Gone, Whole)
_encoder = msgspec.msgpack.Encoder()
_decoders = [msgspec.msgpack.Decoder(kind) for kind in KINDS]


def encode_record(record: Record) -> Frame:
    """Encode a record; the kind of the frame is that of the record."""
    return Frame(KINDS.index(type(record)), _encoder.encode(record))


def decode_record(frame: Frame) -> Record | None:
    """Decode a record.  Returns None for a kind of another version."""
    if frame.kind >= len(_decoders):
        return None
    try:
        return _decoders[frame.kind].decode(frame.payload)
    except msgspec.MsgspecError:
        return None


class StreamRecord(msgspec.Struct):
    """The records of one stream.

    Attributes:
        tokens: its token records, joined without a gap.
    """

    admitted: Admitted
    tokens: list[Tokens] = []
    ended: StreamEnded | None = None

    @property
    def num_tokens(self) -> int:
        """Count the known tokens before the first gap."""
        return self.tokens[-1].position + len(self.tokens[-1].token_ids) if self.tokens else 0

    @property
    def is_finished(self) -> bool:
        """Whether the last token of the answer is known."""
        return bool(self.tokens) and self.tokens[-1].finish_reason is not None

    def records(self) -> list[Record]:
        """List the records from which this stream is found again."""
        ended: list[Record] = [] if self.ended is None else [self.ended]
        return [self.admitted, *self.tokens, *ended]

    def add(self, tokens: Tokens) -> None:
        """Take tokens that join on.  Others are copies, or follow a gap."""
        joins_on = tokens.position == self.num_tokens and not self.is_finished
        if joins_on and (self.tokens or tokens.prompt_token_ids):
            self.tokens.append(tokens)


def join(streams: dict[str, StreamRecord], record: Record) -> None:
    """Add one record to the streams, which must come in the order of writing."""
    match record:
        case Admitted(id):
            streams.setdefault(id, StreamRecord(record))
        case Gone(id):
            streams.pop(id, None)
        case Tokens(id):
            if id in streams:
                streams[id].add(record)
        case StreamEnded(id):
            if id in streams:
                streams[id].ended = record
        case Whole():
            pass


def recover(segments: Iterable[Iterable[Frame]]) -> dict[str, StreamRecord]:
    """Find the streams in the frames of all segments, the oldest segment first.

    A segment that repeats everything replaces those before it, so what was deleted there stays deleted.
    """
    streams: dict[str, StreamRecord] = {}
    for segment in segments:
        records = [record for frame in segment if (record := decode_record(frame)) is not None]
        if any(isinstance(record, Whole) for record in records):
            streams = {}
        for record in records:
            join(streams, record)
    return streams
