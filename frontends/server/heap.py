"""The garbage collector of a process that serves: while it looks, every task and every thread stands still.

Laws.  It never looks of itself, and never at what was there when the model was loaded.  Reference counts find nearly all
garbage of a server (a connection that has ended leaves some thirty objects in a circle), so what is new is looked at four
times a second, and everything when nobody is served, or after a while of work, sooner where memory is short.  What
is free when nobody is served goes back to the system.

Measured with 256 streams, 290 objects each: of itself the collector looks when there are more objects than before, at 28,000
new ones in 10 ms, or with the recent ones in 34; those of 10 ms take 0.2, those of 50 are 3 to 5 % of a busy loop.  A full
look takes 25 to 70 ms, most of it for what is alive, and took 90 or 200 while torch's objects were in it.
"""

import gc
from types import TracebackType
from typing import Self

from trouper.actors.executor.memory import give_back_free_memory

LONGEST_S, TIGHT_S = 300.0, 10.0


class Heap:
    """`with Heap() as heap:` around loading and serving; `settle` in between."""

    def __init__(self) -> None:
        self._was_busy = False
        self._looked_at = 0.0

    def __enter__(self) -> Self:
        gc.disable()
        return self

    def settle(self) -> None:
        """Everything is loaded."""
        gc.collect()
        gc.freeze()

    def look(self, now: float, *, is_busy: bool, is_tight: bool = False) -> bool:
        """At everything, when it is time to; whether it was."""
        longest_s = TIGHT_S if is_tight else LONGEST_S
        is_due = now - self._looked_at > longest_s if is_busy else self._was_busy
        self._was_busy = is_busy
        if is_due:
            gc.collect()
            if not is_busy:
                give_back_free_memory()
            self._looked_at = now
        return is_due

    def look_at_new(self) -> None:
        gc.collect(0)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        gc.unfreeze()
        gc.enable()
