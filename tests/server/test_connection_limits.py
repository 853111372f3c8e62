"""Limits of connections under uvicorn, over sockets: every kind of idle, unread or oversized connection ends."""

import socket
from contextlib import asynccontextmanager

import anyio
import anyio.to_thread
import pytest

from trouper.frontends.server.http import uvicorn_server
from trouper.frontends.server.http.listeners import MAX_HEAD_BYTES, Listener, Shutdown, bind_tcp

pytestmark = pytest.mark.anyio
GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
LARGE = 2**24  # bytes, beyond what the kernel takes


@pytest.fixture(scope="module")
def anyio_backend():
    return "asyncio"


async def answer(scope, receive, send):
    """Says yes without a look at the body; /large says much, /late when the client has left."""
    body = b"x" * LARGE if scope["path"] == "/large" else b"yes"
    if scope["path"] == "/late":
        while (await receive())["type"] != "http.disconnect":
            pass
    head = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    await send({"type": "http.response.body", "body": body})


@asynccontextmanager
async def serving(app=answer):
    listener, shutdown = Listener(bind_tcp("127.0.0.1", 0)), Shutdown()
    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(uvicorn_server.serve, app, listener, shutdown)  # noqa: ASYNC113  # its socket listens
            yield listener.sock.getsockname(), shutdown
            shutdown.closing.set()
            shutdown.aborting.set()


async def heard(address, *pieces):
    """What a client reads until the server ends the connection; it never ends it itself."""

    def talk():
        with socket.create_connection(address, timeout=15) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**12)
            try:
                for piece in pieces:
                    client.sendall(piece)
                    if piece == GET:
                        found.append(client.recv(2**12))
                while piece := client.recv(2**12):
                    found.append(piece)
            except ConnectionError:
                pass

    found = []
    await anyio.to_thread.run_sync(talk)
    return b"".join(found)


@pytest.fixture
def short_times(monkeypatch):
    monkeypatch.setattr(uvicorn_server, "KEEP_ALIVE_S", 0.05)
    monkeypatch.setattr(uvicorn_server, "UNREAD_S", 0.05)


@pytest.mark.parametrize(
    "pieces",
    [
        [],
        [b"GET / HT"],
        [b"GET / HTTP/1.1\r\nhost"],
        [GET, b"GET"],
        [GET],
        [POST],  # the body of a request that has been answered never comes
        [CHUNKED, b"3\r\nabc\r\n"],
        [GET, b"PRI * HTTP/2.0\r\n\r\n"],
    ],
)
async def test_a_connection_without_a_request_ends(short_times, pieces):
    async with serving() as (address, _):
        found = await heard(address, *pieces)
    assert found.count(b"HTTP/1.1 200") == any(GET in p or b"POST" in p for p in pieces)


@pytest.mark.parametrize(
    "data",
    [
        b"GET /" + b"x" * (3 * MAX_HEAD_BYTES),
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * MAX_HEAD_BYTES,
        CHUNKED + b"0\r\n" + b"a: b\r\n" * MAX_HEAD_BYTES,
        CHUNKED + b"1;" + b"x" * (3 * MAX_HEAD_BYTES),
    ],
    ids=["path", "headers", "trailers", "chunk extension"],
)
async def test_what_precedes_a_body_is_bounded(data):
    async with serving() as (address, _):
        await heard(address, data)  # the server ends it, before its time


async def say_headers(scope, receive, send):
    """Reads the body, then says which headers there are."""
    while (await receive()).get("more_body"):
        pass
    body = b" ".join(name for name, _ in scope["headers"])
    head = [(b"content-length", b"%d" % len(body)), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    await send({"type": "http.response.body", "body": body})


async def test_trailers_are_no_headers():
    trailers = b"0\r\nauthorization: Bearer sesame\r\nexpect: 100-continue\r\n\r\n"
    async with serving(say_headers) as (address, _):
        found = await heard(address, CHUNKED, b"3\r\nabc\r\n", trailers)
    assert found.endswith(b"\r\n\r\nhost transfer-encoding")
    assert b"100 Continue" not in found


@pytest.mark.parametrize(
    "encodings",
    [
        [b"gzip, chunked"], [b"gzip", b"chunked"], [b"chunked, chunked"], [b"identity, chunked"],
        [b"x;a=b, Chunked"],
    ],
)  # fmt: skip
async def test_only_the_chunked_coding_is_undone(encodings):
    lines = b"".join(b"transfer-encoding: %b\r\n" % encoding for encoding in encodings)
    request = b"POST / HTTP/1.1\r\nhost: x\r\n" + lines + b"\r\n3\r\nabc\r\n0\r\n\r\n"
    async with serving() as (address, _):
        found = await heard(address, request)
        assert found.startswith((b"HTTP/1.1 501", b"HTTP/1.1 400")), found
        assert b"200 OK" not in found
        if encodings[0] == b"gzip, chunked":
            assert found.startswith(b"HTTP/1.1 501")
            assert b"501" not in await heard(address, GET.replace(b"/ ", b"/late ") + request)
        assert b"200 OK" in await heard(
            address,
            request.replace(lines, b"Transfer-Encoding: CHUNKED\r\nconnection: close\r\n"),
        )


async def test_pipelined_requests_are_bounded():
    async with serving() as (address, _):
        many = GET.replace(b"/ ", b"/late ") + GET * (2 * uvicorn_server.MAX_PIPELINED)
        assert b"HTTP/1.1 400" in await heard(address, many)


async def test_a_few_pipelined_requests_are_answered_in_order():
    async with serving() as (address, _):
        last = GET.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
        assert (await heard(address, b"".join([GET] * 99) + last)).count(b"yes") == 100


async def test_a_client_that_does_not_read_is_disconnected(short_times):
    left = anyio.Event()

    async def large(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        message = {"type": "http.response.body", "body": b"x" * 2**16, "more_body": True}
        with anyio.CancelScope() as writing:
            async with anyio.create_task_group() as tasks:

                async def watch():
                    while (await receive())["type"] != "http.disconnect":
                        pass
                    left.set()
                    writing.cancel()

                tasks.start_soon(watch)
                while True:
                    await send(message)
                    await anyio.lowlevel.checkpoint()

    async with serving(large) as (address, _):
        with socket.create_connection(address) as client:
            client.sendall(GET)
            await left.wait()


async def test_aborting_ends_connections_that_are_being_answered():
    async with serving() as (address, shutdown):
        with socket.create_connection(address, timeout=15) as client:
            client.sendall(GET.replace(b"/ ", b"/late "))
            shutdown.closing.set()
            shutdown.aborting.set()
            assert await anyio.to_thread.run_sync(client.recv, 100) == b""


async def test_exception_in_application_ends_its_connection_alone(caplog):
    async def fail(scope, receive, send):
        if scope["path"] == "/":
            raise ValueError("a bug")
        await answer(scope, receive, send)

    async with serving(fail) as (address, _):
        assert b"HTTP/1.1 500" in await heard(address, GET)
        last = GET.replace(b"/ ", b"/fine ").replace(b"x\r\n", b"x\r\nconnection: close\r\n")
        assert b"yes" in await heard(address, last)
    assert "a bug" in caplog.text
