"""Starts a worker process on this machine, forwards its stderr, and reports how it ended.

The last lines of stderr and the kernel's counter of out-of-memory kills are kept, because a dead process can
no longer explain itself.
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

import msgspec

from trouper.errors import DeviceStartError

MODULE = "trouper.actors.executor.workers.worker"
# Lines of stderr kept for the report of a worker's death.
STDERR_LINES = 64
# Seconds to read the last lines of an ended worker.
STDERR_S = 1.0


class Exit(msgspec.Struct, frozen=True):
    """How a worker ended: its status as in `subprocess` (negative for a signal), and its last lines of stderr.
    `was_machine_lost` means that the whole machine was lost.
    """

    status: int | None
    was_out_of_memory: bool = False
    stderr: tuple[str, ...] = ()
    was_machine_lost: bool = False


class WorkerProcess:
    """A worker process. Its stderr is repeated with its name at the start of each line.

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
        # The counter of the cgroup in which the worker was started.
        self._oom_events = _oom_events()
        self._num_oom_kills = num_oom_kills(self._oom_events)
        self._lines: deque[str] = deque(maxlen=STDERR_LINES)
        self._reader = threading.Thread(target=self._pass_on_stderr, daemon=True)
        self._reader.start()

    def __repr__(self) -> str:
        return f"<WorkerProcess: {self._name}, process {self.pid}>"

    @property
    def pid(self) -> int:
        """The process id, for tests and diagnostics. It may belong to another process after this one was reaped."""
        return self._process.pid

    @property
    def is_reaped(self) -> bool:
        """Whether the process has ended and its status is available."""
        return self._process.returncode is not None

    def reap(self, grace_s: float) -> Exit:
        """Wait up to `grace_s` seconds for the process to exit, then kill it. Blocks until it has ended.
        Idempotent.
        """
        if not self.is_reaped:
            try:
                self._process.wait(grace_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            # A child of the worker may still hold its end of the pipe, hence the time limit.
            self._reader.join(STDERR_S)
        return Exit(
            self._process.returncode,
            was_out_of_memory=self._process.returncode == -9
            and num_oom_kills(self._oom_events) > self._num_oom_kills,
            stderr=tuple(self._lines),
        )

    def _pass_on_stderr(self) -> None:
        """Repeat the stderr of the worker and its libraries with the worker's name, and keep the last lines."""
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                text = line.decode(errors="replace").rstrip("\n")
                self._lines.append(text)
                # The engine's process may have no stderr; the worker's pipe must be read nevertheless.
                with contextlib.suppress(OSError, ValueError, AttributeError):
                    sys.stderr.write(f"{self._name}: {text}\n")


def _oom_events() -> Path | None:
    """Find the file in which the kernel counts out-of-memory kills in this cgroup. Returns None on other
    systems.
    """
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
    """Read the counter of out-of-memory kills; 0 if the kernel does not provide it."""
    try:
        text = "" if events is None else events.read_text()
    except OSError:
        return 0
    counts = dict(line.split() for line in text.splitlines())
    return int(counts.get("oom_kill", 0))
