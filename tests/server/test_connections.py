"""Connections under hypercorn's protocols, over sockets."""

import gc
import socket
import struct
import weakref
from functools import partial

import pytest
import trio
import trio.testing
from hypercorn.config import Config

from trouper.frontends.server.app import App
from trouper.frontends.server.connections import SLACK_S, SMALL, Connection, House
from trouper.frontends.server.http.exchange import Exchange
from trouper.frontends.server.service import Service
from trouper.frontends.server.settings import ServerSettings

pytestmark = pytest.mark.trio
RESET = struct.pack("ii", 1, 0)  # closing throws away what is under way, and says so
GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


def pair():
    """A client, and the server's end of its connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
    accepted.setblocking(False)
    return client, trio.SocketStream(trio.socket.from_stdlib_socket(accepted))


def house_of(app, **options):
    config = Config()
    for name, value in options.items():
        setattr(config, name, value)
    return House(app, config)


async def answer(scope, receive, send, body=b"yes"):
    head = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    await send({"type": "http.response.body", "body": body})


async def test_a_client_that_is_gone_before_it_is_met_is_no_error():
    client, stream = pair()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    client.close()
    await Connection(house_of(answer), stream).run()


async def test_a_connection_that_is_cancelled_is_closed():
    client, stream = pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Connection(house_of(answer), stream).run)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert stream.socket.fileno() == -1
    assert client.recv(100) == b""
    client.close()


async def test_who_asks_nothing_is_left_in_time(autojump_clock):
    for asks in (b"", GET[:-2]):
        client, stream = pair()
        client.sendall(asks)
        begin = trio.current_time()
        house = house_of(answer, keep_alive_timeout=7.0)
        await Connection(house, stream).run()
        assert trio.current_time() - begin == 7.0 + SLACK_S
        assert client.recv(100) == b""
        assert not house.idle
        client.close()


async def test_who_is_idle_is_left_when_the_house_closes_and_who_is_not_gets_the_answer():
    is_asked, may_answer = trio.Event(), trio.Event()

    async def late(scope, receive, send):
        is_asked.set()
        await may_answer.wait()
        await answer(scope, receive, send)

    house = house_of(late)
    idle, busy = pair(), pair()
    busy[0].sendall(GET)
    async with trio.open_nursery() as nursery:
        for _, stream in (idle, busy):
            nursery.start_soon(Connection(house, stream).run)
        await is_asked.wait()
        await trio.testing.wait_all_tasks_blocked()
        await house.close()
        may_answer.set()
    assert idle[0].recv(100) == b""
    last = busy[0].recv(1000)
    assert last.endswith(b"yes")
    assert last.count(b"connection: close\r\n") == 1
    for client, _ in (idle, busy):
        client.close()


async def test_what_the_kernel_does_not_take_at_once_follows_in_order():
    pieces = [bytes([i]) * (SMALL // 2) for i in range(250)]

    async def much(scope, receive, send):
        head = [(b"content-length", str(sum(map(len, pieces))).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        for piece in pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    client, stream = pair()
    stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**14)
    client.sendall(GET)
    found = b""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Connection(house_of(much), stream).run)
        with trio.fail_after(10):
            while not found.endswith(pieces[-1]):
                found += await trio.to_thread.run_sync(client.recv, 2**16)
        client.close()
    assert found.partition(b"\r\n\r\n")[2] == b"".join(pieces)


@pytest.mark.parametrize(
    ("length", "body", "bodies"),
    [
        (3, b"yes", [b"yes"]),
        (0, b"", [b""]),
        (3, None, [b""]),  # it breaks off
        (SMALL + 1, b"x" * (SMALL + 1), [b"", b"x" * (SMALL + 1)]),  # not copied
        (None, b"yes", [b"", b"3\r\nyes\r\n0\r\n\r\n"]),  # a stream's begins at once
    ],
)
async def test_the_head_of_an_answer_that_says_its_length_leaves_with_what_comes_next(
    length, body, bodies, monkeypatch
):
    async def say(scope, receive, send):
        head = [] if length is None else [(b"content-length", str(length).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        if body is not None:
            await send({"type": "http.response.body", "body": body})

    written: list[bytes] = []

    async def write(self, data):
        written.append(data)

    monkeypatch.setattr(Connection, "_write", write)
    client, stream = pair()
    client.sendall(GET)
    client.shutdown(socket.SHUT_WR)
    await Connection(house_of(say), stream).run()
    client.close()
    head, *rest = [data for data in written if data]
    status, _, first = head.partition(b"\r\n\r\n")
    assert status.startswith(b"HTTP/1.1 200")
    assert [first, *rest] == bodies


async def test_an_exchange_is_forgotten_when_its_answer_is_out():
    app = App(Service(ServerSettings()))
    exchanges = []

    async def ask(scope, receive, send):
        exchange = Exchange(scope, receive, send)
        exchanges.append(weakref.ref(exchange))
        act = partial(exchange.send_json, "yes")
        await app._attend(exchange, act, 1000.0, is_stream=False)

    client, stream = pair()
    gc.disable()
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(Connection(house_of(ask), stream).run)
            for _ in range(2):
                client.sendall(GET)
                assert (await trio.to_thread.run_sync(client.recv, 1000)).endswith(b'"yes"')
            await trio.testing.wait_all_tasks_blocked()
            assert [exchange() for exchange in exchanges] == [None, None]
            client.close()
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("sent", "is_left"),
    [(b"", True), (GET, True), (GET, False), (b"GET / HTTP/1.0\r\n\r\n", False)],
)
async def test_a_connection_that_has_ended_is_forgotten_without_the_collector(sent, is_left):
    client, stream = pair()
    connection = Connection(house_of(answer), stream)
    forgotten = weakref.ref(connection)
    gc.disable()
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(connection.run)
            del connection
            client.sendall(sent)
            if not is_left:
                assert await trio.to_thread.run_sync(client.recv, 1000)
                await trio.testing.wait_all_tasks_blocked()
            client.close()
        assert forgotten() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("moment", ["before", "while it waits"])
async def test_a_handler_that_only_waits_is_told_when_its_client_leaves(moment):
    app = App(Service(ServerSettings()))
    left, begun = trio.Event(), trio.Event()

    async def ask(scope, receive, send):
        exchange = Exchange(scope, receive, send)

        async def act():
            begun.set()
            try:
                await trio.sleep_forever()
            finally:
                assert exchange.is_gone
                left.set()

        if moment == "before":
            client.close()
            await trio.testing.wait_all_tasks_blocked()
        with trio.fail_after(10):
            await app._attend(exchange, act, 1000.0, is_stream=False)

    client, stream = pair()
    client.sendall(GET)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Connection(house_of(ask), stream).run)
        await begun.wait()
        client.close()
        await left.wait()
