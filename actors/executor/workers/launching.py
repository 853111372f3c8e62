"""Start the worker processes of a replica on this machine, connect to them, and report how they ended.

Linux's parent-death signal kills a worker when the thread that created it ends, so workers are created on the
event loop's thread and never in a thread pool. A worker started ahead imports torch while the engine's process
still imports its own modules, which shortens the start.

Shared memory and links are created before the processes and inherited by descriptor, so nothing remains in the
file system after a crash. Their sizes come from the config alone, without importing torch.

For the report of a worker's death, this process stores the last lines of its stderr, and reads Linux's counter of
out-of-memory kills.
"""

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import anyio
import anyio.to_thread
import msgspec

from trouper.actors.executor.models.families.mixtures import check_device
from trouper.actors.executor.models.families.registry import decoder_traits
from trouper.actors.executor.models.sharding import check_shards
from trouper.actors.executor.worker_links import (
    ModelSizes,
    SharedSizes,
    close_files,
    create_shared_files,
)
from trouper.actors.executor.workers.wire import MAX_INLINE, Prepare, encode
from trouper.config.engine_config import EngineConfig
from trouper.errors import DeviceStartError

MODULE = "trouper.actors.executor.workers.worker"
# The last lines of stderr to store for the report of a worker's death.
STDERR_LINES = 64
# Seconds to wait for the last lines of an ended worker.
STDERR_S = 1.0


class Exit(msgspec.Struct, frozen=True):
    """Describe how a worker ended: its exit status as in `subprocess` (negative for a signal), and its last lines of stderr.
    `was_machine_lost` means that its machine failed or became unreachable.
    """

    status: int | None
    was_out_of_memory: bool = False
    stderr: tuple[str, ...] = ()
    was_machine_lost: bool = False


class WorkerProcess:
    """Own a worker process. Each line of its stderr is repeated on this process's stderr, prefixed by the worker's name.

    The kernel ends the worker when the thread that created it ends, so create it in a thread that lives as
    long as the worker.

    Args:
        control: the worker's end of its connection to the engine. The caller closes it.
        name: prefix of its lines on stderr.
        files: descriptors of its links to other workers, which it inherits.
        machine: `MachineFacts` in JSON, if the worker does not run on the coordinator's machine.

    Raises:
        DeviceStartError: the system refused.
    """

    def __init__(
        self,
        control: socket.socket,
        name: str,
        module: str = MODULE,
        *,
        files: Sequence[int] = (),
        machine: bytes = b"",
    ) -> None:
        inherited = (control.fileno(), *files)
        facts = ("--machine", machine.decode()) if machine else ()
        arguments = (*facts, *map(str, (control.fileno(), os.getpid(), *files)))
        try:
            self._process = subprocess.Popen(
                # -P keeps the current folder off the module path.
                [sys.executable, "-P", "-m", module, *arguments],
                stdin=subprocess.DEVNULL,
                # Standard output belongs to the engine, which prints the results of commands.
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=inherited,
                start_new_session=True,
            )
        except OSError as error:
            raise DeviceStartError(f"cannot start a worker process: {error}") from None
        self._name = name
        # The out-of-memory counter of the worker's cgroup.
        self._oom_events = _oom_events()
        self._num_oom_kills = num_oom_kills(self._oom_events)
        self._lines: deque[str] = deque(maxlen=STDERR_LINES)
        self._reader = threading.Thread(target=self._pass_on_stderr, daemon=True)
        self._reader.start()

    def __repr__(self) -> str:
        return f"<WorkerProcess: {self._name}, process {self.pid}>"

    @property
    def pid(self) -> int:
        """Return the process id, for tests and diagnostics. After `reap`, the system may give it to another process."""
        return self._process.pid

    @property
    def is_reaped(self) -> bool:
        """Return whether the process has ended and its exit status is available."""
        return self._process.returncode is not None

    def reap(self, grace_s: float) -> Exit:
        """Wait up to `grace_s` seconds for the process to exit, then kill it. Blocks until it has ended. Idempotent."""
        if not self.is_reaped:
            try:
                self._process.wait(grace_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            # The wait is limited, because a child of the worker may hold the pipe open.
            self._reader.join(STDERR_S)
        return Exit(
            self._process.returncode,
            was_out_of_memory=self._process.returncode == -9
            and num_oom_kills(self._oom_events) > self._num_oom_kills,
            stderr=tuple(self._lines),
        )

    def _pass_on_stderr(self) -> None:
        """Repeat the stderr of the worker and its libraries with the worker's name, and store the last lines."""
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                text = line.decode(errors="replace").rstrip("\n")
                self._lines.append(text)
                # Keep reading even if the engine's process has no stderr, because a full pipe would block the worker.
                with contextlib.suppress(OSError, ValueError, AttributeError):
                    sys.stderr.write(f"{self._name}: {text}\n")


def _oom_events() -> Path | None:
    """Return the file in which Linux counts out-of-memory kills in this cgroup, or None if there is none."""
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
    """Read the counter of out-of-memory kills. Returns 0 if the system does not provide it."""
    try:
        text = "" if events is None else events.read_text()
    except OSError:
        return 0
    counts = dict(line.split() for line in text.splitlines())
    return int(counts.get("oom_kill", 0))


READ_BYTES = 2**18
MAX_FILES = 16
# Requested size of the send buffer in bytes; the system grants at least 212,992, see `wire.MAX_INLINE`.
SEND_BUFFER = 2**20
CLOSED: tuple[bytes, list[int]] = (b"", [])


class Peer(Protocol):
    """Connect an engine to one worker, by a byte stream in each direction.

    Attributes:
        max_inline: bytes of a payload sent within its frame; a larger payload arrives as a descriptor.
        where: location for messages, such as "on node 1"; empty on this machine.
    """

    max_inline: int
    where: str

    @property
    def pid(self) -> int:
        """Return the process id, or 0 if the worker runs on another machine."""
        ...

    def send(self, data: bytes, file: int | None) -> None:
        """Send a frame and, if given, its descriptor, without waiting.

        Raises:
            OSError: the worker has ended, or does not read.
        """
        ...

    async def receive(self) -> tuple[bytes, list[int]]:
        """Wait for bytes and descriptors. Empty bytes mean that the worker has hung up."""
        ...

    async def end(self, grace_s: float) -> Exit:
        """Wait up to `grace_s` seconds for the worker to exit, then kill it. Returns when the process has ended.
        Idempotent.
        """
        ...


class Launcher(Protocol):
    """Start the worker of a rank as a process.

    Ranks are numbered across replicas, so that each worker has a unique number.
    """

    def __call__(self, rank: int, *, files: Sequence[int] = ()) -> Peer:
        """Start the worker. It inherits the descriptors in `files`, which connect it to other workers.

        Raises:
            DeviceStartError: the system refused.
        """
        ...


class WorkersLauncher(Protocol):
    """Start all workers of a device, on one or several machines.

    A restart calls it again, after all earlier workers have ended, and may use other machines.
    """

    async def __call__(self) -> Sequence[Peer]:
        """Start all workers and return them in the order of their ranks. Waits for machines not
        connected.

        Raises:
            DeviceStartError: a machine refused or has no room; no worker remains.
        """
        ...

    async def release(self) -> None:
        """Release machines and files reserved for the next start, because there will be none. Idempotent."""
        ...


class LocalPeer:
    """Connect to a worker process on this machine by a socket pair, which hangs up when the worker ends.

    The worker is killed together with its engine.
    """

    max_inline = MAX_INLINE
    where = ""

    def __init__(self, process: WorkerProcess, control: socket.socket) -> None:
        self._process = process
        self._control = control

    def __repr__(self) -> str:
        return f"<LocalPeer: {self._process!r}>"

    @property
    def pid(self) -> int:
        """Return the process id of the worker, also after the process has ended; for tests and diagnostics."""
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
        # A partially sent frame would corrupt every later frame, so close the connection.
        if sent < len(data):
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
        """Kill a process that has no work yet, and wait until it has ended."""
        self._control.close()
        self._process.reap(0.0)

    async def end(self, grace_s: float) -> Exit:
        if not self._process.is_reaped:
            # The shield is bounded, because the process is killed after the grace period.
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(self._process.reap, grace_s)
        self._control.close()
        return self._process.reap(0.0)


def launch(rank: int, module: str = MODULE, *, files: Sequence[int] = ()) -> LocalPeer:
    """Start a worker process that runs `module` and inherits `files`. Call it on the event loop's thread, since the
    worker dies with the thread that created it.

    Raises:
        DeviceStartError: the system refused.
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
    """Implement `Launcher` and start its first worker when the block is entered. If no engine uses this worker, it is
    killed at the end of the block.

    Enter it on the event loop's thread.
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
        """Return the worker that was started ahead at the first call, and start a new one at every later call."""
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


class LocalLauncher:
    """Implement `WorkersLauncher` for one replica on this machine: one process for each rank, connected by rings."""

    def __init__(self, config: EngineConfig, replica: int, launcher: Launcher) -> None:
        self._config, self._launcher = config, launcher
        self._first_number = replica * config.workers_per_replica

    def __repr__(self) -> str:
        return f"<LocalLauncher from worker {self._first_number}>"

    async def __call__(self) -> Sequence[Peer]:
        is_alone = self._config.workers_per_replica == 1
        files = [()] if is_alone else create_shared_files(shared_sizes(self._config))
        return await launch_all(self._launcher, self._first_number, range(len(files)), files)

    async def release(self) -> None:
        # Workers on this machine reserve nothing between two starts.
        pass


async def launch_all(
    launcher: Launcher, first_number: int, ranks: Sequence[int], files: Sequence[tuple[int, ...]]
) -> list[Peer]:
    """Start the workers of these ranks.  Each inherits its descriptors, which this process then closes.

    Raises:
        DeviceStartError: the operating system refused; no worker remains.
    """
    peers: list[Peer] = []
    try:
        for rank, inherited in zip(ranks, files, strict=True):
            peers.append(launcher(first_number + rank, files=inherited))
    except BaseException:
        await end_all(peers)  # noqa: ASYNC102  # shielded inside
        raise
    finally:
        close_files(files)
    return peers


async def end_all(peers: Sequence[Peer]) -> None:
    """Kill workers after a failed start. It completes even if its caller is cancelled, so that no process remains."""
    # The shield is bounded, because each process is killed without a grace period.
    with anyio.CancelScope(shield=True):
        for peer in peers:
            await peer.end(0.0)


def shared_sizes(config: EngineConfig) -> SharedSizes:
    """Compute the sizes of all shared memory and links from the widths of the model.

    Raises:
        TrouperValidationError: the model cannot be split among this many ranks.
        UnsupportedFeatureError: the architecture is not supported, or not on this device.
    """
    traits = decoder_traits(config.model.hf_config, config.model.architecture)
    check_device(traits, config.device)
    check_shards(traits, config.tensor_parallel_size, quantization=config.quantization)
    return SharedSizes.of(config, ModelSizes(traits.hidden_size, traits.vocab_size))
