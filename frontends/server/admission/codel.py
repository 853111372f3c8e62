"""Does the admission queue stand?  Pure.

A queue that takes up a burst empties again.  One that stands makes every request wait its whole length, and
serves clients that have given up.  CoDel's test tells the two apart (Nichols and Jacobson, "Controlling Queue Delay"): for a
whole interval no request has waited less than the target.  It need not drop one by one as CoDel does: here the pace is
known, so the queue is cut to what is done in the target's time.  A request that is kept has waited the target once and waits
it once more at most, so the target is half of what a first token may take.
"""

INTERVAL_S = 1.0


class QueueDelay:
    """The state of the test; `stands` is its result after each `look`."""

    def __init__(self, target_s: float) -> None:
        self.target_s = target_s
        self.stands = False
        self._above_since: float | None = None

    def look(self, wait_s: float, now: float) -> None:
        """Note how long the next request to start has waited; 0 when none waits."""
        if wait_s <= self.target_s:
            self._above_since = None
        elif self._above_since is None:
            self._above_since = now
        self.stands = self._above_since is not None and now - self._above_since >= INTERVAL_S
