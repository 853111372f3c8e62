"""The threads of the renderers: bounded in time, and not interrupted by cancellation."""

import threading

import anyio
import pytest

from trouper.actors.runtime.event_loop import WorkerThreads

pytestmark = pytest.mark.anyio


async def test_results_and_exceptions_come_back():
    threads = WorkerThreads(30)
    assert await threads.run(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await threads.run(divmod, 7, 0)


async def test_slow_call_is_abandoned_and_next_runs():
    stuck = threading.Event()
    threads = WorkerThreads(0.01)
    with pytest.raises(TimeoutError, match=r"0\.01 s"):
        await threads.run(stuck.wait, 30)
    stuck.set()
    assert await WorkerThreads(30).run(abs, -1) == 1


async def test_cancellation_waits_for_the_call():
    done = []
    with anyio.CancelScope() as scope:
        scope.cancel()
        await WorkerThreads(30).run(done.append, 1)
    assert done in ([], [1])
