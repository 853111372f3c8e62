"""HTTP/1.1 on trio by hypercorn, for `--loop trio`.

`hypercorn.trio.serve` runs all connections in one nursery, so any exception of its protocols ends the server, and it has
no setting that refuses HTTP/2 and WebSockets.  So the loop that accepts connections is here, and each runs hypercorn's own
`TCPServer` with its exceptions caught.

Laws.  An exception in a connection ends that connection alone.  HTTP/1.1 is the only protocol.
"""

from functools import partial
from typing import Any, cast

import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState

from trouper.frontends.server.errors import logger
from trouper.frontends.server.http.exchange import Message, Receive, Scope, Send
from trouper.frontends.server.http.listeners import (
    BACKLOG,
    KEEP_ALIVE_S,
    MAX_HEAD_BYTES,
    Listener,
    Shutdown,
)

Stream = trio.SocketStream | trio.SSLStream[trio.SocketStream]


async def serve(app: Any, listener: Listener, shutdown: Shutdown) -> None:
    """Serve the ASGI application until `shutdown.closing`, and then until all connections have ended."""
    connections = _Connections(app)
    async with trio.open_nursery() as helpers:
        async with trio.open_nursery() as tasks:
            async with trio.open_nursery() as accepting:
                accept = partial(trio.serve_listeners, handler_nursery=tasks)
                accepting.start_soon(accept, connections.attend, [_listener(listener)])
                await shutdown.closing.wait()
                accepting.cancel_scope.cancel()
            helpers.start_soon(connections.end, shutdown)
        helpers.cancel_scope.cancel()


def _listener(listener: Listener) -> trio.abc.Listener[Any]:
    listener.sock.listen(BACKLOG)
    plain = trio.SocketListener(trio.socket.from_stdlib_socket(listener.sock))
    context = listener.tls_context()
    return plain if context is None else trio.SSLListener(plain, context, https_compatible=True)


class _Connections:
    """The open connections of a listener, and what they share."""

    def __init__(self, app: Any) -> None:
        self._app = ASGIWrapper(
            cast("Any", _Drained(app))
        )  # it has names of its own for ASGI's types
        self._config = _Http1Config()
        self._context = WorkerContext(None)
        self._streams: set[Stream] = set()

    async def attend(self, stream: Stream) -> None:
        """Serve one connection to its end."""
        self._streams.add(stream)
        try:
            await TCPServer(self._app, self._config, self._context, ConnectionState({}), stream)  # pyright: ignore[reportArgumentType]
        except* Exception as errors:
            logger.debug("a connection has failed: %r", errors.exceptions[0])
        finally:
            self._streams.discard(stream)

    async def end(self, shutdown: Shutdown) -> None:
        """Close idle connections now, and all others at `shutdown.aborting`."""
        await self._context.terminated.set()
        await shutdown.aborting.wait()
        for stream in list(self._streams):  # hypercorn's writes can only be ended by closing
            await trio.aclose_forcefully(stream)


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
    """The client asks for a protocol that is not served."""


class _Drained:
    """The application, with the rest of a request's body read while the end of the answer is sent.

    hypercorn queues ten pieces of a body and waits for the application to take them, also when it has answered.
    """

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_drained(message: Message) -> None:
            if message["type"] != "http.response.body" or message.get("more_body", False):
                await send(message)
                return
            async with trio.open_nursery() as tasks:
                tasks.start_soon(_drain, receive)
                await send(message)
                tasks.cancel_scope.cancel()

        await self._app(scope, receive, send_drained)


async def _drain(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
