"""Bodies while they are read: their bytes, their memory, their time."""

import threading
from functools import partial

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trouper.frontends.server.http import body as module
from trouper.frontends.server.http.body import LARGE, BodyBuffers, BodyMemory, ClientGone
from trouper.frontends.server.shared.errors import HTTPError

SIZE = 4 * LARGE
TIMES = {"timeout_s": 30.0, "start_timeout_s": 5.0, "min_rate": 100}


def memory_of(max_body=SIZE, budget=10 * SIZE):
    return BodyMemory(max_body, budget, partial(HTTPError, 503, "body_memory_full", "full"))


def filled(memory, byte, size=2 * LARGE):
    body = memory.open()
    for _ in range(size // 2**16):
        body.add(byte * 2**16)
    return body


@given(st.lists(st.binary(max_size=9), max_size=9), st.sampled_from([1, 5, LARGE]))
def test_a_body_is_what_its_pieces_were(pieces, large):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "LARGE", large)
        memory = memory_of(100)
        for sent in (pieces, pieces[::-1]):  # the second in the buffer of the first
            with memory.open() as body:
                for piece in sent:
                    body.add(piece)
                assert bytes(body.whole()) == b"".join(sent)
                assert body.size == memory.num_bytes == len(b"".join(sent))
        assert memory.num_bytes == 0


# Buffers


def test_buffer_is_used_again_when_its_last_view_is_gone():
    memory = memory_of()
    body = filled(memory, b"a")
    whole = body.whole()
    part = whole[5:9]
    body.release()
    whole.release()
    other = filled(memory, b"b")
    assert bytes(part) == b"aaaa"  # still in use
    part.release()
    assert len(memory.buffers._free) == 1
    again = memory.buffers.take()
    assert bytes(again[:4]) == b"aaaa"
    assert not memory.buffers._free
    assert bytes(other.whole()[:4]) == b"bbbb"


def test_body_in_used_buffer_shows_nothing_of_last_one():
    memory = memory_of()
    filled(memory, b"a", SIZE).release()
    body = filled(memory, b"b", LARGE + 2**16)
    assert bytes(body.whole()) == b"b" * (LARGE + 2**16)


def test_an_unfinished_body_gives_its_buffer_back():
    memory = memory_of()
    body = filled(memory, b"a")
    assert not memory.buffers._free
    body.release()
    assert len(memory.buffers._free) == 1


def test_one_buffer_is_kept():
    memory = memory_of()
    bodies = [filled(memory, byte) for byte in (b"a", b"b", b"c")]
    assert [bytes(body.whole()[-2:]) for body in bodies] == [b"aa", b"bb", b"cc"]
    for body in bodies:
        body.release()
    assert len(memory.buffers._free) == 1


def test_a_buffer_comes_back_from_another_thread():
    memory = memory_of()
    body = filled(memory, b"a")
    views = [body.whole()]
    body.release()
    thread = threading.Thread(target=views.clear)
    thread.start()
    thread.join()
    assert len(memory.buffers._free) == 1


def test_kept_buffer_is_bounded(monkeypatch):
    monkeypatch.setattr(module, "KEPT", LARGE)
    buffers = BodyBuffers(SIZE)
    view = buffers.take()
    view[: 2 * LARGE] = b"a" * 2 * LARGE
    view.release()
    again = buffers.take()
    assert bytes(again[LARGE - 2 : LARGE + 2]) == b"aa\0\0"


# The budget


def test_body_larger_than_allowed_is_refused_before_it_is_held():
    body = memory_of(10).open()
    body.add(b"x" * 10)
    with pytest.raises(HTTPError) as raised:
        body.add(b"x")
    assert (raised.value.status, raised.value.code) == (413, "body_too_large")
    assert body.size == 10


def test_largest_body_is_refused_when_budget_is_exhausted():
    memory = memory_of(10, 25)
    first, second, small = memory.open(), memory.open(), memory.open()
    first.add(b"x" * 10)
    second.add(b"x" * 9)
    small.add(b"x" * 2)
    with pytest.raises(HTTPError) as raised:
        small.add(b"x" * 8)  # itself would be as large as the largest
    assert (raised.value.status, raised.value.code) == (503, "body_memory_full")
    small.add(b"x" * 5)
    assert bytes(small.whole()) == b"x" * 7
    assert memory.num_bytes == 16
    assert first.whole() == b""
    second.release()
    small.release()
    first.release()
    assert memory.num_bytes == 0


def test_a_complete_body_is_never_taken_back():
    memory = memory_of(10, 15)
    whole = memory.open()
    whole.add(b"x" * 10)
    whole.is_complete = True
    with memory.open() as other:
        other.add(b"x" * 5)
        with pytest.raises(HTTPError):
            other.add(b"x")
    assert bytes(whole.whole()) == b"x" * 10


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 12), st.booleans()), max_size=40))
def test_what_is_held_never_exceeds_the_budget(acts):
    memory = memory_of(10, 30)
    bodies = [memory.open() for _ in range(5)]
    for i, size, ends in acts:
        if ends:
            bodies[i].release()
            bodies[i] = memory.open()
        else:
            before = bodies[i].size
            try:
                bodies[i].add(b"x" * size)
            except HTTPError:
                assert bodies[i].size == before
        open_sizes = [body.size for body in bodies if body in memory._open]
        assert memory.num_bytes == sum(open_sizes) <= 30


# Time


class Sender:
    """Sends pieces after these delays, then nothing more."""

    def __init__(self, *pieces, ends=True):
        self._pieces, self._ends = list(pieces), ends

    async def __call__(self):
        if not self._pieces:
            await anyio.sleep_forever()
        delay_s, piece = self._pieces.pop(0)
        await anyio.sleep(delay_s)
        is_last = self._ends and not self._pieces
        return {"type": "http.request", "body": piece, "more_body": not is_last}


@pytest.mark.trio
async def test_body_that_comes_at_minimum_rate_is_read(autojump_clock):
    with memory_of().open() as body:
        await body.read(Sender((4.9, b"x" * 500), (4.9, b"x" * 500), (4.9, b"x")), **TIMES)
        assert body.size == 1001


@pytest.mark.trio
@pytest.mark.parametrize(
    ("sender", "after_s"),
    [
        (Sender(), 5.0),  # no byte
        (Sender((0.0, b"{"), ends=False), 5.01),  # one byte
        (Sender(*[(1.0, b"x" * 50)] * 100), 10.0 - 0.5),  # half the rate
        (Sender(*[(1.0, b"x" * 200)] * 100), 30.0),  # fast enough and too long
    ],
    ids=["nothing", "one byte", "half the rate", "the whole time"],
)
async def test_body_that_does_not_come_in_time_is_refused(sender, after_s, autojump_clock):
    started = anyio.current_time()
    with memory_of().open() as body, pytest.raises(HTTPError) as raised:
        await body.read(sender, **TIMES)
    assert (raised.value.status, raised.value.code) == (408, "body_timeout")
    assert (b"connection", b"close") in raised.value.headers
    assert anyio.current_time() - started == pytest.approx(after_s, abs=0.51)


@pytest.mark.trio
async def test_evicted_body_hears_of_it_while_it_waits_for_bytes(autojump_clock):
    memory, codes = memory_of(10, 15), []

    async def read():
        with memory.open() as body, pytest.raises(HTTPError) as raised:
            await body.read(Sender((0.0, b"x" * 10), ends=False), **TIMES)
        codes.append(raised.value.code)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        await anyio.wait_all_tasks_blocked()
        with memory.open() as other:
            other.add(b"x" * 6)
            await anyio.wait_all_tasks_blocked()
            assert codes == ["body_memory_full"]
    assert memory.num_bytes == 0


@pytest.mark.trio
async def test_a_client_that_leaves_ends_the_reading(autojump_clock):
    async def receive():
        return {"type": "http.disconnect"}

    with memory_of().open() as body, pytest.raises(ClientGone):
        await body.read(receive, **TIMES)
