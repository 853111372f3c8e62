"""Trio made deterministic.  The only place that touches its private names; `test_canary` guards it.

Two instruments and two sources of order:

* `Shuffle`: every batch in a drawn order, which is what trio does under Hypothesis.
* `Priorities`: PCT.  It finds a bug that needs d + 1 orderings with a probability that does not vanish.
"""

import math
import random
from collections.abc import Awaitable, Callable
from typing import Any

import trio
from trio._core import _run as trio_run
from trio.testing import MockClock

MAX_BATCHES = 50_000  # in one run; the longest that ends has some 2000


class LivelockError(Exception):
    """Tasks run and run, and the clock stands still."""


class Shuffle(random.Random):
    """Trio calls `shuffle` on each batch of runnable tasks, sorted by the order in which they were made."""

    num_batches = 0

    def shuffle(self, batch: list[Any]) -> None:
        self.count()
        if len(batch) > 1:
            super().shuffle(batch)

    def count(self) -> None:
        self.num_batches += 1
        if self.num_batches > MAX_BATCHES:
            raise LivelockError


class Priorities(Shuffle):
    """Each task has a drawn priority; at a few drawn moments the one about to run becomes the last."""

    def __init__(self, seed: int, num_changes: int = 3, horizon: int = 1000) -> None:
        super().__init__(seed)
        self._changes = {self.randrange(horizon) for _ in range(num_changes)}
        self._priorities: dict[Any, float] = {}

    def shuffle(self, batch: list[Any]) -> None:
        self.count()
        if not batch:
            return
        for task in batch:
            self._priorities.setdefault(task, self.random())
        batch.sort(key=self._priorities.__getitem__)
        if self.num_batches in self._changes:
            first = batch.pop(0)
            self._priorities[first] = 1 + self.num_batches
            batch.append(first)


class CancelAtStep(trio.abc.Instrument):
    """Cancels just before the k-th step of one client's task, or of all tasks together (None)."""

    def __init__(self, k: int, client: int | None) -> None:
        self.client = client
        self._k = k
        self._num_seen = 0
        self._task: trio.lowlevel.Task | None = None
        self._cancel: Callable[[], None] | None = None

    @property
    def has_fired(self) -> bool:
        return self._num_seen >= self._k

    def watch(self, task: trio.lowlevel.Task | None, cancel: Callable[[], None]) -> None:
        self._task, self._cancel = task, cancel

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if self._cancel is not None and (self._task is None or task is self._task):
            self._num_seen += 1
            if self._num_seen == self._k:
                self._cancel()


def run_deterministically(
    function: Callable[..., Awaitable[Any]],
    *args: Any,
    seed: int,
    priorities: bool = False,
    on_quiet: Callable[[], None] | None = None,
    instruments: tuple[trio.abc.Instrument, ...] = (),
) -> Any:
    """`trio.run` on virtual time in the order that `seed` draws.

    `on_quiet` is called whenever every task waits and the clock is about to jump.
    """
    clock = MockClock(autojump_threshold=0)

    def jump() -> None:
        if on_quiet is not None:
            on_quiet()
        seconds = trio_run.GLOBAL_RUN_CONTEXT.runner.deadlines.next_deadline() - clock._virtual_base
        if 0 < seconds < math.inf:
            clock.jump(seconds)

    # The class is final.  Its rate is 0, so only jumps move it; and a jump needs none of trio's statistics.
    clock._autojump = jump  # type: ignore[method-assign]
    clock.current_time = lambda: clock._virtual_base  # type: ignore[method-assign]
    before = trio_run._r, trio_run._ALLOW_DETERMINISTIC_SCHEDULING
    trio_run._r = Priorities(seed) if priorities else Shuffle(seed)
    trio_run._ALLOW_DETERMINISTIC_SCHEDULING = True
    try:
        return trio.run(function, *args, clock=clock, instruments=instruments)
    finally:
        trio_run._r, trio_run._ALLOW_DETERMINISTIC_SCHEDULING = before
