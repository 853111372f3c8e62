"""When a process that serves looks for garbage."""

import gc

from trouper.frontends.server.heap import LONGEST_S, YOUNG, Heap


class Circle:
    """Garbage that only the collector finds."""

    num_alive = 0

    def __init__(self):
        self.itself = self
        Circle.num_alive += 1

    def __del__(self):
        Circle.num_alive -= 1


def test_nothing_is_looked_for_while_loading_nor_ever_again_among_what_was_loaded():
    before = gc.get_threshold(), gc.get_freeze_count()
    with Heap() as heap:
        assert not gc.isenabled()
        heap.settle()
        assert gc.isenabled()
        assert gc.get_threshold()[0] == YOUNG
        assert gc.get_freeze_count() > before[1] + 10_000
    assert (gc.get_threshold(), gc.get_freeze_count()) == (before[0], 0)
    assert gc.isenabled()


def test_all_garbage_goes_when_the_last_request_has_gone():
    heap = Heap()
    heap.look(1000.0, is_busy=True)
    Circle()
    assert not heap.look(1000.25, is_busy=True)
    assert Circle.num_alive == 1
    assert heap.look(1000.5, is_busy=False)
    assert Circle.num_alive == 0
    assert not heap.look(1000.75, is_busy=False)


def test_garbage_of_a_server_that_is_never_idle_goes_once_a_minute():
    heap = Heap()
    heap.look(1000.0, is_busy=True)
    assert not heap.look(1000.0 + LONGEST_S, is_busy=True)
    assert heap.look(1000.1 + LONGEST_S, is_busy=True)
