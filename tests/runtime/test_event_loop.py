"""The way from other threads onto the loop, and the check that a caller is on it."""

import contextlib
import sys
import threading

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from trouper.actors.runtime.event_loop import EventLoop, WakeupPipe

pytestmark = pytest.mark.anyio


async def test_function_that_thread_gives_is_called_on_loop():
    loop, called, where = EventLoop(), anyio.Event(), []

    def act():
        where.append(threading.get_ident())
        called.set()

    await anyio.to_thread.run_sync(loop.call_soon, act)
    await called.wait()
    assert where == [threading.get_ident()]


async def test_a_thread_and_another_loop_are_not_current():
    loop = EventLoop()
    loop.check_current()

    async def inside():
        loop.check_current()

    for function in (loop.check_current, lambda: anyio.run(inside)):
        with pytest.raises(RuntimeError, match="belongs to its event loop"):
            await anyio.to_thread.run_sync(function)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
async def test_after_loop_has_ended_thread_is_told(backend):
    async def made():
        return EventLoop()

    loop = await anyio.to_thread.run_sync(lambda: anyio.run(made, backend=backend))
    with pytest.raises(RuntimeError):
        loop.call_soon(print)


async def test_notify_keeps_the_gil_until_its_thread_ends():
    pipe, went_on, seen = WakeupPipe(), [], []

    def notify():
        pipe.notify()
        went_on.append(True)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(10)
    try:
        for _ in range(20):
            went_on.clear()
            thread = threading.Thread(target=notify)
            thread.start()
            with anyio.fail_after(10):
                await pipe.wait()
            seen.append(bool(went_on))
            thread.join()
    finally:
        sys.setswitchinterval(interval)
        pipe.close()
    assert all(seen)


async def test_calls_before_a_wait_count_as_one():
    pipe, woken = WakeupPipe(), []

    async def wait():
        with contextlib.suppress(anyio.ClosedResourceError):
            while True:
                await pipe.wait()
                woken.append(True)

    async with anyio.create_task_group() as tasks:
        # More than a pipe holds.
        for _ in range(70_000):
            pipe.notify()
        tasks.start_soon(wait)
        await pipe_is_empty(woken, 1)
        pipe.notify()
        await pipe_is_empty(woken, 2)
        pipe.close()
    pipe.close()
    pipe.notify()
    assert len(woken) == 2


async def pipe_is_empty(woken, num):
    with anyio.fail_after(10):
        while len(woken) < num:  # noqa: ASYNC110
            await anyio.sleep(0.001)
    await anyio.wait_all_tasks_blocked()
