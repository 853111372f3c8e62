"""The plans that the device has not answered, the eldest first.

Law: answers come in the order of the plans.

A step while it is planned.

Law: a builder commits nothing to a sequence.  A victim of preemption can still leave it, and only `commit`
advances `num_computed` and counts the samples that are now in flight.

How many drafts a step may verify, and what became of those of the steps before.  Pure.

Decide which running sequences a plan for a pipeline of stages may take.

All rows in one step would keep one stage busy and leave the others idle.  So each plan takes its share of the
sequences that decode, those first that have sampled longest ago, and one with a sample in flight only when its token
will have come by the time that the plan is run.  Prompts are not held back: no token of theirs is waited for.
"""

import collections.abc
from collections import deque
from typing import Any, TypeVar

import msgspec

from trouper.actors.messages.requests import RequestId, SequenceId
from trouper.actors.messages.steps import NewSequence, StepDone, StepPlan
from trouper.actors.scheduling.state.sequence import Sequence
from trouper.actors.scheduling.step_time import StepWork
from trouper.actors.stages import decode_quota, is_due
from trouper.config.resolve import SchedulerConfig

StepEntry = tuple[Sequence, int, int, int, int]
"""A sequence, its preemption epoch, the first position, the position after the last, and samples.

Where drafts are in flight before it, the positions are those if none of them is right.
"""


class InFlightPlan(msgspec.Struct, eq=False, kw_only=True):
    """A plan that the device has not answered."""

    step: int
    # Seconds that the device should take for it.  0 before the first fit of the step times.
    estimate_s: float = 0.0
    # An earlier plan has failed, so the device refuses this one.
    is_cancelled: bool = False

    @property
    def ids(self) -> tuple[SequenceId | RequestId, ...]:
        """List its sequences, or its requests in an engine that pools, in the order of the entries."""
        raise NotImplementedError


PlanT = TypeVar("PlanT", bound=InFlightPlan)


class InFlight(deque[PlanT]):
    """The plans in flight of any policy, the eldest first."""

    def complete(self, step: int) -> PlanT:
        """Remove the eldest plan, which must have this number.

        Raises:
            RuntimeError: the device has answered another plan.
        """
        if not self or self[0].step != step:
            raise RuntimeError(
                f"an answer to step {step}, in flight are {[each.step for each in self]}"
            )
        return self.popleft()


class InFlightStep(InFlightPlan, eq=False, kw_only=True):
    """A plan of an engine that generates."""

    entries: list[StepEntry]
    # Drafts of each entry, as planned; the answer contains how many were accepted.  Empty if the step verifies no drafts.
    lookaheads: list[int]
    # None without learnt step times.
    work: StepWork | None = None

    @property
    def ids(self) -> tuple[SequenceId, ...]:
        """List its sequences in the order of the entries."""
        return tuple(entry[0].id for entry in self.entries)


class InFlightSteps(InFlight[InFlightStep]):
    """The plans in flight of an engine that generates."""

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


def find_in_question(
    plans: collections.abc.Sequence[InFlightStep], num_stages: int
) -> dict[SequenceId, tuple[Sequence, int]]:
    """Find the sequences that may have killed the device, among the plans in flight.

    A single process was in the eldest plan.  The stages of a pipeline may have been in any of them.

    Returns:
        Each sequence with the position where its planned tokens end.
    """
    return {
        sequence.id: (sequence, max(end, sequence.num_computed_on_device + end - start))
        for plan in plans[: 1 if num_stages == 1 else None]
        for sequence, _, start, end, _ in plan.entries
    }


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
        return plan, InFlightStep(step=step, entries=entries, lookaheads=lookaheads)


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
    salt, scope = admit.cache_salt or "", admit.options.cache_scope.hex()
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


# Tokens of a step that verifies drafts, all sequences together: eight rows cost 1.2 to 1.55 of one on the CPU, sixteen twice.
MAX_VERIFIED = 16


class Lookahead:
    """The drafts of one engine.

    Args:
        most: of one sequence in a step; 0 = none.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.num_drafts = 0  # runs of tokens
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0  # that were right

    def __repr__(self) -> str:
        return f"<Lookahead of {self._most}, {self.num_accepted_tokens} of {self.num_draft_tokens} right>"

    def statistics(self) -> dict[str, Any]:
        """Describe the drafts in the fields of `SchedulerStats`."""
        return {
            "num_drafts": self.num_drafts,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
        }

    def per_sequence(self, num_running: int, num_tokens: int) -> int:
        """Share what a step of `num_tokens` can verify among the running sequences, all of which find room in it."""
        if not self._most or not num_running:
            return 0
        return max(0, min(self._most, min(MAX_VERIFIED, num_tokens) // num_running - 1))

    def note(self, done: StepDone) -> None:
        """Count the drafts of a step."""
        if not done.num_draft_tokens:
            return
        for num_tokens, token_ids in zip(done.num_draft_tokens, done.token_ids, strict=True):
            self.num_drafts += num_tokens > 0
            self.num_draft_tokens += num_tokens
            self.num_accepted_tokens += max(0, len(token_ids) - 1)


MAX_EARLY = 2  # samples in flight of a sequence that decodes before its token is due


def take_turns(
    sequences: list[Sequence], step: int, num_stages: int, *, is_early: bool = False
) -> list[Sequence]:
    """Return those that step `step` may take, in their order.

    Args:
        is_early: whether nothing else is runnable, so a sequence may be planned once before its token is due.
    """
    decoding = [s for s in sequences if _decodes(s)]
    due = [
        s
        for s in decoding
        if s.num_in_flight == 0
        or is_due(step - 1 - s.sampling_step, num_stages)
        or (is_early and s.num_in_flight < MAX_EARLY)
    ]
    due.sort(key=lambda s: s.sampling_step)
    chosen = {s.id for s in due[: decode_quota(len(decoding), num_stages)]}
    return [s for s in sequences if s.id in chosen or s.num_computed < s.num_prompt]


def _decodes(sequence: Sequence) -> bool:
    """Whether it is past its prompt and does not end with what is in flight."""
    known = sequence.num_tokens + sequence.num_in_flight
    return sequence.num_computed >= sequence.num_prompt and known < sequence.limit
