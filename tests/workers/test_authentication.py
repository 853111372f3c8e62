"""Connections without a proof: who makes room, who is not heard, and what the log says.

Machines that vanish without a word: what connections ask of the system, and when a channel ends by it.
"""

import random
import socket
from unittest.mock import patch

import pytest
import trio
import trio.testing

from tests.simulation.hosts.hosts_places import VirtualAnyio
from tests.simulation.hosts.virtual_network import MACHINE, PROGRAM, VirtualNetwork
from trouper.actors.executor.workers.machines import authentication, channel, coordinator
from trouper.actors.executor.workers.machines.authentication import (
    LOG_S,
    MAX_ADDRESSES,
    MAX_FAILURES,
    WINDOW_S,
    UnprovenConnections,
)
from trouper.actors.executor.workers.machines.channel import Channel, Listen

from .test_machines import KEY, a_coordinator, tcp_pair


def test_eldest_of_address_with_most_places_makes_room():
    strangers = UnprovenConnections(4)
    for connection, address in ((1, "a"), (2, "b"), (3, "a"), (4, "c")):
        assert strangers.enter(connection, address) is None
    assert strangers.enter(5, "d") == 1
    strangers.leave(1)
    assert len(strangers) == 4


def test_address_that_has_proved_itself_makes_room_last():
    strangers = UnprovenConnections(3)
    strangers.note_proof("ours")
    for connection, address in ((1, "ours"), (2, "ours"), (3, "theirs")):
        strangers.enter(connection, address)
    assert strangers.enter(4, "ours") == 3
    assert strangers.enter(5, "theirs") == 1


def test_address_that_fails_too_often_is_not_heard_for_while():
    strangers = UnprovenConnections(4)
    strangers.note_proof("ours")
    assert strangers.is_welcome("a", 100.0)
    for address in ("a", "ours"):
        for _ in range(MAX_FAILURES):
            strangers.note_failure(address, 100.0)
    assert not strangers.is_welcome("a", 101.0)
    assert strangers.is_welcome("b", 101.0)
    assert strangers.is_welcome("ours", 101.0)
    assert strangers.is_welcome("a", 100.0 + WINDOW_S)


def test_log_has_one_line_of_address_minute():
    strangers = UnprovenConnections(4)
    found = [strangers.note_failure("a", now) for now in (0.0, 1.0, 2.0, LOG_S, LOG_S + 1)]
    assert found == [1, None, None, 3, None]
    assert strangers.note_failure("b", 2.0) == 1


def test_only_many_addresses_are_remembered_and_strangers_go_first():
    strangers = UnprovenConnections(4)
    strangers.note_proof("ours")
    for number in range(2 * MAX_ADDRESSES):
        strangers.is_welcome(str(number), 0.0)
    assert len(strangers._known) == MAX_ADDRESSES
    assert "ours" in strangers._known


TCP = socket.IPPROTO_TCP
WANTED = {
    (socket.SOL_SOCKET, "SO_KEEPALIVE"): 1,
    (TCP, "TCP_NODELAY"): 1,
    (TCP, "TCP_KEEPIDLE"): authentication.KEEP_ALIVE_S,
    (TCP, "TCP_KEEPINTVL"): authentication.KEEP_ALIVE_S,
    (TCP, "TCP_KEEPCNT"): authentication.VANISHED_S // authentication.KEEP_ALIVE_S,
    (TCP, "TCP_USER_TIMEOUT"): authentication.VANISHED_S * 1000,
}


def options_of(connection):
    return {(level, n): connection.getsockopt(level, getattr(socket, n)) for level, n in WANTED}


def test_both_sides_enable_keepalive(monkeypatch):
    accepted = []

    def note(connection):
        authentication.tune(connection)
        accepted.append(options_of(connection))

    monkeypatch.setattr(coordinator, "tune", note)

    async def connect():
        async with a_coordinator() as (_, address):
            with await trio.to_thread.run_sync(authentication.dial, address, KEY) as dialled:
                assert options_of(dialled) == WANTED

    trio.run(connect)
    assert accepted == [WANTED]


def test_connection_that_is_not_tuned_asks_for_nothing():
    for side in tcp_pair():
        with side:
            assert options_of(side)[socket.SOL_SOCKET, "SO_KEEPALIVE"] == 0


@pytest.mark.parametrize(
    ("sends", "is_tuned", "gone_after_s"),
    [
        (False, True, authentication.KEEP_ALIVE_S + authentication.VANISHED_S),
        (True, True, authentication.VANISHED_S),  # what is not acknowledged
        (True, False, None),
    ],
)
def test_channel_to_machine_that_has_vanished_ends_if_it_asked(sends, is_tuned, gone_after_s):
    async def act():
        network = VirtualNetwork(random.Random(1))
        PROGRAM.set("host")
        MACHINE.set("host")
        listener = network.listen("coordinator")
        far = await network.connect("coordinator")
        near, _ = listener.accept()
        if is_tuned:
            authentication.tune(near)
        link = Channel(near)
        began_s = trio.current_time()
        network.switch_off("host")
        assert far.is_vanished
        if sends:
            link.send(Listen(1))
        with trio.move_on_after(1000.0) as patience:
            assert await link.receive() is None
        assert patience.cancelled_caught == (gone_after_s is None)
        if gone_after_s is not None:
            assert trio.current_time() - began_s == pytest.approx(gone_after_s)

    with patch.object(channel, "anyio", VirtualAnyio()):
        trio.run(act, clock=trio.testing.MockClock(autojump_threshold=0))
