"""Rings between stages: order, room, waits, and memory that is not to be had."""

import os
import threading

import numpy as np
import pytest

from trouper.actors.executor.links.rings import Ring, RingFiles, create_ring
from trouper.actors.executor.links.worker_links import (
    CrewSizes,
    close_files,
    create_crew_files,
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
    sizes = CrewSizes(3, 1, hidden_bytes=64, token_bytes=8, group_bytes=())
    files = create_crew_files(sizes)
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
