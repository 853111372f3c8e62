"""A link between two stages on different machines: what a ring is on one, by a connection of its own.

A message is the step and the number of bytes, then the bytes.  What has been sent waits in the system's buffers on both
sides; a sender of hidden states waits for room there while nothing that the receiver needs is behind it.

A link ends with the process on its other side, whose end the engine sees as well, and knows the cause of. So a side that finds
the end first says nothing for a moment, in which the engine ends it too; only what the engine has not seen is an error. Its class says that
no request is the cause: a network that is silent is found by each connection in its own time, and by a link before the engine's own.
"""

import select
import socket
import struct
import time
from typing import NoReturn

import numpy as np

HEADER = struct.Struct("<qq")
PATIENCE_S = 2.0


class LinkLostError(ConnectionError):
    """The connection to another stage has ended."""


class TcpLink:
    """One side of a link.  It takes the descriptor over, and closes it with itself.

    Args:
        max_bytes: of a message.
        patience_s: before the end of the other side is an error of this one.
    """

    def __init__(self, file: int, max_bytes: int, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._socket = socket.socket(fileno=file)
        self._socket.setblocking(True)
        self._max_bytes = max_bytes
        # A message that has come in part: its header, then its bytes.
        self._buffer = np.empty(HEADER.size + max_bytes, dtype=np.uint8)
        self._num_here = 0

    def __repr__(self) -> str:
        return f"<TcpLink of {self._max_bytes} bytes, {self._num_here} here>"

    def send(self, step: int, payload: np.ndarray) -> None:
        """Send the payload, contiguous uint8; waits for room in the system's buffer.

        Raises:
            ValueError: the payload is larger than a message may be.
            LinkLostError: the other side is gone.
        """
        if len(payload) > self._max_bytes:
            raise ValueError(f"{len(payload)} bytes for messages of {self._max_bytes}")
        header = HEADER.pack(step, len(payload))
        try:
            num_sent = self._socket.sendmsg([header, payload.data])
            if num_sent < len(header):
                self._socket.sendall(header[num_sent:])
            self._socket.sendall(payload.data[max(0, num_sent - len(header)) :])
        except OSError as error:
            self._lose(error)

    def receive(self, out: np.ndarray, *, wait: bool) -> tuple[int, int] | None:
        """Copy the payload of the next message to the beginning of `out`.

        Returns:
            Its step and its number of bytes; None if none is here as a whole and `wait` is False.

        Raises:
            LinkLostError: the other side is gone.
            ValueError: a message is larger than it may be.
        """
        if not self._read_up_to(HEADER.size, wait=wait):
            return None
        step, num_bytes = HEADER.unpack_from(self._buffer.data)
        if not 0 <= num_bytes <= self._max_bytes:
            raise ValueError(f"a message of {num_bytes} bytes, at most {self._max_bytes} may come")
        end = HEADER.size + num_bytes
        if not self._read_up_to(end, wait=wait):
            return None
        out[:num_bytes] = self._buffer[HEADER.size : end]
        self._num_here = 0
        return step, num_bytes

    def close(self) -> None:
        """Close the connection.  Idempotent."""
        self._socket.close()

    def _read_up_to(self, end: int, *, wait: bool) -> bool:
        """Have this many bytes of the message here."""
        while self._num_here < end:
            if not wait and not select.select([self._socket], [], [], 0)[0]:
                return False
            try:
                num_read = self._socket.recv_into(self._buffer[self._num_here : end].data)
            except OSError as error:
                self._lose(error)
            if num_read == 0:
                self._lose("closed by another stage")
            self._num_here += num_read
        return True

    def _lose(self, words: object) -> NoReturn:
        """Wait for the engine to end this side too, and then say what it has not seen."""
        time.sleep(self._patience_s)
        raise LinkLostError(f"a link between stages: {words}") from None
