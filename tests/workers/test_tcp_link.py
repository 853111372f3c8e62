"""A link between stages over a connection: its messages are whole however the bytes come, and its end is an error."""

import random
import socket

import numpy as np
import pytest

from trouper.actors.executor.links.tcp_link import HEADER, LinkLostError, TcpLink
from trouper.actors.executor.links.worker_links import CrewSizes, open_worker_links


def tcp_pair():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        return near, listener.accept()[0]


@pytest.fixture
def ends():
    """The sender's side and the receiver's, with messages of at most 16 bytes."""
    sides = [TcpLink(end.detach(), 16, patience_s=0.0) for end in tcp_pair()]
    yield sides
    for side in sides:
        side.close()


def some_bytes(text):
    return np.frombuffer(text, dtype=np.uint8)


def test_messages_come_in_order_with_their_steps(ends):
    sender, receiver = ends
    out = np.zeros(16, dtype=np.uint8)
    assert receiver.receive(out, wait=False) is None
    for step, text in ((1, b"first"), (2, b""), (5, b"sixteen bytes ..")):
        sender.send(step, some_bytes(text))
    for step, text in ((1, b"first"), (2, b""), (5, b"sixteen bytes ..")):
        assert receiver.receive(out, wait=True) == (step, len(text))
        assert out[: len(text)].tobytes() == text
    assert receiver.receive(out, wait=False) is None


def test_a_message_that_comes_in_pieces_is_handed_out_when_it_is_whole():
    near, far = tcp_pair()
    receiver = TcpLink(far.detach(), 16)
    out = np.zeros(16, dtype=np.uint8)
    dice = random.Random(3)
    with near:
        for step in range(20):
            text = bytes(dice.randrange(256) for _ in range(dice.randrange(17)))
            data = HEADER.pack(step, len(text)) + text
            found = None
            while data:
                assert found is None
                size = dice.randrange(1, len(data) + 1)
                near.sendall(data[:size])
                data = data[size:]
                found = receiver.receive(out, wait=not data)
            assert found == (step, len(text))
            assert out[: len(text)].tobytes() == text
    receiver.close()


def test_what_is_too_large_is_refused_on_both_sides(ends):
    sender, _ = ends
    with pytest.raises(ValueError, match="17 bytes for messages of 16"):
        sender.send(1, some_bytes(b"." * 17))
    near, far = tcp_pair()
    with near:
        near.sendall(HEADER.pack(1, 2**40))
        receiver = TcpLink(far.detach(), 16)
        with pytest.raises(ValueError, match="at most 16 may come"):
            receiver.receive(np.zeros(16, dtype=np.uint8), wait=True)
        receiver.close()


def test_the_end_of_the_other_side_is_an_error_after_what_it_sent(ends):
    sender, receiver = ends
    out = np.zeros(16, dtype=np.uint8)
    sender.send(1, some_bytes(b"last"))
    sender.close()
    assert receiver.receive(out, wait=True) == (1, 4)
    with pytest.raises(LinkLostError, match="closed by another stage"):
        receiver.receive(out, wait=False)


def test_a_network_that_is_silent_is_a_lost_link_on_both_sides():
    class Silent:
        """A socket whose keep-alive was not answered."""

        def sendmsg(self, parts):
            raise TimeoutError("timed out")

        def recv_into(self, buffer):
            raise TimeoutError("timed out")

        def close(self):
            pass

    for end in tcp_pair():
        link = TcpLink(end.detach(), 16, patience_s=0.0)
        link.close()
        link._socket = Silent()
        with pytest.raises(LinkLostError, match="between stages: timed out"):
            link.send(1, some_bytes(b"x"))
        with pytest.raises(LinkLostError, match="between stages: timed out"):
            link.receive(np.zeros(16, dtype=np.uint8), wait=True)


def test_stages_open_a_connection_where_they_inherit_a_socket():
    sizes = CrewSizes(2, 1, 64, 16, ())
    hidden, tokens = tcp_pair(), tcp_pair()
    first = open_worker_links(0, [hidden[0].detach(), tokens[0].detach()], sizes)
    second = open_worker_links(1, [hidden[1].detach(), tokens[1].detach()], sizes)
    out = np.zeros(64, dtype=np.uint8)
    first.hidden_out.send(7, some_bytes(b"." * 64))
    assert second.hidden_in.receive(out, wait=True) == (7, 64)
    second.tokens_out[0].send(7, some_bytes(b"ids"))
    assert first.tokens_in.receive(out, wait=True) == (7, 3)
    assert first.hidden_in is second.hidden_out is None
    first.close()
    second.close()
