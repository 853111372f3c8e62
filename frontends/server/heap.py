"""The garbage collector of a process that serves: while it looks, every task and every thread stands still.

Laws.  It does not look while the model is loaded, and never again at what was there then.  Reference counts find
nearly all garbage of a server (a connection that has ended leaves some sixty objects in circles), so young objects
are looked at rarely, and all of them when nobody is served, or after a minute of work.

Measured with 256 streams: 44 ms a full look and 7 % of the loop's time before, 90 ms or 200 while torch's objects were in it.
"""

import gc
from types import TracebackType
from typing import Self

YOUNG = 5_000  # objects more than at the last look, 2 ms
NUM_YOUNG = 5  # such looks before those that stayed are looked at once more, 7 ms
NEVER = 2**31 - 1
LONGEST_S = 60.0


class Heap:
    """`with Heap() as heap:` around loading and serving; `settle` in between."""

    def __init__(self) -> None:
        self._was_busy = False
        self._looked_at = 0.0
        self._threshold = gc.get_threshold()

    def __enter__(self) -> Self:
        gc.disable()
        return self

    def settle(self) -> None:
        """Everything is loaded."""
        gc.collect()
        gc.freeze()
        gc.set_threshold(YOUNG, NUM_YOUNG, NEVER)
        gc.enable()

    def look(self, now: float, *, is_busy: bool) -> bool:
        """Called now and then; whether it was time to look at all objects."""
        is_due = now - self._looked_at > LONGEST_S if is_busy else self._was_busy
        self._was_busy = is_busy
        if is_due:
            gc.collect()
            self._looked_at = now
        return is_due

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        gc.unfreeze()
        gc.set_threshold(*self._threshold)
        gc.enable()
