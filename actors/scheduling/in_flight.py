"""The plans that the device has not answered, the eldest first.

Law: answers come in the order of the plans.
"""

from collections import deque
from typing import Protocol, TypeVar

import msgspec

from trouper.actors.messages.identifiers import SequenceId
from trouper.actors.scheduling.sequences import Sequence
from trouper.actors.scheduling.step_time import StepWork

StepEntry = tuple[Sequence, int, int, int, int]
"""A sequence, its preemption epoch, the first position, the position after the last, and samples.

Where drafts are in flight before it, the positions are those if none of them is right.
"""


class Numbered(Protocol):
    """A plan in flight."""

    step: int


StepT = TypeVar("StepT", bound=Numbered)


class InFlight(deque[StepT]):
    """The plans in flight of any policy."""

    def complete(self, step: int) -> StepT:
        """Remove the eldest plan, which must be this one."""
        if not self or self[0].step != step:
            raise RuntimeError(
                f"an answer to step {step}, in flight are {[each.step for each in self]}"
            )
        return self.popleft()


class InFlightStep(msgspec.Struct, eq=False):
    """A plan that the device has not answered."""

    step: int
    entries: list[StepEntry]
    # Drafts of each entry, of which the answer says how far they took it; empty: none.
    lookaheads: list[int]
    is_cancelled: bool = False  # an earlier step raised: this one never runs
    work: StepWork | None = None  # None without learnt step times
    estimate_s: float = 0.0  # 0 before the first fit


class InFlightSteps(InFlight[InFlightStep]):
    """The plans in flight of an engine that generates."""

    def ids(self) -> tuple[tuple[int, tuple[SequenceId, ...]], ...]:
        """List the number of each step, and its sequences."""
        return tuple((each.step, tuple(entry[0].id for entry in each.entries)) for each in self)

    def sequence_ids(self) -> set[SequenceId]:
        """Return the sequences that steps in flight compute."""
        return {entry[0].id for each in self for entry in each.entries}

    def unknown_tokens(self) -> dict[SequenceId, int]:
        """Count the tokens that drafts may yield for each sequence, beyond the one that its step samples anyway."""
        found: dict[SequenceId, int] = {}
        for step in self:
            if step.is_cancelled or not step.lookaheads:
                continue
            for (sequence, epoch, *_), lookahead in zip(step.entries, step.lookaheads, strict=True):
                if lookahead and epoch == sequence.preemption_epoch:
                    found[sequence.id] = found.get(sequence.id, 0) + lookahead
        return found

    def in_question(self, num_stages: int) -> dict[SequenceId, tuple[Sequence, int]]:
        """Find the sequences that may have killed the device: stages may have been in any plan, one process in the eldest.

        Returns:
            Each with the position where its tokens end.
        """
        return {
            sequence.id: (sequence, max(end, sequence.num_computed_on_device + end - start))
            for plan in list(self)[: 1 if num_stages == 1 else None]
            for sequence, _, start, end, _ in plan.entries
        }
