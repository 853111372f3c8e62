"""End a test at its time limit so that it fails and no other test does.

An exception that a signal raises in the middle of an event loop leaves the loop's runner unusable, and with it every later
test of the process. So a test ends in one of these ways:

* Under xdist its process ends. xdist reports the test as failed and starts another process for the rest.
* In a single process the scope of a coroutine test is cancelled, which its runner survives.
* In a single process any other test is interrupted as by Ctrl-C, which `trio.run` and `asyncio.run` know how to pass on.

A test in a single process that goes on for another GRACE seconds ends the run, with the stacks of all threads.
"""

import functools
import inspect
import os
import signal
import threading

import anyio
import anyio.lowlevel
import pytest
import pytest_timeout

GRACE = 10.0
MESSAGE = "Timeout: the test ran past its time limit"


class Limit:
    """The time limit of one test in a single process, and whether it has passed."""

    def __init__(self):
        self.passed = False
        self.interrupt = functools.partial(signal.raise_signal, signal.SIGINT)

    def around(self, function):
        """Return the coroutine function in a scope that is cancelled when the limit passes."""

        @functools.wraps(function)
        async def limited(*args, **kwargs):
            interrupt = self.interrupt
            with anyio.CancelScope() as scope:
                token = anyio.lowlevel.current_token().native_token
                wake = getattr(token, "run_sync_soon", None) or token.call_soon_threadsafe
                self.interrupt = functools.partial(wake, scope.cancel)
                try:
                    await function(*args, **kwargs)
                finally:
                    self.interrupt = interrupt
            if self.passed:
                pytest.fail(MESSAGE)

        return limited

    def end(self, item, settings):
        """Interrupt the test, and end the process if the test goes on."""
        self.passed = True
        stop_alarm = item.cancel_timeout
        last_resort = threading.Timer(GRACE, pytest_timeout.timeout_timer, (item, settings))
        last_resort.start()

        def cancel_timeout():
            stop_alarm()
            last_resort.cancel()

        item.cancel_timeout = cancel_timeout
        self.interrupt()


LIMIT = pytest.StashKey[Limit]()


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_timeout_set_timer(item, settings):
    """Arm pytest-timeout's timer, and choose what happens when it fires."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return pytest_timeout.pytest_timeout_set_timer(item, settings._replace(method="thread"))
    limit = item.stash[LIMIT] = Limit()
    function = getattr(item, "function", None)
    if inspect.iscoroutinefunction(function) and not hasattr(function, "hypothesis"):
        item.obj = limit.around(item.obj)
    pytest_timeout.pytest_timeout_set_timer(item, settings._replace(method="signal"))
    signal.signal(signal.SIGALRM, lambda *_: limit.end(item, settings))
    return True


def fail_if_passed(item):
    """Turn the interrupt of a limit into a failure, since pytest ends the run at one from the keyboard."""
    try:
        return (yield)
    except KeyboardInterrupt:
        if LIMIT not in item.stash or not item.stash[LIMIT].passed:
            raise
        pytest.fail(MESSAGE)


pytest_runtest_setup = pytest.hookimpl(wrapper=True)(fail_if_passed)
pytest_runtest_call = pytest.hookimpl(wrapper=True)(fail_if_passed)
pytest_runtest_teardown = pytest.hookimpl(wrapper=True)(fail_if_passed)


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(report):
    """Say why a process may have ended, since xdist speaks of a crash."""
    report.longrepr += (
        "\nIt ran past its time limit, and its stacks are above, or something killed its process."
    )
