"""Links between places are accepted side by side, whatever else connects to their port."""

import select
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from trouper.actors.executor.worker_links import close_files
from trouper.actors.executor.workers.machines import authentication, worker_group
from trouper.actors.executor.workers.machines import channel as messages
from trouper.actors.executor.workers.machines.channel import ChannelError, LinkHello
from trouper.actors.executor.workers.machines.worker_group import LinkAcceptor, PendingHello

KEY = b"a key of these machines"


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as found:
        yield found


def dial(listener, hello, key=KEY):
    """What a place sends whose link this is; and whether the other side keeps it, when it has said so."""
    with authentication.dial(listener.getsockname(), key) as link:
        link.sendall(messages.encode(hello))
        return link.recv(10)


def accept(listener, names, *diallers):
    """Accept links while these dial; returns the names of those that have been handed out."""
    with ThreadPoolExecutor(max(len(diallers), 1)) as places:
        dialled = [places.submit(dial, listener, *words) for words in diallers]
        found = LinkAcceptor(listener, KEY, 1, names).accept_all()
        close_files([tuple(found.values())])
        for one in dialled:
            one.exception()
    return set(found)


def test_slow_handshake_is_limited_in_total(monkeypatch):
    now_s = 0.0

    class Slow:
        def settimeout(self, limit_s):
            self.limit_s = limit_s

        def recv(self, num_bytes):
            nonlocal now_s
            now_s += min(4.9, self.limit_s)
            if self.limit_s < 4.9:
                raise TimeoutError
            return b"."

    monkeypatch.setattr(authentication, "monotonic", lambda: now_s)
    with pytest.raises(TimeoutError):
        authentication.receive_exactly(Slow(), authentication.ANSWER_BYTES)
    assert now_s == pytest.approx(authentication.PROOF_S)


def test_silent_strangers_hold_up_no_link(listener, monkeypatch):
    monkeypatch.setattr(worker_group, "MAX_HEARD", 3)
    strangers = [socket.create_connection(listener.getsockname()) for _ in range(8)]
    assert accept(listener, {"hidden 0"}, (LinkHello(1, "hidden 0"),)) == {"hidden 0"}
    for stranger in strangers:
        stranger.close()


def test_links_not_dialled_are_named_when_their_time_is_over(listener, monkeypatch):
    monkeypatch.setattr(worker_group, "LINKS_S", 0.01)
    with socket.create_connection(listener.getsockname()):
        with pytest.raises(TimeoutError, match=r"not dialled within 0\.01 s: hidden 0, tokens 0"):
            LinkAcceptor(listener, KEY, 1, {"tokens 0", "hidden 0"}).accept_all()


def test_links_come_in_any_order_past_those_not_wanted(listener):
    wanted = {"hidden 0", "hidden 1"}
    for data in (b"GET / HTTP/1.1\r\n" * 10, b"short", b""):
        with socket.create_connection(listener.getsockname()) as stranger:
            stranger.sendall(data)
    found = accept(
        listener,
        wanted,
        (LinkHello(1, "hidden 0"), b"another key"),
        (LinkHello(2, "hidden 0"),),
        (LinkHello(1, "hidden 7"),),
        (messages.Listen(1),),
        (LinkHello(1, "hidden 1"),),
        (LinkHello(1, "hidden 0"),),
    )
    assert found == wanted


def answer_to(near):
    """What a dialler says to a side that hears it, and reads of it."""
    sent, verdict = authentication.answer(KEY, near.recv(authentication.GREETING_BYTES))
    return sent, verdict


def read(hearing):
    """What it finds in what comes next."""
    select.select([hearing.connection], [], [])
    return hearing.read()


@pytest.fixture
def pair(listener):
    near = socket.create_connection(listener.getsockname())
    far, _ = listener.accept()
    with closing(near), closing(far):
        yield near, far


def test_hello_is_read_exactly(pair):
    near, far = pair
    hearing = PendingHello(far, KEY)
    sent, verdict = answer_to(near)
    hello = messages.encode(LinkHello(1, "hidden 0"))
    found = []
    for byte in (*sent, *hello):
        assert found == []
        near.sendall(bytes([byte]))
        if (message := read(hearing)) is not None:
            found.append(message)
    assert found == [LinkHello(1, "hidden 0")]
    assert near.recv(100) == verdict
    near.sendall(b"the first step")
    assert far.recv(100) == b"the first step"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (messages.LENGTH.pack(messages.HELLO_BYTES + 1), "maximum 1024"),
        (messages.LENGTH.pack(0), "not a message"),
        (messages.LENGTH.pack(1) + b"\xc1", "not a message"),
    ],
)
def test_what_is_no_hello_is_an_error(pair, data, words):
    near, far = pair
    hearing = PendingHello(far, KEY)
    near.sendall(answer_to(near)[0])
    assert read(hearing) is None
    near.sendall(data)
    with pytest.raises(ChannelError, match=words):
        while read(hearing) is None:
            pass


def test_another_key_is_reported_to_dialler_and_ends_connection(pair):
    near, far = pair
    hearing = PendingHello(far, b"another key")
    near.sendall(answer_to(near)[0])
    with pytest.raises(authentication.WrongKeyError):
        read(hearing)
    assert near.recv(100) == bytes(authentication.VERDICT_BYTES)
