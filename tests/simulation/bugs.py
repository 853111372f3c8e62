"""Bugs on purpose.  Each replaces one method by a faulty one; the production code has no switches.

An oracle that has gone blind is worse than none: `test_bugs` demands that every one of these is found.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import anyio
import anyio.lowlevel
import msgspec

import tests.simulation.simulated_device as simulated_module
import trouper.actors.rendering.renderer as renderer_module
import trouper.actors.scheduling.state.sequence as sequences_module
import trouper.actors.scheduling.state.sequence_table as table_module
import trouper.actors.scheduling.state.windows as windows_module
from trouper.actors.engine.generation import Generation
from trouper.actors.engine.request_table import RequestTable
from trouper.actors.output.detokenizer import Detokenizer, OutputStatsCollector
from trouper.actors.output.slot import ReplySlot
from trouper.actors.rendering.renderer import Renderer
from trouper.actors.scheduling.culprit_search import FaultBisection
from trouper.actors.scheduling.policy import Policy
from trouper.actors.scheduling.prompt_turns import PromptTurns, _Starting
from trouper.actors.scheduling.state.fluid import Fluid
from trouper.actors.scheduling.state.kv_blocks import FIRST_PARENT, KVBlocks
from trouper.actors.scheduling.state.running import Running
from trouper.actors.scheduling.state.sequence import Sequence
from trouper.actors.scheduling.state.sequence_table import SequenceTable
from trouper.actors.scheduling.state.state_snapshots import StateSnapshots
from trouper.actors.scheduling.state.step_builder import InFlightSteps, StepBuilder
from trouper.actors.scheduling.state.windows import Windows
from trouper.actors.scheduling.step_planner import StepPlanner
from trouper.actors.scheduling.step_time import StepTimes
from trouper.config.kv_layout import KVLayout
from trouper.errors import EngineDeadError

from .scenario import (
    draw,
    draw_with_drafts,
    draw_with_states,
    draw_with_windows,
    draw_without_states,
)
from .simulated_device import SimulatedDevice

Faulty = Callable[..., Any]
Made = Callable[[Any], Faulty]


class Bug(msgspec.Struct, frozen=True):
    """A function that makes a faulty `owner.attribute` from the right one, and the scenarios in which it shows."""

    owner: Any
    attribute: str
    make: Made
    draw: Callable[[int], Any]


BUGS: dict[str, Bug] = {}


def bug(owner: Any, attribute: str, draw: Callable[[int], Any] = draw) -> Callable[[Made], Made]:
    def register(make: Made) -> Made:
        BUGS[make.__name__] = Bug(owner, attribute, make, draw)
        return make

    return register


@contextmanager
def planted(name: str) -> Iterator[None]:
    bug = BUGS[name]
    right = getattr(bug.owner, bug.attribute)
    setattr(bug.owner, bug.attribute, bug.make(right))
    try:
        yield
    finally:
        setattr(bug.owner, bug.attribute, right)


# KVBlocks and the prefix cache


@bug(SequenceTable, "_end")
def block_leaks_on_abort(right):
    def faulty(self, sequence, reason, error=None):
        if reason == "abort":
            self._blocks.share(sequence.blocks[-1:])
        right(self, sequence, reason, error)

    return faulty


@bug(Running, "leave")
def block_freed_twice(right):
    def faulty(self, sequence):
        last = sequence.blocks[-1:]
        right(self, sequence)
        if self._blocks.num_free < 3:
            self._blocks.free(last)

    return faulty


@bug(KVBlocks, "allocate")
def hash_survives_reuse(right):
    def faulty(self, count):
        if count > len(self._free):
            return None
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self._references[block] = 1
        return taken

    return faulty


@bug(KVBlocks, "share")
def hit_is_not_counted(right):
    return lambda self, blocks: [self._free.pop(block, None) for block in blocks]


@bug(sequences_module, "block_hash")
def salt_is_forgotten(right):
    return lambda parent, token_ids, extra=b"": right(parent, token_ids)


@bug(sequences_module, "block_hash")
def hash_without_its_parent(right):
    return lambda parent, token_ids, extra=b"": right(FIRST_PARENT, token_ids, extra)


@bug(Running, "_prefix")
def hit_covers_the_whole_prompt(right):
    def faulty(self, sequence):
        sequence.num_tokens += 1
        try:
            return right(self, sequence)
        finally:
            sequence.num_tokens -= 1

    return faulty


@bug(Running, "register")
def prefix_offered_before_it_is_computed(right):
    def faulty(self, sequence):
        landed, sequence.num_computed_on_device = (
            sequence.num_computed_on_device,
            sequence.num_computed,
        )
        known = sequence.num_tokens
        sequence.num_computed_on_device = min(sequence.num_computed, known)
        right(self, sequence)
        sequence.num_computed_on_device = landed

    return faulty


@bug(Running, "grow")
def device_is_not_told_of_new_blocks(right):
    def faulty(self, sequence, num_tokens, builder):
        told = list(builder.new_blocks)
        grown = right(self, sequence, num_tokens, builder)
        builder.new_blocks = told
        return grown

    return faulty


# Plans


@bug(StepBuilder, "commit")
def fork_without_copy(right):
    def faulty(self, step, epoch):
        self.copies.clear()
        return right(self, step, epoch)

    return faulty


@bug(StepBuilder, "commit")
def chunk_is_sampled(right):
    def faulty(self, step, epoch):
        plan, record = right(self, step, epoch)
        return msgspec.structs.replace(
            plan, num_sampled_tokens=(1,) * len(plan.request_slots)
        ), record

    return faulty


@bug(StepBuilder, "commit")
def chunk_begins_one_too_late(right):
    def faulty(self, step, epoch):
        plan, record = right(self, step, epoch)
        starts = tuple(
            start + 1 if start and count > 1 else start
            for start, count in zip(
                plan.num_computed_tokens, plan.num_scheduled_tokens, strict=True
            )
        )
        counts = tuple(
            count - (new - old)
            for count, new, old in zip(
                plan.num_scheduled_tokens, starts, plan.num_computed_tokens, strict=True
            )
        )
        return msgspec.structs.replace(
            plan, num_computed_tokens=starts, num_scheduled_tokens=counts
        ), record

    return faulty


@bug(StepBuilder, "add")
def budget_is_not_spent(right):
    def faulty(self, sequence, count, lookahead=0):
        right(self, sequence, count, lookahead)
        self.budget += count // 2

    return faulty


@bug(StepPlanner, "__init__")
def one_slot_too_many(right):
    def faulty(self, *args):
        right(self, *args)
        self._max_num_running += 1

    return faulty


@bug(StepPlanner, "_start_waiting")
def head_of_the_queue_is_overtaken(right):
    def faulty(self, builder, *, only_returning):
        right(self, builder, only_returning=only_returning)
        table = self._table
        for sequence in table.waiting.fresh.live()[1:]:
            is_free = builder.budget > 0 and len(table.running) < self._max_num_running
            is_free = is_free and not only_returning and not builder.has_preempted
            if is_free and table.running.start(sequence, builder):
                table.waiting.discard(sequence)

    return faulty


@bug(table_module, "open_request")
def priority_is_inverted(right):
    def faulty(admit, *args, **kwargs):
        request = right(admit, *args, **kwargs)
        for sequence in request.sequences:
            sequence.order = (-sequence.order[0], *sequence.order[1:])
        return request

    return faulty


@bug(table_module, "open_request")
def one_token_too_many(right):
    def faulty(admit, *args, **kwargs):
        request = right(admit, *args, **kwargs)
        for sequence in request.sequences:
            sequence.limit += 1
        return request

    return faulty


@bug(Sequence, "sampling")
def siblings_share_a_seed(right):
    return lambda self: self.request.sampling


@bug(Sequence, "append")
def stop_reason_of_eos_is_its_id(right):
    def faulty(self, token):
        end = right(self, token)
        return ("stop", token) if end is not None and end[0] == "stop" else end

    return faulty


# Turns


@bug(Policy, "_waits_for_answer")
def plans_follow_a_long_one(right):
    return lambda self: False


@bug(_Starting, "may_start")
def room_goes_to_a_lower_priority(right):
    def faulty(self, sequence):
        self._blocked_rank = None
        return right(self, sequence)

    return faulty


@bug(Fluid, "leave")
def the_fluid_keeps_who_has_gone(right):
    return lambda self, id: None


@bug(PromptTurns, "note_undone", draw_without_states)
def what_is_undone_is_no_prompt(right):
    return lambda self, sequence: None


@bug(StepTimes, "tokens_in")
def a_step_takes_twice_its_seconds(right):
    return lambda self, seconds, start: 2 * right(self, seconds, start)


@bug(Fluid, "order")
def priorities_are_forgotten_in_turns(right):
    return lambda self: iter(sorted(right(self), key=lambda job: (job.num_tokens, job.order)))


# Drafts


@bug(Running, "register", draw_with_drafts)
def unaccepted_drafts_are_offered_as_prefix(right):
    def faulty(self, sequence):
        landed = sequence.num_computed_on_device
        room = len(sequence.blocks) * self._blocks.block_size
        sequence.num_computed_on_device = min(landed + 3, room, sequence.num_tokens)
        right(self, sequence)
        sequence.num_computed_on_device = landed

    return faulty


@bug(Policy, "apply", draw_with_drafts)
def all_drafts_count_as_computed(right):
    def faulty(self, done):
        entries = self.in_flight[0].entries
        right(self, done)
        for i, num in enumerate(done.num_draft_tokens):
            sequence = entries[i][0]
            if num and sequence.request_slot >= 0 and done.token_ids[i]:
                rest = num + 1 - len(done.token_ids[i])
                sequence.num_computed += rest
                sequence.num_computed_on_device += rest

    return faulty


@bug(Policy, "apply", draw_with_drafts)
def a_run_counts_one_token_too_many(right):
    return miscounted(right, 1)


@bug(Policy, "apply", draw_with_drafts)
def a_run_counts_one_token_too_few(right):
    return miscounted(right, -1)


def miscounted(right: Faulty, error: int) -> Faulty:
    """Make an `apply` after which what is computed of a sequence that took several tokens is wrong by `error`."""

    def faulty(self, done):
        entries = self.in_flight[0].entries
        right(self, done)
        for entry, token_ids in zip(entries, done.token_ids, strict=True):
            sequence = entry[0]
            if len(token_ids) > 1 and sequence.request_slot >= 0:
                sequence.num_computed += error
                sequence.num_computed_on_device += error

    return faulty


@bug(Running, "_lookahead", draw_with_drafts)
def drafts_without_blocks(right):
    def faulty(self, sequence, end, builder):
        return builder.max_lookahead if right(self, sequence, end, builder) else 0

    return faulty


@bug(SequenceTable, "append", draw_with_drafts)
def tokens_behind_the_end_are_kept(right):
    def faulty(self, sequence, token_ids, logprobs):
        ends = [sequence.append(token) for token in token_ids]
        end = next((end for end in ends if end is not None), None)
        self.num_generation_tokens += len(token_ids)
        self.outputs.add_tokens(sequence, token_ids, end, logprobs)
        if end is not None:
            self._finish(sequence)
        elif sequence.request_slot < 0:
            self.requeue(sequence)

    return faulty


@bug(SimulatedDevice, "_sample_run", draw_with_drafts)
def noise_is_of_the_draw_instead_of_the_position(right):
    def faulty(self, row, start, end, num_drafts):
        choose = simulated_module._choose
        simulated_module._choose = lambda context, position, *rest: choose(context, end, *rest)
        try:
            return right(self, row, start, end, num_drafts)
        finally:
            simulated_module._choose = choose

    return faulty


@bug(Running, "_lookahead", draw_with_drafts)
def drafts_of_others_blocks(right):
    def faulty(self, sequence, end, builder):
        count = min(builder.max_lookahead, sequence.limit - sequence.num_tokens - 1)
        is_decoding = end == sequence.num_tokens == sequence.num_computed + 1
        if count <= 0 or not is_decoding:
            return 0
        return count if self.grow(sequence, end + count, builder) else 0

    return faulty


def draw_ahead(seed: int) -> Any:
    return msgspec.structs.replace(draw_with_drafts(seed), steps_in_flight=2)


@bug(SimulatedDevice, "_starts", draw_ahead)
def a_plan_made_ahead_is_taken_at_its_word(right):
    return lambda self, plan, rows: plan.num_computed_tokens


@bug(InFlightSteps, "unknown_tokens", draw_ahead)
def drafts_in_flight_are_forgotten(right):
    return lambda self: {}


# Results, preemption, failures


@bug(Running, "preempt")
def result_of_a_preempted_one_is_dropped(right):
    def faulty(self, sequence, **kwargs):
        right(self, sequence, **kwargs)
        sequence.valid_from_epoch = sequence.preemption_epoch

    return faulty


@bug(Running, "preempt")
def preemption_is_not_counted(right):
    def faulty(self, sequence, **kwargs):
        right(self, sequence, **kwargs)
        sequence.preemption_epoch -= 1

    return faulty


@bug(Running, "preempt")
def preempted_one_starts_before_its_result(right):
    def faulty(self, sequence, **kwargs):
        right(self, sequence, **kwargs)
        if sequence.num_in_flight:
            self._returning.push(sequence)

    return faulty


@bug(Policy, "_undo")
def failed_step_forgets_an_entry(right):
    def faulty(self, step):
        if len(step.entries) > 1:
            step.entries.pop()
        return right(self, step)

    return faulty


@bug(Policy, "fail_step")
def epoch_stands_still(right):
    def faulty(self, step, message, **more):
        right(self, step, message, **more)
        self._epoch = 0

    return faulty


@bug(FaultBisection, "failed")
def group_is_condemned_together(right):
    def faulty(self):
        suspects = list(self._tested)
        return right(self) or (suspects[0] if suspects else None)

    return faulty


@bug(Policy, "apply")
def one_bad_row_fails_the_batch(right):
    def faulty(self, done):
        if done.failed:
            everything = tuple((i, "not_finite") for i in range(len(done.token_ids)))
            done = msgspec.structs.replace(done, failed=everything)
        right(self, done)

    return faulty


@bug(SequenceTable, "release_siblings")
def siblings_wait_for_a_dead_leader(right):
    def faulty(self, request):
        if request.sequences[0].request_slot >= 0:
            right(self, request)

    return faulty


@bug(SimulatedDevice, "submit")
def steps_run_out_of_order(right):
    def faulty(self, plan):
        right(self, plan)
        self._queue.rotate(1)

    return faulty


# Requests and their readers


@bug(Policy, "abort")
def abort_of_a_waiting_one_is_silent(right):
    def faulty(self, id):
        requests = self.table.requests
        is_waiting = id in requests and requests[id].sequences[0].request_slot < 0
        right(self, id)
        if is_waiting:
            self.table.outputs.withdraw(id)

    return faulty


@bug(RequestTable, "_post_abort")
def abort_is_not_posted(right):
    def faulty(self, id, slot):
        slot.cancel()

    return faulty


@bug(Renderer, "_serve")
def abort_is_lost_while_rendering(right):
    async def faulty(self, message):
        try:
            rendered = await self._threads.run(self._render, message)
        except Exception as error:
            message.slot.fail(renderer_module.typed(error))
            return
        self._admit(rendered)

    return faulty


@bug(Renderer, "_serve")
def error_kills_the_renderer(right):
    async def faulty(self, message):
        if message.slot.is_aborted:
            message.slot.abort()
            return
        with message.slot.scope:
            rendered = await self._threads.run(self._render, message)
        if message.slot.is_aborted:
            message.slot.abort()
        else:
            self._admit(rendered)

    return faulty


@bug(Renderer, "_serve")
def admitted_before_tracked(right):
    async def faulty(self, message):
        slot = message.slot
        rendered = None
        try:
            with slot.scope:
                rendered = await self._threads.run(self._render, message)
        except Exception as error:
            slot.fail(renderer_module.typed(error))
            return
        if rendered is None or slot.is_aborted:
            slot.abort()
            return
        self._scheduler.send_nowait(rendered.admit)
        await anyio.sleep(0.02)
        self._detokenizer.send_nowait(rendered.track)

    return faulty


# Snapshots of recurrent states


@bug(Running, "_prefix", draw_with_states)
def keys_are_shared_beyond_the_state(right):
    def faulty(self, sequence):
        found = right(self, sequence)
        return found if not found.junction else found._replace(start=found.junction)

    return faulty


@bug(StateSnapshots, "save", draw_with_states)
def state_is_offered_when_it_is_planned(right):
    def faulty(self, sequence, start, end):
        saves = right(self, sequence, start, end)
        if end <= sequence.num_tokens:
            self.land(sequence, end)
        return saves

    return faulty


@bug(StateSnapshots, "_name", draw_with_states)
def state_has_the_name_of_an_earlier_block(right):
    return lambda self, sequence, end: right(
        self, sequence, max(self._block_size, end - self._block_size)
    )


@bug(StateSnapshots, "leave", draw_with_states)
def planned_row_is_not_given_back(right):
    return lambda self, sequence: None


@bug(Policy, "_begin_again", draw_with_states)
def state_of_a_failed_step_is_used_again(right):
    return lambda self, states, torn, undone: None


# Windows


@bug(Windows, "give_back", draw_with_windows)
def window_is_given_back_when_it_is_planned(right):
    def faulty(self, sequence):
        landed = sequence.num_computed_on_device
        sequence.num_computed_on_device = sequence.num_computed
        right(self, sequence)
        sequence.num_computed_on_device = landed

    return faulty


@bug(KVLayout, "num_behind", draw_with_windows)
def window_is_given_back_one_block_early(right):
    return lambda self, window, position: right(self, window, position + self.block_size)


@bug(Windows, "_gap", draw_with_windows)
def hit_without_the_blocks_of_the_window(right):
    return lambda self, hashes, count: None


@bug(KVLayout, "_most", draw_with_windows)
def limit_without_the_tokens_of_a_step(right):
    return lambda self, window: (
        right(self, window) and -(-((window or 2**40) - 1) // self.block_size)
    )


@bug(windows_module, "_name", draw_with_windows)
def groups_share_names(right):
    return lambda hash, group: hash


@bug(Windows, "fork", draw_with_windows)
def sibling_misses_the_window(right):
    def faulty(self, leader, num_shared, *, copies_next):
        return leader.blocks[: num_shared * self._num_groups]

    return faulty


@bug(Running, "_shortened", draw_with_windows)
def step_is_not_shortened(right):
    return lambda self, sequence, builder, table, start, count: count


@bug(Detokenizer, "_take_update")
def stop_is_not_sent(right):
    def faulty(self, *args):
        right(self, *args)
        return []

    return faulty


@bug(Detokenizer, "_tell_all")
def detokenizer_waits_for_a_reader(right):
    async def faulty(self, message):
        slots = [
            self._sequences[news.id].request.slot
            for news in message.sequences
            if news.id in self._sequences
        ]
        await right(self, message)
        for slot in slots:
            while len(slot._due) > 0 and not slot.is_closed:  # noqa: ASYNC110  # it is a bug
                await anyio.sleep(0.001)

    return faulty


@bug(ReplySlot, "_wake_reader")
def last_wake_up_is_lost(right):
    def faulty(self):
        if self._num_open:
            right(self)

    return faulty


@bug(ReplySlot, "_take")
def delta_repeats_itself(right):
    def faulty(self, index):
        mine = self._completions[index]
        before = list(mine.token_ids)
        output = right(self, index)
        if not mine.token_ids and len(before) > 1:
            mine.token_ids = before[-1:]
        return output

    return faulty


@bug(Generation, "close")
def finished_request_opens_again(right):
    def faulty(self):
        right(self)
        self._is_closed = not self._is_finished

    return faulty


@bug(Generation, "__anext__")
def cancelled_read_leaves_the_request_open(right):
    async def faulty(self):
        if self._is_closed:
            await anyio.lowlevel.checkpoint()
            raise StopAsyncIteration
        output = await self.open().read()
        if output.finished:
            self._is_finished = True
            self.close()
        return output

    return faulty


@bug(RequestTable, "close_request")
def request_stays_in_the_table(right):
    def faulty(self, id, slot, *, is_finished):
        right(self, id, slot, is_finished=is_finished)
        if not is_finished:
            self._open.setdefault(slot.request_id, (id, slot))

    return faulty


@bug(RequestTable, "abort_all")
def shutdown_forgets_the_readers(right):
    return lambda self: []


@bug(ReplySlot, "fail")
def death_is_not_told(right):
    def faulty(self, error):
        if not isinstance(error, EngineDeadError):
            right(self, error)

    return faulty


@bug(sequences_module, "is_repeating")
def repetition_is_seen_one_token_late(right):
    return lambda tokens, rule: right(tokens[:-1], rule)


@bug(OutputStatsCollector, "note_end")
def aborted_request_is_not_counted(right):
    def faulty(self, ended, now):
        if ended.finish_reason != "abort":
            right(self, ended, now)

    return faulty


@bug(OutputStatsCollector, "note_tokens")
def first_token_is_not_counted(right):
    def faulty(self, stats, times, num_tokens, now):
        is_first = times.num_tokens == 0
        right(self, stats, times, num_tokens, now)
        if is_first:
            stats.num_generation_tokens -= num_tokens

    return faulty
