"""A plan while it is being made, and the record of it while it is in flight.

Law: a draft commits nothing to a sequence.  A victim of preemption can still leave it, and only `commit`
advances `num_computed` and counts the samples that are now under way.
"""

import msgspec

from trouper.actors.messages.plans import NewSequence, StepPlan
from trouper.actors.scheduling.sequences import Sequence
from trouper.config.args import SchedulerConfig

Column = tuple[Sequence, int, int, int, int]  # sequence, incarnation, start, end, num_sampled


class Flight(msgspec.Struct, eq=False):
    """A plan that the device has not answered."""

    step: int
    columns: list[Column]
    is_void: bool = False  # an earlier step raised: this one never runs


class Draft:
    """Who is in the next step, and with how many tokens."""

    __slots__ = (
        "budget",
        "capacity",
        "copies",
        "counts",
        "has_preempted",
        "max_count",
        "new_blocks",
        "sequences",
    )

    def __init__(self, config: SchedulerConfig, num_competing: int, capacity: int) -> None:
        """`num_competing` sequences run or queue; the step has at most `capacity` tokens."""
        self.capacity = capacity
        self.budget = capacity  # tokens left
        self.max_count = _max_count(config, num_competing)  # for one sequence
        self.sequences: list[Sequence] = []
        self.counts: list[int] = []
        self.new_blocks: list[tuple[int, tuple[int, ...]]] = []
        self.copies: list[tuple[int, int]] = []
        self.has_preempted = False

    def add(self, sequence: Sequence, count: int) -> None:
        self.sequences.append(sequence)
        self.counts.append(count)
        self.budget -= count

    def drop(self, victim: Sequence) -> None:
        """It is being preempted; its row is still its own."""
        self.has_preempted = True
        self.new_blocks = [entry for entry in self.new_blocks if entry[0] != victim.row]
        if victim in self.sequences:
            i = self.sequences.index(victim)
            del self.sequences[i]
            self.budget += self.counts.pop(i)

    def commit(self, step: int, epoch: int) -> tuple[StepPlan, Flight]:
        rows: list[int] = []
        starts: list[int] = []
        num_sampled: list[int] = []
        new_rows: list[NewSequence] = []
        columns: list[Column] = []
        for sequence, count in zip(self.sequences, self.counts, strict=True):
            start = sequence.num_computed
            end = start + count
            samples = int(end == sequence.num_tokens + sequence.num_in_flight)
            if sequence.is_row_stale:
                sequence.is_row_stale = False
                new_rows.append(_new_row(sequence))
            rows.append(sequence.row)
            starts.append(start)
            num_sampled.append(samples)
            columns.append((sequence, sequence.incarnation, start, end, samples))
            sequence.num_computed = end
            sequence.num_in_flight += samples
        plan = StepPlan(
            step=step,
            epoch=epoch,
            request_slots=tuple(rows),
            num_computed_tokens=tuple(starts),
            num_scheduled_tokens=tuple(self.counts),
            num_sampled_tokens=tuple(num_sampled),
            new_sequences=tuple(new_rows),
            new_blocks=tuple(self.new_blocks),
            copies=tuple(self.copies),
        )
        return plan, Flight(step, columns)


def _max_count(config: SchedulerConfig, num_competing: int) -> int:
    """The threshold for long prompts binds nobody who is alone; spec 5.4."""
    threshold, budget = config.long_prefill_token_threshold, config.max_num_scheduled_tokens
    if threshold <= 0 or num_competing <= 1:
        return budget
    if config.long_prefill_token_threshold_adaptive:
        return max(threshold, budget // num_competing)
    return threshold


def _new_row(sequence: Sequence) -> NewSequence:
    return NewSequence(
        request_slot=sequence.row,
        sequence=sequence.id,
        token_ids=sequence.token_ids(0, sequence.num_tokens),
        num_prompt=sequence.num_prompt,
        block_ids=tuple(sequence.blocks),
        sampling=sequence.sampling(),
        embeds=sequence.request.admit.embeds,
    )
