"""Decide what the server gives up when memory or time runs short, level by level.

    TIDY         closes idle connections                 SHED_ALL   admits no new request
    SHED_LOWEST  refuses requests of negative priority   ABORT      aborts the newest request at every check

`Ladder` decides, and `memory_used` measures.
"""

from enum import IntEnum
from pathlib import Path


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
    """Choose the level.  It rises at once and falls by one level at a time."""

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
    """Return the share of unreclaimable memory, of the machine or the control group, whichever is larger.

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
