"""Rings between stages: order, room, waits, and memory that is not to be had.

A link between stages over a connection: its messages are whole however the bytes come, and its end is an error.
"""

import os
import random
import socket
import threading

import numpy as np
import pytest

from trouper.actors.executor.rings import Ring, RingFiles, create_ring
from trouper.actors.executor.worker_links import (
    HEADER,
    LinkLostError,
    SharedSizes,
    TcpLink,
    close_files,
    create_shared_files,
    open_worker_links,
)

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs memory files")


@pytest.fixture
def ends():
    """The sender's side and the receiver's of a ring with two entries of 16 bytes."""
    files = create_ring(2, 16)
    sides = Ring(files, 2, 16), Ring(RingFiles(*map(os.dup, files)), 2, 16)
    yield sides
    for side in sides:
        side.close()
        side.close()


def payload(number, size=16):
    return np.full(size, number, dtype=np.uint8)


def received(ring, *, wait=False):
    out = payload(255)
    found = ring.receive(out, wait=wait)
    return found and (*found, out[: found[1]].tolist())


def test_payloads_come_in_order_and_only_once(ends):
    sender, receiver = ends
    assert received(receiver) is None
    for step in range(7):
        sender.send(step, payload(step, 16 - step))
        assert received(receiver) == (step, 16 - step, [step] * (16 - step))
    assert received(receiver) is None


def test_a_receiver_waits_for_a_payload(ends):
    sender, receiver = ends
    found = []
    reader = threading.Thread(target=lambda: found.append(received(receiver, wait=True)))
    reader.start()
    sender.send(3, payload(9, 2))
    reader.join(20)
    assert found == [(3, 2, [9, 9])]


def test_a_sender_waits_for_room(ends):
    sender, receiver = ends
    sent = []

    def send():
        for step in range(5):
            sender.send(step, payload(step))
            sent.append(step)

    writer = threading.Thread(target=send)
    writer.start()
    found = [received(receiver, wait=True)[0] for _ in range(3)]
    writer.join(20)
    assert (found, sent) == ([0, 1, 2], [0, 1, 2, 3, 4])
    assert [received(receiver)[0] for _ in range(2)] == [3, 4]


def test_a_payload_that_is_too_large_is_refused(ends):
    with pytest.raises(ValueError, match="17 bytes"):
        ends[0].send(0, payload(0, 17))


def test_two_stages_share_each_ring_and_nothing_is_left():
    before = set(os.listdir("/proc/self/fd"))
    sizes = SharedSizes(3, 1, hidden_bytes=64, token_bytes=8, group_bytes=())
    files = create_shared_files(sizes)
    assert [len(mine) for mine in files] == [6, 6, 6]
    assert set(files[0][3:]) == set(files[2][3:])  # the tokens
    stages = [open_worker_links(i, list(map(os.dup, mine)), sizes) for i, mine in enumerate(files)]
    close_files(files)
    stages[0].hidden_out.send(1, payload(4, 64))
    assert stages[1].hidden_in.receive(np.zeros(64, np.uint8), wait=True) == (1, 64)
    stages[2].tokens_out[0].send(1, payload(5, 8))
    assert stages[0].tokens_in.receive(np.zeros(8, np.uint8), wait=True) == (1, 8)
    assert stages[0].hidden_in is stages[1].tokens_in is stages[2].hidden_out is None
    assert stages[0].tokens_out == stages[1].tokens_out == ()
    for stage in stages:
        stage.close()
    assert set(os.listdir("/proc/self/fd")) == before


def tcp_pair():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        return near, listener.accept()[0]


@pytest.fixture
def connected_links():
    """The sender's side and the receiver's, with messages of at most 16 bytes."""
    sides = [TcpLink(end.detach(), 16, patience_s=0.0) for end in tcp_pair()]
    yield sides
    for side in sides:
        side.close()


def some_bytes(text):
    return np.frombuffer(text, dtype=np.uint8)


def test_messages_come_in_order_with_their_steps(connected_links):
    sender, receiver = connected_links
    out = np.zeros(16, dtype=np.uint8)
    assert receiver.receive(out, wait=False) is None
    for step, text in ((1, b"first"), (2, b""), (5, b"sixteen bytes ..")):
        sender.send(step, some_bytes(text))
    for step, text in ((1, b"first"), (2, b""), (5, b"sixteen bytes ..")):
        assert receiver.receive(out, wait=True) == (step, len(text))
        assert out[: len(text)].tobytes() == text
    assert receiver.receive(out, wait=False) is None


def test_partial_message_is_delivered_when_complete():
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


def test_what_is_too_large_is_refused_on_both_sides(connected_links):
    sender, _ = connected_links
    with pytest.raises(ValueError, match=r"17 bytes \(maximum 16\)"):
        sender.send(1, some_bytes(b"." * 17))
    near, far = tcp_pair()
    with near:
        near.sendall(HEADER.pack(1, 2**40))
        receiver = TcpLink(far.detach(), 16)
        with pytest.raises(ValueError, match="maximum 16"):
            receiver.receive(np.zeros(16, dtype=np.uint8), wait=True)
        receiver.close()


def test_end_of_other_side_is_error_after_what_it_sent(connected_links):
    sender, receiver = connected_links
    out = np.zeros(16, dtype=np.uint8)
    sender.send(1, some_bytes(b"last"))
    sender.close()
    assert receiver.receive(out, wait=True) == (1, 4)
    with pytest.raises(LinkLostError, match="closed by another stage"):
        receiver.receive(out, wait=False)


def test_network_silent_is_lost_link_on_both_sides():
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


def test_stages_open_connection_where_they_inherit_socket():
    sizes = SharedSizes(2, 1, 64, 16, ())
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
