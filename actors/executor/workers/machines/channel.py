"""Messages between the coordinator and the hosts of its other machines: length (4 bytes), msgpack.

An order starts the workers of one device, or refers to workers that it started. Messages are few and small;
plans and results go directly between the engine and each worker.
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

from trouper.actors.executor.worker_links import SharedSizes
from trouper.actors.executor.workers.launching import Exit
from trouper.actors.executor.workers.machines.authentication import (
    ANSWER_BYTES,
    ListenerProof,
    WrongKeyError,
)
from trouper.actors.executor.workers.wire import TYPES

LENGTH = struct.Struct("<I")
# Bytes; the largest message is an `Ended` with its lines of stderr.
MAX_MESSAGE = 2**16
# Lines of a worker's stderr in an `Ended`, and characters of each.
LAST_LINES, LINE_LENGTH = 8, 400
# Maximum size of the first message.
HELLO_BYTES = 2**10


class HostHello(msgspec.Struct, frozen=True, tag=True):
    """Host → coordinator, the first message: a machine offers itself. `num_workers` follows from its own
    options; they share its cores.
    """

    protocol: str
    node: int
    num_nodes: int
    num_workers: int = 1


class WorkerHello(msgspec.Struct, frozen=True, tag=True):
    """Worker's machine → coordinator, the first message: this connection belongs to a worker of an order."""

    order: int
    rank: int


class LinkHello(msgspec.Struct, frozen=True, tag=True):
    """Machine → machine, the first message: this connection is a link between stages of an order."""

    order: int
    name: str


class Accepted(msgspec.Struct, frozen=True, tag=True):
    """Coordinator → host, before any order: the machine is part of the cluster.

    The host then waits for orders, for as long as the connection exists.
    """


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Coordinator → host, instead of orders: why the machine is refused. If not `is_final`, it may try again."""

    message: str
    is_final: bool


class Listen(msgspec.Struct, frozen=True, tag=True):
    """Coordinator → host: listen for the stage links of an order.

    It is sent before `Start`, so that all listeners exist before any machine dials.
    """

    order: int


class Listens(msgspec.Struct, frozen=True, tag=True):
    """Host → coordinator: the port at which the host listens for the links of an order.

    The coordinator passes it to the machines that dial.
    """

    order: int
    port: int


class Start(msgspec.Struct, frozen=True, tag=True):
    """Coordinator → machine, after `Listen`: start these ranks of an order.

    `first_number` is the number of rank 0 in messages. `sizes` describes the memory that workers share, None
    for a single worker. `dials` gives the links to dial by name, each with its listener's address.
    """

    order: int
    ranks: tuple[int, ...]
    first_number: int = 0
    sizes: SharedSizes | None = None
    dials: dict[str, tuple[str, int]] = {}


class Started(msgspec.Struct, frozen=True, tag=True):
    """Host → coordinator: the workers of an order run and are connected.

    It answers `Start`; an order that fails is answered with `Failed`.
    """

    order: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Host → coordinator: the order failed, and nothing of it remains.

    The message is shown as the reason why the device could not start.
    """

    order: int
    message: str


class End(msgspec.Struct, frozen=True, tag=True):
    """Coordinator → host: wait up to `grace_s` seconds for a worker to exit, then kill it."""

    order: int
    rank: int
    grace_s: float


class Ended(msgspec.Struct, frozen=True, tag=True):
    """Host → coordinator: a worker has ended, with its exit status and last lines of stderr. It answers `End`."""

    order: int
    rank: int
    exit: Exit


class GiveUp(msgspec.Struct, frozen=True, tag=True):
    """Coordinator → host: end everything that belongs to an order, started or not. There is no answer."""

    order: int


Message = (
    HostHello | WorkerHello | LinkHello | Accepted | Refused | Listen | Listens
    | Start | Started | Failed | End | Ended | GiveUp
)  # fmt: skip
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Message)


@functools.cache
def protocol() -> str:
    """Return a digest of all message types, including those between an engine and its workers. Both sides must
    have the same digest. Computing it takes 10 ms, so it is cached.
    """
    types = repr(msgspec.inspect.multi_type_info((*TYPES, Message)))
    return hashlib.sha256(re.sub(r" at 0x\w+", "", types).encode()).hexdigest()


class ChannelError(Exception):
    """The received bytes are not a message of this protocol.

    The connection is closed, because the position of the next message is unknown.
    """


def encode(message: Message) -> bytes:
    """Encode a message, preceded by its length.

    The result can be sent as a whole; `length_of` and `decode` are the reverse. Messages larger than `MAX_MESSAGE`
    are refused by receivers.
    """
    data = _encoder.encode(message)
    return LENGTH.pack(len(data)) + data


def decode(data: bytes) -> Message:
    """Decode a message without its length.

    Raises:
        ChannelError: the bytes are not a message.
    """
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, ValueError) as error:
        raise ChannelError(f"not a message: {error}") from None


def length_of(header: bytes, max_bytes: int = MAX_MESSAGE) -> int:
    """Read the length of a message from its header.

    Raises:
        ChannelError: the message is too long.
    """
    (length,) = LENGTH.unpack(header)
    if length > max_bytes:
        raise ChannelError(f"a message of {length} bytes is too long (maximum {max_bytes})")
    return length


def first_message(key: bytes) -> Generator[tuple[bytes, int], bytes, Message]:
    """Perform the listener's proof and read the first message. Pure: yields the bytes to send and the number of
    bytes to read next.

    Returns:
        The first message of the other side.

    Raises:
        WrongKeyError: it has a different key.
        ChannelError: its bytes are not a message.
    """
    proof = ListenerProof(key)
    is_right, verdict = proof.judge((yield proof.greeting, ANSWER_BYTES))
    if not is_right:
        yield verdict, 0
        raise WrongKeyError("it has a different key")
    length = length_of((yield verdict, LENGTH.size), HELLO_BYTES)
    return decode((yield b"", length) if length > 0 else b"")


def shorten(ended: Exit) -> Exit:
    """Shorten a worker's last lines of stderr to what a message can hold."""
    lines = tuple(line[:LINE_LENGTH] for line in ended.stderr[-LAST_LINES:])
    return msgspec.structs.replace(ended, stderr=lines)


class Channel:
    """A connection after the other side's proof. One task receives.

    Args:
        connection: a non-blocking socket, which the channel closes.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<Channel {'closed' if self._is_closed else 'open'}>"

    def send(self, message: Message) -> None:
        """Send a message without waiting.

        Raises:
            OSError: the other side has disconnected, or does not read.
        """
        data = encode(message)
        # A torn message would garble every later one.
        if self._socket.send(data) < len(data):
            self.close()
            raise BlockingIOError("the other side does not read")

    async def receive(self) -> Message | None:
        """Wait for a message.

        Returns None at the end of the connection.  A cancelled wait is only safe before a message has begun.

        Raises:
            ChannelError: the received bytes are not a message.
        """
        try:
            length = length_of(await self.receive_exactly(LENGTH.size))
            return decode(await self.receive_exactly(length))
        except (OSError, anyio.ClosedResourceError):
            return None

    async def receive_exactly(self, num_bytes: int) -> bytes:
        """Wait for exactly `num_bytes` bytes.

        Raises:

            OSError: the connection ended first.
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
        """Send bytes of the proof, for which a new connection always has room.

        Raises:
            OSError: the other side has disconnected.
        """
        self._socket.send(data)

    def detach(self) -> socket.socket:
        """Take the socket out of the channel.

        The caller then owns it, for example to pass it to a worker process. Nothing is buffered in the channel.
        """
        self._is_closed = True
        return self._socket

    def close(self) -> None:
        """Close the connection.  Idempotent. A task waiting in `receive` is woken."""
        if not self._is_closed:
            self._is_closed = True
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            anyio.notify_closing(self._socket)
            self._socket.close()
