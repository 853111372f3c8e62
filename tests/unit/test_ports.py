"""The threads of the renderers: bounded in time, and not interrupted by cancellation."""

import threading

import anyio
import pytest

from trouper.actors.runtime.threads import WorkerThreads, _Call, _Interrupted

pytestmark = pytest.mark.anyio


async def test_results_and_exceptions_come_back():
    threads = WorkerThreads(30)
    assert await threads.run(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await threads.run(divmod, 7, 0)


async def test_a_call_that_takes_too_long_is_given_up_and_the_next_one_runs():
    stuck = threading.Event()
    threads = WorkerThreads(0.01)
    with pytest.raises(TimeoutError, match=r"0\.01 s"):
        await threads.run(stuck.wait, 30)
    stuck.set()
    assert await WorkerThreads(30).run(abs, -1) == 1


async def test_an_endless_loop_is_given_up_and_its_thread_comes_back():
    has_ended = threading.Event()

    def loop():
        try:
            while True:
                pass
        finally:
            has_ended.set()

    with pytest.raises(TimeoutError):
        await WorkerThreads(0.01).run(loop)
    assert await anyio.to_thread.run_sync(has_ended.wait, 30)


def returns():
    return None


def raises():
    raise ValueError


def handles():
    try:
        while True:
            pass
    except _Interrupted:
        return


def drive(call, is_released, outcomes):
    is_released.wait(30)
    try:
        call.run()
    except (ValueError, _Interrupted) as error:
        outcomes.append(error)
    for _ in range(2000):  # what the thread does next
        pass
    outcomes.append("unharmed")


@pytest.mark.parametrize("is_early", [False, True])
@pytest.mark.parametrize("function", [returns, raises, handles])
def test_an_interruption_hits_its_own_call_or_nothing(function, is_early):
    for _ in range(50):
        call, is_released, outcomes = _Call(function), threading.Event(), []
        thread = threading.Thread(target=drive, args=(call, is_released, outcomes))
        thread.start()
        if is_early:
            call.interrupt()
        is_released.set()
        call.interrupt()
        thread.join(30)
        assert outcomes[-1] == "unharmed"
        assert not is_early or isinstance(outcomes[0], _Interrupted)


async def test_cancellation_waits_for_the_call():
    done = []
    with anyio.CancelScope() as scope:
        scope.cancel()
        await WorkerThreads(30).run(done.append, 1)
    assert done in ([], [1])
