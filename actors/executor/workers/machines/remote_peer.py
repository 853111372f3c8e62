"""A worker on another machine, reached through a TCP connection; its end shows the end of the worker.

TCP buffers are too small for an adapter or a vocabulary, and sending must never wait, so frames queue here
and the task that receives also sends them.
"""

import socket
from collections import deque
from collections.abc import Awaitable, Callable

import anyio

from trouper.actors.executor.workers.launching import CLOSED, READ_BYTES, SEND_BUFFER
from trouper.actors.executor.workers.wire import MAX_FRAME, read_inline
from trouper.actors.executor.workers.worker_process import Exit

# Seconds to wait for the report that a worker has ended, beyond its grace period.
END_S = 5.0
# Frames queued for room in the system's buffer: plans in flight (stages + 1, at most 65), three calls and a
# vocabulary. Restoring 256 adapters adds one at a time, since each is sent after the previous one is loaded.
MAX_WAITING = 128


class RemotePeer:
    """`Peer` of a worker on another machine. Frames that do not fit into the system's buffer are queued and sent
    by the task that receives.

    Args:
        connection: socket to the worker; the peer closes it.
        end: asks the worker's machine to end it.
        name: of the worker, for messages.
        where: location of the worker, for messages.
    """

    # TCP carries no descriptors, so every payload is inline.
    max_inline = MAX_FRAME
    pid = 0

    def __init__(
        self,
        connection: socket.socket,
        end: Callable[[float], Awaitable[Exit]],
        name: str,
        where: str = "",
    ) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        self._socket = connection
        self._end, self._name, self.where = end, name, where
        self._waiting: deque[memoryview] = deque()
        # Surrounds a wait for bytes, which `send` cancels when the wait must include room for queued frames.
        self._reading = anyio.CancelScope()
        self._exit: Exit | None = None

    def __repr__(self) -> str:
        return f"<RemotePeer: {self._name}, {len(self._waiting)} frames wait>"

    def send(self, data: bytes, file: int | None) -> None:
        if len(self._waiting) >= MAX_WAITING:
            self._socket.shutdown(socket.SHUT_RDWR)
            raise BlockingIOError("the worker does not read")
        whole = data if file is None else read_inline(data, file)
        self._waiting.append(memoryview(whole))
        if len(self._waiting) == 1 and not self._send_some():
            self._reading.cancel()

    async def receive(self) -> tuple[bytes, list[int]]:
        while True:
            try:
                data = self._socket.recv(READ_BYTES)
            except BlockingIOError:
                await self._wait()
            except OSError:
                return CLOSED
            else:
                return data, []

    async def end(self, grace_s: float) -> Exit:
        if self._exit is not None:
            return self._exit
        found = Exit(None, stderr=(f"{self._name} does not answer",), was_machine_lost=True)
        # Bounded by the grace period and `END_S`.
        with anyio.CancelScope(shield=True):
            with anyio.move_on_after(grace_s):
                await self._flush()
            with anyio.move_on_after(grace_s + END_S):
                found = await self._end(grace_s)
        self._exit = found
        anyio.notify_closing(self._socket)
        self._socket.close()
        return found

    async def _flush(self) -> None:
        """Send all queued frames, if the worker still reads."""
        try:
            while not self._send_some():
                await anyio.wait_writable(self._socket)
        except OSError:
            pass

    def _send_some(self) -> bool:
        """Send as many queued bytes as the system accepts. Returns whether the queue is empty.

        Raises:
            OSError: the worker has ended.
        """
        while self._waiting:
            try:
                num_sent = self._socket.send(self._waiting[0])
            except BlockingIOError:
                return False
            if num_sent < len(self._waiting[0]):
                self._waiting[0] = self._waiting[0][num_sent:]
            else:
                self._waiting.popleft()
        return True

    async def _wait(self) -> None:
        """Wait for bytes to read, or, with queued frames, for room to send them."""
        if not self._waiting:
            with anyio.CancelScope() as self._reading:
                await anyio.wait_readable(self._socket)
            return

        async def wait_readable() -> None:
            await anyio.wait_readable(self._socket)
            tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait_readable)
            await anyio.wait_writable(self._socket)
            tasks.cancel_scope.cancel()
        try:
            self._send_some()
        except OSError:
            # The next read finds the end of the connection.
            self._waiting.clear()
