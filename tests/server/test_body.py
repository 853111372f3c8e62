import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trouper.frontends.server.http import body as module
from trouper.frontends.server.http.body import LARGE, Body, Rooms

SIZE = 4 * LARGE


def filled(rooms, byte, size=2 * LARGE):
    body = Body(rooms)
    for _ in range(size // 2**16):
        body.add(byte * 2**16)
    return body


@given(st.lists(st.binary(max_size=9), max_size=9), st.sampled_from([1, 5, LARGE]))
def test_a_body_is_what_its_pieces_were(pieces, large):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "LARGE", large)
        rooms = Rooms(100)
        for sent in (pieces, pieces[::-1]):  # the second where the first was
            body = Body(rooms)
            for piece in sent:
                body.add(piece)
            assert bytes(body.whole()) == b"".join(sent)
            assert body.size == len(b"".join(sent))


def test_a_core_is_asked_for_with_each_megabyte_that_is_added_to_a_large_body():
    asked = []
    rooms = Rooms(SIZE, lambda: asked.append(1))
    filled(rooms, b"a", LARGE)
    assert not asked
    body = filled(rooms, b"a", SIZE)
    assert len(asked) == SIZE // LARGE - 1
    assert body.size == SIZE


def test_a_room_is_used_again_when_nobody_sees_its_body_any_more():
    rooms = Rooms(SIZE)
    body = filled(rooms, b"a")
    whole = body.whole()
    part = whole[5:9]
    del body
    whole.release()
    other = filled(rooms, b"b")
    assert bytes(part) == b"aaaa"  # somebody still reads it
    part.release()
    assert len(rooms._free) == 1
    again = rooms.take()
    assert bytes(again[:4]) == b"aaaa"
    assert not rooms._free
    assert bytes(other.whole()[:4]) == b"bbbb"


def test_a_body_that_nobody_finished_gives_its_room_back():
    rooms = Rooms(SIZE)
    body = filled(rooms, b"a")
    assert not rooms._free
    del body
    assert len(rooms._free) == 1


def test_one_room_is_kept():
    rooms = Rooms(SIZE)
    bodies = [filled(rooms, byte) for byte in (b"a", b"b", b"c")]
    assert [bytes(body.whole()[-2:]) for body in bodies] == [b"aa", b"bb", b"cc"]
    bodies.clear()
    assert len(rooms._free) == 1


def test_a_room_comes_back_from_another_thread():
    rooms = Rooms(SIZE)
    views = [filled(rooms, b"a").whole()]
    thread = threading.Thread(target=views.clear)
    thread.start()
    thread.join()
    assert len(rooms._free) == 1


def test_of_a_kept_room_no_more_than_so_much_is_memory(monkeypatch):
    monkeypatch.setattr(module, "KEPT", LARGE)
    rooms = Rooms(SIZE)
    filled(rooms, b"a")
    room = rooms.take()
    assert bytes(room[LARGE - 2 : LARGE + 2]) == b"aa\0\0"
