"""A binary search for the sequence that makes the device raise, over the sequences of a failed step.

    suspect(n sequences) ─▶ group() ─▶ it runs alone ─┬─ passed(): the culprit is among the others
                              ▲                       └─ failed(): it is in here, the others are free
                              └──────────────────────────── until no suspect is left

One poisonous sequence costs ⌈log2 n⌉ halvings and one confirmation: no sequence is condemned by elimination
alone, only by failing alone.  With several, the freed ones fail again in company and are searched again.
A passing fault, which no sequence causes, is gone when all suspects have passed.
"""

from collections.abc import Iterable

from trouper.actors.messages.identifiers import SequenceId
from trouper.actors.scheduling.sequences import Sequence


class FaultBisection:
    """Search for the sequence that makes steps fail.

    It holds the suspects and the group under test; while there is such a group, no other step may be in flight.
    """

    def __init__(self) -> None:
        self._suspects: list[Sequence] = []
        self._tested: list[Sequence] = []

    def __bool__(self) -> bool:
        return bool(self._suspects)

    @property
    def suspect_ids(self) -> tuple[SequenceId, ...]:
        """The ids of all suspects, for tests and debugging."""
        return tuple(sequence.id for sequence in self._suspects)

    def suspect(self, sequences: Iterable[Sequence]) -> None:
        """Begin a search among the sequences of a step that raised; it replaces an earlier search."""
        self._suspects = list(sequences)
        self._tested = []

    def group(self) -> list[Sequence]:
        """The sequences to run alone next: half of the suspects that still run; empty at the end."""
        self._suspects = [suspect for suspect in self._suspects if suspect.request_slot >= 0]
        return self._suspects[: (len(self._suspects) + 1) // 2]

    def begin(self, tested: list[Sequence]) -> None:
        """Note the sequences in the step: the group, or as much of it as could be planned."""
        self._tested = tested

    @property
    def is_testing(self) -> bool:
        """Tell whether a group under test is in flight."""
        return bool(self._tested)

    def passed(self) -> None:
        """Free the tested group: its step did not raise."""
        tested = {sequence.id for sequence in self._tested}
        self._suspects = [suspect for suspect in self._suspects if suspect.id not in tested]
        self._tested = []

    def failed(self) -> Sequence | None:
        """Narrow the search to the tested group, whose step raised; return the culprit if it was alone."""
        self._suspects, self._tested = self._tested, []
        return self._suspects.pop() if len(self._suspects) == 1 else None
