"""When a process that serves looks for garbage."""

import gc

import pytest

from trouper.frontends.server.program.monitor import LONGEST_S, TIGHT_S, Heap


class Circle:
    """Garbage that only the collector finds."""

    num_alive = 0

    def __init__(self):
        self.itself = self
        Circle.num_alive += 1

    def __del__(self):
        Circle.num_alive -= 1


@pytest.fixture
def small_heap():
    """Keep what other tests have loaded away from the collector, which then takes milliseconds."""
    gc.freeze()


def test_loaded_objects_are_never_collected():
    gc.unfreeze()
    before = gc.get_freeze_count()
    with Heap() as heap:
        assert not gc.isenabled()
        heap.settle()
        assert not gc.isenabled()  # only when it is told to look
        assert gc.get_freeze_count() > before + 10_000
    assert gc.get_freeze_count() == 0
    assert gc.isenabled()


def test_it_looks_when_the_last_request_has_gone(small_heap):
    heap = Heap()
    heap.look(1000.0, is_busy=True)
    Circle()
    heap.look(1000.25, is_busy=True)
    assert Circle.num_alive == 1
    heap.look(1000.5, is_busy=False)
    assert Circle.num_alive == 0
    Circle()
    heap.look(1000.75, is_busy=False)
    assert Circle.num_alive == 1
    gc.collect()


def test_it_looks_when_much_more_than_after_last_look(monkeypatch, small_heap):
    monkeypatch.setattr("trouper.frontends.server.program.monitor.MAX_MORE", 20_000)
    heap = Heap()
    heap.look(1000.0, is_busy=True)
    circles = [Circle() for _ in range(4_000)]  # two blocks each
    heap.look(1000.25, is_busy=True)
    circles = [Circle() for _ in range(12_000)]
    assert Circle.num_alive == 16_000
    heap.look(1000.5, is_busy=True)
    assert Circle.num_alive == len(circles)
    circles = None
    heap.look(1000.75, is_busy=True)
    assert Circle.num_alive == 12_000
    gc.collect()


def test_garbage_of_server_never_idle_goes_now_and_then(small_heap):
    heap = Heap()
    heap.look(1000.0, is_busy=True)
    for now, is_tight, is_looked_at in (
        (1000.0 + LONGEST_S, False, False),
        (1000.1 + LONGEST_S, False, True),
        (1000.2 + LONGEST_S + TIGHT_S, False, False),
        (1000.2 + LONGEST_S + TIGHT_S, True, True),
    ):
        Circle()
        heap.look(now, is_busy=True, is_tight=is_tight)
        assert (Circle.num_alive == 0) == is_looked_at
