"""Serve HTTP/1.1 on trio by hypercorn, for `--loop trio`.

`hypercorn.trio.serve` runs all connections in one nursery, so an exception of one protocol ends the whole server, and hypercorn has no
setting that refuses HTTP/2 and WebSockets.  So this module accepts the connections and runs hypercorn's own `TCPServer` for each, in a
scope of its own.

Laws.  An exception in a connection ends only that connection.  HTTP/1.1 is the only protocol.  A connection ends after `KEEP_ALIVE_S`
without a request, whatever its protocol waits for.  A head that gives the length of its body twice is refused, because a proxy
may have used the other value.
"""

import math
from functools import partial
from typing import Any, cast

import anyio
import h11
import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState

from trouper.frontends.server.http.context import Message, Receive, Scope, Send
from trouper.frontends.server.http.listeners import (
    BACKLOG,
    KEEP_ALIVE_S,
    MAX_HEAD_BYTES,
    Listener,
    Shutdown,
)
from trouper.frontends.server.shared.errors import logger

LENGTHS = (b"content-length", b"transfer-encoding")
Stream = trio.SocketStream | trio.SSLStream[trio.SocketStream]


async def serve(app: Any, listener: Listener, shutdown: Shutdown) -> None:
    """Serve the ASGI application until `shutdown.closing`, and then until all connections have ended.

    A failed connection is logged and does not affect the others.
    """
    connections = _Connections(app)
    async with trio.open_nursery() as helpers:
        async with trio.open_nursery() as tasks:
            async with trio.open_nursery() as accepting:
                accept = partial(trio.serve_listeners, handler_nursery=tasks)
                accepting.start_soon(accept, connections.attend, [_listener(listener)])
                accepting.start_soon(_cancel_at, shutdown.leaving, accepting.cancel_scope)
                await shutdown.closing.wait()
                accepting.cancel_scope.cancel()
            # Not at once, if another server accepts now.
            await shutdown.closing.wait()
            helpers.start_soon(connections.end, shutdown)
        helpers.cancel_scope.cancel()


async def _cancel_at(event: anyio.Event, scope: trio.CancelScope) -> None:
    await event.wait()
    scope.cancel()


def _listener(listener: Listener) -> trio.abc.Listener[Any]:
    listener.sock.listen(BACKLOG)
    plain = trio.SocketListener(trio.socket.from_stdlib_socket(listener.sock))
    context = listener.tls_context()
    return plain if context is None else trio.SSLListener(plain, context, https_compatible=True)


class _Connections:
    """The open connections of a listener, and what they share."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._config = _Http1Config()
        self._context = WorkerContext(None)
        self._open: set[_Connection] = set()

    async def attend(self, stream: Stream) -> None:
        """Serve one connection to its end.

        Errors of the protocol end only this connection.
        """
        connection = _Connection(self._app, stream)
        self._open.add(connection)
        try:
            await connection.serve(self._config, self._context)
        except* Exception as errors:
            logger.debug("a connection has failed: %r", errors.exceptions[0])
        finally:
            self._open.discard(connection)

    async def end(self, shutdown: Shutdown) -> None:
        """Close idle connections now, and all others at `shutdown.aborting`."""
        await self._context.terminated.set()
        await shutdown.aborting.wait()
        for connection in list(self._open):
            await connection.abort()


class _Connection:
    """One connection, and the application as its protocol calls it."""

    def __init__(self, app: Any, stream: Stream) -> None:
        self._app = app
        self._stream = stream
        self._scope = trio.CancelScope(deadline=trio.current_time() + KEEP_ALIVE_S)

    async def serve(self, config: Config, context: WorkerContext) -> None:
        # hypercorn has its own names for ASGI's types.
        app = ASGIWrapper(cast("Any", self._perform))
        with self._scope:
            await _StrictServer(
                app, config, context, ConnectionState({}), cast("Any", self._stream)
            )

    async def abort(self) -> None:
        self._scope.cancel()
        # An ordinary end would wait, because hypercorn shields its writes.
        await trio.aclose_forcefully(self._stream)

    async def _perform(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application for one request, without the limit for idle connections."""

        async def send_or_leave(message: Message) -> None:
            is_last = message["type"] == "http.response.body" and not message.get("more_body")
            try:
                await (_send_last(message, receive, send) if is_last else send(message))
            except (
                Exception
            ) as error:  # of several libraries: the client disconnected, or sent no HTTP
                raise ConnectionError("the connection has ended") from error

        self._scope.deadline = math.inf
        try:
            await self._app(scope, receive, send_or_leave)
        finally:
            self._scope.deadline = trio.current_time() + KEEP_ALIVE_S


class _StrictServer(TCPServer):
    """hypercorn's server of one connection, with a stricter parser than h11's own."""

    async def _read_data(self) -> None:
        protocol = cast("H11Protocol", self.protocol.protocol)  # which has read nothing yet
        protocol.connection = _OneLength(h11.SERVER, self.config.h11_max_incomplete_size)
        await super()._read_data()


class _OneLength(h11.Connection):
    """A parser that refuses a head with two fields that give the length of the body.

    h11 takes Transfer-Encoding where there is Content-Length, too, and one of several equal Content-Lengths.
    """

    def next_event(self) -> Any:
        before = self.trailing_data[0] if self.their_state is h11.IDLE else b""
        event = super().next_event()
        if type(event) is h11.Request:
            head = before[: len(before) - len(self.trailing_data[0])]
            names = [line.partition(b":")[0].lower() for line in head.split(b"\n")]
            if sum(name in LENGTHS for name in names) > 1:
                raise h11.RemoteProtocolError("the length of the body is given twice")
        return event


async def _send_last(message: Message, receive: Receive, send: Send) -> None:
    """Send the end of an answer while the rest of the request's body is read.

    hypercorn queues ten pieces of a body and waits for the application to take them, also when it has answered.
    """
    async with trio.open_nursery() as tasks:
        tasks.start_soon(_drain, receive)
        await send(message)
        tasks.cancel_scope.cancel()


async def _drain(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class _Http1Config(Config):
    """hypercorn's settings.  Those that it reads when a connection leaves HTTP/1.1 end the connection."""

    errorlog = logger
    include_server_header = False
    h11_max_incomplete_size = MAX_HEAD_BYTES
    keep_alive_timeout = KEEP_ALIVE_S

    @property
    def h2_max_inbound_frame_size(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        raise _OtherProtocolError("HTTP/2")

    @property
    def websocket_max_message_size(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        raise _OtherProtocolError("WebSocket")


class _OtherProtocolError(Exception):
    """The client asks for an unsupported protocol."""
