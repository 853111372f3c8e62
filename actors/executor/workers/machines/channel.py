"""The messages between the front and the hosts of its other machines: length (4 bytes), msgpack.

They are few and small: an order is a crew that is being started, or runs.  Steps and answers never pass here.
"""

import contextlib
import functools
import hashlib
import re
import socket
import struct
from collections.abc import Generator
from typing import Any

import anyio
import msgspec

from trouper.actors.executor.links.worker_links import SharedSizes
from trouper.actors.executor.workers.machines.authentication import (
    ANSWER_BYTES,
    ListenerProof,
    WrongKeyError,
)
from trouper.actors.executor.workers.wire import TYPES
from trouper.actors.executor.workers.worker_process import Exit

LENGTH = struct.Struct("<I")
MAX_MESSAGE = 2**16  # bytes; the largest is an `Ended` with its last lines of stderr
LAST_LINES, LINE_LENGTH = 8, 400  # of a worker's stderr that an `Ended` brings
HELLO_BYTES = 2**10  # at most, of the first message


class HostHello(msgspec.Struct, frozen=True, tag=True):
    """Host → front, the first message: a machine is there."""

    protocol: str
    node: int
    num_nodes: int
    num_workers: int = 1  # on it, by its own options: they share its cores


class WorkerHello(msgspec.Struct, frozen=True, tag=True):
    """Place → front, the first message: this connection is the worker's of an order."""

    order: int
    rank: int


class LinkHello(msgspec.Struct, frozen=True, tag=True):
    """Place → place, the first message: this connection is a link between stages of an order."""

    order: int
    name: str


class Accepted(msgspec.Struct, frozen=True, tag=True):
    """Coordinator → host, before orders: it is part of this cluster."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Coordinator → host, instead of orders: why it cannot be part of this cluster."""

    message: str
    is_final: bool  # False: it may come again


class Listen(msgspec.Struct, frozen=True, tag=True):
    """Coordinator → host: listen for links of an order."""

    order: int


class Listens(msgspec.Struct, frozen=True, tag=True):
    """Host → front: the port that listens."""

    order: int
    port: int


class Start(msgspec.Struct, frozen=True, tag=True):
    """Coordinator → place: start these ranks of an order, behind `Listen`."""

    order: int
    ranks: tuple[int, ...]
    first_number: int = 0  # of rank 0, for people
    sizes: SharedSizes | None = None  # of what workers share; None: there is one
    dials: dict[str, tuple[str, int]] = {}  # links by name, and where their other side listens


class Started(msgspec.Struct, frozen=True, tag=True):
    """Host → front: they run, and are connected."""

    order: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Host → front: the order could not be followed; nothing of it is left."""

    order: int
    message: str


class End(msgspec.Struct, frozen=True, tag=True):
    """Coordinator → host: let a worker exit for so long, then kill it."""

    order: int
    rank: int
    grace_s: float


class Ended(msgspec.Struct, frozen=True, tag=True):
    """Host → front: nothing of a worker is left."""

    order: int
    rank: int
    exit: Exit


class GiveUp(msgspec.Struct, frozen=True, tag=True):
    """Coordinator → host: end what there is of an order, started or not; it is not answered."""

    order: int


Message = (
    HostHello | WorkerHello | LinkHello | Accepted | Refused | Listen | Listens
    | Start | Started | Failed | End | Ended | GiveUp
)  # fmt: skip
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Message)


@functools.cache  # it takes 10 ms
def protocol() -> str:
    """Return a digest of all messages, also of those between an engine and its workers: both sides must have the same."""
    types = repr(msgspec.inspect.multi_type_info((*TYPES, Message)))
    return hashlib.sha256(re.sub(r" at 0x\w+", "", types).encode()).hexdigest()


class ChannelError(Exception):
    """The bytes of the other side are no message of this protocol."""


def encode(message: Message) -> bytes:
    """Encode a message with its length."""
    data = _encoder.encode(message)
    return LENGTH.pack(len(data)) + data


def decode(data: bytes) -> Message:
    """Decode a message without its length.

    Raises:
        ChannelError: it is none.
    """
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, ValueError) as error:
        raise ChannelError(f"not a message: {error}") from None


def length_of(header: bytes, max_bytes: int = MAX_MESSAGE) -> int:
    """Read a message's length.

    Raises:
        ChannelError: it is longer than a message may be.
    """
    (length,) = LENGTH.unpack(header)
    if length > max_bytes:
        raise ChannelError(f"a message of {length} bytes, at most {max_bytes} may come")
    return length


def first_message(key: bytes) -> Generator[tuple[bytes, int], bytes, Message]:
    """Talk to a side that has connected: yields what is to be sent and how many bytes must come then.  Pure.

    Returns:
        Its first message.

    Raises:
        WrongKeyError: it has another key.
        ChannelError: what it says is no message.
    """
    proof = ListenerProof(key)
    is_right, verdict = proof.judge((yield proof.greeting, ANSWER_BYTES))
    if not is_right:
        yield verdict, 0
        raise WrongKeyError("it has another key")
    length = length_of((yield verdict, LENGTH.size), HELLO_BYTES)
    return decode((yield b"", length) if length > 0 else b"")


def shorten(ended: Exit) -> Exit:
    """Keep as much of a worker's last words as a message has room for."""
    lines = tuple(line[:LINE_LENGTH] for line in ended.stderr[-LAST_LINES:])
    return msgspec.structs.replace(ended, stderr=lines)


class Channel:
    """A connection whose other side has proved itself; one task receives.

    Args:
        connection: a socket that does not block; it is the channel's to close.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<Channel {'closed' if self._is_closed else 'open'}>"

    def send(self, message: Message) -> None:
        """Send a message; never waits.

        Raises:
            OSError: the other side is gone, or does not read.
        """
        data = encode(message)
        if self._socket.send(data) < len(data):  # what follows would be torn
            self.close()
            raise BlockingIOError("the other side does not read")

    async def receive(self) -> Message | None:
        """Wait for a message; None: the other side is gone.

        Raises:
            ChannelError: what came is none.
        """
        try:
            length = length_of(await self.receive_exactly(LENGTH.size))
            return decode(await self.receive_exactly(length))
        except (OSError, anyio.ClosedResourceError):
            return None

    async def receive_exactly(self, num_bytes: int) -> bytes:
        """Wait for so many bytes, and read none behind them.

        Raises:
            OSError: they do not come.
        """
        data = b""
        while len(data) < num_bytes:
            try:
                more = self._socket.recv(num_bytes - len(data))
            except BlockingIOError:
                await anyio.wait_readable(self._socket)
                continue
            if not more:
                raise ConnectionError("the other side has hung up")
            data += more
        return data

    def send_bytes(self, data: bytes) -> None:
        """Send bytes of the proof, for which a fresh connection has room.

        Raises:
            OSError: the other side is gone.
        """
        self._socket.send(data)

    def detach(self) -> socket.socket:
        """Take the socket out of the channel."""
        self._is_closed = True
        return self._socket

    def close(self) -> None:
        """Close the connection.  Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes the task that receives
            anyio.notify_closing(self._socket)
            self._socket.close()
