"""A link between two workers on different machines, as a TCP connection of its own.

A message is the step and the number of bytes, then the bytes. Sent messages wait in the system's buffers on
both sides. A sender of hidden states may wait for room, since nothing that the receiver needs is queued after
it.

A link ends with the process on its other side. The engine also sees that end and knows its cause, so a worker
that finds it first waits a moment for the engine to end it too. Only what the engine has not seen becomes an
error, `LinkLostError`, which no request can have caused: on a silent network each connection detects the loss
at a different time.
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
    """The connection to another stage has ended.

    The worker ends too, since it cannot continue without the other stage; the engine then restarts the device.
    """


class TcpLink:
    """One side of a link. It owns the descriptor and closes it.

    Args:
        max_bytes: maximum size of a message.
        patience_s: seconds before the end of the other side becomes an error of this side.
    """

    def __init__(self, file: int, max_bytes: int, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._socket = socket.socket(fileno=file)
        self._socket.setblocking(True)
        self._max_bytes = max_bytes
        # The header and bytes of a partly received message.
        self._buffer = np.empty(HEADER.size + max_bytes, dtype=np.uint8)
        self._num_here = 0

    def __repr__(self) -> str:
        return f"<TcpLink of {self._max_bytes} bytes, {self._num_here} here>"

    def send(self, step: int, payload: np.ndarray) -> None:
        """Send the payload, contiguous uint8. Waits for room in the system's buffer.

        Raises:
            ValueError: the payload is larger than a message may be.
            LinkLostError: the other side has disconnected.
        """
        if len(payload) > self._max_bytes:
            raise ValueError(f"the payload has {len(payload)} bytes (maximum {self._max_bytes})")
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
            Its step and number of bytes, or None if no complete message has arrived and `wait` is False.

        Raises:
            LinkLostError: the other side has disconnected.
            ValueError: a message is too large.
        """
        if not self._read_up_to(HEADER.size, wait=wait):
            return None
        step, num_bytes = HEADER.unpack_from(self._buffer.data)
        if not 0 <= num_bytes <= self._max_bytes:
            raise ValueError(
                f"a message of {num_bytes} bytes is too long (maximum {self._max_bytes})"
            )
        end = HEADER.size + num_bytes
        if not self._read_up_to(end, wait=wait):
            return None
        out[:num_bytes] = self._buffer[HEADER.size : end]
        self._num_here = 0
        return step, num_bytes

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._socket.close()

    def _read_up_to(self, end: int, *, wait: bool) -> bool:
        """Read until `end` bytes of the message are buffered. Returns False if that would wait."""
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
        """Give the engine time to end this worker, then raise the error."""
        time.sleep(self._patience_s)
        raise LinkLostError(f"a link between stages: {words}") from None
