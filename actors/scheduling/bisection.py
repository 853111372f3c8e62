"""Which sequence makes the device raise?  A binary search over the sequences of a failed step.

    accuse(n suspects) ─▶ group() ─▶ it runs alone ─┬─ passed(): the culprit is among the others
                             ▲                      └─ failed(): it is in here, the others are free
                             └──────────────────────────── until nobody is left

One poison sequence costs ⌈log2 n⌉ halvings and one confirmation: nobody is condemned by elimination
alone, only by failing alone.  With several, the freed ones fail again in company and are searched again.
A cause that is nobody's (a passing fault) is gone when all suspects have passed.
"""

from collections.abc import Iterable

from trouper.actors.scheduling.sequences import Sequence


class Quarantine:
    """At most one group is under test; while it is, nothing else may be in flight."""

    def __init__(self) -> None:
        self._suspects: list[Sequence] = []
        self._tested: list[Sequence] = []

    def __bool__(self) -> bool:
        return bool(self._suspects)

    def accuse(self, suspects: Iterable[Sequence]) -> None:
        """A step of these raised; replaces what was suspected before."""
        self._suspects = list(suspects)
        self._tested = []

    def group(self) -> list[Sequence]:
        """Who runs alone next: half of those suspects that still run; empty when it is over."""
        self._suspects = [suspect for suspect in self._suspects if suspect.row >= 0]
        return self._suspects[: (len(self._suspects) + 1) // 2]

    def begin(self, tested: list[Sequence]) -> None:
        """These are in the step: the group, or as much of it as could be planned."""
        self._tested = tested

    @property
    def is_testing(self) -> bool:
        return bool(self._tested)

    def passed(self) -> None:
        tested = {sequence.id for sequence in self._tested}
        self._suspects = [suspect for suspect in self._suspects if suspect.id not in tested]
        self._tested = []

    def failed(self) -> Sequence | None:
        """The culprit if it was tested alone."""
        self._suspects, self._tested = self._tested, []
        return self._suspects.pop() if len(self._suspects) == 1 else None
