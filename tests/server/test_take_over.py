"""A server passes its listeners to a successor, and goes on if the successor does not."""

import errno
import os
import socket

import anyio
import anyio.to_thread
import msgspec
import pytest

from trouper.errors import TrouperValidationError
from trouper.frontends.server.http.listeners import OpenListeners
from trouper.frontends.server.program import hand_over
from trouper.frontends.server.program import server as program
from trouper.frontends.server.program.hand_over import (
    HandOver,
    Predecessor,
    describe_server,
    offering,
    refusal_of,
)
from trouper.frontends.server.service.service import Service
from trouper.frontends.server.shared.settings import ServerSettings, ServeSettings

SETTINGS = {"port": 0, "admin_uds": "/run/s", "journal": "/data/j"}
REFUSED = {
    "port": {"port": 9},
    "uds": {"uds": "/run/u"},
    "admin_uds": {"admin_uds": "/run/t"},
    "admin_port": {"admin_port": 7},
    "ollama": {"ollama": True},
    "ssl_certfile": {"ssl_certfile": "c.pem"},
    "journal": {"journal": "/data/other"},
}


def described(**changes):
    return describe_server(ServeSettings(**{**SETTINGS, **changes}))


@pytest.mark.parametrize("name", REFUSED)
def test_other_addresses_are_refused_by_name(name):
    running, successor = described(), described(**REFUSED[name])
    assert refusal_of(running, running) is None
    for server, other in ((running, successor), (successor, running)):
        refusal = refusal_of(server, other)
        assert refusal is not None
        # Without the port, both names are right.
        assert refusal.parameter in (name, "port" if name == "uds" else name)


def test_journal_is_not_given_up():
    assert refusal_of(described(), described(journal=None)).parameter == "journal"
    assert refusal_of(described(journal=None), described()) is None


def test_other_protocol_and_lost_adapter_are_refused():
    running = msgspec.structs.replace(described(), adapters=["poet"])
    assert "poet" in refusal_of(running, described()).message
    newer = msgspec.structs.replace(described(), protocol=hand_over.PROTOCOL + 1)
    assert refusal_of(described(), newer).parameter == "take_over"


class Server:
    """Notes what a hand-over does to it."""

    def __init__(self, settings):
        self.settings, self.calls, self.problem = settings, [], None
        self.has_left, self.accepts = anyio.Event(), anyio.Event()

    def describe(self):
        return describe_server(self.settings)

    def sockets(self):
        return {each.option: each.sock for each in self.listeners.all}

    def stop_accepting(self):
        self.calls.append("stop")

    def accept_again(self):
        self.calls.append("accept")
        self.accepts.set()

    async def close_journal(self, fingerprint):
        self.calls.append(f"close {fingerprint.decode()}")
        await anyio.lowlevel.checkpoint()
        return self.problem

    def reopen_journal(self):
        self.calls.append("reopen")

    async def leave(self):
        self.calls.append("leave")
        self.has_left.set()


class World:
    """A running server that offers its listeners."""

    def __init__(self, folder):
        self.path = str(folder / "s")
        self.settings = ServeSettings(port=0, admin_uds=self.path)
        self.server, self.lines = Server(self.settings), []
        self.listeners = self.server.listeners = OpenListeners({})
        self.listeners.open(self.settings)
        self.port = self.listeners.public[0].sock.getsockname()[1]
        self.news = anyio.Event()
        offered = offering(self.listeners, self.path, self.report)
        self.hand_over = HandOver(self.server, self.listeners, offered, self.report)

    def has_file(self):
        return os.path.exists(self.path)

    def report(self, line):
        self.lines.append(line)
        self.news.set()

    async def wait_for_lines(self, number):
        with anyio.fail_after(5):
            while len(self.lines) < number:
                self.news = anyio.Event()
                await self.news.wait()

    def ask(self, **changes):
        return Predecessor.ask(
            self.path, describe_server(msgspec.structs.replace(self.settings, **changes))
        )


@pytest.fixture
def world(tmp_path, monkeypatch):
    monkeypatch.setattr(hand_over, "SETTLE_S", 0)
    world = World(tmp_path)
    with world.listeners:
        yield world


async def in_thread(function, *arguments):
    return await anyio.to_thread.run_sync(function, *arguments)


@pytest.mark.anyio
async def test_successor_gets_the_listeners(world):
    async with anyio.create_task_group() as tasks:
        await tasks.start(world.hand_over.listen)
        predecessor = await in_thread(world.ask)
        assert predecessor.pid == os.getpid()
        assert world.server.calls == []
        listeners = OpenListeners(predecessor.sockets)
        with listeners:
            listeners.open(world.settings)
            assert listeners.public[0].sock.getsockname()[1] == world.port
            await in_thread(predecessor.take, b"model")
            assert world.server.calls == ["stop", "close model"]
            await in_thread(predecessor.finish, listeners)
            with anyio.fail_after(5):
                await world.server.has_left.wait()
            assert world.server.calls[2:] == ["leave"]
            world.listeners.__exit__()
            with socket.create_connection(("127.0.0.1", world.port)) as client:
                accepted, address = listeners.public[0].sock.accept()
                accepted.close()
                assert address == client.getsockname()
            assert world.has_file()
    assert not world.has_file()


@pytest.mark.anyio
@pytest.mark.parametrize("is_ready", [False, True])
async def test_server_outlives_a_failed_successor(world, is_ready):
    async with anyio.create_task_group() as tasks:
        await tasks.start(world.hand_over.listen)
        for number in range(2):
            predecessor = await in_thread(world.ask)
            listeners = OpenListeners(predecessor.sockets)
            if is_ready:
                await in_thread(predecessor.take, b"m")
            predecessor.close()
            listeners.__exit__()
            await world.wait_for_lines(2 * (number + 1))
            assert "this server continues" in world.lines[-1]
        calls = ["stop", "close m", "reopen", "accept"] if is_ready else []
        assert world.server.calls == 2 * calls
        assert world.listeners.owns_files
        tasks.cancel_scope.cancel()


@pytest.mark.anyio
async def test_late_successor_leaves_the_listeners(world, monkeypatch):
    monkeypatch.setattr(hand_over, "FINISH_S", -1)
    async with anyio.create_task_group() as tasks:
        await tasks.start(world.hand_over.listen)
        predecessor = await in_thread(world.ask)
        assert not any(sock.get_inheritable() for sock in predecessor.sockets.values())
        listeners = OpenListeners(predecessor.sockets)
        await in_thread(predecessor.take, b"m")
        with pytest.raises(TrouperValidationError, match="took longer"):
            predecessor.finish(listeners)
        assert not listeners.owns_files
        predecessor.close()
        listeners.__exit__()
        with anyio.fail_after(5):
            await world.server.accepts.wait()
        tasks.cancel_scope.cancel()


@pytest.mark.anyio
async def test_server_that_goes_on_refuses_a_late_end(world, monkeypatch):
    monkeypatch.setattr(hand_over, "DONE_S", 0.01)
    async with anyio.create_task_group() as tasks:
        await tasks.start(world.hand_over.listen)
        predecessor = await in_thread(world.ask)
        listeners = OpenListeners(predecessor.sockets)
        predecessor._link.sendall(hand_over._encode(hand_over.Take(b"m")))
        await world.server.accepts.wait()
        # As if it had been stopped for a long time.
        released = hand_over._encode(hand_over.Released())
        assert predecessor._link.recv(len(released)) == released
        with pytest.raises(TrouperValidationError, match="the running server continues"):
            await in_thread(predecessor.finish, listeners)
        assert not listeners.owns_files
        predecessor.close()
        listeners.__exit__()
        tasks.cancel_scope.cancel()


@pytest.mark.anyio
async def test_server_goes_on_after_an_unheard_end(world, monkeypatch):
    """The server is stopped while its successor waits for the last answer."""
    monkeypatch.setattr(hand_over, "ANSWER_S", 0.01)
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    theirs.setblocking(False)
    predecessor = Predecessor(ours, hand_over.Offer(1, []), [])
    with pytest.raises(TrouperValidationError, match="does not answer"):
        await in_thread(predecessor.finish, OpenListeners({}))

    class Stopped(hand_over._Channel):
        async def send(self, message, files=()):
            if not isinstance(message, hand_over.Released):
                await super().send(message, files)

    async with await anyio.abc.UNIXSocketStream.from_socket(theirs) as stream:
        with pytest.raises((anyio.BrokenResourceError, OSError)):
            await world.hand_over._pass_on(Stopped(stream), b"m")
    assert not world.hand_over.is_done
    assert world.server.calls[-1] == "accept"
    predecessor.close()


@pytest.mark.anyio
async def test_server_without_file_descriptors_goes_on(world, monkeypatch):
    def fail():
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(world.server, "stop_accepting", fail)
    async with anyio.create_task_group() as tasks:
        await tasks.start(world.hand_over.listen)
        predecessor = await in_thread(world.ask)
        with pytest.raises(TrouperValidationError, match=r"continues: .*too many open files"):
            await in_thread(predecessor.take, b"m")
        predecessor.close()
        OpenListeners(predecessor.sockets).__exit__()
        await world.wait_for_lines(2)
        assert "this server continues" in world.lines[-1]
        assert world.server.calls == []
        tasks.cancel_scope.cancel()


@pytest.mark.anyio
@pytest.mark.parametrize("ask", ["take", "finish"])
async def test_server_that_goes_on_after_nonsense_says_so(world, monkeypatch, ask):
    async with anyio.create_task_group() as tasks:
        await tasks.start(world.hand_over.listen)
        predecessor = await in_thread(world.ask)
        listeners = OpenListeners(predecessor.sockets)
        if ask == "finish":
            await in_thread(predecessor.take, b"m")
        monkeypatch.setattr(hand_over, "_encode", lambda message, right=hand_over._encode: (
            right(message) if isinstance(message, hand_over.TakeOverRefusal) else b"{}\n"
        ))  # fmt: skip
        argument = listeners if ask == "finish" else b"m"
        with pytest.raises(TrouperValidationError, match="the running server continues"):
            await in_thread(getattr(predecessor, ask), argument)
        assert not listeners.owns_files
        predecessor.close()
        listeners.__exit__()
        await world.wait_for_lines(2)
        assert world.listeners.owns_files
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("ask", ["take", "finish"])
@pytest.mark.parametrize("answer", [b"x\n", b"{}\n", b'{"type":"Left"}\nx\n', b"x" * 2**16])
def test_damaged_answer_is_an_error_of_the_option(ask, answer):
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    listeners = OpenListeners({})
    listeners.owns_files = False
    predecessor = Predecessor(ours, hand_over.Offer(1, []), [])
    with ours, theirs:
        theirs.sendall(answer)
        with pytest.raises(TrouperValidationError, match=r"take_over: .*sent an invalid answer"):
            getattr(predecessor, ask)(listeners if ask == "finish" else b"m")
    assert not listeners.owns_files


@pytest.mark.parametrize("answer", [b"", b'{"type":"Le'])
def test_successor_goes_on_after_the_end_of_the_server(answer):
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    listeners = OpenListeners({})
    listeners.owns_files = False
    predecessor = Predecessor(ours, hand_over.Offer(1, []), [])
    theirs.sendall(answer)
    theirs.close()
    predecessor.take(b"m")
    predecessor.finish(listeners)
    assert listeners.owns_files


def test_answer_in_two_parts_is_read_whole():
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        theirs.sendall(b'ft"}\n')
        found = hand_over._receive_last(ours, b'{"type":"Le')
    assert found == hand_over.Left()


@pytest.mark.anyio
async def test_silent_server_keeps_the_listeners(world, monkeypatch):
    async with anyio.create_task_group() as tasks:
        await tasks.start(world.hand_over.listen)
        predecessor = await in_thread(world.ask)
        tasks.cancel_scope.cancel()
    ours, silent = socket.socketpair(socket.AF_UNIX)
    monkeypatch.setattr(hand_over, "DONE_S", 0.05)
    predecessor.close()
    predecessor._link = ours
    with ours, silent, pytest.raises(TrouperValidationError, match="does not answer"):
        await in_thread(predecessor.take, b"m")
    OpenListeners(predecessor.sockets).__exit__()


@pytest.mark.anyio
async def test_refusals_reach_the_successor(world):
    async with anyio.create_task_group() as tasks:
        await tasks.start(world.hand_over.listen)
        with pytest.raises(TrouperValidationError, match=r"admin_port: .* no such listener"):
            await in_thread(lambda: world.ask(admin_port=5))
        world.server.problem = "3 answers would be lost"
        predecessor = await in_thread(world.ask)
        with pytest.raises(TrouperValidationError, match="3 answers would be lost"):
            await in_thread(predecessor.take, b"other")
        predecessor.close()
        OpenListeners(predecessor.sockets).__exit__()
        with anyio.fail_after(5):
            await world.server.accepts.wait()
        assert world.server.calls == ["stop", "close other", "reopen", "accept"]
        assert world.listeners.owns_files
        tasks.cancel_scope.cancel()


@pytest.mark.anyio
async def test_other_users_and_strange_messages_get_nothing(world, monkeypatch):
    async with anyio.create_task_group() as tasks:
        await tasks.start(world.hand_over.listen)
        for data in (b"x\n", b'{"type":"Done"}\n', b""):
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(world.path + hand_over.SUFFIX)
                client.sendall(data)
                client.shutdown(socket.SHUT_WR)
                assert await in_thread(client.recv, 10) == b""
        monkeypatch.setattr(hand_over, "peer_of", lambda _: (4711, os.geteuid() + 1))
        with pytest.raises(TrouperValidationError, match="belongs to user"):
            await in_thread(world.ask)
        await world.wait_for_lines(3)
        assert "process 4711" in world.lines[-1]
        assert world.server.calls == []
        tasks.cancel_scope.cancel()


@pytest.mark.anyio
async def test_server_that_shuts_down_hands_over_closed_listeners(world):
    server = program.Server(Service(ServerSettings()), shutdown_timeout_s=0, report=print)
    listener = world.listeners.public[0]
    server._accepting = [(None, listener)]
    server._start_accepting = lambda: pytest.fail("accepts after its end")
    server._shutdown.closing.set()
    listener.sock.close()
    server.stop_accepting()
    assert server._service.is_leaving
    server.accept_again()


@pytest.mark.anyio
async def test_unknown_question_is_an_error_of_the_option(world, monkeypatch):
    monkeypatch.setattr(hand_over, "_encode", lambda _: b"{}\n")
    async with anyio.create_task_group() as tasks:
        await tasks.start(world.hand_over.listen)
        with pytest.raises(TrouperValidationError, match="sent no sockets"):
            await in_thread(world.ask)
        tasks.cancel_scope.cancel()


def test_missing_server_is_named(tmp_path):
    with pytest.raises(TrouperValidationError, match="take_over: no server with this"):
        Predecessor.ask(str(tmp_path / "s"), described())
