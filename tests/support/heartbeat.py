"""Check that work leaves the event loop free: count turns of the loop (beats), and delay work until they happen.

Work on the loop would never see a beat, so a test of it could not end: beats are counted, no clock is looked at.
"""

import threading
from collections import Counter

import anyio
import anyio.from_thread
import anyio.lowlevel
import trio

BEATS = 50
WAIT_S = 30  # only a failure lasts so long


class Heartbeat:
    """Beat only while work is delayed: an always busy loop would keep the interpreter from the device."""

    def __init__(self):
        self.count = 0
        self._changed = threading.Condition()
        self._num_held = 0
        self._is_wanted = anyio.Event()
        self._token = None

    async def run(self, *, task_status=anyio.TASK_STATUS_IGNORED):
        self._token = anyio.lowlevel.current_token()
        task_status.started()
        while True:
            await self._is_wanted.wait()
            with self._changed:
                if not self._num_held:
                    self._is_wanted = anyio.Event()
                self.count += 1
                self._changed.notify_all()
            await anyio.sleep(0)  # noqa: ASYNC115  # every turn of the loop

    def hold_up(self, function):
        """Return the function, delayed until the loop has beaten `BEATS` more times."""

        def held(*args, **kwargs):
            with self._changed:
                self._num_held += 1
            anyio.from_thread.run_sync(lambda: self._is_wanted.set(), token=self._token)
            with self._changed:
                until = self.count + BEATS
                is_beating = self._changed.wait_for(lambda: self.count >= until, WAIT_S)
                self._num_held -= 1
            assert is_beating
            return function(*args, **kwargs)

        return held


class Pace(trio.abc.Instrument):
    """Count the calls of a function within one step of a task; the loop does nothing else during a step."""

    def __init__(self):
        self._num_steps = 0
        self._num_calls = Counter()

    def before_task_step(self, task):
        self._num_steps += 1

    def counted(self, function):
        def called(*args, **kwargs):
            self._num_calls[function.__name__, self._num_steps] += 1
            return function(*args, **kwargs)

        return called

    def of(self, name):
        """Return the number of calls in each step with at least one call."""
        return [num for (called, _), num in self._num_calls.items() if called == name]
