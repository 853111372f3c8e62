"""One unauthenticated connection never ends the server, or another connection."""

import math
import socket
from contextlib import suppress

import anyio
import anyio.to_thread
import pytest

from trouper.frontends.server.asgi.app import App
from trouper.frontends.server.http.listeners import Listener, Shutdown, bind_tcp
from trouper.frontends.server.program.server import listener_task
from trouper.frontends.server.service.service import Service
from trouper.frontends.server.shared.settings import ServerSettings

from .hostile import KEY, PACKETS, answer_s, attack_all, h1, num_descriptors, wait_idle
from .process import started, stop

NUM_DRAWN = 200


@pytest.fixture(scope="module", params=["asyncio", "trio"])
def anyio_backend(request):
    return request.param


@pytest.mark.parametrize("is_admin", [False, True], ids=["public", "admin"])
@pytest.mark.anyio
async def test_drawn_hostile_connections_end_alone(anyio_backend, is_admin):
    app = App(Service(ServerSettings(api_keys=(KEY,))), is_admin_listener=is_admin)
    listener, shutdown = Listener(bind_tcp("127.0.0.1", 0)), Shutdown()
    address = listener.sock.getsockname()
    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listener_task(anyio_backend), app, listener, shutdown)
            await anyio.to_thread.run_sync(attack_all, [address], NUM_DRAWN)
            assert await anyio.to_thread.run_sync(answer_s, address) < math.inf
            shutdown.closing.set()
            shutdown.aborting.set()


@pytest.mark.parametrize(
    "lines",
    [
        (b"content-length: 5", b"transfer-encoding: chunked"),
        (b"Transfer-Encoding: chunked", b"Content-Length: 5"),
        (b"content-length: 5", b"content-length: 5"),
        (b"content-length: 5", b"content-length: 6"),
    ],
)
@pytest.mark.anyio
async def test_a_length_given_twice_ends_the_connection(anyio_backend, lines):
    app = App(Service(ServerSettings()))
    listener, shutdown = Listener(bind_tcp("127.0.0.1", 0)), Shutdown()
    address = listener.sock.getsockname()
    first, second = h1(b"GET /version HTTP/1.1"), h1(b"GET /health/live HTTP/1.1")
    twice = h1(b"POST /ping HTTP/1.1", *lines, body=b"0\r\n\r\n")
    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listener_task(anyio_backend), app, listener, shutdown)
            plain = await anyio.to_thread.run_sync(heard, address, first, twice + second)
            shutdown.closing.set()
            shutdown.aborting.set()
    assert plain.count(b"HTTP/1.1 ") == 2
    assert b"HTTP/1.1 400" in plain.partition(b"}")[2]


def heard(address, first, then):
    """What a client hears until the end of its connection, when it sends more after a first answer."""
    with socket.create_connection(address, timeout=20) as client:
        client.sendall(first)
        found = client.recv(2**16)
        client.sendall(then)
        with suppress(ConnectionError):  # what the server has not read resets the connection
            while piece := client.recv(2**16):
                found += piece
    return found


@pytest.mark.parametrize("loop", ["asyncio", pytest.param("trio", marks=pytest.mark.slow)])
def test_server_process_stands_every_packet_on_every_listener(loop):
    with started("--loop", loop, "--api-key", KEY, "--admin-port", "0") as server:
        server.headers = [("authorization", f"Bearer {KEY}")]
        addresses = [("127.0.0.1", port) for port in server.ports]
        before = num_descriptors(server)
        attack_all(addresses, 0)
        assert all(answer_s(address) < math.inf for address in addresses)
        assert wait_idle(server, before)
        assert stop(server) == 0
        assert not [line for line in server.lines if "Traceback" in line], server.lines


def test_packets_that_once_ended_process_are_in_table():
    assert PACKETS.keys() >= {
        "websocket extensions", "upgrade to h2c", "h2 path", "h2 connect", "h2 priorities",
        "h2 data after the answer", "h2 window of 0", "h2",
    }  # fmt: skip
