"""A worker that is started before its engine, and the pause of collections around imports."""

import gc
import os

import pytest

from trouper.actors.executor.workers import launching
from trouper.actors.executor.workers.launching import LaunchedAhead
from trouper.actors.executor.workers.wire import FrameReader, Prepare
from trouper.actors.runtime.startup import collections_paused


class FakePeer:
    def __init__(self, rank, files):
        self.rank, self.files, self.is_killed = rank, files, False
        self.received = []

    def send(self, data, file):
        frames = FrameReader()
        frames.feed(data, [])
        self.received.append(frames.take())

    def kill(self):
        self.is_killed = True


@pytest.fixture
def launched(monkeypatch):
    peers = []

    def launch(rank, *, files=()):
        peers.append(FakePeer(rank, files))
        return peers[-1]

    monkeypatch.setattr(launching, "launch", launch)
    return peers


def test_the_worker_that_runs_is_given_out_once(launched):
    with LaunchedAhead() as launcher:
        assert [peer.received for peer in launched] == [[Prepare()]]
        assert launcher(0) is launched[0]
        assert launcher(0) is launched[1]
    assert not any(peer.is_killed for peer in launched)


@pytest.mark.parametrize(("rank", "files"), [(1, ()), (0, (7,))])
def test_late_ranks_and_workers_start_on_request(launched, rank, files):
    with LaunchedAhead() as launcher:
        peer = launcher(rank, files=files)
        assert peer is launched[1]
        assert (peer.rank, peer.files) == (rank, files)
    assert launched[0].is_killed


def test_worker_that_no_engine_takes_ends_with_block():
    with LaunchedAhead() as launcher:
        pid = launcher._first.pid
        os.kill(pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_collections_resume_after_pause():
    assert gc.isenabled()
    with collections_paused():
        assert not gc.isenabled()
        with collections_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_frozen_pause_exempts_what_was_made_in_it():
    before = gc.get_freeze_count()
    kept = []
    try:
        with collections_paused(is_frozen=True):
            kept += [[] for _ in range(100)]
        assert gc.get_freeze_count() >= before + 100
        assert gc.isenabled()
    finally:
        gc.unfreeze()
