"""The way from other threads onto the loop, and the check that a caller is on it."""

import threading

import anyio
import anyio.to_thread
import pytest

from trouper.actors.runtime.event_loop import EventLoop

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
