"""What other threads give the loop is done by the task that waits for it: in its own turn, and whatever becomes of it."""

import errno
import os
import random
import sys
import threading
from contextlib import closing
from functools import partial

import numpy as np
import pytest
import trio
from pytest_trio import trio_fixture

from trouper.actors.runtime.event_loop import Loop

pytestmark = [
    pytest.mark.trio,
    pytest.mark.skipif(sys.platform != "linux", reason="elsewhere trio's queue is used"),
]


@trio_fixture
def loop(nursery):
    """Which is made on the loop, and so after the nursery."""
    with closing(Loop()) as loop:
        yield loop


def in_a_thread(function):
    """Call it in another thread, and come back when it has returned."""
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def num_files():
    return len(os.listdir("/proc/self/fd"))


class Steps(trio.abc.Instrument):
    def __init__(self):
        self.names = []

    def before_task_step(self, task):
        self.names.append(task.name.rpartition(".")[2])


async def test_the_reader_does_it_and_goes_on_in_the_same_turn(loop, nursery):
    event, done = loop.new_event(), []

    async def reader():
        await event.wait()
        done.append("read")

    nursery.start_soon(reader)
    await trio.testing.wait_all_tasks_blocked()
    in_a_thread(partial(loop.soon, event.set))
    steps = Steps()
    trio.lowlevel.add_instrument(steps)
    await trio.testing.wait_all_tasks_blocked()
    trio.lowlevel.remove_instrument(steps)
    assert done == ["read"]
    assert steps.names.count("reader") == 1
    assert "<TrioToken.run_sync_soon task>" not in steps.names


async def test_nobody_waits_so_the_loop_itself_does_it(loop):
    done = trio.Event()
    in_a_thread(partial(loop.soon, done.set))
    with trio.fail_after(10):
        await done.wait()


async def test_what_is_for_somebody_else_leaves_the_reader_waiting(loop, nursery):
    mine, other = loop.new_event(), trio.Event()
    nursery.start_soon(mine.wait)
    await trio.testing.wait_all_tasks_blocked()
    for _ in range(3):
        other = trio.Event()
        in_a_thread(partial(loop.soon, other.set))
        with trio.fail_after(10):
            await other.wait()
    assert nursery.child_tasks  # still there
    mine.set()


async def test_all_who_wait_for_an_event_are_woken_and_so_is_who_waits_for_another(loop):
    async with trio.open_nursery() as waiters:
        first, second = loop.new_event(), loop.new_event()
        for event in (first, second, first, second):
            waiters.start_soon(event.wait)
        await trio.testing.wait_all_tasks_blocked()
        third = loop.new_event()
        waiters.start_soon(third.wait)
        await trio.testing.wait_all_tasks_blocked()
        assert len(waiters.child_tasks) == 5
        for event, num_left in ((second, 3), (third, 2), (first, 0)):
            event.set()
            await trio.testing.wait_all_tasks_blocked()
            assert len(waiters.child_tasks) == num_left


async def test_an_event_that_is_set_already_is_not_waited_for(loop):
    event = loop.new_event()
    event.set()
    with trio.fail_after(10):
        await event.wait()


@pytest.mark.parametrize("comes", ["before the cancellation", "behind it"])
async def test_what_was_given_is_done_though_who_waits_is_cancelled(loop, comes):
    done = []
    async with trio.open_nursery() as waiters:
        waiters.start_soon(loop.new_event().wait)
        await trio.testing.wait_all_tasks_blocked()
        if comes == "behind it":
            waiters.cancel_scope.cancel()
        in_a_thread(partial(loop.soon, partial(done.append, 1)))
        waiters.cancel_scope.cancel()
    await trio.testing.wait_all_tasks_blocked()
    assert done == [1]
    with trio.move_on_after(0):  # the next one finds the bell as it was
        await loop.new_event().wait()
    in_a_thread(partial(loop.soon, partial(done.append, 2)))
    await trio.testing.wait_all_tasks_blocked()
    assert done == [1, 2]


async def test_ctrl_c_does_not_interrupt_what_is_done(loop, nursery):
    protected, event = [], loop.new_event()

    def act():
        protected.append(trio.lowlevel.currently_ki_protected())
        event.set()

    async def reader():
        assert not trio.lowlevel.currently_ki_protected()
        await event.wait()

    nursery.start_soon(trio.lowlevel.disable_ki_protection(reader))
    await trio.testing.wait_all_tasks_blocked()
    in_a_thread(partial(loop.soon, act))
    await trio.testing.wait_all_tasks_blocked()
    assert protected == [True]


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_it_is_not_done_in_the_context_of_who_waits(loop, is_cancelled):
    """As numpy keeps there whether an underflow is an error: it would be in everybody's post-processing."""
    seen = []

    async def reader(scope):
        with scope, np.errstate(all="raise"):
            await loop.new_event().wait()

    async with trio.open_nursery() as readers:
        scope = trio.CancelScope()
        readers.start_soon(reader, scope)
        await trio.testing.wait_all_tasks_blocked()
        if is_cancelled:
            scope.cancel()
        in_a_thread(partial(loop.soon, lambda: seen.append(np.geterr()["under"])))
        await trio.testing.wait_all_tasks_blocked()
        scope.cancel()
    assert seen == ["ignore"]


@pytest.mark.parametrize("waits", [False, True])
async def test_its_file_is_closed_when_the_last_one_has_left(waits):
    before = num_files()
    loop = Loop()
    event = loop.new_event()
    async with trio.open_nursery() as waiters:
        waiters.start_soon(event.wait)
        await trio.testing.wait_all_tasks_blocked()
        assert num_files() == before + 1
        if not waits:
            event.set()
            await trio.testing.wait_all_tasks_blocked()
        loop.close()
        assert num_files() == before + waits
        event.set()
    loop.close()
    assert num_files() == before

    later, done = loop.new_event(), []
    in_a_thread(partial(loop.soon, partial(done.append, 1)))
    in_a_thread(partial(loop.soon, later.set))
    with trio.fail_after(10):
        await later.wait()
    assert done == [1]


async def test_a_process_with_too_many_files_waits_as_ever(loop, nursery, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "eventfd", refuse)
    event = loop.new_event()
    nursery.start_soon(event.wait)
    await trio.testing.wait_all_tasks_blocked()
    in_a_thread(partial(loop.soon, event.set))
    with trio.fail_after(10):
        await event.wait()


async def test_after_the_loop_a_thread_is_told():
    async def made():
        with closing(Loop()) as loop:
            with trio.move_on_after(0):
                await loop.new_event().wait()
        return loop

    loop = await trio.to_thread.run_sync(trio.run, made)
    with pytest.raises(RuntimeError):
        loop.soon(print)


async def test_garbage_that_is_collected_while_somebody_rings_gives_its_own(loop, nursery):
    """As in a thread that holds the lock."""
    done, event = [], loop.new_event()
    nursery.start_soon(event.wait)
    await trio.testing.wait_all_tasks_blocked()
    with loop.soon.__self__._lock:
        loop.soon(partial(done.append, 1))
    await trio.testing.wait_all_tasks_blocked()
    assert done == [1]
    event.set()


async def test_what_was_given_before_somebody_came_wakes_him(loop):
    """It is with trio's queue, and for him."""
    event, done = loop.new_event(), []
    loop.soon(partial(done.append, 1))
    loop.soon(event.set)
    loop.soon(partial(done.append, 2))
    with trio.fail_after(10):
        await event.wait()
    await trio.testing.wait_all_tasks_blocked()
    assert done == [1, 2]


@pytest.mark.parametrize("seed", range(5))
async def test_threads_and_readers_that_come_and_go_lose_nothing(loop, seed):
    """Each of many things is done once, on the loop; each reader is woken by his own."""
    rng, done, home = random.Random(seed), [], threading.get_ident()
    num = 100

    def act(number, event):
        assert threading.get_ident() == home
        done.append(number)
        event.set()

    async def ask(number, patience):
        event = loop.new_event()
        thread = threading.Thread(target=loop.soon, args=(partial(act, number, event),))
        thread.start()
        with trio.move_on_after(patience):
            await event.wait()
            assert number in done
        thread.join()

    with trio.fail_after(60):
        async with trio.open_nursery() as readers:
            for number in range(num):
                readers.start_soon(ask, number, rng.choice((0, 1e-4, 50)))
                if rng.random() < 0.5:
                    await trio.lowlevel.checkpoint()
        await trio.testing.wait_all_tasks_blocked()
    assert sorted(done) == list(range(num))
