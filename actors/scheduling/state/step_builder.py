"""A step while it is planned, and the plans in flight.

`StepBuilder` collects the sequences of the next step.  Law: it changes no sequence until `commit`, so a preempted sequence can still
leave the step.  `commit` advances `num_computed` and counts the samples in flight.

`InFlight` holds the plans without an answer, the eldest first.  Law: answers come in the order of the plans.

`Lookahead` shares the drafts of a step among its sequences.  `take_turns` does the same for the stages of a pipeline: if one step took
all sequences, one stage would work while the others idle.  So each plan takes its share of the decoding sequences, beginning with the
oldest sample.  It takes one with a sample in flight only if that token arrives before the plan runs.  Prompts need no such wait.
"""

import collections.abc
from collections import deque
from typing import Any, TypeVar

import msgspec

from trouper.actors.messages.requests import RequestId, SequenceId
from trouper.actors.messages.steps import NEVER, NewSequence, StepDone, StepPlan
from trouper.actors.scheduling.state.sequence import Sequence
from trouper.actors.scheduling.state.state_snapshots import StateSnapshots
from trouper.actors.scheduling.step_time import StepWork
from trouper.actors.stages import decode_quota, is_due
from trouper.config.engine_config import SchedulerConfig
from trouper.config.speculation import MAX_VERIFIED
from trouper.params import RequestOutputKind

# Seconds for images in a step without streams: a newcomer waits for at most one such step.
QUIET_ENCODE_S = 0.1
StepEntry = tuple[Sequence, int, int, int, int]
"""A sequence, its preemption epoch, the first position, the position after the last, and the number of samples.

If drafts are in flight, the positions assume that none of them is accepted.
"""


class InFlightPlan(msgspec.Struct, eq=False, kw_only=True):
    """A plan that the device has not answered.

    The device answers plans in their order, so the records are a queue.
    """

    step: int
    # Seconds that the device should take for it.  0 before the first fit of the step times.
    estimate_s: float = 0.0
    # The next plan is made after its answer.
    is_long: bool = False
    # An earlier plan has failed, so the device refuses this one.
    is_cancelled: bool = False

    @property
    def ids(self) -> tuple[SequenceId | RequestId, ...]:
        """List its sequences, or its requests in an engine that pools, in the order of the entries."""
        raise NotImplementedError


PlanT = TypeVar("PlanT", bound=InFlightPlan)


class InFlight(deque[PlanT]):
    """The plans in flight of any policy, the eldest first.

    Answers must come in the same order, which this class enforces.
    """

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
    """A plan of an engine that generates.

    It keeps what the policy needs to apply the answer, such as the epoch of each sequence.
    """

    # The entries of the plan, then those of sequences whose images are encoded, without tokens.
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
    """The plans in flight of an engine that generates.

    The next step is planned behind them, so their unknown results are taken into account.
    """

    def sequence_ids(self) -> set[SequenceId]:
        """Return the sequences in all steps in flight.

        The search for a culprit uses it to find suspects with results still to come.
        """
        return {entry[0].id for each in self for entry in each.entries}

    def unknown_tokens(self) -> dict[SequenceId, int]:
        """Count the tokens that the drafts in flight may add to each sequence, beyond the sampled ones."""
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
        # The image of an entry without tokens is encoded before the next token.
        sequence.id: (
            sequence,
            max(end + (start == end), sequence.num_computed_on_device + end - start),
        )
        for plan in plans[: 1 if num_stages == 1 else None]
        for sequence, _, start, end, _ in plan.entries
    }


class StepBuilder:
    """The sequences of the next step, and the number of tokens scheduled for each.

    Nothing is visible to the policy's tables until `commit`, so a step can be abandoned.
    """

    __slots__ = (
        "budget",
        "capacity",
        "copies",
        "counts",
        "encode_s",
        "encodes",
        "has_preempted",
        "lookaheads",
        "max_count",
        "max_lookahead",
        "new_blocks",
        "sequences",
        "states",
        "unknown",
    )

    def __init__(self, config: SchedulerConfig, num_competing: int, capacity: int) -> None:
        """Begin a step.

        Args:
            num_competing: sequences that run or are queued.
            capacity: the most tokens of the step.
        """
        self.capacity = capacity
        # Tokens left.
        self.budget = capacity
        # The most tokens of one sequence.
        self.max_count = _max_count(config, num_competing)
        self.sequences: list[Sequence] = []
        self.counts: list[int] = []
        self.new_blocks: list[tuple[int, tuple[int, ...]]] = []
        self.copies: list[tuple[int, int]] = []
        self.has_preempted = False
        # The most drafts of one sequence.
        self.max_lookahead = 0
        self.lookaheads: list[int] = []
        # Tokens that drafts in flight may add to each sequence.
        self.unknown: dict[SequenceId, int] = {}
        # None if the model keeps only keys and values.
        self.states: StateSnapshots | None = None
        # The seconds for images in a step with streams.  With 0 each image is encoded in the step that reads it.
        self.encode_s = 0.0
        # Sequences that cannot go on without an image.
        self.encodes: list[Sequence] = []

    def cut(self, sequence: Sequence, start: int, count: int) -> int | None:
        """Return how many of the `count` tokens from `start` on can be in this step: up to an image, and without dividing a span.

        Returns 0 if the sequence waits for an image, and None if it waits for a step with more tokens.
        """
        admit = sequence.request.admit
        if not (admit.media or admit.spans):
            return count
        if admit.spans:
            count = self.whole_spans(sequence, start, count)
            if not count:
                return None
        return self.until_image(sequence, start, count)

    def wait(self, sequence: Sequence, count: int | None) -> None:
        """Let a sequence wait, as `cut` has found: the step encodes its image, if it is an image that is missing."""
        if count is not None:
            self.encodes.append(sequence)

    def until_image(self, sequence: Sequence, start: int, count: int) -> int:
        """Return how many of the `count` tokens from `start` on are before the next image that is to be encoded in slices."""
        if sequence.seen_until == NEVER or not sequence.request.admit.media or not self.encode_s:
            return count
        end = min(start + count, sequence.next_image(start))
        begin, span_end = sequence.span_at(end)
        # A prompt that sees all of itself waits for all of its images.
        return max(start, begin if span_end else end) - start

    def whole_spans(self, sequence: Sequence, start: int, count: int) -> int:
        """Return how many of the `count` tokens from `start` on, or a few more, do not divide a run of tokens that see each other.

        Returns 0 if the step has not enough tokens left for such a run.  Then no other prompt may take them either: a run that
        always found too few would never be computed.
        """
        begin, end = sequence.span_at(start + count)
        if not end:
            return count
        if begin > start:
            return begin - start
        if end - start <= self.budget:
            return end - start
        self.budget = 0
        return 0

    def add(self, sequence: Sequence, count: int, lookahead: int = 0) -> None:
        """Schedule `count` tokens of a sequence, and at most `lookahead` drafts behind them.

        The budget of the step is reduced by both numbers.
        """
        self.sequences.append(sequence)
        self.counts.append(count)
        self.lookaheads.append(lookahead)
        self.budget -= count + lookahead

    def drop(self, victim: Sequence) -> None:
        """Remove a sequence before its preemption, while it still has its request slot.

        The budget gets its tokens back, and no other sequence is affected.
        """
        self.has_preempted = True
        self.new_blocks = [entry for entry in self.new_blocks if entry[0] != victim.request_slot]
        if victim in self.sequences:
            i = self.sequences.index(victim)
            del self.sequences[i]
            self.budget += self.counts.pop(i) + self.lookaheads.pop(i)
        if victim in self.encodes:
            self.encodes.remove(victim)

    def commit(self, step: int, epoch: int) -> tuple[StepPlan, InFlightStep]:
        """Advance the scheduled sequences, and end the planning of the step.

        Returns the plan for the device, and the record of it with which the policy applies the answer.
        """
        slots: list[int] = []
        num_computed: list[int] = []
        num_sampled: list[int] = []
        new_sequences: list[NewSequence] = []
        entries: list[StepEntry] = []
        saves: list[tuple[int, int, int]] = []
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
            if self.states is not None:
                saves += self.states.save(sequence, start, end)
            sequence.num_in_flight += samples
        for sequence in self.encodes:
            if sequence.is_slot_stale:
                sequence.is_slot_stale = False
                new_sequences.append(_new_sequence(sequence))
            place = sequence.num_computed
            entries.append((sequence, sequence.preemption_epoch, place, place, 0))
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
            saves=tuple(saves),
            encodes=tuple(sequence.request_slot for sequence in self.encodes),
            encode_s=self._seconds_of_images() if self.encodes else 0.0,
        )
        if lookaheads:
            lookaheads += [0] * len(self.encodes)
        record = InFlightStep(step=step, entries=entries, lookaheads=lookaheads)
        # The next plan is made when it is known whether the image is ready.
        record.is_long = bool(self.encodes)
        return plan, record

    def _seconds_of_images(self) -> float:
        """Return the seconds for images: few if an output of this step is streamed, else enough to make the loss small."""
        final_only = RequestOutputKind.FINAL_ONLY
        kinds = (s.request.admit.params.output_kind for s in self.sequences if s.output)
        has_streams = any(kind != final_only for kind in kinds)
        return self.encode_s if has_streams else max(self.encode_s, QUIET_ENCODE_S)


def _max_count(config: SchedulerConfig, num_competing: int) -> int:
    """Return the most tokens of one sequence.  The threshold for long prompts applies only if sequences compete."""
    threshold, budget = config.long_prefill_token_threshold, config.max_num_scheduled_tokens
    if threshold <= 0 or num_competing <= 1:
        return budget
    if config.long_prefill_token_threshold_adaptive:
        return max(threshold, budget // num_competing)
    return threshold


def _new_sequence(sequence: Sequence) -> NewSequence:
    admit = sequence.request.admit
    adapter = "" if admit.adapter is None else admit.adapter.digest.hex()
    salt, scope = admit.cache_salt or "", admit.options.cache_scope.hex()
    return NewSequence(
        request_slot=sequence.request_slot,
        sequence=sequence.id,
        token_ids=sequence.token_ids(0, sequence.num_tokens),
        num_prompt=sequence.num_prompt,
        block_ids=tuple(sequence.blocks),
        sampling=sequence.sampling(),
        embeds=admit.embeds,
        media=tuple(item for item in admit.media if item.end > sequence.num_computed),
        grids=tuple((x.first + x.runs[0][0], *x.grid) for x in admit.media if x.grid is not None),
        spans=admit.spans,
        grammar=admit.grammar,
        adapter_slot=0 if admit.adapter is None else admit.adapter.slot,
        family=f"{adapter} {scope} {salt}" if adapter or scope or salt else "",
        state_row=sequence.marks.restore,
    )


class Lookahead:
    """Share the drafts of a step among its sequences, and count how many are accepted.

    Args:
        most: the most drafts of one sequence in a step.  0 turns speculation off.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        # Runs of draft tokens, their tokens, and the accepted tokens.
        self.num_drafts = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0

    def __repr__(self) -> str:
        return f"<Lookahead of {self._most}, {self.num_accepted_tokens} of {self.num_draft_tokens} right>"

    def statistics(self) -> dict[str, Any]:
        """Describe the drafts in the fields of `SchedulerStats`.

        The share of accepted drafts shows whether speculation pays.
        """
        return {
            "num_drafts": self.num_drafts,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
        }

    def per_sequence(self, num_running: int, num_tokens: int) -> int:
        """Return the drafts of each running sequence in a step of `num_tokens`, so that all of them have room in it."""
        if not self._most or not num_running:
            return 0
        return max(0, min(self._most, min(MAX_VERIFIED, num_tokens) // num_running - 1))

    def note(self, done: StepDone) -> None:
        """Count the drafts of a step.

        Accepted drafts are the sampled tokens beyond the first one of each sequence.
        """
        if not done.num_draft_tokens:
            return
        for num_tokens, token_ids in zip(done.num_draft_tokens, done.token_ids, strict=True):
            self.num_drafts += num_tokens > 0
            self.num_draft_tokens += num_tokens
            self.num_accepted_tokens += max(0, len(token_ids) - 1)


# The most samples in flight of a sequence planned before its token is due.
MAX_EARLY = 2


def take_turns(
    sequences: list[Sequence], step: int, num_stages: int, *, is_early: bool = False
) -> list[Sequence]:
    """Return the sequences that one step of a pipeline may take, in their order.

    Args:
        step: the number of the step.
        is_early: whether nothing else is runnable.  Then a sequence may be planned once before its token is due.
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
    """Whether a sequence is past its prompt, and does not certainly end with a step in flight."""
    known = sequence.num_tokens + sequence.num_in_flight
    return sequence.num_computed >= sequence.num_prompt and known < sequence.limit
