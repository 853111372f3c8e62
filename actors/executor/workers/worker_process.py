"""A worker's process on this machine: its start, its last words, and how it has ended."""

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
STDERR_LINES = 64  # of a worker's last words that are kept for the report of its death
STDERR_S = 1.0  # for the last lines of a worker that has ended


class Exit(msgspec.Struct, frozen=True):
    """How a worker has ended: its status, as `subprocess` has it, and its last words."""

    status: int | None
    was_out_of_memory: bool = False
    stderr: tuple[str, ...] = ()
    was_machine_lost: bool = False  # it has ended with the machine that it was on


class WorkerProcess:
    """A process that runs a worker; its stderr is repeated with a name in front.

    It is made in the thread that calls this, which must live as long: the kernel ends the worker when that thread ends.

    Args:
        control: the worker's end of its connection to the engine, which stays the caller's to close.
        name: for its lines on stderr.
        files: descriptors of its links to other workers, which it inherits.
        place: the facts of this machine in JSON, where it is not the front's.

    Raises:
        DeviceStartError: the system has refused.
    """

    def __init__(
        self,
        control: socket.socket,
        name: str,
        module: str = MODULE,
        *,
        files: Sequence[int] = (),
        place: bytes = b"",
    ) -> None:
        inherited = (control.fileno(), *files)
        facts = ("--place", place.decode()) if place else ()
        arguments = (*facts, *map(str, (control.fileno(), os.getpid(), *files)))
        try:
            self._process = subprocess.Popen(
                # -P: not what happens to lie in the folder where the engine was started
                [sys.executable, "-P", "-m", module, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # results of commands are the engine's to print
                stderr=subprocess.PIPE,
                pass_fds=inherited,
                start_new_session=True,
            )
        except OSError as error:
            raise DeviceStartError(f"cannot start a worker process: {error}") from None
        self._name = name
        self._oom_events = _oom_events()  # of the cgroup in which the worker was started
        self._num_oom_kills = num_oom_kills(self._oom_events)
        self._lines: deque[str] = deque(maxlen=STDERR_LINES)
        self._reader = threading.Thread(target=self._pass_on_stderr, daemon=True)
        self._reader.start()

    def __repr__(self) -> str:
        return f"<WorkerProcess: {self._name}, process {self.pid}>"

    @property
    def pid(self) -> int:
        """The process, for tests and for people."""
        return self._process.pid

    @property
    def is_reaped(self) -> bool:
        """Whether it has ended, and its status is known."""
        return self._process.returncode is not None

    def reap(self, grace_s: float) -> Exit:
        """Let it exit for so long, then kill it; blocks until nothing of it is left.  Idempotent."""
        if not self.is_reaped:
            try:
                self._process.wait(grace_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._reader.join(STDERR_S)  # a child of the worker may still hold its end
        return Exit(
            self._process.returncode,
            was_out_of_memory=self._process.returncode == -9
            and num_oom_kills(self._oom_events) > self._num_oom_kills,
            stderr=tuple(self._lines),
        )

    def _pass_on_stderr(self) -> None:
        """Repeat what the worker and its libraries write, with its name in front, and keep the last lines."""
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                text = line.decode(errors="replace").rstrip("\n")
                self._lines.append(text)
                # The program that this is a part of may have no stderr; the worker's pipe is read all the same.
                with contextlib.suppress(OSError, ValueError, AttributeError):
                    sys.stderr.write(f"{self._name}: {text}\n")


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
