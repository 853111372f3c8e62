"""A heart that beats with the event loop, and work that is held up until it has.

Work on the loop would never see a beat, so a test of it could not end: beats are counted, no clock is looked at.
"""

import threading

import anyio

BEATS = 50
WAIT_S = 30  # only a failure lasts so long


class Heartbeat:
    def __init__(self):
        self.count = 0
        self._changed = threading.Condition()

    async def run(self, *, task_status=anyio.TASK_STATUS_IGNORED):
        task_status.started()
        while True:
            with self._changed:
                self.count += 1
                self._changed.notify_all()
            await anyio.sleep(0)  # noqa: ASYNC115  # every turn of the loop

    def hold_up(self, function):
        """The function, but first the loop must beat `BEATS` times more."""

        def held(*args, **kwargs):
            with self._changed:
                until = self.count + BEATS
                assert self._changed.wait_for(lambda: self.count >= until, WAIT_S)
            return function(*args, **kwargs)

        return held
