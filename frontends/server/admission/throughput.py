"""Measure whether the engine makes progress, how fast, and whether the admission queue persists.  Pure.

A queue that absorbs a burst drains again.  A queue that persists makes every request wait for its whole length, and serves clients
that have given up.  CoDel's test distinguishes the two (Nichols and Jacobson, "Controlling Queue Delay"): the queue persists if no
request waited less than the target during a whole interval.  CoDel then drops one request at a time; here the throughput is known,
so the queue is cut at once to the work of one target time.  A kept request has waited for the target once and waits at most once
more, so the target is half of the acceptable time to the first token.
"""

import math

from trouper.actors.messages.outputs import SchedulerStats

MEMORY_S = 10.0  # time constant of the throughput's average
MIN_S = 0.2  # seconds of work before the throughput is known


class StepClock:
    """Detect the end of steps by changes of the scheduler's counters between two calls."""

    def __init__(self) -> None:
        self._seen: tuple[int, int, int] = (0, 0, 0)
        self._moved_at: float | None = None

    def age_s(self, stats: SchedulerStats, now: float) -> float:
        """Return the seconds since the last detected end of a step.

        An idle engine counts as just having ended one, because there is nothing to wait for.
        """
        seen = (stats.num_prompt_tokens, stats.num_generation_tokens, stats.num_preemptions)
        if self._moved_at is None or seen != self._seen or not stats.num_steps_in_flight:
            self._seen, self._moved_at = seen, now
        return now - self._moved_at


class Throughput:
    """A moving average of tokens per second, over the recent seconds with work."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._seen: tuple[int, float] | None = (
            None  # the counter and its time, unless it was idle then
        )

    def note(self, num_tokens: int, now: float, *, is_busy: bool) -> None:
        """Record the token counter.  `is_busy` holds until the next call."""
        if self._seen is not None:
            seconds = now - self._seen[1]
            kept = math.exp(-seconds / MEMORY_S)
            self._tokens = self._tokens * kept + num_tokens - self._seen[0]
            self._seconds = self._seconds * kept + seconds
        self._seen = (num_tokens, now) if is_busy else None

    @property
    def per_s(self) -> float | None:
        """Tokens per second, or None while too little has been measured."""
        return self._tokens / self._seconds if self._seconds >= MIN_S else None

    def time_s(self, num_tokens: int) -> float:
        """Return the seconds that this many tokens take, or 0 while the throughput is unknown."""
        per_s = self.per_s
        return 0.0 if per_s is None else num_tokens / max(per_s, 1e-9)


INTERVAL_S = 1.0


class QueueDelay:
    """The state of the test.  `stands` is its result after each `look`."""

    def __init__(self, target_s: float) -> None:
        self.target_s = target_s
        self.stands = False
        self._above_since: float | None = None

    def look(self, wait_s: float, now: float) -> None:
        """Record how long the next request has waited; 0 if none waits."""
        if wait_s <= self.target_s:
            self._above_since = None
        elif self._above_since is None:
            self._above_since = now
        self.stands = self._above_since is not None and now - self._above_since >= INTERVAL_S
