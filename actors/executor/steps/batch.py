"""Build the flat batch of one step for a decoder on the CPU: the tokens of all entries in one array, with their
positions and attention.

One array operation for each quantity keeps the cost of a step independent of Python loops over entries.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np
import torch
from torch import Tensor

from trouper.actors.executor.models.decoder import LogitsIndices
from trouper.actors.executor.models.traits import PlanKey
from trouper.actors.executor.steps.request_slots import RequestSlots
from trouper.actors.messages.steps import StepPlan
from trouper.kernels.ops import HostTokens, Spans
from trouper.kernels.reference.recurrent import NEVER, NO_SAVES

# The tensor shares the array's memory.
from_numpy = cast("Callable[[np.ndarray], Tensor]", cast("Any", torch).from_numpy)


# Prompts up to this length are attended token by token, like generated tokens, so that their steps can be
# recorded. Law: how a position is attended depends only on the prompt's length. Keys and logits therefore
# have the same bits however the prompt is chunked, cached or forked, and whether an output is generated or
# recomputed.
SHORT_PROMPT = 8
# Maximum tokens of an entry in a step that can be recorded: a token with its drafts, but not a recomputed
# output.
SHORT_ENTRY = 8


# Rows, starts and counts of entries as attention takes them, and which of them are of prompts.
AttendedColumns = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


class Samples(NamedTuple):
    """The S positions from which a token is drawn, in the order of the batch: the last token of each entry and
    those of its drafts.

    `tokens` are indices into the flat batch, `ends` the positions of the drawn tokens in their sequences.
    """

    entries: np.ndarray
    tokens: np.ndarray
    slots: np.ndarray
    ends: np.ndarray


class Batch(msgspec.Struct, frozen=True):
    """One step of C entries and T tokens.

    `first_tokens` are the indices of the entries' first tokens in the flat batch, `adapters` the adapter slot
    of each token, `inputs` the ids, positions and cache slots of the tokens, `settled` the tokens of each entry without drafts, and `plans` the attention of each window as made by the decoder's ops. `can_be_recorded`
    means that every token is attended separately, and that no recurrent state is saved inside an entry. `embeds` holds embeddings that
    replace tokens, each with its first index in the flat batch. `read` selects the needed states; None means all tokens.
    """

    request_slots: np.ndarray  # [C]
    first_tokens: np.ndarray
    # [C], the position of each entry's first token, and its number of tokens.
    starts: np.ndarray
    counts: np.ndarray
    settled: np.ndarray
    samples: Samples
    inputs: tuple[np.ndarray, np.ndarray, np.ndarray]
    adapters: np.ndarray
    plans: dict[PlanKey, Any]
    can_be_recorded: bool = False
    embeds: tuple[tuple[int, Tensor], ...] = ()
    read: LogitsIndices | None = None
    # As in `Entries`.
    saves: np.ndarray = NO_SAVES
    # Positions in time, height and width [3, T], if a sequence has images.
    axes: np.ndarray | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.inputs[0])

    @property
    def tokens(self) -> HostTokens:
        """Return the inputs as tensors.

        Recorded steps do without them: every call of torch lets go of the GIL, which a busy event loop then keeps for a while.
        """
        axes = None if self.axes is None else from_numpy(self.axes)
        ids, positions, slots = map(from_numpy, self.inputs)
        return HostTokens(ids, positions, slots, axes)

    @property
    def entries(self) -> tuple[np.ndarray, ...]:
        """Return the columns of `StepStates`. The inputs of drafts are kept one after the other, in the order of the batch."""
        drafts = self.counts - self.settled
        keeps = np.cumsum(drafts) - drafts
        columns = self.first_tokens, self.counts, self.request_slots, self.starts
        return (*columns, self.settled, keeps, self.saves)

    def replayed(self, num_right: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return the columns of `StepStates` by which states move forward over the right drafts of each entry [C]."""
        chosen = np.flatnonzero(num_right)
        counts, keeps = num_right[chosen], self.entries[5][chosen]
        starts, none = (self.starts + self.settled)[chosen], np.zeros_like(keeps)
        return keeps, counts, self.request_slots[chosen], starts, counts, none, NO_SAVES


def make_batch(
    plan: StepPlan,
    slots: RequestSlots,
    keys: Sequence[PlanKey],
    plan_attention: Callable[..., Any],
    num_drafts: np.ndarray | None = None,
    *,
    reads_some: bool = True,
    plan_tables: Callable[..., list[Any]] | None = None,
) -> Batch:
    """Gather the tokens of a plan, and plan their attention once for each window.

    Args:
        keys: of the attention plans.
        plan_attention: plans the attention of one window and block table, `Decoder.plan`.
        num_drafts: [C] tokens in the slots after those of each entry, to be verified; None if no entry has
            drafts.
        reads_some: whether only the states of sampled tokens are needed; False for all but the last
            stage.
        plan_tables: plans the attention of one window and several block tables, `Decoder.plan_tables`.
    """
    plans_of = partial(_plans, keys, slots.tables, plan_attention, plan_tables)
    if num_drafts is None and reads_some:
        batch = _of_single_tokens(plan, slots, plans_of)
        if batch is not None:
            return batch
    chosen = np.array(plan.request_slots, dtype=np.int64)
    starts = np.array(plan.num_computed_tokens, dtype=np.int64)
    settled = np.array(plan.num_scheduled_tokens, dtype=np.int64)
    counts = settled if num_drafts is None else settled + num_drafts
    first_tokens = np.cumsum(counts) - counts
    chosen_T = np.repeat(chosen, counts)
    positions_T = np.arange(counts.sum(), dtype=np.int64) - np.repeat(first_tokens - starts, counts)
    size = slots.block_size
    kv_slots_T = slots.blocks_at(chosen_T, positions_T // size) * size + positions_T % size
    samples = _samples(plan, chosen, starts + counts, first_tokens + counts - 1, num_drafts)
    prompt_ends = np.where(slots.num_prompt > SHORT_PROMPT, slots.num_prompt, 0)  # by slot
    has_spans = slots.has_spans(plan)
    columns = _attended(chosen, starts, counts, prompt_ends[chosen])
    spans: tuple[Spans, ...] = ()
    if has_spans:
        columns, spans = split_at_spans(columns, slots.spans, slots.spans_ignore_window)
    *attended, are_prompts = columns
    axes = slots.axes(chosen_T, positions_T)
    saves = _saves(plan, first_tokens) if plan.saves else NO_SAVES
    can_be_recorded = axes is None and not (
        are_prompts.any() or (counts > SHORT_ENTRY).any() or len(saves) > 1
    )
    with_prompt_logprobs = not slots.with_prompt_logprobs.isdisjoint(plan.request_slots)
    read = None
    if reads_some and not (can_be_recorded or with_prompt_logprobs):
        read_from = samples.ends - 1
        are_of_prompts = read_from < prompt_ends[samples.slots]
        lone = samples.slots, read_from, np.ones_like(read_from), are_of_prompts
        read_spans: tuple[Spans, ...] = ()
        if has_spans:
            lone, read_spans = split_at_spans(lone, slots.spans, slots.spans_ignore_window)
        *lone, are_of_prompts = lone
        read = LogitsIndices(
            from_numpy(samples.tokens),
            plans_of(*lone, are_of_prompts, *read_spans),
        )
    return Batch(
        request_slots=chosen,
        first_tokens=first_tokens,
        starts=starts,
        counts=counts,
        settled=settled,
        samples=samples,
        inputs=(slots.token_ids[chosen_T, positions_T], positions_T, kv_slots_T),
        axes=axes,
        plans=plans_of(*attended, are_prompts, *spans),
        can_be_recorded=can_be_recorded,
        embeds=slots.take_embeds(plan, first_tokens),
        read=read,
        adapters=slots.adapters[chosen_T],
        saves=saves,
    )


def _saves(plan: StepPlan, first_tokens: np.ndarray) -> np.ndarray:
    """Return where states are saved inside entries. Those at the end of an entry are copied after the step."""
    columns = plan.num_computed_tokens, plan.num_scheduled_tokens, first_tokens.tolist()
    spans = dict(zip(plan.request_slots, zip(*columns, strict=True), strict=True))
    found: list[tuple[int, int]] = []
    for slot, row, position in plan.saves:
        start, count, first = spans[slot]
        if start < position < start + count:
            found.append((first + position - start, row))
    return np.array([*sorted(found), (NEVER, -1)])


def _of_single_tokens(
    plan: StepPlan,
    slots: RequestSlots,
    plans_of: Callable[..., dict[PlanKey, Any]],
) -> Batch | None:
    """Make the batch of a step in which every sequence generates one token, or return None for any other step.

    Most steps are of this kind, and a third of the array operations suffices for them. Between two steps the processor waits
    for this code.
    """
    if max(plan.num_scheduled_tokens) > 1 or 0 in plan.num_sampled_tokens or not slots.are_plain:
        return None
    chosen = np.array(plan.request_slots, dtype=np.int64)
    starts = np.array(plan.num_computed_tokens, dtype=np.int64)
    # A token of a longer prompt is attended as a prompt.
    lengths = slots.num_prompt[chosen]
    if ((starts < lengths) & (lengths > SHORT_PROMPT)).any():
        return None
    indices, ones = np.arange(len(chosen)), np.array(plan.num_scheduled_tokens, dtype=np.int64)
    block, place = np.divmod(starts, slots.block_size)
    kv_slots = slots.blocks_at(chosen, block) * slots.block_size + place
    return Batch(
        request_slots=chosen,
        first_tokens=indices,
        starts=starts,
        counts=ones,
        settled=ones,
        samples=Samples(indices, indices, chosen, starts + 1),
        inputs=(slots.token_ids[chosen, starts], starts, kv_slots),
        plans=plans_of(chosen, starts, ones),
        can_be_recorded=True,
        adapters=slots.adapters[chosen],
    )


def split_at_spans(
    columns: AttendedColumns,
    spans: Mapping[int, Sequence[tuple[int, int]]],
    ignore_window: bool,
) -> tuple[AttendedColumns, tuple[Spans]]:
    """Split the attention of a step at the begins and ends of spans.

    A part of a span counts as a prompt even in a short one, because its tokens are attended together.

    Args:
        columns: the rows, starts and counts of entries, and which of them are prompts.
        spans: by row the runs of tokens that see each other, in order.
    """
    parts: list[tuple[int, int, int, bool, int]] = []
    for row, start, count, is_prompt in zip(*(x.tolist() for x in columns), strict=True):
        end = start + count
        for first, last in spans.get(row, ()):
            if last <= start or first >= end:
                continue
            if first > start:
                parts.append((row, start, first - start, is_prompt, 0))
            begin, start = max(start, first), min(last, end)
            parts.append((row, begin, start - begin, True, last))
        if start < end:
            parts.append((row, start, end - start, is_prompt, 0))
    rows, starts, counts, prompts, ends = np.array(parts, dtype=np.int64).reshape(-1, 5).T
    return (rows, starts, counts, prompts.astype(bool)), (Spans(ends, ignore_window),)


def _plans(
    keys: Sequence[PlanKey],
    tables: np.ndarray,
    plan_attention: Callable[..., Any],
    plan_tables: Callable[..., list[Any]] | None,
    rows: np.ndarray,
    starts: np.ndarray,
    counts: np.ndarray,
    *rest: Any,
) -> dict[PlanKey, Any]:
    """Plan the attention of a step once for each window. Layers with tables of their own share all of it but the table."""
    found: dict[PlanKey, Any] = {}
    by_window: dict[int | None, list[tuple[int | None, int]]] = {}
    for key in keys:
        if isinstance(key, tuple):
            by_window.setdefault(key[0], []).append(key)
        else:
            found[key] = plan_attention(tables[0], rows, starts, counts, key, *rest)
    for window, own in by_window.items():
        assert plan_tables is not None, "layers have tables of their own"
        chosen = [tables[table] for _, table in own]
        plans = plan_tables(chosen, rows, starts, counts, window, *rest)
        found.update(zip(own, plans, strict=True))
    return found


def _samples(
    plan: StepPlan,
    chosen: np.ndarray,
    seq_lens: np.ndarray,
    last_tokens: np.ndarray,
    num_drafts: np.ndarray | None,
) -> Samples:
    entries = np.flatnonzero(plan.num_sampled_tokens)
    if num_drafts is None:
        return Samples(entries, last_tokens[entries], chosen[entries], seq_lens[entries])
    times = num_drafts[entries] + 1
    num_samples: list[int] = times.tolist()
    before_last = np.concatenate([np.arange(num, dtype=np.int64)[::-1] for num in num_samples])
    entries = entries.repeat(times)
    return Samples(
        entries,
        last_tokens[entries] - before_last,
        chosen[entries],
        seq_lens[entries] - before_last,
    )


def _attended(
    chosen: np.ndarray, starts: np.ndarray, counts: np.ndarray, prompt_ends: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Split entries for attention: their part before `prompt_ends` as a whole, the rest token by token.

    Returns:
        Slots, starts and counts of the parts, and which parts belong to prompts.
    """
    together = np.clip(prompt_ends - starts, 0, counts)
    has_prompt = (together > 0).astype(np.int64)
    times = has_prompt + counts - together
    offsets = np.arange(times.sum(), dtype=np.int64) - (np.cumsum(times) - times).repeat(times)
    are_prompts = offsets < has_prompt.repeat(times)
    # In an entry with a prompt part, part i is the (i - 1)-th token after it.
    skipped = np.where(are_prompts, 0, (together - has_prompt).repeat(times))
    lengths = np.where(are_prompts, together.repeat(times), 1)
    return chosen.repeat(times), starts.repeat(times) + offsets + skipped, lengths, are_prompts
