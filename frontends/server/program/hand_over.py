"""Pass the listening sockets of a running server to its successor, so that an upgrade refuses no connection.

    successor: Ask → (loads) → Take → (opens the journal) → Done      server: Offer and the sockets → Released → Left

The server listens for successors at a socket file next to that of `--admin-uds`.  A successor gets copies of the sockets at once, but
accepts no connection until its model is loaded.  Then the server stops accepting and closes its journal, while new connections queue in the
kernel.

Laws:
1. Only a process of the same user gets an answer.
2. Exactly one of the two accepts in the end, even if either is killed at any moment:
   * Until the server has sent `Left`, any failure of the successor makes it accept again.  After `Left` it only finishes its open requests.
   * The successor accepts after it has received `Left`, or when the server's process has ended.
   * A server that continues sends a refusal before it closes the connection.  So a connection closed without one means that it has ended.
   * A successor that gives up closes its connection first, so that `Left` can no longer be sent.
"""

import math
import os
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol, Self

import anyio
import msgspec
from anyio.abc import SocketAttribute, SocketListener, TaskStatus, UNIXSocketStream

from trouper import __version__
from trouper.errors import TrouperValidationError, invalid
from trouper.frontends.server.http.listeners import LOOPBACK, OLLAMA_PORT, OpenListeners
from trouper.frontends.server.shared.settings import ServeSettings

# The version of the messages below.  Servers with different versions refuse each other.
PROTOCOL = 2
SUFFIX = ".take-over"
# The longest message: a path of 4 KiB, and a few hundred names of adapters.
MAX_BYTES = 2**16
# Five listeners, and the socket for the next take-over.
MAX_SOCKETS = 6
# The time limit of an answer that needs no loading, in seconds.
ANSWER_S = 10.0
# Seconds before the journal is closed, in which requests of the last accepted connections reach their handlers.
SETTLE_S = 0.2
# Seconds that the server gives its successor to open the journal and resume its answers.
DONE_S = 60.0
# The successor's own, shorter limit for this.  It gives up first, so that never both accept.
FINISH_S = 45.0
# Seconds between two attempts to accept after an error.
RETRY_S = 1.0
SILENT = "the running server does not answer; stop it, or try again later"
TOO_LATE = f"the successor was not ready within {DONE_S:g} s"
# The errors of a broken connection or an invalid message.
BROKEN = (anyio.EndOfStream, anyio.BrokenResourceError, OSError, ValueError)
CREDENTIALS = struct.Struct("3i")


class Ask(msgspec.Struct, frozen=True, tag=True):
    """Describe what a server and its successor must have in common.

    Attributes:
        listeners: the addresses by the names of their options.
        journal: the folder without symbolic links.
        adapters: the names of its adapters.
    """

    protocol: int
    program: str
    pid: int
    listeners: dict[str, str]
    has_tls: bool
    journal: str | None
    adapters: list[str]


class Take(msgspec.Struct, frozen=True, tag=True):
    """Announce that the successor is loaded.  The fingerprint identifies its model in the journal; it is empty without a journal."""

    fingerprint: bytes = b""


class Done(msgspec.Struct, frozen=True, tag=True):
    """Announce that the successor has opened the journal and is ready to accept."""


class Offer(msgspec.Struct, frozen=True, tag=True):
    """Name the sockets attached to this message, in the same order."""

    pid: int
    listeners: list[str]


class Released(msgspec.Struct, frozen=True, tag=True):
    """Confirm that the server has stopped accepting and has closed its journal."""


class Left(msgspec.Struct, frozen=True, tag=True):
    """Confirm that the server only finishes its open requests and then exits."""


class TakeOverRefusal(msgspec.Struct, frozen=True, tag=True):
    """Refuse a take-over with a reason and the option to change."""

    parameter: str
    message: str


Message = Ask | Take | Done | Offer | Released | Left | TakeOverRefusal


def describe_server(settings: ServeSettings) -> Ask:
    """Return the facts about a server with these settings that its successor must share."""
    listeners = {"port": f"{settings.host}:{settings.port}"}
    if settings.uds is not None:
        listeners = {"uds": os.path.realpath(settings.uds)}
    if settings.ollama:
        listeners["ollama"] = f"{LOOPBACK}:{OLLAMA_PORT}"
    if settings.admin_uds is not None:
        listeners["admin_uds"] = os.path.realpath(settings.admin_uds)
    if settings.admin_port is not None:
        listeners["admin_port"] = f"{LOOPBACK}:{settings.admin_port}"
    journal = None if settings.journal is None else os.path.realpath(settings.journal)
    return Ask(
        PROTOCOL, __version__, os.getpid(), listeners, settings.ssl_certfile is not None,
        journal, [adapter.lora_name for adapter in settings.lora_modules],
    )  # fmt: skip


def offering(
    listeners: OpenListeners, admin_uds: str, report: Callable[[str], None]
) -> socket.socket | None:
    """Open the socket for successors, next to that of `--admin-uds`.  On an error, reports it and returns None."""
    try:
        return listeners.socket_file("take_over", admin_uds + SUFFIX)
    except TrouperValidationError as error:
        report(f"no other server can take over from this one: {error}")
        return None


def refusal_of(server: Ask, successor: Ask) -> TakeOverRefusal | None:
    """Decide whether a successor may take over.  Returns None if it may.

    Clients must find the same addresses and adapters, and no durable answer may be lost.  Everything else may change.
    """
    if server.protocol != successor.protocol:
        text = (
            f"the running server (trouper {server.program}) cannot pass its listeners to trouper {successor.program}: "
            "stop it and start this one"
        )
        return TakeOverRefusal("take_over", text)
    for name in {**server.listeners, **successor.listeners}:
        theirs, ours = server.listeners.get(name), successor.listeners.get(name)
        if theirs is None:
            return TakeOverRefusal(
                name, f"the running server has no such listener ({ours}); leave it out"
            )
        if ours != theirs:
            return TakeOverRefusal(
                name, f"the running server listens at {theirs}; give the same address"
            )
    if server.has_tls != successor.has_tls:
        kind = "https" if server.has_tls else "http without a certificate"
        return TakeOverRefusal("ssl_certfile", f"the running server uses {kind}; use the same")
    if server.journal is not None and server.journal != successor.journal:
        text = (
            f"the running server stores durable answers in {server.journal}; give the same folder"
        )
        return TakeOverRefusal("journal", text)
    missing = sorted(set(server.adapters) - set(successor.adapters))
    if missing:
        text = f"the running server has loaded the adapter {missing[0]!r}; load it here, too, or unload it there first"
        return TakeOverRefusal("lora_modules", text)
    return None


class RunningServer(Protocol):
    """Control the running server during a hand-over."""

    def describe(self) -> Ask:
        """Describe the server, with the adapters that are loaded now."""
        ...

    def sockets(self) -> dict[str, socket.socket]:
        """Return the listening sockets by the names of their options."""
        ...

    def stop_accepting(self) -> None:
        """Stop accepting, so that new connections queue in the kernel."""
        ...

    def accept_again(self) -> None:
        """Undo `stop_accepting`."""
        ...

    async def close_journal(self, fingerprint: bytes) -> str | None:
        """Close the journal for a server with this fingerprint.  If that would lose answers, keeps it and returns the reason."""
        ...

    def reopen_journal(self) -> None:
        """Undo `close_journal`."""
        ...

    async def leave(self) -> None:
        """Finish the open requests, then end the server."""
        ...


class HandOver:
    """Run the server's side of the protocol.

    Args:
        listeners: the owner of the socket files, which the successor inherits.
        offered: the socket at which successors connect.  It is passed on, too, for the next take-over.
    """

    def __init__(
        self,
        server: RunningServer,
        listeners: OpenListeners,
        offered: socket.socket,
        report: Callable[[str], None],
    ) -> None:
        self._server, self._report = server, report
        self._listeners, self._offered = listeners, offered
        self.is_done = False

    def __repr__(self) -> str:
        return f"<HandOver {'done' if self.is_done else 'offered'}>"

    async def listen(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Serve one successor after the other until one has taken over, then let the server finish."""
        async with await SocketListener.from_socket(self._offered.dup()) as listener:
            task_status.started()
            while not self.is_done:
                try:
                    stream = await listener.accept()
                except OSError as error:
                    # Client connections may have used up all file descriptors.
                    self._report(
                        f"cannot accept a request to take over, trying again in {RETRY_S:g} s: {error}"
                    )
                    await anyio.sleep(RETRY_S)
                    continue
                async with stream:
                    assert isinstance(stream, UNIXSocketStream)
                    await self._attend(stream)
        self._offered.close()
        await self._server.leave()

    async def _attend(self, stream: UNIXSocketStream) -> None:
        pid, uid = peer_of(stream.extra(SocketAttribute.raw_socket))
        if uid != os.geteuid():
            self._report(
                f"refused to pass the listeners to process {pid}: it belongs to another user ({uid})"
            )
            return
        channel = _Channel(stream)
        try:
            with anyio.fail_after(ANSWER_S):
                asked = await channel.receive()
            if isinstance(asked, Ask):
                await self._answer(channel, asked)
        except BROKEN as error:
            self._listeners.owns_files = True
            self._report(f"process {pid} has not taken over, so this server continues: {error!r}")

    async def _answer(self, channel: "_Channel", asked: Ask) -> None:
        refusal = refusal_of(self._server.describe(), asked)
        if refusal is not None:
            await channel.send(refusal)
            return
        self._report(f"process {asked.pid} (trouper {asked.program}) is preparing to take over")
        passed = {**self._server.sockets(), "take_over": self._offered}
        files = [sock.fileno() for sock in passed.values()]
        # From now on an exit must not unlink the socket files, because the successor would accept at them.
        self._listeners.owns_files = False
        await channel.send(Offer(os.getpid(), list(passed)), files)
        failure: Exception | None = None
        try:
            taken = await channel.receive()
            if not isinstance(taken, Take):
                raise ValueError(f"it sent {taken!r} instead of Take")
            await self._pass_on(channel, taken.fingerprint)
        except BROKEN as error:
            failure = error
        if failure is not None:
            # Without a refusal, the successor would conclude that this server has ended, and both would accept.
            with anyio.move_on_after(ANSWER_S), suppress(*BROKEN):
                text = f"the running server continues: {failure}"
                await channel.send(TakeOverRefusal("take_over", text))
            raise failure

    async def _pass_on(self, channel: "_Channel", fingerprint: bytes) -> None:
        self._server.stop_accepting()
        try:
            await anyio.sleep(SETTLE_S)
            problem = await self._server.close_journal(fingerprint)
            if problem is not None:
                self._listeners.owns_files = True
                await channel.send(TakeOverRefusal("journal", problem))
                return
            await channel.send(Released())
            done: Message | None = None
            with anyio.move_on_after(DONE_S):
                done = await channel.receive()
            if done is None:
                raise TimeoutError(TOO_LATE)
            if not isinstance(done, Done):
                raise ValueError(f"it sent {done!r} instead of Done")
            # Fails if the successor has given up, because then it has closed the connection.
            await channel.send(Left())
            self.is_done = True
        finally:
            if not self.is_done:
                self._server.reopen_journal()
                self._server.accept_again()


class Predecessor:
    """Run the successor's side of the protocol with the server from which it takes over.

    Attributes:
        pid: the process id of the running server.
        sockets: the listening sockets by the names of their options.
    """

    def __init__(self, link: socket.socket, offer: Offer, sockets: Sequence[socket.socket]) -> None:
        self._link = link
        # The deadline of `finish`, on the monotonic clock.
        self._latest = math.inf
        self.pid = offer.pid
        self.sockets = dict(zip(offer.listeners, sockets, strict=True))

    def __repr__(self) -> str:
        return f"<Predecessor {self.pid}>"

    @classmethod
    def ask(cls, path: str, asked: Ask) -> Self:
        """Ask the server with this `--admin-uds` for its sockets.

        Raises:
            TrouperValidationError: there is no such server, it belongs to another user, or it refuses.
        """
        link = socket.socket(socket.AF_UNIX)
        link.settimeout(ANSWER_S)
        files: list[int] = []
        try:
            link.connect(path + SUFFIX)
            _, uid = peer_of(link)
            if uid != os.geteuid():
                raise invalid("take_over", f"the server belongs to user {uid}", path)
            link.sendall(_encode(asked))
            data, files, _, _ = socket.recv_fds(link, MAX_BYTES, MAX_SOCKETS)
            # A server that cannot parse the message closes the connection without an answer.
            answer = _receive_last(link, data)
            if not isinstance(answer, Offer) or len(files) != len(answer.listeners):
                for file in files:
                    os.close(file)
                raise _refused(answer)
            found = [socket.socket(fileno=file) for file in files]
            for sock in found:
                # Otherwise a worker process would keep the socket open.
                sock.set_inheritable(False)
            return cls(link, answer, found)
        except TimeoutError:
            link.close()
            text = "the running server does not answer; it may still be loading, or another process is taking over from it"
            raise invalid("take_over", text, path) from None
        except OSError as error:
            link.close()
            text = (
                "no server with this --admin-uds offers its listeners; it must be running and serve a single model "
                f"({error.strerror or error})"
            )
            raise invalid("take_over", text, path) from None
        except BaseException:
            link.close()
            raise

    def take(self, fingerprint: bytes) -> None:
        """Wait until the running server has stopped accepting and has closed its journal, or has ended.  Call it from a thread.

        Raises:
            TrouperValidationError: the running server refuses or does not answer.
        """
        try:
            answer = self._exchange(Take(fingerprint), DONE_S)
        except TimeoutError:
            # The server may be alive and still accept.
            raise invalid("take_over", SILENT, self.pid) from None
        if isinstance(answer, Released):
            self._latest = time.monotonic() + FINISH_S
        elif answer is not None:
            raise _refused(answer)

    def finish(self, listeners: OpenListeners) -> None:
        """Make the running server finish, so that this process may accept.  Call it from a thread.

        If this is not called, or raises, the running server continues.

        Raises:
            TrouperValidationError: the deadline has passed, or the running server does not answer.
        """
        if time.monotonic() > self._latest:
            text = f"opening the journal took longer than {FINISH_S:g} s, so the running server continues"
            raise invalid("take_over", text, self.pid)
        try:
            answer = self._exchange(Done(), ANSWER_S)
        except TimeoutError:
            # After the shutdown no `Left` can be sent, but one may already have arrived.
            self._link.shutdown(socket.SHUT_RDWR)
            answer = _receive_last(self._link)
            if answer is None:
                raise invalid("take_over", SILENT, self.pid) from None
        if answer is not None and not isinstance(answer, Left):
            raise _refused(answer)
        listeners.owns_files = True
        self._link.close()

    def _exchange(self, message: Message, limit_s: float) -> Message | None:
        """Send a message, and return the last answer.  Returns None if the running server has ended.

        Raises:
            TimeoutError: no answer arrives in time.
            TrouperValidationError: the answer is not a message of the protocol.
        """
        self._link.settimeout(limit_s)
        try:
            self._link.sendall(_encode(message))
        except OSError:
            # The server has ended, or it has closed the connection after a refusal that can still be read.
            pass
        try:
            return _receive_last(self._link)
        except TimeoutError:
            raise
        except OSError:
            return None

    def close(self) -> None:
        """Close the connection.  The running server continues unless `finish` has succeeded.  Idempotent."""
        self._link.close()


class _Channel:
    """Exchange messages over a connection, one line of JSON each.

    The sides alternate, so at most one message is in flight in each direction.
    """

    def __init__(self, stream: UNIXSocketStream) -> None:
        self._stream = stream

    async def receive(self) -> Message:
        """Return the next message.  Raises ValueError for an invalid message, and anyio's errors for a broken connection."""
        data = await self._stream.receive(MAX_BYTES)
        while not data.endswith(b"\n") and len(data) < MAX_BYTES:
            data += await self._stream.receive(MAX_BYTES - len(data))
        return _decode(data)

    async def send(self, message: Message, files: Sequence[int] = ()) -> None:
        if files:
            await self._stream.send_fds(_encode(message), files)
        else:
            await self._stream.send(_encode(message))


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """Return (pid, uid) of the process at the other end of a Unix socket, as reported by the kernel."""
    size = CREDENTIALS.size
    pid, uid, _ = CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return pid, uid


def _encode(message: Message) -> bytes:
    return msgspec.json.encode(message) + b"\n"


def _decode(data: bytes) -> Message:
    """Decode a message.  Raises ValueError if it is invalid."""
    try:
        return msgspec.json.decode(data, type=Message)
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from None


def _receive_last(link: socket.socket, data: bytes = b"") -> Message | None:
    """Return the last received message, because a refusal may follow an unread answer.

    Returns None if the connection ends before a complete message.

    Args:
        data: bytes of the answer that were already received.

    Raises:
        TrouperValidationError: the received line is not a message.
        TimeoutError: nothing arrives within the socket's timeout.
        OSError: the connection is broken.
    """
    while not data.endswith(b"\n") and len(data) < MAX_BYTES:
        more = link.recv(MAX_BYTES)
        if not more:
            # A server that ends may leave its last message incomplete.
            return None
        data += more
    try:
        return _decode(data.splitlines()[-1])
    except ValueError as error:
        text = f"the running server sent an invalid answer; stop it and start this one: {error}"
        raise invalid("take_over", text) from None


def _refused(answer: Message | None) -> TrouperValidationError:
    if isinstance(answer, TakeOverRefusal):
        return invalid(answer.parameter, answer.message)
    return invalid("take_over", "the running server sent no sockets; stop it and start this one")
