"""Does the queue at the door stand?  Pure.

A queue that takes up a burst empties again.  One that stands makes everybody wait its whole length, and
serves them when they have given up.  CoDel's test tells the two apart (Nichols and Jacobson, "Controlling
Queue Delay"): for a whole interval nobody has waited less than the target.  It need not drop one by one as
CoDel does: here the pace is known, so the queue is cut to what is done in the target's time.  Who is
kept has waited the target once and waits it once more at most: it is half of what a first token may take.
"""

INTERVAL_S = 1.0


class QueueDelay:
    """`stands` after each look."""

    def __init__(self, target_s: float) -> None:
        self.target_s = target_s
        self.stands = False
        self._above_since: float | None = None

    def look(self, wait_s: float, now: float) -> None:
        """`wait_s`: how long whose turn is next has waited; 0 when nobody waits."""
        if wait_s <= self.target_s:
            self._above_since = None
        elif self._above_since is None:
            self._above_since = now
        self.stands = self._above_since is not None and now - self._above_since >= INTERVAL_S
