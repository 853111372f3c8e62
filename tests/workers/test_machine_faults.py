"""Several machines, of which one dies, falls silent or talks nonsense at the worst moment."""

import socket
import threading
from contextlib import asynccontextmanager

import anyio
import anyio.to_thread
import pytest

from tests.support.accepting import accept, receive_message
from trouper.actors.executor.workers.launching import Exit, launch
from trouper.actors.executor.workers.machines import authentication
from trouper.actors.executor.workers.machines import channel as messages
from trouper.actors.executor.workers.machines.channel import (
    Accepted,
    Channel,
    End,
    Ended,
    Failed,
    GiveUp,
    HostHello,
    Listen,
    Listens,
    Start,
    Started,
)
from trouper.actors.executor.workers.machines.host import Orders
from trouper.actors.executor.workers.machines.launch_hosts import (
    MAX_HOSTS_LOST,
    HostsLauncher,
    LocalGroup,
    listen,
)
from trouper.config.parallel import CLUSTER_KEY, NodesConfig
from trouper.errors import DeviceStartError, TrouperValidationError

from .test_machines import KEY, a_config, a_coordinator, a_host, launcher_on_host, running

pytestmark = [pytest.mark.anyio]


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request):
    return request.param


@pytest.fixture(autouse=True)
def hosts_come_back_at_once(monkeypatch):
    monkeypatch.setattr("trouper.actors.executor.workers.machines.host.DIAL_AGAIN_S", 0.001)


@asynccontextmanager
async def played_host(address):
    """The channel of a host that does what the test has it do."""
    connection = await anyio.to_thread.run_sync(authentication.dial, address, KEY)
    connection.setblocking(False)
    channel = Channel(connection)
    channel.send(HostHello(messages.protocol(), 1, 2))
    try:
        assert await channel.receive() == Accepted()
        yield channel
    finally:
        channel.close()


@pytest.mark.parametrize("error", [ConnectionResetError, BlockingIOError])
async def test_order_that_cannot_be_sent_waits_for_next_host(error, monkeypatch):
    """The connection is broken before its reader knows: it is tried once, and the loop goes on."""
    broken, send = [], Channel.send

    def send_if_whole(channel, message):
        if isinstance(message, Listen):
            broken.extend([] if broken else [channel])
            if channel is broken[0]:
                broken.append(channel)
                assert len(broken) < 100, "the order is repeated without end"
                raise error
        send(channel, message)

    monkeypatch.setattr(Channel, "send", send_if_whole)
    async with a_coordinator() as (coordinator, address), running(a_host(address)):
        (peer,) = await launcher_on_host(coordinator)()
        await peer.end(0.0)
    assert len(broken) == 2


async def test_dying_host_is_not_retried_forever():
    num_starts = 0

    async def die_of_each(address):
        nonlocal num_starts
        while True:
            async with played_host(address) as channel:
                while not isinstance(message := await channel.receive(), Start):
                    if isinstance(message, Listen):
                        channel.send(Listens(message.order, 1))
                num_starts += 1

    async with a_coordinator() as (coordinator, address), anyio.create_task_group() as hosts:
        hosts.start_soon(die_of_each, address)
        with pytest.raises(DeviceStartError, match=r"node 1 at 127\.0\.0\.1 is gone"):
            await launcher_on_host(coordinator)()
        hosts.cancel_scope.cancel()
    assert num_starts == MAX_HOSTS_LOST


@pytest.mark.parametrize("answers", [(), (Listens,)], ids=["at all", "the start"])
async def test_silent_host_is_an_error(answers, monkeypatch):
    monkeypatch.setattr("trouper.actors.executor.workers.machines.coordinator.CONNECT_S", 0.02)
    async with a_coordinator() as (coordinator, address), played_host(address) as channel:
        found = []

        async def read():
            while not isinstance(message := await channel.receive(), GiveUp):
                found.append(type(message))
                if isinstance(message, Listen) and answers:
                    channel.send(Listens(message.order, 1))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read)
            with pytest.raises(DeviceStartError, match=r"node 1 did not answer within 0\.02 s"):
                await launcher_on_host(coordinator)()
        assert found == ([Listen, Start] if answers else [Listen])


async def test_order_whose_start_is_cancelled_is_given_up():
    async with a_coordinator() as (coordinator, address), played_host(address) as channel:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(launcher_on_host(coordinator))
            assert isinstance(await channel.receive(), Listen)
            tasks.cancel_scope.cancel()
        assert isinstance(await channel.receive(), GiveUp)


class PlayedGroup:
    """A group whose start takes until it is let go, and may fail."""

    def __init__(self, error=None, is_let_go=True):
        self.error, self.calls, self.processes = error, [], {}
        self.let_go, self.killed = threading.Event(), threading.Event()
        self.loop = threading.current_thread()
        if is_let_go:
            self.let_go.set()

    def listen(self):
        return 7

    def connect(self, start):
        self.calls.append("connect")
        assert self.let_go.wait(10)
        if self.error is not None:
            raise self.error

    def spawn(self):
        self.calls.append("spawn")

    def kill(self):
        assert threading.current_thread() is not self.loop, "it holds up the loop"
        self.calls.append("kill")
        self.killed.set()

    @property
    def is_over(self):
        return False


class PlayedChannel:
    """A coordinator's end of a channel, of which the test sends each message and takes each answer."""

    def __init__(self):
        self.to_host, self._receive = anyio.create_memory_object_stream(8)
        self._answer, self.answers = anyio.create_memory_object_stream(8)

    async def receive(self):
        try:
            return await self._receive.receive()
        except anyio.EndOfStream:
            return None

    def send(self, message):
        self._answer.send_nowait(message)

    def close(self):
        for end in (self.to_host, self._receive, self._answer, self.answers):
            end.close()


@asynccontextmanager
async def orders_of(*groups):
    """Orders that have these groups made, and the coordinator's end of their channel."""
    channel = PlayedChannel()
    orders = Orders(channel, iter(groups).__next__)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(orders.follow)
        yield orders, channel
        channel.to_host.close()
    channel.close()


async def test_order_given_up_while_it_connects_starts_no_worker():
    group = PlayedGroup(is_let_go=False)
    async with orders_of(group) as (orders, channel):
        for message in (Listen(1), Start(1, (0,)), GiveUp(1)):
            await channel.to_host.send(message)
            await anyio.wait_all_tasks_blocked()
        assert "1 start" in repr(orders)
        group.let_go.set()
        assert await channel.answers.receive() == Listens(1, 7)
        assert await channel.answers.receive() == Failed(1, "the order was cancelled")
        assert group.calls == ["connect", "kill"]
        assert repr(orders) == "<Orders: {}, 0 start>"


async def test_what_listens_for_order_given_up_is_closed():
    group = PlayedGroup()
    async with orders_of(group) as (_, channel):
        await channel.to_host.send(Listen(1))
        assert await channel.answers.receive() == Listens(1, 7)
        await channel.to_host.send(GiveUp(1))
        assert await anyio.to_thread.run_sync(group.killed.wait, 10)


async def test_of_order_not_known_all_workers_have_ended():
    async with orders_of() as (_, channel):
        await channel.to_host.send(End(1, 0, 0.0))
        assert await channel.answers.receive() == Ended(1, 0, Exit(None))


async def test_any_error_of_start_is_of_that_order_alone(caplog):
    groups = PlayedGroup(RuntimeError("can't start new thread")), PlayedGroup()
    async with orders_of(*groups) as (_, channel):
        for order, wanted in ((1, Failed(1, "can't start new thread")), (2, Started(2))):
            await channel.to_host.send(Listen(order))
            assert await channel.answers.receive() == Listens(order, 7)
            await channel.to_host.send(Start(order, (0,)))
            assert await channel.answers.receive() == wanted
    assert "RuntimeError: can't start new thread" in caplog.text
    assert [group.calls for group in groups] == [["connect", "kill"], ["connect", "spawn"]]


@pytest.mark.parametrize(
    "data", [b"\xff" * 50, messages.encode(Started(1))], ids=["bytes", "message"]
)
@pytest.mark.parametrize("before", [b"", messages.encode(Accepted())], ids=["at once", "later"])
async def test_front_that_talks_nonsense_is_one_gone(before, data):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            connection, _ = listener.accept()
            with connection:
                assert accept(connection, KEY)
                assert isinstance(receive_message(connection), HostHello)
                connection.sendall(before + data)

        async with running(a_host(listener.getsockname())):
            for _ in range(2):
                await anyio.to_thread.run_sync(serve)


async def test_what_machine_has_prepared_is_closed_if_another_cannot():
    """The coordinator listens for links, and then a host of the same order refuses."""
    where = []

    class Refusing:
        async def prepare(self):
            raise DeviceStartError("no room")

        def close(self):
            where.append("closed")

    class Local(LocalGroup):
        async def prepare(self):
            where.append(await super().prepare())
            return where[-1]

    async def make_group(node, order):
        return Refusing() if node else Local(("127.0.0.1", 1), KEY, launch)

    async with a_coordinator() as (coordinator, _):
        launcher = HostsLauncher(a_config(), {0: (0,), 1: (1,)}, 0, coordinator, make_group)
        with pytest.raises(DeviceStartError, match="no room"):
            await launcher()
    address, closed = where
    assert closed == "closed"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)


@pytest.mark.parametrize("address", ["0", "0x0", "0.0", "00.0.0.0", "0.0.0.0", "::", "::0", "0::0", "::ffff:0.0.0.0", "::ffff:0:0", " ", ""])  # fmt: skip
def test_address_every_address_is_refused_however_it_is_written(address, monkeypatch):
    monkeypatch.setenv(CLUSTER_KEY, KEY.decode())
    with pytest.raises(TrouperValidationError, match="reach machine 0") as caught:
        a_config(nnodes=2, pipeline_parallel_size=2, master_addr=address)
    assert caught.value.parameter == "master_addr"


def test_name_of_every_address_is_refused_where_it_is_bound(monkeypatch):
    def serve_at(address, backlog):
        return socket.create_server(("0.0.0.0", 0), backlog=backlog)

    monkeypatch.setattr("trouper.actors.executor.workers.machines.launch_hosts.serve_at", serve_at)
    with pytest.raises(TrouperValidationError, match="not all addresses") as caught:
        listen(NodesConfig("mp", 2, 0, "everywhere", 1))
    assert caught.value.parameter == "master_addr"
