"""hypercorn's protocols over trio's sockets: `serve` in place of hypercorn's own.

Its connections start a task whenever a client falls idle, and take every frame through a lock, a shield and two turns of
the event loop.  Here idleness is a deadline, and what the kernel takes at once is written at once.

Laws.  Bytes leave in the order of the calls.  A client that is idle, or has not sent a whole head, for `keep_alive_timeout`
is left, and so is every idle one when the server closes.  What is larger than `SMALL` gives others a turn.
"""

import math
import os
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, cast

import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol import ProtocolWrapper
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.trio.task_group import TaskGroup
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState
from hypercorn.utils import parse_socket_addr

from trouper.frontends.server.http.listeners import BACKLOG
from trouper.frontends.server.http1 import SMALL, Http1, Shared

MAX_RECV = 2**16
# Of a body of which so much is still to come: 90 MB take half as much of the loop, at 0.1 ms a piece.
LARGE_RECV = 2**18
CLOSE_S = 1.0  # for the last words of TLS
SLACK_S = 0.25  # that an idle client may stay longer
Stream = trio.SocketStream | trio.SSLStream[trio.SocketStream]


async def serve(app: Any, config: Config, wait_close: Callable[[], Awaitable[object]]) -> None:
    """Until `wait_close` returns, and then until all have their answers or `graceful_timeout` is over.

    What an ASGI application has as `greet(scope)` is asked first: it answers at once, or says None and is called.
    """
    house = House(app, config)
    async with trio.open_nursery() as connections:
        async with trio.open_nursery() as accepting:
            accept = partial(trio.serve_listeners, handler_nursery=connections)
            accepting.start_soon(accept, house.receive, _listeners(config))
            await wait_close()
            accepting.cancel_scope.cancel()
        await house.close()
        connections.cancel_scope.deadline = trio.current_time() + config.graceful_timeout


def _listeners(config: Config) -> list[trio.abc.Listener[Any]]:
    sockets, context = config.create_sockets(), config.create_ssl_context()
    listeners: list[trio.abc.Listener[Any]] = []
    for socket in (*sockets.insecure_sockets, *sockets.secure_sockets):
        socket.listen(BACKLOG)
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(socket))
        if socket in sockets.secure_sockets:
            assert context is not None
            listeners.append(trio.SSLListener(listener, context, https_compatible=True))
        else:
            listeners.append(listener)
    return listeners


class House:
    """What all connections share."""

    def __init__(self, app: Any, config: Config) -> None:
        self.config = config
        self.context = WorkerContext(None)
        self.shared = Shared(app, getattr(app, "greet", _greet), config, self.context)
        self.idle: set[Connection] = set()

    async def receive(self, stream: Stream) -> None:
        await Connection(self, stream).run()

    async def close(self) -> None:
        """Whoever asks nothing is left; answers under way are the last on their connections."""
        await self.context.terminated.set()
        for connection in self.idle:
            connection.leave()


def _greet(_: object) -> None:
    """An application that has nothing to say before it is called."""


class Connection:
    """One client's, for any number of requests one after another (HTTP/1.1) or at a time (HTTP/2)."""

    def __init__(self, house: House, stream: Stream) -> None:
        self._house = house
        self._stream = stream
        self._writing = trio.Lock()  # what the kernel did not take at once
        self._reading = trio.CancelScope()  # its deadline is when an idle client is left
        self._protocol: Protocols

    async def run(self) -> None:
        try:
            plain, alpn = await self._shake_hands()
            socket = plain.socket
            client = parse_socket_addr(socket.family, socket.getpeername())
            server = parse_socket_addr(socket.family, socket.getsockname())
            async with TaskGroup() as tasks:
                self._protocol = Protocols(
                    self._house,
                    self._write,
                    tasks,
                    ConnectionState({}),
                    self._stream is not plain,
                    client,
                    server,
                    self._handle,
                    alpn,
                )
                await self._protocol.initiate()
                self._note_idle()
                await self._read()
        except (OSError, trio.BrokenResourceError, trio.TooSlowError):
            pass  # it is gone
        finally:
            self._house.idle.discard(self)
            with trio.move_on_after(CLOSE_S, shield=True):
                await self._close()
            # it knows us: a circle, which only the collector would find
            vars(self).pop("_protocol", None)

    def leave(self) -> None:
        """It is idle, and has been for long enough."""
        self._reading.cancel()

    async def _shake_hands(self) -> tuple[trio.SocketStream, str]:
        if isinstance(self._stream, trio.SocketStream):
            return self._stream, "http/1.1"
        with trio.fail_after(self._house.config.ssl_handshake_timeout):
            await self._stream.do_handshake()
        return self._stream.transport_stream, self._stream.selected_alpn_protocol() or "http/1.1"

    async def _read(self) -> None:
        try:
            with self._reading:
                while data := await self._receive():
                    await self._protocol.handle(RawData(data))
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # it is gone
        await self._protocol.handle(Closed())

    async def _receive(self) -> bytes:
        if not isinstance(self._stream, trio.SocketStream):
            return bytes(await self._stream.receive_some(MAX_RECV))
        number = self._stream.socket.fileno()
        while number >= 0:  # most often there is nothing yet, so that is not asked first
            await trio.lowlevel.wait_readable(number)
            is_large = self._protocol.num_due >= LARGE_RECV
            try:
                return os.read(number, LARGE_RECV if is_large else MAX_RECV)
            except BlockingIOError:
                pass  # it was for nothing
        return b""  # the last answer has closed it

    async def _handle(self, event: Event) -> None:
        """What the protocol wants."""
        if isinstance(event, RawData):
            await self._write(event.data)
        elif isinstance(event, Closed):
            with trio.move_on_after(CLOSE_S, shield=True):  # of whoever gave the last answer
                await self._close()
            await self._protocol.handle(Closed())
        elif isinstance(event, Updated) and event.idle:
            self._note_idle()
        elif isinstance(event, Updated):
            self._house.idle.discard(self)
            self._reading.deadline = math.inf

    def _note_idle(self) -> None:
        self._house.idle.add(self)
        if self._house.context.terminated.is_set():
            self.leave()
        else:
            # moved once in a while: it takes as long as to read the head of a request
            least = trio.current_time() + self._house.config.keep_alive_timeout
            if not least <= self._reading.deadline <= least + SLACK_S:
                self._reading.deadline = least + SLACK_S

    async def _write(self, data: bytes) -> None:
        if not data:
            return
        if isinstance(self._stream, trio.SocketStream) and len(data) <= SMALL:
            if not self._writing.locked():
                try:
                    data = data[os.write(self._stream.socket.fileno(), data) :]
                except OSError:
                    pass  # full, or closed: the stream says which
            if not data:
                return
        with trio.CancelScope(shield=True):
            async with self._writing:
                try:
                    await self._stream.send_all(data)
                except (trio.BrokenResourceError, trio.ClosedResourceError):
                    await self._protocol.handle(Closed())

    async def _close(self) -> None:
        try:
            if isinstance(self._stream, trio.SocketStream):
                await self._stream.send_eof()
        except (trio.BrokenResourceError, trio.BusyResourceError, trio.ClosedResourceError):
            pass  # nobody is there any more, or somebody is still writing
        await self._stream.aclose()


class Protocols(ProtocolWrapper):
    """hypercorn's, with our HTTP/1.1 before its own."""

    def __init__(
        self, house: House, write: Callable[[bytes], Awaitable[None]], *given: Any
    ) -> None:
        super().__init__(ASGIWrapper(house.shared.app), house.config, house.context, *given)
        self._ours: Http1 | None = None
        if isinstance(self.protocol, H11Protocol):
            tasks, _, is_tls, client, server, *_ = given
            base = {
                "type": "http",
                "http_version": "1.1",
                "asgi": {"spec_version": "2.1", "version": "3.0"},
                "scheme": "https" if is_tls else "http",
                "root_path": house.config.root_path,
                "client": client,
                "server": server,
            }
            self._ours = Http1(house.shared, self.protocol, tasks, write, base)
            self.protocol = cast("Any", self._ours)  # is called like it

    @property
    def num_due(self) -> int:
        """Bytes of a body that have not come; 0 where only hypercorn knows."""
        return self._ours.num_due if self._ours is not None else 0
