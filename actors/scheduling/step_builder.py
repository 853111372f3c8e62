"""A step while it is planned.

Law: a builder commits nothing to a sequence.  A victim of preemption can still leave it, and only `commit`
advances `num_computed` and counts the samples that are now in flight.
"""

from trouper.actors.messages.identifiers import SequenceId
from trouper.actors.messages.plans import NewSequence, StepPlan
from trouper.actors.scheduling.in_flight import InFlightStep, StepEntry
from trouper.actors.scheduling.sequences import Sequence
from trouper.config.resolve import SchedulerConfig


class StepBuilder:
    """The sequences of the next step, and the number of tokens scheduled for each."""

    __slots__ = (
        "budget",
        "capacity",
        "copies",
        "counts",
        "has_preempted",
        "lookaheads",
        "max_count",
        "max_lookahead",
        "new_blocks",
        "sequences",
        "unknown",
    )

    def __init__(self, config: SchedulerConfig, num_competing: int, capacity: int) -> None:
        """Begin a step of at most `capacity` tokens, for which `num_competing` sequences run or queue."""
        self.capacity = capacity
        self.budget = capacity  # tokens left
        self.max_count = _max_count(config, num_competing)  # tokens of one sequence
        self.sequences: list[Sequence] = []
        self.counts: list[int] = []
        self.new_blocks: list[tuple[int, tuple[int, ...]]] = []
        self.copies: list[tuple[int, int]] = []
        self.has_preempted = False
        self.max_lookahead = 0  # drafts of one sequence that the device may verify
        self.lookaheads: list[int] = []
        self.unknown: dict[SequenceId, int] = {}  # tokens that drafts in flight may yield, if any

    def add(self, sequence: Sequence, count: int, lookahead: int = 0) -> None:
        """Schedule `count` tokens of a sequence, and as many drafts behind them as `lookahead` says at the most."""
        self.sequences.append(sequence)
        self.counts.append(count)
        self.lookaheads.append(lookahead)
        self.budget -= count + lookahead

    def drop(self, victim: Sequence) -> None:
        """Take out a sequence that is about to be preempted and still has its request slot."""
        self.has_preempted = True
        self.new_blocks = [entry for entry in self.new_blocks if entry[0] != victim.request_slot]
        if victim in self.sequences:
            i = self.sequences.index(victim)
            del self.sequences[i]
            self.budget += self.counts.pop(i) + self.lookaheads.pop(i)

    def commit(self, step: int, epoch: int) -> tuple[StepPlan, InFlightStep]:
        """Make the plan and its record, and advance the sequences."""
        slots: list[int] = []
        num_computed: list[int] = []
        num_sampled: list[int] = []
        new_sequences: list[NewSequence] = []
        entries: list[StepEntry] = []
        reads = 0
        for sequence, count in zip(self.sequences, self.counts, strict=True):
            start = sequence.num_computed
            end = start + count
            samples = int(end == sequence.num_tokens + sequence.num_in_flight)
            if end > sequence.num_tokens:
                reads = max(reads, sequence.sampling_step)
            if samples:
                sequence.sampling_step = step
            if sequence.is_slot_stale:
                sequence.is_slot_stale = False
                new_sequences.append(_new_sequence(sequence))
            slots.append(sequence.request_slot)
            num_computed.append(start)
            num_sampled.append(samples)
            entries.append((sequence, sequence.preemption_epoch, start, end, samples))
            sequence.num_computed = end
            sequence.num_in_flight += samples
        lookaheads = self.lookaheads if any(self.lookaheads) else []
        unknown = self.unknown
        unknowns = tuple(unknown.get(s.id, 0) for s in self.sequences) if unknown else ()
        plan = StepPlan(
            step=step,
            epoch=epoch,
            request_slots=tuple(slots),
            num_computed_tokens=tuple(num_computed),
            num_scheduled_tokens=tuple(self.counts),
            num_sampled_tokens=tuple(num_sampled),
            new_sequences=tuple(new_sequences),
            new_blocks=tuple(self.new_blocks),
            copies=tuple(self.copies),
            reads=reads,
            num_lookahead_tokens=tuple(lookaheads),
            num_unknown_tokens=unknowns,
        )
        return plan, InFlightStep(step, entries, lookaheads)


def _max_count(config: SchedulerConfig, num_competing: int) -> int:
    """The most tokens of one sequence; the threshold for long prompts does not bind one that is alone."""
    threshold, budget = config.long_prefill_token_threshold, config.max_num_scheduled_tokens
    if threshold <= 0 or num_competing <= 1:
        return budget
    if config.long_prefill_token_threshold_adaptive:
        return max(threshold, budget // num_competing)
    return threshold


def _new_sequence(sequence: Sequence) -> NewSequence:
    admit = sequence.request.admit
    number = 0 if admit.adapter is None else admit.adapter.number
    salt, scope = admit.cache_salt or "", admit.cache_scope.hex()
    return NewSequence(
        request_slot=sequence.request_slot,
        sequence=sequence.id,
        token_ids=sequence.token_ids(0, sequence.num_tokens),
        num_prompt=sequence.num_prompt,
        block_ids=tuple(sequence.blocks),
        sampling=sequence.sampling(),
        embeds=admit.embeds,
        grammar=admit.grammar,
        adapter_slot=0 if admit.adapter is None else admit.adapter.slot,
        family=f"{number} {scope} {salt}" if number or scope or salt else "",
    )
