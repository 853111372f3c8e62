"""A binary search for the sequence that makes the device raise, over the sequences of a failed step.

    suspect(n sequences) ─▶ group() ─▶ it runs alone ─┬─ passed(): the culprit is among the others
                              ▲                       └─ failed(): it is in here, the others are free
                              └──────────────────────────── until no suspect is left

One poisonous sequence costs ⌈log2 n⌉ halvings and one confirmation: no sequence is condemned by elimination
alone, only by failing alone.  With several, the freed ones fail again in company and are searched again.
A passing fault, which no sequence causes, is gone when all suspects have passed.

A search for the request that kills the device, over the sequences of the step in which it died.

    lose(columns) ─▶ group() ─▶ it runs alone ─┬─ every member has landed: advance() to the next group
                       ▲                       └─ lose() again: the culprit is in here
                       └──────────────────────────── until no suspect is left

Laws:
1. While there is a suspect nothing runs but the group under test, so the step of a loss has no bystander in it.
2. A request is condemned only when it was alone in the step of a loss, and a suspect before.
3. Newcomers are tested first: a sequence that has finished a step before is a rare killer.  So a new prompt that
   kills costs two losses in any crowd, any other at most 2 + ⌈log2 n⌉.
4. A suspect is free once it has landed past the position that was planned for it at the loss, and in no other way: one whose
   client hangs up, or has hung up before the loss, is tried as a ghost.  One that ends earlier is free when the device has
   answered the last step that it is in, because that step may still be the one that kills.
"""

from collections.abc import Iterable, Set

import msgspec

from trouper.actors.messages.requests import RequestId, SequenceId
from trouper.actors.scheduling.state.sequence import Request, Sequence, State


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


class Suspect(msgspec.Struct, frozen=True, eq=False):
    """A sequence in the step of a loss, and the position past which it is free."""

    sequence: Sequence
    until: int

    def is_free(self, in_flight: Set[SequenceId]) -> bool:
        """Whether it has landed past the position, or has ended and is in no step in flight."""
        sequence = self.sequence
        if sequence.state is State.FINISHED:
            return sequence.id not in in_flight
        return sequence.request_slot >= 0 and sequence.num_computed_on_device >= self.until

    @property
    def is_due(self) -> bool:
        """Whether steps must still be planned for it."""
        sequence = self.sequence
        return sequence.state is not State.FINISHED and sequence.num_computed < self.until


class Quarantine:
    """The suspects, and those of them that are under test.

    Args:
        num_drafts: positions behind its tokens that a step may have computed for a sequence, too.
    """

    def __init__(self, num_drafts: int = 0) -> None:
        self._num_drafts = num_drafts
        self._suspects: list[Suspect] = []  # at most the columns of a step, `max_num_seqs`
        self._tested: list[Suspect] = []
        self._num_losses = 0  # of this search

    def __repr__(self) -> str:
        return f"<Quarantine: {len(self._suspects)} suspects, {len(self._tested)} under test>"

    def __bool__(self) -> bool:
        return bool(self._suspects)

    @property
    def suspect_ids(self) -> tuple[SequenceId, ...]:
        """The ids of the suspects that have not ended, for tests and debugging."""
        sequences = [suspect.sequence for suspect in self._suspects]
        return tuple(s.id for s in sequences if s.state is not State.FINISHED)

    @property
    def requests(self) -> frozenset[RequestId]:
        """The requests in question."""
        return frozenset(suspect.sequence.request.admit.id for suspect in self._suspects)

    def lose(self, columns: Iterable[tuple[Sequence, int]]) -> tuple[Request, int] | None:
        """Take the columns of the step that the device was in: each sequence and where its tokens end.

        Returns:
            The culprit, if it has been found, and how many losses it has cost.
        """
        columns = list(columns)
        if not columns:  # it was idle: no request's doing
            return None
        self._num_losses += 1
        requests = {id(sequence.request): sequence.request for sequence, _ in columns}
        before = {suspect.sequence.id for suspect in self._suspects}
        if len(requests) == 1 and any(sequence.id in before for sequence, _ in columns):
            (culprit,) = requests.values()
            num_losses = self._num_losses
            self._end()
            return culprit, num_losses
        self._suspects = [
            Suspect(sequence, min(end, sequence.num_tokens) + self._num_drafts)
            for sequence, end in columns
            if sequence.state is not State.FINISHED
        ]
        self._choose()
        return None

    def group(self, in_flight: Set[SequenceId]) -> list[Suspect]:
        """Return those under test that are not free yet.

        Args:
            in_flight: the sequences of steps that the device has not answered.
        """
        free = {suspect.sequence.id for suspect in self._tested if suspect.is_free(in_flight)}
        if free:
            self._suspects = [s for s in self._suspects if s.sequence.id not in free]
            self._tested = [s for s in self._tested if s.sequence.id not in free]
        return self._tested

    def advance(self) -> None:
        """Go on to the next group: all of the last one have passed."""
        self._choose()

    def _choose(self) -> None:
        """Take the newcomers, unless none or all are; else the first half of the suspects."""
        self._suspects = [s for s in self._suspects if s.sequence.state is not State.FINISHED]
        if not self._suspects:
            self._end()
        newcomers = [suspect for suspect in self._suspects if not suspect.sequence.has_landed]
        if not 0 < len(newcomers) < len(self._suspects):
            newcomers = self._suspects[: (len(self._suspects) + 1) // 2]
        self._tested = newcomers

    def _end(self) -> None:
        self._suspects, self._tested, self._num_losses = [], [], 0
