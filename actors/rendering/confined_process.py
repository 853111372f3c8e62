"""Run work in a child process with limits, for templates and grammars that cannot be trusted.

A renderer's thread sends an order and waits for the answer.  Both are frames of bytes: the length in four bytes,
big-endian, then the content.  The socket is the standard input of the child, which exits when the socket closes.  The
child inherits no environment variables, so foreign code finds no secrets in them.
"""

import os
import signal
import socket
import subprocess
import sys
import time

LENGTH_BYTES = 4
OVER_BUDGET = 3  # exit code of a process over its limits
RECEIVE_BYTES = 2**16
# For its time, or for its memory where nothing caught the error.
OVERRUN = tuple(-getattr(signal, name, 0) for name in ("SIGXCPU", "SIGSEGV", "SIGABRT"))


class HelperKilledError(ChildProcessError):
    """The process was killed from outside: by an operator, or by the kernel for lack of memory.

    The order itself is not at fault, so it may be tried again in a new process.
    """


def framed(payload: bytes) -> bytes:
    return len(payload).to_bytes(LENGTH_BYTES) + payload


class ConfinedProcess:
    """Process that carries out one order at a time.

    Args:
        module: the module to run, with its arguments.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, module: str, *arguments: object) -> None:
        self._pid = os.getpid()
        self._socket, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", module, *map(str, arguments)],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    env=_environment(),
                    start_new_session=True,  # Ctrl-C is for the server
                )
            except OSError:
                self._socket.close()
                raise

    @property
    def is_usable(self) -> bool:
        """Return whether the child is alive and was started by this process, not by the process from which it was forked."""
        is_open = self._socket.fileno() >= 0 and self._pid == os.getpid()
        return is_open and self._process.poll() is None

    def ask(self, order: bytes, wall_s: float) -> bytes:
        """Return the answer; the process is closed unless it has answered.

        Raises:
            TimeoutError: it takes longer than `wall_s`, or has ended because it took too much.
            HelperKilledError: it was killed from outside.
            ChildProcessError: it has ended for another reason.
        """
        answer, descriptor = self.ask_for_file(order, wall_s)
        if descriptor is not None:
            os.close(descriptor)
        return answer

    def ask_for_file(self, order: bytes, wall_s: float) -> tuple[bytes, int | None]:
        """Return the answer as `ask` does, and the descriptor of a file that came with it.

        An answer of many MiB comes as a file in memory, so that it is not copied through the socket.
        """
        descriptor: int | None = None
        try:
            deadline = time.monotonic() + wall_s
            self._socket.settimeout(wall_s)
            self._socket.sendall(framed(order))
            descriptor, head = self._receive_file(deadline)
            head += self._receive(LENGTH_BYTES - len(head), deadline)
            return self._receive(int.from_bytes(head), deadline), descriptor
        except BaseException as error:
            if descriptor is not None:
                os.close(descriptor)
            self._end(error, wall_s)
            raise

    def _end(self, error: BaseException, wall_s: float) -> None:
        """Close the process after a failure; raises the reason of its end if the socket broke."""
        if isinstance(error, OSError) and not isinstance(error, TimeoutError):
            failure = self._failure(wall_s)
            self.close()
            raise failure from None
        self.close()

    def _receive_file(self, deadline: float) -> tuple[int | None, bytes]:
        """Receive the first bytes of an answer, and the descriptor that may come with them."""
        self._socket.settimeout(max(0.001, deadline - time.monotonic()))
        begin, descriptors, _, _ = socket.recv_fds(
            self._socket, LENGTH_BYTES, 1, getattr(socket, "MSG_CMSG_CLOEXEC", 0)
        )
        if not begin:
            raise ConnectionResetError
        return (descriptors[0] if descriptors else None), begin

    def close(self) -> None:
        """End the process, whatever it is doing, together with its own children.

        In a forked child, the copy of this object only closes its descriptors.
        """
        self._socket.close()
        if self._pid != os.getpid():
            self._process.returncode = 0  # it is another's child: there is nothing to wait for
        elif self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)  # with what it has forked
            self._process.wait()
        if self._process.stderr is not None:
            self._process.stderr.close()

    def _receive(self, num_bytes: int, deadline: float) -> bytes:
        found = bytearray()
        while len(found) < num_bytes:
            self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            piece = self._socket.recv(min(RECEIVE_BYTES, num_bytes - len(found)))
            if not piece:
                raise ConnectionResetError
            found += piece
        return bytes(found)

    def _failure(self, wall_s: float) -> OSError:
        """Return why the process ended; it may have closed its socket a moment before its end."""
        try:
            code = self._process.wait(wall_s)
        except subprocess.TimeoutExpired:
            return TimeoutError()
        if code in OVERRUN or code == OVER_BUDGET:
            return TimeoutError()
        if code == -signal.SIGKILL:
            return HelperKilledError("killed")
        message = self._process.stderr.read()[-500:] if self._process.stderr is not None else b""
        return ChildProcessError(repr(message))


def _environment() -> dict[str, str]:
    """Name the place of the packages, and the time zone for templates that write the date."""
    zone = {name: value for name, value in os.environ.items() if name == "TZ"}
    return zone | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
