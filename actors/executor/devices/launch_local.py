"""Start worker processes on this machine, and reach them."""

import os
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import anyio
import anyio.to_thread
import msgspec

from trouper.actors.executor.devices.supervision import STDERR_LINES
from trouper.errors import DeviceStartError

MODULE = "trouper.actors.executor.devices.worker"
READ_BYTES = 2**18
MAX_FILES = 16
SEND_BUFFER = 2**20  # asked for; the system gives at least 212,992 bytes, see `wire.MAX_INLINE`
STDERR_S = 1.0  # for the last lines of a worker that has ended
CLOSED: tuple[bytes, list[int]] = (b"", [])


class Exit(msgspec.Struct, frozen=True):
    """How a worker has ended: its status, as `subprocess` has it, and its last words."""

    status: int | None
    was_out_of_memory: bool = False
    stderr: tuple[str, ...] = ()


class Peer(Protocol):
    """A worker as its engine reaches it: a stream of bytes each way, and an end."""

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
    """Starts the worker of a rank."""

    def __call__(self, rank: int, *, files: Sequence[int] = ()) -> Peer:
        """Start it; it inherits the descriptors, which only ranks that have neighbours are given.

        Raises:
            DeviceStartError: the system has refused.
        """
        ...


class LocalPeer:
    """A process of this machine, by a socket pair whose end is its sign of life."""

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket, rank: int) -> None:
        self._process = process
        self._control = control
        self._rank = rank
        self._oom_events = _oom_events()  # of the cgroup in which the worker was started
        self._num_oom_kills = num_oom_kills(self._oom_events)
        self._lines: deque[str] = deque(maxlen=STDERR_LINES)
        self._reader = threading.Thread(target=self._pass_on_stderr, daemon=True)
        self._reader.start()

    def __repr__(self) -> str:
        return f"<LocalPeer: worker {self._rank}, process {self._process.pid}>"

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

    async def end(self, grace_s: float) -> Exit:
        if self._process.returncode is None:
            with anyio.CancelScope(shield=True):  # bounded: by the grace, and a kill
                await anyio.to_thread.run_sync(self._reap, grace_s)
        self._control.close()
        return Exit(
            self._process.returncode,
            was_out_of_memory=self._process.returncode == -9
            and num_oom_kills(self._oom_events) > self._num_oom_kills,
            stderr=tuple(self._lines),
        )

    def _reap(self, grace_s: float) -> None:
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(STDERR_S)  # a child of the worker may still hold its end

    def _pass_on_stderr(self) -> None:
        """Repeat what the worker and its libraries write, with its rank in front, and keep the last lines."""
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                text = line.decode(errors="replace").rstrip("\n")
                self._lines.append(text)
                sys.stderr.write(f"worker {self._rank}: {text}\n")


def launch(rank: int, module: str = MODULE, *, files: Sequence[int] = ()) -> LocalPeer:
    """Start a worker process that runs `module` and inherits `files`.

    It is made in this thread, the event loop's, and not in one of a pool: the kernel ends the worker when the thread that
    made it ends.

    Raises:
        DeviceStartError: the system has refused.
    """
    ours, theirs = socket.socketpair()
    try:
        ours.setblocking(False)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        process = subprocess.Popen(
            # -P: not what happens to lie in the folder where the engine was started
            [sys.executable, "-P", "-m", module, *map(str, (theirs.fileno(), os.getpid(), *files))],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # results of commands are the engine's to print
            stderr=subprocess.PIPE,
            pass_fds=(theirs.fileno(), *files),
            start_new_session=True,
        )
    except OSError as error:
        ours.close()
        raise DeviceStartError(f"cannot start a worker process: {error}") from None
    finally:
        theirs.close()
    return LocalPeer(process, ours, rank)


def _oom_events() -> Path | None:
    """Find the file in which the kernel counts the processes of this cgroup that it has killed for memory."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2
            file = Path(f"/sys/fs/cgroup{path}/memory.events")
        elif "memory" in controllers.split(","):
            file = Path(f"/sys/fs/cgroup/memory{path}/memory.oom_control")
        else:
            continue
        if file.exists():
            return file
    return None


def num_oom_kills(events: Path | None) -> int:
    """Read the count; 0 where the kernel does not tell it."""
    try:
        text = "" if events is None else events.read_text()
    except OSError:
        return 0
    counts = dict(line.split() for line in text.splitlines())
    return int(counts.get("oom_kill", 0))
