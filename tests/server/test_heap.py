"""When a process that serves looks for garbage."""

import gc

from trouper.frontends.server.heap import LONGEST_S, TIGHT_S, Heap


class Circle:
    """Garbage that only the collector finds."""

    num_alive = 0

    def __init__(self):
        self.itself = self
        Circle.num_alive += 1

    def __del__(self):
        Circle.num_alive -= 1


def test_nothing_is_looked_for_while_loading_nor_ever_again_among_what_was_loaded():
    before = gc.get_freeze_count()
    with Heap() as heap:
        assert not gc.isenabled()
        heap.settle()
        assert not gc.isenabled()  # only when it is told to look
        assert gc.get_freeze_count() > before + 10_000
    assert gc.get_freeze_count() == 0
    assert gc.isenabled()


def test_what_is_new_is_looked_at_each_time_and_everything_when_the_last_request_has_gone():
    heap = Heap()
    heap.look(1000.0, is_busy=True)
    circles = [Circle(), Circle()]
    heap.look_at_new()
    circles.pop()
    Circle()
    heap.look_at_new()
    assert not heap.look(1000.5, is_busy=True)
    assert Circle.num_alive == 2  # the one that is older, and the one that is in use
    assert heap.look(1000.75, is_busy=False)
    assert Circle.num_alive == len(circles)
    assert not heap.look(1001.0, is_busy=False)


def test_garbage_of_a_server_that_is_never_idle_goes_now_and_then():
    heap = Heap()
    heap.look(1000.0, is_busy=True)
    assert not heap.look(1000.0 + LONGEST_S, is_busy=True)
    assert heap.look(1000.1 + LONGEST_S, is_busy=True)
    assert not heap.look(1000.2 + LONGEST_S + TIGHT_S, is_busy=True)
    assert heap.look(1000.2 + LONGEST_S + TIGHT_S, is_busy=True, is_tight=True)
