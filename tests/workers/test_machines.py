"""Several machines on the loopback: the proof, the messages, the coordinator and its hosts, with workers that only listen."""

import random
import socket
import threading
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from tests.support.accepting import accept
from trouper.actors.executor.worker_links import SharedSizes
from trouper.actors.executor.workers.launching import CLOSED, Exit
from trouper.actors.executor.workers.machines import authentication
from trouper.actors.executor.workers.machines import channel as messages
from trouper.actors.executor.workers.machines.channel import Channel, ChannelError, HostHello, Start
from trouper.actors.executor.workers.machines.coordinator import Coordinator
from trouper.actors.executor.workers.machines.host import Host, Orders
from trouper.actors.executor.workers.machines.launch_hosts import (
    HostGroup,
    HostsLauncher,
    listen,
    open_nodes,
)
from trouper.actors.executor.workers.machines.worker_group import RemotePeer
from trouper.actors.executor.workers.model_files import MachineFacts
from trouper.actors.executor.workers.wire import MAX_FRAME, Close, FrameReader, encode
from trouper.config.args import EngineArgs
from trouper.config.parallel import CLUSTER_KEY, NodesConfig
from trouper.config.resolve import resolve
from trouper.errors import DeviceStartError, TrouperValidationError

from .test_wire import a_plan

KEY = b"a key of these machines"
IDLE = "tests.robustness.idle_worker"


@pytest.fixture(params=["trio"])
def anyio_backend(request):
    return request.param


@pytest.fixture(autouse=True)
def workers_find_the_tests(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))


@pytest.fixture
def key(monkeypatch):
    monkeypatch.setenv(CLUSTER_KEY, KEY.decode())


def tcp_pair():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        return near, listener.accept()[0]


# The proof


def prove(dialler_key, listener_key):
    """What a dialler raises, and what its listener finds."""
    found = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            with listener.accept()[0] as connection:
                found.append(accept(connection, listener_key))

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            authentication.dial(listener.getsockname(), dialler_key).close()
            found.append(None)
        except authentication.WrongKeyError as error:
            found.append(error)
        thread.join()
    return found


def test_both_sides_prove_the_same_key():
    assert set(prove(KEY, KEY)) == {True, None}


def test_a_wrong_key_is_told_to_the_dialler():
    found = prove(b"another key", KEY)
    assert False in found
    assert any("has a different key" in str(x) for x in found)


def test_proofs_are_not_reusable():
    one, two = authentication.ListenerProof(KEY), authentication.ListenerProof(KEY)
    sent, wanted = authentication.answer(KEY, one.greeting)
    assert one.judge(sent) == (True, wanted)
    assert two.judge(sent) == (False, bytes(33))
    theirs = sent[: authentication.CHALLENGE_BYTES]
    assert one.judge(theirs + wanted[1:])[0] is False
    assert one.judge(bytes(authentication.ANSWER_BYTES))[0] is False


def test_what_listens_but_is_not_trouper_is_named():
    with pytest.raises(ConnectionError, match="not trouper"):
        authentication.answer(KEY, b"HTTP/1.1".ljust(authentication.GREETING_BYTES))


# Messages


@pytest.mark.anyio
async def test_messages_are_whole_however_their_bytes_come():
    near, far = tcp_pair()
    far.setblocking(False)
    wanted = [
        HostHello("digest", 1, 2),
        Start(3, (0, 1), 4, SharedSizes(4, 1, 64, 8, ()), {"hidden 1": ("10.0.0.1", 77)}),
        messages.Ended(3, 1, Exit(-9, stderr=("last", "words"))),
        messages.Failed(3, "no memory"),
    ]
    data, dice = b"".join(map(messages.encode, wanted)), random.Random(5)
    channel, found = Channel(far), []

    async def read():
        while (message := await channel.receive()) is not None:
            found.append(message)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        while data:
            size = dice.randrange(1, 20)
            near.sendall(data[:size])
            data = data[size:]
            await anyio.wait_all_tasks_blocked()
        near.close()
    assert found == wanted
    channel.close()


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("data", "words"),
    [
        (messages.LENGTH.pack(messages.MAX_MESSAGE + 1), "maximum 65536"),
        (messages.LENGTH.pack(3) + b"\xc1\xc1\xc1", "not a message"),
    ],
)
async def test_what_is_no_message_is_an_error(data, words):
    near, far = tcp_pair()
    far.setblocking(False)
    near.sendall(data)
    channel = Channel(far)
    with pytest.raises(ChannelError, match=words):
        await channel.receive()
    channel.close()
    near.close()


def test_last_words_fit_into_a_message():
    ended = messages.shorten(Exit(1, stderr=("é" * 10_000,) * 64))
    assert len(messages.encode(messages.Ended(2**31, 64, ended))) < messages.MAX_MESSAGE
    assert len(ended.stderr) == messages.LAST_LINES


# The connection to a worker


@pytest.mark.anyio
async def test_frames_wait_for_room_and_go_whole_and_in_order():
    near, far = tcp_pair()
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**12)

    async def end(grace_s):
        return Exit(0)

    peer = RemotePeer(near, end, "worker 1")
    far.setblocking(False)
    plans = [a_plan(num_embeds_bytes=2**20) for _ in range(8)]
    for plan in plans:
        peer.send(*encode(plan))
    reader, found = FrameReader(max_inline=MAX_FRAME), []

    async def read():
        while len(found) < len(plans):
            await anyio.wait_readable(far)
            reader.feed(far.recv(2**16), [])
            while (frame := reader.take()) is not None:
                found.append(frame.step)
        far.sendall(b"done")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        assert await peer.receive() == (b"done", [])
    assert found == [plan.step for plan in plans]
    far.close()
    assert await peer.receive() == CLOSED
    assert await peer.end(0.0) == await peer.end(0.0) == Exit(0)


@pytest.mark.anyio
async def test_worker_that_does_not_read_is_cut_off():
    near, far = tcp_pair()

    async def end(grace_s):
        return Exit(-9)

    peer = RemotePeer(near, end, "worker 1")
    large = encode(a_plan(num_embeds_bytes=2**22), is_inline=True)
    with pytest.raises(BlockingIOError):
        for _ in range(200):
            peer.send(*large)
    assert await peer.receive() == CLOSED
    await peer.end(0.0)
    far.close()


# The coordinator and its hosts


def a_config(**options):
    return resolve(EngineArgs(**options))


def a_host(address, rank=1, num_nodes=2, key=KEY, num_workers=1):
    nodes = NodesConfig("mp", num_nodes, rank, *address)
    return Host(nodes, key, MachineFacts(num_workers), IDLE)


@asynccontextmanager
async def a_coordinator(num_nodes=2):
    listener = socket.create_server(("127.0.0.1", 0))
    coordinator = Coordinator(listener, KEY, num_nodes)
    async with anyio.create_task_group() as tasks:
        await tasks.start(coordinator.listen)
        yield coordinator, listener.getsockname()
        tasks.cancel_scope.cancel()


def launcher_on_host(coordinator):
    """A launcher of one worker, which runs on node 1."""

    async def make_group(node, order):
        return HostGroup(coordinator, await coordinator.host(1), order)

    config = a_config()
    return HostsLauncher(config, {1: (0,)}, 0, coordinator, make_group)


@asynccontextmanager
async def running(host):
    """A host that serves its coordinator while the block runs."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(host.serve)  # noqa: ASYNC113  # it may come at any moment
        yield
        tasks.cancel_scope.cancel()


async def started(coordinator):
    """The peer of a worker, however long its host takes to come."""
    (peer,) = await launcher_on_host(coordinator)()
    return peer


@pytest.mark.anyio
async def test_worker_ends_with_its_host_and_next_host_starts_another():
    async with a_coordinator() as (coordinator, address):
        for _ in range(2):
            async with running(a_host(address)):
                peer = await started(coordinator)
                assert "worker 0 on node 1" in repr(peer)
            assert await peer.receive() == CLOSED
            ended = await peer.end(1.0)
            assert (ended.status, ended.was_machine_lost) == (None, True)
            assert ended.stderr == ("node 1 at 127.0.0.1 is gone",)


@pytest.mark.anyio
async def test_how_worker_has_ended_is_reported_by_its_host():
    async with a_coordinator() as (coordinator, address), running(a_host(address)):
        told, killed = await started(coordinator), await started(coordinator)
        told.send(*encode(Close()))
        assert await told.receive() == CLOSED
        assert await told.end(5.0) == Exit(3, stderr=("idle, 0 links",))
        assert (await killed.end(0.0)).status == -9


@pytest.mark.anyio
async def test_host_serves_next_front_when_one_is_gone(monkeypatch):
    monkeypatch.setattr("trouper.actors.executor.workers.machines.host.DIAL_AGAIN_S", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = free.getsockname()
    async with running(a_host(address)):
        for _ in range(2):
            async with anyio.create_task_group() as tasks:
                coordinator = Coordinator(listen(NodesConfig("mp", 2, 0, *address)), KEY, 2)
                await tasks.start(coordinator.listen)
                peer = await started(coordinator)
                tasks.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                await peer.end(0.0)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("host", "parameter", "words"),
    [
        ({"key": b"another key of others"}, CLUSTER_KEY, "has a different key"),
        ({"num_nodes": 3}, "node_rank", "node 1 of 3, but the coordinator expects 2 nodes"),
        ({"rank": 2}, "node_rank", "node 2 of 2"),
        (
            {"num_workers": 3},
            "node_rank",
            "node 1 has 3 workers by its -pp, -tp and -dp, but the coordinator expects 1",
        ),
    ],
)
async def test_host_that_does_not_belong_is_refused_and_ends(host, parameter, words):
    async with a_coordinator() as (coordinator, address):
        with pytest.raises(TrouperValidationError, match=words) as caught:
            await a_host(address, **host).serve()
        assert caught.value.parameter == parameter
        assert "0 hosts" in repr(coordinator)


@pytest.mark.anyio
async def test_duplicate_host_is_logged_once(monkeypatch, caplog):
    monkeypatch.setattr("trouper.actors.executor.workers.machines.host.DIAL_AGAIN_S", 0.001)
    refused, accepted = anyio.Semaphore(0), anyio.Semaphore(0)
    note, follow = Host._note_refusal, Orders.follow

    def note_refusal(host, *refusal):
        note(host, *refusal)
        refused.release()

    async def follow_orders(orders):
        accepted.release()
        await follow(orders)

    monkeypatch.setattr(Host, "_note_refusal", note_refusal)
    monkeypatch.setattr(Orders, "follow", follow_orders)

    def lines():
        found = [r.getMessage() for r in caplog.records]
        caplog.clear()
        return found

    async with a_coordinator() as (_, address):
        async with anyio.create_task_group() as second:
            async with running(a_host(address)):
                await accepted.acquire()
                lines()
                second.start_soon(a_host(address).serve)
                for _ in range(5):
                    await refused.acquire()
                where = f"{address[0]}:{address[1]}"
                told = ["node 1 waits for the coordinator at " + where,
                        "127.0.0.1: node 1 is already connected",
                        "the coordinator refuses this node for now: node 1 is already connected"]  # fmt: skip
                assert sorted(lines()) == sorted(told)
            await accepted.acquire()
            assert lines() == [
                "node 1 of 2 is gone",
                "node 1 of 2 is connected from 127.0.0.1",
                "node 1 of 2 serves the coordinator",
            ]
            second.cancel_scope.cancel()


@pytest.mark.anyio
async def test_strangers_neither_hold_up_front_nor_end_it(monkeypatch, caplog):
    """As many silent ones as there are places keep no host out: the eldest makes room."""
    monkeypatch.setattr("trouper.actors.executor.workers.machines.coordinator.MAX_UNPROVEN", 3)
    async with a_coordinator() as (coordinator, address):
        strangers = [socket.create_connection(address) for _ in range(3)]
        for stranger in strangers:
            stranger.setblocking(False)
            await anyio.wait_readable(stranger)
            assert stranger.recv(1000).startswith(authentication.MAGIC)
        with socket.create_connection(address) as one_more:
            one_more.setblocking(False)
            await anyio.wait_readable(one_more)
            assert one_more.recv(1000).startswith(authentication.MAGIC)
            await anyio.wait_readable(strangers[0])
            assert strangers[0].recv(1000) == b""
            strangers[1].sendall(b"GET / HTTP/1.1\r\n" * 10)
            strangers[2].sendall(b"short")
            strangers[2].close()
            silent = [socket.create_connection(address) for _ in range(3)]
            async with running(a_host(address)):
                peer = await started(coordinator)
                await peer.end(0.0)
        for stranger in (*strangers, *silent):
            stranger.close()
    assert sum("connection from 127.0.0.1" in line for line in caplog.messages) == 1


@pytest.mark.anyio
async def test_error_beside_front_is_raised_as_it_is(key):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = a_config(nnodes=2, pipeline_parallel_size=2, master_port=port)
    with pytest.raises(DeviceStartError, match="as it is"):
        async with open_nodes(config, config.nodes):
            raise DeviceStartError("as it is")


@pytest.mark.anyio
async def test_key_holder_that_says_nonsense_is_left_alone():
    async with a_coordinator() as (coordinator, address):
        for data in (
            b"\xff" * 50,
            messages.encode(messages.WorkerHello(9, 9)),
            messages.encode(messages.Started(1)),
        ):
            connection = await anyio.to_thread.run_sync(authentication.dial, address, KEY)
            connection.sendall(data)
            connection.setblocking(False)
            await anyio.wait_readable(connection)
            try:
                assert connection.recv(10) == b""
            except ConnectionResetError:
                pass
            connection.close()
        assert repr(coordinator) == "<Coordinator: 0 hosts, 0 workers expected>"


@pytest.mark.anyio
async def test_an_address_that_cannot_be_had_is_named(key):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        options = {"nnodes": 2, "pipeline_parallel_size": 2}
        for more, parameter in (
            ({"master_port": port}, "master_port"),
            ({"master_addr": "192.0.2.1", "master_port": port}, "master_addr"),
            ({"master_addr": "no such name", "master_port": port}, "master_addr"),
        ):
            config = a_config(**options, **more)
            with pytest.raises(TrouperValidationError, match=r"cannot|not an address") as caught:
                async with open_nodes(config, config.nodes):
                    pass
            assert caught.value.parameter == parameter


@pytest.mark.anyio
async def test_worker_that_does_not_connect_is_error(monkeypatch):
    monkeypatch.setattr("trouper.actors.executor.workers.machines.coordinator.CONNECT_S", 0.01)
    async with a_coordinator() as (coordinator, _):
        coordinator.expect(1, 0)
        with pytest.raises(DeviceStartError, match="worker 3 of a test did not connect"):
            await coordinator.worker(1, 0, "worker 3 of a test")
