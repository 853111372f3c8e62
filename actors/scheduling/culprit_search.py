"""Find the request that makes a step raise (`FaultBisection`) or that kills the device (`Quarantine`).

One bad request must not fail the others in its batch.  The device cannot name it, so the scheduler runs suspects in ever smaller
groups until one fails on its own.

`FaultBisection` is a binary search over the sequences of a step that raised:

    suspect(n sequences) ─▶ group() ─▶ it runs alone ─┬─ passed(): the culprit is among the others
                              ▲                       └─ failed(): it is in here, the others are free
                              └──────────────────────────── until no suspect is left

One bad sequence costs ⌈log2 n⌉ halvings and one confirmation: a sequence fails only if it raises in a step without others, never by
elimination.  If there are several, the freed ones raise again in a later step and are searched again.  The search ends without a
culprit when all suspects have passed: then the fault was temporary.

`Quarantine` searches the sequences of the step in which the device died:

    lose(entries) ─▶ group() ─▶ it runs alone ─┬─ every member has landed: advance() to the next group
                       ▲                       └─ lose() again: the culprit is in here
                       └──────────────────────────── until no suspect is left

Laws:
1. While there is a suspect, only the group under test runs.  So no innocent request is in the step of another loss.
2. A request is condemned only if it was the only one in the step of a loss, and a suspect before.
3. Newcomers are tested first, because a sequence that has finished a step rarely kills.  So a new prompt that kills costs two losses
   in any crowd, and any other request at most 2 + ⌈log2 n⌉.
4. A suspect is freed only when it has landed past the position planned for it at the loss.  If its client hangs up, before or after
   the loss, it is tested as a ghost.  If it ends earlier, it is freed when the device has answered its last step, because that step
   may still kill.
"""

from collections.abc import Iterable, Set

import msgspec

from trouper.actors.messages.requests import RequestId, SequenceId
from trouper.actors.scheduling.state.sequence import Request, Sequence, State


class FaultBisection:
    """Search for the sequence that makes steps raise.

    It holds the suspects and the group under test.  While a group is under test, no other step may be in flight.
    """

    def __init__(self) -> None:
        self._suspects: list[Sequence] = []
        self._tested: list[Sequence] = []

    def __bool__(self) -> bool:
        return bool(self._suspects)

    @property
    def suspect_ids(self) -> tuple[SequenceId, ...]:
        """List the ids of all suspects, for tests and debugging.

        The list is empty if no search is on.
        """
        return tuple(sequence.id for sequence in self._suspects)

    def suspect(self, sequences: Iterable[Sequence]) -> None:
        """Begin a search among the sequences of a step that raised.  It replaces an earlier search.

        All of them are equally suspect, because a step fails as a whole.
        """
        self._suspects = list(sequences)
        self._tested = []

    def group(self) -> list[Sequence]:
        """Return the sequences for the next test: half of the suspects that still run.  It is empty at the end of the search."""
        self._suspects = [suspect for suspect in self._suspects if suspect.request_slot >= 0]
        return self._suspects[: (len(self._suspects) + 1) // 2]

    def begin(self, tested: list[Sequence]) -> None:
        """Note the sequences in the step: the group, or the part of it for which there was room.

        The result of this step decides about exactly these sequences.
        """
        self._tested = tested

    @property
    def is_testing(self) -> bool:
        """Whether a group under test is in flight.

        No other step may be planned meanwhile, because its failure could not be distinguished. Other sequences wait.
        """
        return bool(self._tested)

    def passed(self) -> None:
        """Free the tested group: its step did not raise.

        The culprit must then be among the remaining suspects, or the failure was a transient one.
        """
        tested = {sequence.id for sequence in self._tested}
        self._suspects = [suspect for suspect in self._suspects if suspect.id not in tested]
        self._tested = []

    def failed(self) -> Sequence | None:
        """Narrow the search to the tested group, because its step raised.

        Returns the culprit if the group was one sequence; otherwise the next group is half as large.
        """
        self._suspects, self._tested = self._tested, []
        return self._suspects.pop() if len(self._suspects) == 1 else None


class Suspect(msgspec.Struct, frozen=True, eq=False):
    """A sequence in the step of a loss.  It is freed when it has landed past the position `until`.

    Freed means that the device computed its tokens again without dying, so it was not the cause.
    """

    sequence: Sequence
    until: int

    def is_free(self, in_flight: Set[SequenceId]) -> bool:
        """Whether the suspect has landed past the position, or has ended and is in no step in flight."""
        sequence = self.sequence
        if sequence.state is State.FINISHED:
            return sequence.id not in in_flight
        return sequence.request_slot >= 0 and sequence.num_computed_on_device >= self.until

    @property
    def is_due(self) -> bool:
        """Whether further steps must be planned for the suspect.

        A suspect past its position needs no more tests, but its results may still be in flight.
        """
        sequence = self.sequence
        return sequence.state is not State.FINISHED and sequence.num_computed < self.until


class Quarantine:
    """Search for the request that kills the device.

    Args:
        num_drafts: the most drafts that a step computes behind the tokens of a sequence.
    """

    def __init__(self, num_drafts: int = 0) -> None:
        self._num_drafts = num_drafts
        # At most the entries of one step: `max_num_seqs`.
        self._suspects: list[Suspect] = []
        self._tested: list[Suspect] = []
        # Losses of this search.
        self._num_losses = 0

    def __repr__(self) -> str:
        return f"<Quarantine: {len(self._suspects)} suspects, {len(self._tested)} under test>"

    def __bool__(self) -> bool:
        return bool(self._suspects)

    @property
    def suspect_ids(self) -> tuple[SequenceId, ...]:
        """List the ids of the unfinished suspects.

        Finished suspects are tested too, as ghosts, but nothing else needs their ids.
        """
        sequences = [suspect.sequence for suspect in self._suspects]
        return tuple(s.id for s in sequences if s.state is not State.FINISHED)

    @property
    def requests(self) -> frozenset[RequestId]:
        """List the requests of all suspects.

        Other requests may be moved to another replica meanwhile; these stay.
        """
        return frozenset(suspect.sequence.request.admit.id for suspect in self._suspects)

    def lose(self, entries: Iterable[tuple[Sequence, int]]) -> tuple[Request, int] | None:
        """Take the entries of the step in which the device died: each sequence, and the position at which its tokens end.

        Returns:
            The culprit and the number of losses that it has caused, if this loss shows it.
        """
        entries = list(entries)
        if not entries:
            # The device was idle, so no request has killed it.
            return None
        self._num_losses += 1
        requests = {id(sequence.request): sequence.request for sequence, _ in entries}
        before = {suspect.sequence.id for suspect in self._suspects}
        if len(requests) == 1 and any(sequence.id in before for sequence, _ in entries):
            (culprit,) = requests.values()
            num_losses = self._num_losses
            self._end()
            return culprit, num_losses
        self._suspects = [
            Suspect(sequence, min(end, sequence.num_tokens) + self._num_drafts)
            for sequence, end in entries
            if sequence.state is not State.FINISHED
        ]
        self._choose()
        return None

    def group(self, in_flight: Set[SequenceId]) -> list[Suspect]:
        """Free the tested suspects after they passed, and return the others under test.

        Args:
            in_flight: the sequences of steps that the device has not answered.
        """
        free = {suspect.sequence.id for suspect in self._tested if suspect.is_free(in_flight)}
        if free:
            self._suspects = [s for s in self._suspects if s.sequence.id not in free]
            self._tested = [s for s in self._tested if s.sequence.id not in free]
        return self._tested

    def advance(self) -> None:
        """Go on to the next group, because all suspects of the last one have passed.

        Without a further group, the search ends without a culprit.
        """
        self._choose()

    def _choose(self) -> None:
        """Choose the newcomers for the next test.  If all or none are newcomers, choose the first half of the suspects."""
        self._suspects = [s for s in self._suspects if s.sequence.state is not State.FINISHED]
        if not self._suspects:
            self._end()
        newcomers = [suspect for suspect in self._suspects if not suspect.sequence.has_landed]
        if not 0 < len(newcomers) < len(self._suspects):
            newcomers = self._suspects[: (len(self._suspects) + 1) // 2]
        self._tested = newcomers

    def _end(self) -> None:
        self._suspects, self._tested, self._num_losses = [], [], 0
