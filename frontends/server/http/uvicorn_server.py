"""Serve HTTP/1.1 on asyncio by uvicorn: one `uvicorn.Server` for each listener, driven by the program.

uvicorn has no limits for the size of a head, for its arrival time, for pipelined requests, and for clients that do not read their
responses.  `LimitedProtocol` adds these four limits to uvicorn's protocol.  It also keeps trailers out of the headers, and refuses transfer
encodings that it does not decode.  An exception in a protocol or the application ends only that connection: the event loop
and uvicorn catch it.
"""

import asyncio
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import anyio
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from trouper.frontends.server.http.listeners import (
    BACKLOG,
    KEEP_ALIVE_S,
    MAX_HEAD_BYTES,
    UNREAD_S,
    Listener,
    Shutdown,
)

# Queued requests of one connection; about 3 KB each, so at most 1 MB.
MAX_PIPELINED = 256
NOT_IMPLEMENTED = (
    b"HTTP/1.1 501 Not Implemented\r\ncontent-type: text/plain; charset=utf-8\r\ncontent-length: 54\r\n"
    b"connection: close\r\n\r\nOf Transfer-Encoding only chunked is supported here.\r\n"
)
# uvicorn's own interval between two looks at `should_exit`.
TICK_S = 0.1


async def serve(app: Any, listener: Listener, shutdown: Shutdown) -> None:
    """Serve the ASGI application until `shutdown.closing`, and then until all connections have ended.

    uvicorn's own signal handlers are not installed; the program decides when to stop.
    """
    config = uvicorn.Config(
        app,
        http=LimitedProtocol,
        ws="none",
        interface="asgi3",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        ssl_certfile=listener.certfile,
        ssl_keyfile=listener.keyfile,
    )
    server = _Server(config)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_end, server, shutdown, name="end of the listener")
        await server.serve(sockets=[listener.sock])
        tasks.cancel_scope.cancel()


async def _end(server: uvicorn.Server, shutdown: Shutdown) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_leave, server, shutdown, name="end of accepting")
        await shutdown.closing.wait()
        tasks.cancel_scope.cancel()
    server.should_exit = True
    await shutdown.aborting.wait()
    # Some may have been accepted before uvicorn saw `should_exit`.
    while True:
        for connection in list(server.server_state.connections):
            connection.transport.abort()
        await anyio.sleep(TICK_S)


async def _leave(server: uvicorn.Server, shutdown: Shutdown) -> None:
    """Stop accepting, without an effect on open connections."""
    await shutdown.leaving.wait()
    for each in server.servers:
        each.close()


class _Server(uvicorn.Server):
    """A server without signal handlers: the program has its own."""

    @contextmanager
    def capture_signals(self) -> Generator[None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        yield


class LimitedProtocol(HttpToolsProtocol):
    """One connection of uvicorn, with limits on heads, idle time, pipelined requests and unread responses.

    Laws.  At most `MAX_HEAD_BYTES` and one read are accepted without a complete head or chunk of a body, which bounds heads, trailers
    and chunk extensions.  While no response is pending, the next head must be complete within `KEEP_ALIVE_S`, however slowly its bytes or
    those of an earlier body arrive.  A connection is aborted if its client reads nothing of the written bytes for `UNREAD_S`.
    Trailers of a chunked body are not headers of its request (RFC 9110, 6.5.1), because a proxy did not check them.  Only the chunked
    encoding is accepted, because the server would misread a body in another one.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Requests without a complete answer.
        self._cycles: deque[RequestResponseCycle] = deque()
        # The bytes since the last complete head or chunk of a body.
        self._num_pending_bytes = 0
        self._idle_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None
        self._is_behind_head = self._refuses_encoding = False

    def on_message_begin(self) -> None:
        self._is_behind_head = False
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_behind_head:
            super().on_header(name, value)

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self._start_idle_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_timers()
        # uvicorn itself notifies only the latest request.
        for cycle in self._cycles:
            cycle.disconnected = True
            cycle.message_event.set()
        # Break the reference cycle.
        self._cycles.clear()

    def data_received(self, data: bytes) -> None:
        self._num_pending_bytes += len(data)
        if self._num_pending_bytes <= MAX_HEAD_BYTES + len(data):
            super().data_received(data)
        elif self.cycle is None or self.cycle.response_complete:  # pyright: ignore[reportUnnecessaryComparison]  # None at first
            self.send_400_response("The head of the request is too large.")
        else:
            # A status line would become part of the response being sent.
            self.transport.abort()

    def on_headers_complete(self) -> None:
        self._is_behind_head = True
        encodings = [value for name, value in self.headers if name == b"transfer-encoding"]
        if encodings and b",".join(encodings).strip().lower() != b"chunked":
            self._refuses_encoding = True
            raise ValueError("a transfer coding that is not undone")  # the parser's error
        if len(self.pipeline) >= MAX_PIPELINED:
            raise ValueError("too many pipelined requests")  # the parser's error: 400, and the end
        super().on_headers_complete()
        self._cycles.append(self.cycle)
        self._num_pending_bytes = 0
        self._stop_idle_timer()

    def send_400_response(self, msg: str) -> None:
        if not self._refuses_encoding:
            super().send_400_response(msg)
        elif self._cycles:  # a status line would become part of the response being sent
            self.transport.abort()
        else:
            self.transport.write(NOT_IMPLEMENTED)
            self.transport.close()

    def on_body(self, body: bytes) -> None:
        self._num_pending_bytes = 0
        super().on_body(body)

    def on_response_complete(self) -> None:
        self._cycles.popleft()
        super().on_response_complete()
        if self.cycle.response_complete:  # else a pipelined request is being answered now
            self._start_idle_timer()

    def shutdown(self) -> None:
        super().shutdown()
        if self.transport.is_closing():
            self._start_unread_timer()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_unread_timer()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_unread_timer()

    def _start_idle_timer(self) -> None:
        self._stop_idle_timer()
        self._idle_timer = self.loop.call_later(KEEP_ALIVE_S, self._close_idle)

    def _close_idle(self) -> None:
        self.transport.close()
        # Closing waits until the client has received everything written.
        self._start_unread_timer()

    def _stop_idle_timer(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None

    def _start_unread_timer(self) -> None:
        self._stop_unread_timer()
        self._unread_timer = self.loop.call_later(UNREAD_S, self.transport.abort)

    def _stop_unread_timer(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def _stop_timers(self) -> None:
        self._stop_idle_timer()
        self._stop_unread_timer()
