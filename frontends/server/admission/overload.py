"""Decide how the server sheds load when memory or time runs short, level by level.

    TIDY         closes idle connections                 SHED_ALL   admits no new request
    SHED_LOWEST  refuses requests of negative priority   ABORT      aborts the newest request at every check

`Ladder` decides, `memory_used` measures memory, and `Throughput` measures whether the engine makes progress, how fast,
and whether the admission queue persists.

A queue that absorbs a burst drains again.  A standing queue makes every request wait for its whole length, and serves clients that have
given up.  CoDel's test distinguishes the two (Nichols and Jacobson, "Controlling Queue Delay"): the queue is standing if no request waited
less than the target during a whole interval.  CoDel then drops one request at a time; here the throughput is known, so the queue is cut at
once to the work of one target time.  A remaining request has waited for the target once and waits at most once more, so the target is half
of the acceptable time to the first token.
"""

import math
from enum import IntEnum
from pathlib import Path

from trouper.actors.messages.outputs import SchedulerStats


class Level(IntEnum):
    CALM = 0
    TIDY = 1
    SHED_LOWEST = 2
    SHED_ALL = 3
    ABORT = 4


# The thresholds of each level: a share of memory, or seconds of event-loop lag.  No request is aborted because of lag.
MEMORY = {Level.TIDY: 0.92, Level.SHED_LOWEST: 0.94, Level.SHED_ALL: 0.95, Level.ABORT: 0.98}
LAG_S = {Level.TIDY: 1.0, Level.SHED_LOWEST: 2.0, Level.SHED_ALL: 5.0}
# A value counts as below a threshold if it is below this share of the threshold.
MARGIN = 0.98
# Consecutive checks below a level before the level falls.
NUM_CALM = 8


class Ladder:
    """Choose the level.  It rises at once and falls by one level at a time.

    It falls only after several consecutive checks below a lower threshold, so that the server does not oscillate.
    """

    def __init__(self) -> None:
        self.level = Level.CALM
        self._num_below = 0

    def look(self, memory: float, lag_s: float) -> Level:
        """Return the level for this share of used memory and this lag of the event loop since the last call."""
        wanted = _level(memory, lag_s)
        if wanted >= self.level:
            self.level, self._num_below = wanted, 0
        elif _level(memory / MARGIN, lag_s / MARGIN) < self.level:
            self._num_below += 1
            if self._num_below == NUM_CALM:
                self.level, self._num_below = Level(self.level - 1), 0
        else:
            self._num_below = 0
        return self.level


def _level(memory: float, lag_s: float) -> Level:
    held = [level for level, at in MEMORY.items() if memory >= at]
    held += [level for level, at in LAG_S.items() if lag_s >= at]
    return max(held, default=Level.CALM)


def memory_used(root: Path = Path("/")) -> float:
    """Return the share of memory that cannot be reclaimed, in the machine or the control group, whichever is larger.

    Returns 0.0 on systems without this information (all but Linux).
    """
    return max(_used_of_machine(root), _used_of_group(root / "sys/fs/cgroup"))


def _used_of_machine(root: Path) -> float:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return 0.0
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    return 1 - kib["MemAvailable"] / kib["MemTotal"]


def _used_of_group(group: Path) -> float:
    """Read a control group of version 2, without inactive file pages, which the system reclaims on demand."""
    try:
        limit = (group / "memory.max").read_text().strip()
        if limit == "max":
            return 0.0
        used = int((group / "memory.current").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except OSError:
        return 0.0
    return (used - int(stat["inactive_file"])) / int(limit)


# The time constant of the throughput's average.
MEMORY_S = 10.0
# The time under load, in seconds, that must be measured before the throughput is known.
MIN_S = 0.2


class StepClock:
    """Detect completed steps by changes of the scheduler's counters between two calls.

    The age of the current step reveals a hung device even while the server itself still answers.
    """

    def __init__(self) -> None:
        self._seen: tuple[int, int, int] = (0, 0, 0)
        self._moved_at: float | None = None

    def age_s(self, stats: SchedulerStats, now: float) -> float:
        """Return the seconds since the last detected end of a step, or 0 if no step is running."""
        seen = (stats.num_prompt_tokens, stats.num_generation_tokens, stats.num_preemptions)
        if self._moved_at is None or seen != self._seen or not stats.num_steps_in_flight:
            self._seen, self._moved_at = seen, now
        return now - self._moved_at


class Throughput:
    """Maintain a moving average of tokens per second under load.

    Idle time does not count, so the average describes the engine's capacity and not the demand.
    """

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        # The counter and its time at the last call, or None if the engine was idle.
        self._seen: tuple[int, float] | None = None
        # Tokens per second, or None while too little has been measured.
        self.per_s: float | None = None

    def note(self, num_tokens: int, now: float, *, is_busy: bool) -> None:
        """Record the token counter.  Call it periodically, with whether the engine will be busy until the next call.

        Older measurements lose weight exponentially.
        """
        if self._seen is not None:
            seconds = now - self._seen[1]
            kept = math.exp(-seconds / MEMORY_S)
            self._tokens = self._tokens * kept + num_tokens - self._seen[0]
            self._seconds = self._seconds * kept + seconds
            if self._seconds >= MIN_S:
                self.per_s = self._tokens / self._seconds
        self._seen = (num_tokens, now) if is_busy else None

    def time_s(self, num_tokens: int) -> float:
        """Return the seconds that this many tokens take, or 0 while the throughput is unknown."""
        per_s = self.per_s
        return 0.0 if per_s is None else num_tokens / max(per_s, 1e-9)


INTERVAL_S = 1.0


class QueueDelay:
    """Run CoDel's test.  `stands` is True after a `look` if the delay has been above the target for a whole interval.

    A shorter delay is the normal effect of a burst.
    """

    def __init__(self, target_s: float) -> None:
        self.target_s = target_s
        self.stands = False
        self._above_since: float | None = None

    def look(self, wait_s: float, now: float) -> None:
        """Record how long the next request has waited, in seconds; 0 if none is waiting."""
        if wait_s <= self.target_s:
            self._above_since = None
        elif self._above_since is None:
            self._above_since = now
        self.stands = self._above_since is not None and now - self._above_since >= INTERVAL_S
