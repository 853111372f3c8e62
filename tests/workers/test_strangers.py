"""Connections without a proof: who makes room, who is not heard, and what the log says."""

from trouper.actors.executor.workers.machines.authentication import (
    LOG_S,
    MAX_ADDRESSES,
    MAX_FAILURES,
    WINDOW_S,
    Strangers,
)


def test_the_eldest_of_the_address_with_most_places_makes_room():
    strangers = Strangers(4)
    for connection, address in ((1, "a"), (2, "b"), (3, "a"), (4, "c")):
        assert strangers.enter(connection, address) is None
    assert strangers.enter(5, "d") == 1
    strangers.leave(1)
    assert len(strangers) == 4


def test_an_address_that_has_proved_itself_makes_room_last():
    strangers = Strangers(3)
    strangers.note_proof("ours")
    for connection, address in ((1, "ours"), (2, "ours"), (3, "theirs")):
        strangers.enter(connection, address)
    assert strangers.enter(4, "ours") == 3
    assert strangers.enter(5, "theirs") == 1


def test_an_address_that_fails_too_often_is_not_heard_for_a_while():
    strangers = Strangers(4)
    strangers.note_proof("ours")
    assert strangers.is_welcome("a", 100.0)
    for address in ("a", "ours"):
        for _ in range(MAX_FAILURES):
            strangers.note_failure(address, 100.0)
    assert not strangers.is_welcome("a", 101.0)
    assert strangers.is_welcome("b", 101.0)
    assert strangers.is_welcome("ours", 101.0)
    assert strangers.is_welcome("a", 100.0 + WINDOW_S)


def test_the_log_has_one_line_of_an_address_a_minute():
    strangers = Strangers(4)
    found = [strangers.note_failure("a", now) for now in (0.0, 1.0, 2.0, LOG_S, LOG_S + 1)]
    assert found == [1, None, None, 3, None]
    assert strangers.note_failure("b", 2.0) == 1


def test_only_so_many_addresses_are_remembered_and_strangers_go_first():
    strangers = Strangers(4)
    strangers.note_proof("ours")
    for number in range(2 * MAX_ADDRESSES):
        strangers.is_welcome(str(number), 0.0)
    assert len(strangers._known) == MAX_ADDRESSES
    assert "ours" in strangers._known
