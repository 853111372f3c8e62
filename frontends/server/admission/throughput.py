"""Watch whether the engine moves, and how fast.  Pure.

Does the admission queue stand?  Pure.

A queue that takes up a burst empties again.  One that stands makes every request wait its whole length, and
serves clients that have given up.  CoDel's test tells the two apart (Nichols and Jacobson, "Controlling Queue Delay"): for a
whole interval no request has waited less than the target.  It need not drop one by one as CoDel does: here the pace is
known, so the queue is cut to what is done in the target's time.  A request that is kept has waited the target once and waits
it once more at most, so the target is half of what a first token may take.
"""

import math

from trouper.actors.messages.outputs import SchedulerStats

MEMORY_S = 10.0  # time constant of the throughput's average
MIN_S = 0.2  # seconds of work before the throughput is known


class StepClock:
    """Notices that a step has ended when the scheduler's counters have moved between two looks."""

    def __init__(self) -> None:
        self._seen: tuple[int, int, int] = (0, 0, 0)
        self._moved_at: float | None = None

    def age_s(self, stats: SchedulerStats, now: float) -> float:
        """Return the seconds since the last step that was seen to end.

        Nothing in flight counts as a step: there is nothing to wait for.
        """
        seen = (stats.num_prompt_tokens, stats.num_generation_tokens, stats.num_preemptions)
        if self._moved_at is None or seen != self._seen or not stats.num_steps_in_flight:
            self._seen, self._moved_at = seen, now
        return now - self._moved_at


class Throughput:
    """The tokens per second while there is work, over the last seconds of it."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._seen: tuple[int, float] | None = (
            None  # tokens so far and when; None: it was idle then
        )

    def note(self, num_tokens: int, now: float, *, is_busy: bool) -> None:
        """Note the token counter, at any time; `is_busy` holds until the next call."""
        if self._seen is not None:
            seconds = now - self._seen[1]
            kept = math.exp(-seconds / MEMORY_S)
            self._tokens = self._tokens * kept + num_tokens - self._seen[0]
            self._seconds = self._seconds * kept + seconds
        self._seen = (num_tokens, now) if is_busy else None

    @property
    def per_s(self) -> float | None:
        """The pace; None until it is known."""
        return self._tokens / self._seconds if self._seconds >= MIN_S else None

    def time_s(self, num_tokens: int) -> float:
        """Return the time that so many tokens take; 0 when the pace is not known."""
        per_s = self.per_s
        return 0.0 if per_s is None else num_tokens / max(per_s, 1e-9)


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
