"""Choose the prompts of a step, and the number of tokens to compute of each.  Pure.

A long prompt must not delay short ones, and must not starve.  So each step first contains all decoding sequences, which never wait for
prompts.  Running and waiting prompts are added in the order of the `Fluid` (with fcfs, in the order of arrival) until the time of
the `StepBudget` is used up.  A prompt whose grammar is not compiled yet is skipped.

Laws:
1. A step that finishes one prompt takes no partial chunk of another, because the chunk would delay the first token of the finished one.
2. When time is short, no prompt overtakes the first one in the order.  While the first one lacks KV blocks or an adapter slot, others
   may overtake it at most MAX_PASSES times, and a lower priority never takes the blocks that it waits for.
3. Every step advances the fluid by its prompt tokens, whatever the reason for the step.
"""

import math
from collections import deque
from collections.abc import Iterator
from typing import Any

from trouper.actors.messages.requests import SequenceId
from trouper.actors.messages.steps import StepPlan
from trouper.actors.scheduling.state.fluid import GRAIN, Fluid, Job
from trouper.actors.scheduling.state.sequence import Sequence, State
from trouper.actors.scheduling.state.sequence_table import MAX_PASSES, SequenceTable
from trouper.actors.scheduling.state.step_builder import InFlightStep, StepBuilder
from trouper.actors.scheduling.step_time import (
    LONG_PROMPT_S,
    LONG_S,
    NUM_KEPT,
    StepBudget,
    StepTimes,
    StepWork,
)
from trouper.config.engine_config import SchedulerConfig
from trouper.params import RequestOutputKind

# Waiting prompts that one step considers.
MAX_WAITING = 64
# A chunk that does not end its prompt is a multiple of this many tokens.
CHUNK_GRAIN = 16
# Minimum tokens of a chunk that is not the first of its step.
MIN_CHUNK = 32
# Chunk sizes until step times are known, used alternately.  With two sizes a fit can separate fixed costs from costs per token.
FIRST_CHUNKS = 64, 256
# Before each plan, this many first prompts look up their prefixes again, because other prompts may have computed them meanwhile.
NUM_LOOKED_UP = 4
# While prompts wait, drafts may lengthen the decoding part of a step by this fraction.
DRAFTS_SHARE = 0.5


class PromptTurns:
    """Own the fluid order, the step times and the step budget of one policy.  Only the policy changes them, through its calls."""

    def __init__(self, config: SchedulerConfig, table: SequenceTable, max_num_running: int) -> None:
        self.fluid = table.fluid = Fluid()
        self.times = StepTimes()
        self.budget = StepBudget(self.times, config.max_step_ms, GRAIN)
        self.config = config
        self.table = table
        self.max_num_running = max_num_running
        self._is_fcfs = config.policy == "fcfs"
        self._arrivals = table.waiting.keep_arrivals()
        # Prompts that started before an earlier one in the order, which lacked blocks or an adapter slot.
        self.num_passed = 0
        # Tokens of the first prompt of each step, and of the further prompts.
        self.num_first_tokens = self.num_other_tokens = 0
        # Decode-only steps: the duration of the last one, and the measurements that no fit contains yet.
        self._rows_s = 0.0
        self._steps_of_rows: deque[tuple[StepWork, float]] = deque(maxlen=NUM_KEPT)
        # Ratios of estimated to measured seconds, until `take_ratios`.
        self._ratios: list[float] = []

    def __repr__(self) -> str:
        return f"<PromptTurns {self.fluid!r}, {self.times!r}>"

    @property
    def has_prompts(self) -> bool:
        """Whether a prompt is running or waiting.

        Otherwise all sequences are decoding, and a step needs no choice of prompts.
        """
        return bool(self._arrivals or self.fluid.open)

    def statistics(self) -> dict[str, Any]:
        """Describe the state in the fields of `SchedulerStats`.

        Overdue tokens show by how much the engine is behind the ideal fair server.  They should be 0.
        """
        return {
            "step_prompt_budget_s": self.budget.last_s,
            "num_overdue_tokens": self.fluid.num_overdue_tokens,
            "num_turns_passed": self.num_passed,
            "num_first_turn_tokens": self.num_first_tokens,
            "num_other_turn_tokens": self.num_other_tokens,
        }

    def take_ratios(self) -> tuple[float, ...]:
        """Return and clear the ratios of estimated to measured time of the steps with a prompt since the last call.

        A ratio of 1 is a perfect estimate.  The observer exports the ratios as a histogram.
        """
        if not self._ratios:
            return ()
        ratios = tuple(self._ratios)
        self._ratios.clear()
        return ratios

    def note_undone(self, sequence: Sequence) -> None:
        """Note that a running sequence must compute the tokens of a failed step again.

        With the next plan it enters the fluid again, like a new arrival.
        """
        self._arrivals.append(sequence)

    def settle(self) -> None:
        """Add the sequences that arrived since the last plan to the fluid.

        Sequences whose grammar is not ready are parked instead.
        """
        arrivals, table = self._arrivals, self.table
        for sequence in arrivals:
            if sequence.state is State.FINISHED or sequence.id not in table.sequences:
                continue
            if table.waiting.is_parked(sequence):
                # It arrives again when it is queued again.
                continue
            if sequence.request_slot < 0 and not table.grammars.is_ready(sequence.request.admit):
                table.waiting.park(sequence)
                continue
            num_tokens = self._rest(sequence)
            if sequence.request_slot >= 0 and num_tokens <= 1:
                continue  # it decodes
            # A sibling computes only the last prompt token: its leader computes the others.
            size = 1 if sequence.index and num_tokens == 1 else max(num_tokens, GRAIN)
            key = sequence.request.admit.options.key
            self.fluid.enter(sequence.id, key, sequence.order, num_tokens, size)
        arrivals.clear()
        if self.fluid.open and self.config.enable_prefix_caching:
            self._look_up_again()

    def _rest(self, sequence: Sequence) -> int:
        """Count the known tokens of a sequence that are neither computed nor expected in the prefix cache."""
        if sequence.request_slot >= 0:
            return _known(sequence) - sequence.num_computed
        return sequence.num_tokens - self.table.running.expected_start(sequence)

    def rows(self) -> list[Sequence]:
        """List the decoding sequences.

        Each needs only one token per step, so they are planned before any prompt.
        """
        prompts = self.fluid.open
        running = self.table.running.snapshot()
        return [sequence for sequence in running if sequence.id not in prompts]

    def limit_drafts(self, builder: StepBuilder, num_rows: int) -> None:
        """Limit the drafts of a step while prompts wait, so that drafts lengthen its decoding part by at most `DRAFTS_SHARE`."""
        _, _, _, row_s, _, _ = self.times.coefficients
        if builder.max_lookahead and self.times.is_known and row_s > 0 and num_rows:
            alone_s = self.times.seconds(StepWork(0, 0, num_rows, 0.0, 0))
            most = DRAFTS_SHARE * alone_s / (self.times.drift * row_s * num_rows)
            builder.max_lookahead = min(builder.max_lookahead, int(most))

    def fill(self, builder: StepBuilder, *, only_returning: bool) -> None:
        """Add prompts, in order, to a step that already has its decoding sequences, until its time or token budget is used up.

        Args:
            only_returning: start only sequences that ran before.
        """
        self.refresh()
        filling = _Filling(self, builder, self._prompt_s(builder))
        starting = _Starting(self, builder, only_returning=only_returning)
        running = self.table.running
        for sequence, num_left in self._candidates(starting):
            if builder.budget <= 0 or filling.is_over:
                break
            start = _known(sequence) - num_left
            count = filling.count(start, num_left)
            if not count:
                break
            before, builder.max_count = builder.max_count, min(builder.max_count, count)
            if sequence.request_slot >= 0:
                running.schedule(builder, [sequence])
            else:
                starting.start(sequence)
            builder.max_count = before
            # The number of entries would not show this, because the sequence may have replaced a preempted one.
            if builder.sequences and builder.sequences[-1] is sequence:
                if filling.has_any:
                    self.num_other_tokens += builder.counts[-1]
                else:
                    self.num_first_tokens += builder.counts[-1]
                filling.note(sequence, builder.counts[-1])

    def note_plan(self, builder: StepBuilder) -> bool:
        """Advance the fluid by the prompt tokens of a plan that is about to be committed.  Returns whether the plan has any."""
        jobs = self.fluid.open
        if not jobs:  # most steps only decode
            return False
        counts: dict[SequenceId, int] = {}
        for sequence, count in zip(builder.sequences, builder.counts, strict=True):
            if sequence.id in jobs:
                self.fluid.correct(sequence.id, _known(sequence) - sequence.num_computed)
                counts[sequence.id] = count
        if counts:
            self.fluid.plan(counts)
        return bool(counts)

    def estimate(self, plan: StepPlan, record: InFlightStep, *, has_prompts: bool) -> None:
        """Record the work of a plan and its estimated duration.

        The estimate of a decode-only step is the duration of the one before, and the fit uses its measurement only once a prompt
        needs an estimate.  Most steps only decode, and estimates may make planning them at most 2 % slower.
        """
        if plan.encodes:
            # Not measured, because most of its time is spent in the vision tower.
            record.estimate_s = self._rows_s + plan.encode_s
            return
        num_drafts = sum(plan.num_lookahead_tokens)
        if not has_prompts:
            starts = plan.num_computed_tokens
            record.work = StepWork(0, 0, len(starts) + num_drafts, 0.0, sum(starts))
            record.estimate_s = self._rows_s
            record.is_long = self._rows_s >= LONG_S
            return
        work = StepWork.of(plan.num_scheduled_tokens, plan.num_computed_tokens, num_drafts)
        record.work = work
        if self.times.is_known:
            record.estimate_s = self.times.seconds(work)
            record.is_long = record.estimate_s >= LONG_PROMPT_S

    def start_of(self, job: Job) -> int:
        """Return the position of the first token of a job that is neither cached nor planned."""
        return _known(self.table.sequences[job.id]) - job.num_tokens

    def ahead_of(self, sequence: Sequence, num_tokens: int) -> Iterator[Job]:
        """Yield the prompts that would precede a sequence with this many tokens to compute, if it entered now."""
        if self._is_fcfs:
            return iter(self.fluid.open.values())
        size = max(num_tokens, GRAIN)
        return self.fluid.ahead_of(sequence.request.admit.options.key, sequence.order, size)

    def seconds_until(self, work_s: float) -> float:
        """Estimate how long prompt work takes that would take `work_s` without other sequences.

        The estimate includes the sequences now decoding, which share each step with the prompts.
        """
        rows, final_only = self.rows(), RequestOutputKind.FINAL_ONLY
        has_streams = any(row.request.admit.params.output_kind != final_only for row in rows)
        context = sum(row.num_computed for row in rows)
        work = StepWork(0, 0, len(rows), 0.0, context)
        return self.budget.seconds_until(work_s, work, has_streams=has_streams)

    def note_step(self, record: InFlightStep, seconds: float) -> None:
        """Record the measured time of a step: 0 if the device does not measure time.

        Measurements of decode-only steps are stored until an estimate needs them.
        """
        work = record.work
        if seconds <= 0 or work is None:
            return
        self.budget.quiet_s += seconds
        if not work.has_chunk:
            self._rows_s = seconds
            self._steps_of_rows.append((work, seconds))
            return
        self.times.note(work, seconds)
        if record.estimate_s:
            self._ratios.append(record.estimate_s / seconds)

    def refresh(self) -> None:
        """Update the fit with the stored measurements.  Must be called before estimates.

        Most steps only decode and need no estimate, so the update is postponed until here.
        """
        for work, seconds in self._steps_of_rows:
            self.times.note(work, seconds)
        self._steps_of_rows.clear()
        self.times.refresh()

    def _prompt_s(self, builder: StepBuilder) -> float | None:
        counts, starts = builder.counts, [s.num_computed for s in builder.sequences]
        rows = StepWork.of(counts, starts, sum(builder.lookaheads))
        final_only = RequestOutputKind.FINAL_ONLY
        kinds = (sequence.request.admit.params.output_kind for sequence in builder.sequences)
        has_streams = any(kind != final_only for kind in kinds)
        return self.budget.prompt_s(rows, has_streams=has_streams)

    def _candidates(self, starting: "_Starting") -> Iterator[tuple[Sequence, int]]:
        """Yield the prompts that may be planned, in order, each with its number of remaining tokens."""
        sequences, num_waiting = self.table.sequences, 0
        for job in self.in_order():
            sequence = sequences[job.id]
            if sequence.request_slot < 0:
                if num_waiting >= MAX_WAITING or not starting.may_start(sequence):
                    continue
                num_waiting += 1
            # `job.num_tokens` may be stale, because the prefix may have been evicted from the cache.
            yield sequence, self._rest(sequence)

    def in_order(self) -> Iterator[Job]:
        """Yield the open prompts in order.

        With the policy `fcfs` this is the order of arrival, otherwise the fluid's.
        """
        if not self._is_fcfs:
            return self.fluid.order()
        jobs, table = self.fluid.open, self.table
        ids = (*table.running.ids, *table.waiting.ids)
        return (jobs[id] for id in ids if id in jobs)

    def _look_up_again(self) -> None:
        """Shorten the next prompts by prefixes that other prompts have computed meanwhile."""
        sequences, running = self.table.sequences, self.table.running
        first = [job for job, _ in zip(self.fluid.order(), range(NUM_LOOKED_UP), strict=False)]
        for job in first:
            sequence = sequences[job.id]
            start = sequence.num_tokens - job.num_tokens
            if sequence.request_slot < 0 and running.has_longer_prefix(sequence, start):
                start = running.expected_start(sequence)
                self.fluid.correct(job.id, sequence.num_tokens - start)


class _Filling:
    """Track the time budget of one step, and choose the size of each prompt's chunk."""

    def __init__(self, turns: PromptTurns, builder: StepBuilder, prompt_s: float | None) -> None:
        self._times = turns.times
        self._builder = builder
        self._cuts = turns.config.enable_chunked_prefill
        self._left_s = math.inf if prompt_s is None else prompt_s
        self._most = FIRST_CHUNKS[turns.times.num_chunks % 2] if prompt_s is None else 0
        self.has_any = self._has_end = self._is_short = False
        self.is_over = False

    def count(self, start: int, num_left: int) -> int:
        """Return the number of tokens to compute of a prompt.  0 means that the step is full: later prompts do not fit either."""
        builder = self._builder
        most = self._most or self._times.tokens_in(self._left_s, start)
        self._is_short = num_left > most
        # A prompt cannot be split, so the first one of a step may exceed the time.
        if not self._cuts:
            fits = num_left <= builder.budget or num_left > builder.capacity
            return num_left if fits and not (self._is_short and self.has_any) else 0
        most = min(most, builder.budget, builder.max_count)
        if num_left <= most:
            return num_left
        if self._has_end:
            return 0
        count = min(max(CHUNK_GRAIN, most // CHUNK_GRAIN * CHUNK_GRAIN), builder.budget)
        return count if count >= MIN_CHUNK or not self.has_any else 0

    def note(self, sequence: Sequence, count: int) -> None:
        start = sequence.num_computed
        self._left_s -= self._times.cost(start, count)
        self.has_any = True
        is_end = start + count == _known(sequence)
        self._has_end |= is_end
        self.is_over = self._is_short and not is_end


class _Starting:
    """Start waiting sequences in one step, and count how often others overtook each sequence that could not start."""

    def __init__(self, turns: PromptTurns, builder: StepBuilder, *, only_returning: bool) -> None:
        self._turns = turns
        self._table = turns.table
        self._builder = builder
        self._only_returning = only_returning
        self._passed: list[Sequence] = []
        self._is_over = False
        # The priority of a sequence that lacked blocks.  Lower priorities must not start, because they would take its blocks.
        self._blocked_rank: int | None = None

    def may_start(self, sequence: Sequence) -> bool:
        """Whether this sequence is waiting and may try to start in this step."""
        table = self._table
        if self._is_over or self._builder.has_preempted:
            return False
        if len(table.running) >= self._turns.max_num_running:
            return False
        if self._blocked_rank is not None and sequence.order[0] > self._blocked_rank:
            return False
        if not table.grammars.is_ready(sequence.request.admit):
            return False
        is_fresh = sequence.id in table.waiting.fresh and not self._only_returning
        return is_fresh or sequence.id in table.waiting.returning

    def start(self, sequence: Sequence) -> None:
        """Start this sequence.  If it lacks blocks or an adapter slot, later sequences may overtake it, up to its limit."""
        table = self._table
        has_place = table.running.has_adapter_room(sequence)
        if not has_place or not table.running.start(sequence, self._builder):
            self._is_over = sequence.num_passed >= MAX_PASSES
            self._passed.append(sequence)
            if has_place:
                self._blocked_rank = sequence.order[0]
            return
        table.waiting.take(sequence)
        table.outputs.add_start(sequence.id)
        for other in self._passed:
            other.num_passed += 1
        self._turns.num_passed += bool(self._passed)


def _known(sequence: Sequence) -> int:
    return sequence.num_tokens + sequence.num_in_flight
