"""Start worker processes on this machine, and reach them.

A worker process that is started before the engine that will have it.

Importing torch takes it longer than the engine's process takes to import its own modules, so the two go side by side.
"""

import socket
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self

import anyio
import anyio.to_thread

from trouper.actors.executor.workers.wire import MAX_INLINE, Prepare, encode
from trouper.actors.executor.workers.worker_process import MODULE, Exit, WorkerProcess
from trouper.errors import DeviceStartError

READ_BYTES = 2**18
MAX_FILES = 16
SEND_BUFFER = 2**20  # asked for; the system gives at least 212,992 bytes, see `wire.MAX_INLINE`
CLOSED: tuple[bytes, list[int]] = (b"", [])


class Peer(Protocol):
    """A worker as its engine reaches it: a stream of bytes each way, and an end.

    Attributes:
        max_inline: bytes of a payload that come with a frame of it; a larger one comes as a descriptor.
        where: it runs, for people, as in "on node 1"; empty: on this machine.
    """

    max_inline: int
    where: str

    def send(self, data: bytes, file: int | None) -> None:
        """Send a frame, and the descriptor that goes with it; never waits.

        Raises:
            OSError: the worker is gone, or does not read.
        """
        ...

    async def receive(self) -> tuple[bytes, list[int]]:
        """Wait for bytes and descriptors; no bytes: the worker has hung up."""
        ...

    async def end(self, grace_s: float) -> Exit:
        """Let the worker exit for so long, then kill it; returns when nothing of it is left.  Idempotent."""
        ...


class Launcher(Protocol):
    """Starts the worker of a rank; those of all replicas are numbered through."""

    def __call__(self, rank: int, *, files: Sequence[int] = ()) -> Peer:
        """Start it; it inherits the descriptors, which only ranks that have neighbours are given.

        Raises:
            DeviceStartError: the system has refused.
        """
        ...


class WorkersLauncher(Protocol):
    """Starts the workers of a device, wherever each of them is to run."""

    async def __call__(self) -> Sequence[Peer]:
        """Start them all, in the order of their ranks; waits for machines that are not there.

        Raises:
            DeviceStartError: a machine has refused, or there is no room for them; none is left.
        """
        ...

    async def release(self) -> None:
        """Give back what is held for the next start: there is none to come.  Idempotent."""
        ...


class LocalPeer:
    """A process of this machine, by a socket pair whose end is its sign of life."""

    max_inline = MAX_INLINE
    where = ""

    def __init__(self, process: WorkerProcess, control: socket.socket) -> None:
        self._process = process
        self._control = control

    def __repr__(self) -> str:
        return f"<LocalPeer: {self._process!r}>"

    @property
    def pid(self) -> int:
        """The process, for tests and for people."""
        return self._process.pid

    def send(self, data: bytes, file: int | None) -> None:
        try:
            sent = (
                self._control.send(data)
                if file is None
                else socket.send_fds(self._control, [data], [file])
            )
        except BlockingIOError:
            sent = 0
        if sent < len(data):  # what follows would be torn, so the connection ends here
            self._control.shutdown(socket.SHUT_RDWR)
            raise BlockingIOError("the worker does not read")

    async def receive(self) -> tuple[bytes, list[int]]:
        while True:
            try:
                data, files, _, _ = socket.recv_fds(self._control, READ_BYTES, MAX_FILES)
            except BlockingIOError:
                await anyio.wait_readable(self._control)
            except OSError:
                return CLOSED
            else:
                return data, files

    def kill(self) -> None:
        """End a process that has no work yet, at once."""
        self._control.close()
        self._process.reap(0.0)

    async def end(self, grace_s: float) -> Exit:
        if not self._process.is_reaped:
            with anyio.CancelScope(shield=True):  # bounded: by the grace, and a kill
                await anyio.to_thread.run_sync(self._process.reap, grace_s)
        self._control.close()
        return self._process.reap(0.0)


def launch(rank: int, module: str = MODULE, *, files: Sequence[int] = ()) -> LocalPeer:
    """Start a worker process that runs `module` and inherits `files`.

    It is made in this thread, the event loop's, and not in one of a pool: the kernel ends the worker when the thread that
    made it ends.

    Raises:
        DeviceStartError: the system has refused.
    """
    try:
        ours, theirs = socket.socketpair()
    except OSError as error:
        raise DeviceStartError(f"cannot start a worker process: {error}") from None
    with theirs:
        try:
            ours.setblocking(False)
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
            process = WorkerProcess(theirs, f"worker {rank}", module, files=files)
        except BaseException:
            ours.close()
            raise
    return LocalPeer(process, ours)


class LaunchedAhead:
    """`Launcher` whose first worker runs already; it is ended with the block where no engine has taken it.

    Enter it in the thread of the event loop: the kernel ends a worker with the thread that made it.
    """

    def __init__(self) -> None:
        self._first: LocalPeer | None = None

    def __repr__(self) -> str:
        return f"<LaunchedAhead {self._first!r}>"

    def __enter__(self) -> Self:
        self._first = launch(0)
        self._first.send(*encode(Prepare()))
        return self

    def __call__(self, rank: int, *, files: Sequence[int] = ()) -> LocalPeer:
        """Return the worker that runs, once; then, and for other ranks, start one."""
        if rank or files or self._first is None:
            return launch(rank, files=files)
        first, self._first = self._first, None
        return first

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._first is not None:
            self._first.kill()
            self._first = None
