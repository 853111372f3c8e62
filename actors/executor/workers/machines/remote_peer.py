"""A worker on another machine, by a connection whose end is its sign of life."""

import socket
from collections import deque
from collections.abc import Awaitable, Callable

import anyio

from trouper.actors.executor.workers.launching import CLOSED, READ_BYTES, SEND_BUFFER
from trouper.actors.executor.workers.wire import MAX_FRAME, read_inline
from trouper.actors.executor.workers.worker_process import Exit

END_S = 5.0  # for the word that a worker is gone, beyond the grace that it was given
# Frames that wait for room in the system's buffer: plans in flight (stages + 1, 65 at most), three calls, a vocabulary,
# and 256 adapters of a successor, of which each is sent when the one before is loaded.
MAX_WAITING = 128


class RemotePeer:
    """`Peer` of a worker on another machine.

    What the system's buffer has no room for waits here, and is sent by the task that receives.

    Args:
        connection: to the worker; it is the peer's to close.
        end: has the worker's place end it.
        name: for people.
        where: it runs, for people.
    """

    max_inline = MAX_FRAME  # no descriptor comes from there

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
        self._reading = anyio.CancelScope()  # around a wait for bytes alone
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
            self._reading.cancel()  # it waits for room as well from now on

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
        with anyio.CancelScope(shield=True):  # bounded: by the grace, and its place's silence
            with anyio.move_on_after(grace_s):
                await self._flush()
            with anyio.move_on_after(grace_s + END_S):
                found = await self._end(grace_s)
        self._exit = found
        anyio.notify_closing(self._socket)
        self._socket.close()
        return found

    async def _flush(self) -> None:
        """Send all that waits, if the worker still reads."""
        try:
            while not self._send_some():
                await anyio.wait_writable(self._socket)
        except OSError:
            pass

    def _send_some(self) -> bool:
        """Send what the system has room for; returns whether that was all.

        Raises:
            OSError: the worker is gone.
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
        """Wait until there is something to read, or, while frames wait, until there was room for them."""
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
            self._waiting.clear()  # the next read finds the end
