"""Pass the listening sockets of a running server to its successor, so that an upgrade refuses no connection.

    successor: Ask → (loads) → Take → (opens the journal) → Done      server: Offer and the sockets → Released → Left

The server offers its sockets at a socket file next to that of `--admin-uds`.  A successor gets copies of them at once, but accepts nothing
until its model is ready.  Then the server stops accepting and closes its journal; new connections wait in the kernel meanwhile.

Laws.  Only a process of the same user gets an answer.  Until it has sent `Left`, whatever happens to the successor, the server accepts again
and goes on; then it only finishes what it has begun.  The successor accepts when it has received `Left`, or when the server has ended.  A server
that goes on sends a refusal before it closes the connection, so a connection closed without one is the end of the server.  A successor that waits
no longer closes the connection first, so that `Left` cannot be sent any more: also if either is stopped at any moment, exactly one of them
goes on.
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

# Of the messages below; servers of different versions refuse each other.
PROTOCOL = 2
SUFFIX = ".take-over"
# The longest message: a path of 4 KiB, and some hundred names of adapters.
MAX_BYTES = 2**16
# At most five listeners and the socket of the next take-over.
MAX_SOCKETS = 6
# Seconds for an answer to a short question.
ANSWER_S = 10.0
# Seconds in which requests of the connections accepted last reach their handlers, before the journal is closed.
SETTLE_S = 0.2
# Seconds for the successor to open the journal and to resume its answers.
DONE_S = 60.0
# The same for the successor, which gives up first: only one of them accepts.
FINISH_S = 45.0
# Seconds between two attempts to accept after an error.
RETRY_S = 1.0
SILENT = "the running server does not answer"
TOO_LATE = f"it took longer than {DONE_S:g} s to begin"
# What a message from the other side may fail with.
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
    """The successor is ready.  The digest names its model in the journal; it is empty without a journal."""

    fingerprint: bytes = b""


class Done(msgspec.Struct, frozen=True, tag=True):
    """The successor has the journal, and begins to accept."""


class Offer(msgspec.Struct, frozen=True, tag=True):
    """The names of the sockets that come with this message, in their order."""

    pid: int
    listeners: list[str]


class Released(msgspec.Struct, frozen=True, tag=True):
    """The server accepts no more, and its journal is closed."""


class Left(msgspec.Struct, frozen=True, tag=True):
    """The server only finishes what it has begun."""


class TakeOverRefusal(msgspec.Struct, frozen=True, tag=True):
    """Why there is no take-over, and the option to change."""

    parameter: str
    message: str


Message = Ask | Take | Done | Offer | Released | Left | TakeOverRefusal


def describe_server(settings: ServeSettings) -> Ask:
    """Return what a successor must have in common with a server of these settings."""
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
    """Open the socket at which successors ask, next to that of `--admin-uds`.  Returns None if it cannot be opened."""
    try:
        return listeners.socket_file("take_over", admin_uds + SUFFIX)
    except TrouperValidationError as error:
        report(f"no other server can take over from this one: {error}")
        return None


def refusal_of(server: Ask, successor: Ask) -> TakeOverRefusal | None:
    """Decide whether a successor may take over.  Returns the reason why not, if there is one.

    Clients must find the same addresses, and durable answers must not be lost.  Everything else may
    change.
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
        return TakeOverRefusal("ssl_certfile", f"the running server speaks {kind}; do the same")
    if server.journal is not None and server.journal != successor.journal:
        text = f"the running server keeps durable answers in {server.journal}; give the same folder"
        return TakeOverRefusal("journal", text)
    missing = sorted(set(server.adapters) - set(successor.adapters))
    if missing:
        text = (
            f"the running server has loaded {missing[0]!r}; give it too, or unload it there first"
        )
        return TakeOverRefusal("lora_modules", text)
    return None


class RunningServer(Protocol):
    """The running server, as far as a hand-over concerns it."""

    def describe(self) -> Ask:
        """Describe the server as it is now."""
        ...

    def sockets(self) -> dict[str, socket.socket]:
        """Return the listening sockets by the names of their options."""
        ...

    def stop_accepting(self) -> None:
        """Leave new connections in the queue of the kernel."""
        ...

    def accept_again(self) -> None:
        """Go on as before `stop_accepting`."""
        ...

    async def close_journal(self, fingerprint: bytes) -> str | None:
        """Close the journal, so that a server of this model can open it.  Returns the reason why this would lose answers."""
        ...

    def reopen_journal(self) -> None:
        """Use the journal again."""
        ...

    async def leave(self) -> None:
        """Finish what was begun, and end."""
        ...


class HandOver:
    """The running server's side.

    Args:
        listeners: the successor gets their files.
        offered: the socket at which successors ask.  It is passed, too.
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
        """Answer one successor after the other, until one has taken over."""
        async with await SocketListener.from_socket(self._offered.dup()) as listener:
            task_status.started()
            while not self.is_done:
                try:
                    stream = await listener.accept()
                except OSError as error:
                    # Connections may have taken all file descriptors.
                    self._report(f"another process cannot ask for the listeners: {error}")
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
            self._report(f"process {pid} of user {uid} asked for the listeners and got none")
            return
        channel = _Channel(stream)
        try:
            with anyio.fail_after(ANSWER_S):
                asked = await channel.receive()
            if isinstance(asked, Ask):
                await self._answer(channel, asked)
        except BROKEN as error:
            self._listeners.owns_files = True
            self._report(f"process {pid} has not taken over, this server goes on: {error!r}")

    async def _answer(self, channel: "_Channel", asked: Ask) -> None:
        refusal = refusal_of(self._server.describe(), asked)
        if refusal is not None:
            await channel.send(refusal)
            return
        self._report(f"process {asked.pid} (trouper {asked.program}) prepares to take over")
        passed = {**self._server.sockets(), "take_over": self._offered}
        files = [sock.fileno() for sock in passed.values()]
        # If this server is stopped now, the successor accepts at the same files.
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
            # The successor would take a closed connection for the end of this server, and accept, too.
            with anyio.move_on_after(ANSWER_S), suppress(*BROKEN):
                text = f"the running server goes on: {failure}"
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
            # It fails if the successor waits no longer.
            await channel.send(Left())
            self.is_done = True
        finally:
            if not self.is_done:
                self._server.reopen_journal()
                self._server.accept_again()


class Predecessor:
    """The successor's side: the running server, from which it takes over.

    Attributes:
        pid: the process of the running server.
        sockets: by the names of their options.
    """

    def __init__(self, link: socket.socket, offer: Offer, sockets: Sequence[socket.socket]) -> None:
        self._link = link
        # Until then `finish` may be called.
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
            # Nothing comes from a server that does not understand the question.
            answer = _receive_last(link, data)
            if not isinstance(answer, Offer) or len(files) != len(answer.listeners):
                for file in files:
                    os.close(file)
                raise _refused(answer)
            found = [socket.socket(fileno=file) for file in files]
            for sock in found:
                # No process that this one starts may keep it open.
                sock.set_inheritable(False)
            return cls(link, answer, found)
        except TimeoutError:
            link.close()
            text = "the server does not answer; perhaps it is still loading, or another one is taking over from it"
            raise invalid("take_over", text, path) from None
        except OSError as error:
            link.close()
            text = (
                "no running server of one model has this --admin-uds and passes its listeners "
                f"({error.strerror or error})"
            )
            raise invalid("take_over", text, path) from None
        except BaseException:
            link.close()
            raise

    def take(self, fingerprint: bytes) -> None:
        """Wait until the running server accepts no more and has closed its journal.  Call it from a thread.

        After the end of the running server there is nothing to wait for.

        Raises:
            TrouperValidationError: it refuses, or does not answer.
        """
        try:
            answer = self._exchange(Take(fingerprint), DONE_S)
        except TimeoutError:
            # It may still accept.
            raise invalid("take_over", SILENT, self.pid) from None
        if isinstance(answer, Released):
            self._latest = time.monotonic() + FINISH_S
        elif answer is not None:
            raise _refused(answer)

    def finish(self, listeners: OpenListeners) -> None:
        """Let the running server leave.  It goes on if this is not called, or fails.  Call it from a thread.

        Raises:
            TrouperValidationError: this comes too late, or the running server does not answer.
        """
        if time.monotonic() > self._latest:
            raise invalid("take_over", f"took longer than {FINISH_S:g} s to begin", self.pid)
        try:
            answer = self._exchange(Done(), ANSWER_S)
        except TimeoutError:
            # It cannot answer from now on, but may have done so just before.
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
            TimeoutError: nothing comes in time.
            TrouperValidationError: something else comes.
        """
        self._link.settimeout(limit_s)
        try:
            self._link.sendall(_encode(message))
        except OSError:
            # It has ended, or its refusal can still be read.
            pass
        try:
            return _receive_last(self._link)
        except TimeoutError:
            raise
        except OSError:
            return None

    def close(self) -> None:
        """Let the running server go on, unless `finish` was called.  Idempotent."""
        self._link.close()


class _Channel:
    """Messages over a connection, one line of JSON each.  Each side waits for the other's before it sends the next."""

    def __init__(self, stream: UNIXSocketStream) -> None:
        self._stream = stream

    async def receive(self) -> Message:
        """Return the next message.  Raises ValueError for anything else, and anyio's errors for a broken connection."""
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
    """Return the process and the user at the other end of a socket, as the kernel knows them."""
    size = CREDENTIALS.size
    pid, uid, _ = CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return pid, uid


def _encode(message: Message) -> bytes:
    return msgspec.json.encode(message) + b"\n"


def _decode(data: bytes) -> Message:
    """Raises ValueError for anything but a message."""
    try:
        return msgspec.json.decode(data, type=Message)
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from None


def _receive_last(link: socket.socket, data: bytes = b"") -> Message | None:
    """Return the last of the received answers: a refusal may follow an unread answer.

    Returns None if the connection ends before a whole answer.

    Args:
        data: earlier bytes of the answer.

    Raises:
        TrouperValidationError: something else came.
        TimeoutError: nothing comes.
        OSError: the connection is broken.
    """
    while not data.endswith(b"\n") and len(data) < MAX_BYTES:
        more = link.recv(MAX_BYTES)
        if not more:
            # The end of a server may cut its last answer.
            return None
        data += more
    try:
        return _decode(data.splitlines()[-1])
    except ValueError as error:
        text = f"the running server has sent something else than an answer: {error}"
        raise invalid("take_over", text) from None


def _refused(answer: Message | None) -> TrouperValidationError:
    if isinstance(answer, TakeOverRefusal):
        return invalid(answer.parameter, answer.message)
    return invalid("take_over", "the running server has given no sockets")
