"""Pack a plan for a GPU: the array that its kernels read, and the changes to the tables of request slots.

All of it is packed without the device, because a launch must not wait for it.

A captured CUDA graph reads its inputs from a fixed address, so a plan becomes one array of int32:

    bounds [C + 1]            the first token of each entry, then the number of tokens
    request_slots [C]
    num_computed_tokens [C]   the position of the entry's first token
    sampled_slots [C]         the request slot if the entry samples, else -1
    seq_lens [C]              the length after the step, also the position of the sampled token
    last_tokens [C]           the token that predicts the sample

Entries beyond those of the plan are padding: they are empty and do not sample. Graphs exist for these sizes:

    decode   every entry has one token: 1, 2, 4, 8, then in steps of 8 up to 256 and of 16 up to 512
    mixed    some entries are prompts or chunks: powers of two from 16 to 2048 tokens

A larger batch runs without a graph, because each layer takes longer on the GPU than its launches take on the CPU.

The tables of request slots are views of one array of int32 words, the *arena*.  Whatever a plan changes (a slot's tokens, blocks,
sampling parameters) is therefore a list of words with their addresses, copied at once and written by one launch.  The device itself
writes only `history`, which is not in the arena, and sampled tokens in `tokens`.

    M  request slots    L  longest sequence    V  vocabulary
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from trouper.actors.messages.requests import MAX_BAD_WORD, MAX_EDITS
from trouper.actors.messages.steps import NewSequence, Sampling, StepPlan
from trouper.kernels.cuda.sampling_rows import NEVER, SamplingRows, make_sampling_rows
from trouper.kernels.reference.sampling import ROW, row_of


class Inputs(NamedTuple):
    """The rows of the array on the device, int32, as views with the entries of one batch."""

    bounds: Tensor
    request_slots: Tensor
    num_computed_tokens: Tensor
    sampled_slots: Tensor
    seq_lens: Tensor
    last_tokens: Tensor


def inputs_of(array: Tensor, num_entries: int) -> Inputs:
    """Return views of the first `num_entries` entries of the array [6, width].

    Kernels read them at fixed addresses, which captured graphs require. Entries beyond them are padding.
    """
    bounds, *others = array.unbind(0)
    return Inputs(
        bounds.narrow(0, 0, num_entries + 1), *(x.narrow(0, 0, num_entries) for x in others)
    )


def pack(plan: StepPlan | None, width: int) -> np.ndarray:
    """Pack a plan of at most width - 1 entries as [6, width] int32. Without a plan, everything is padding."""
    packed = np.zeros((len(Inputs._fields), width), dtype=np.int32)
    bounds, slots, starts, sampled, seq_lens, last_tokens = packed
    sampled[:] = -1
    if plan is None:
        return packed
    entries = slice(len(plan.request_slots))
    counts = np.array(plan.num_scheduled_tokens)
    bounds[1 : len(counts) + 1] = counts.cumsum()
    bounds[len(counts) + 1 :] = counts.sum()
    slots[entries] = plan.request_slots
    starts[entries] = plan.num_computed_tokens
    sampled[entries] = np.where(plan.num_sampled_tokens, plan.request_slots, -1)
    seq_lens[entries] = starts[entries] + counts
    last_tokens[entries] = bounds[1 : len(counts) + 1] - 1
    return packed


DECODE = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
MIXED = tuple(2**i for i in range(4, 12))


class BatchShape(NamedTuple):
    """The size of a batch including its padding, and the kind of graph that it needs."""

    num_tokens: int
    num_entries: int
    is_decode: bool
    # Whether some token has an adapter.
    has_adapters: bool = False


def graph_shapes(
    sizes: Sequence[int] | None,
    max_num_seqs: int,
    max_num_tokens: int,
    *,
    has_adapters: bool = False,
) -> tuple[BatchShape, ...]:
    """List the shapes to capture, the largest first, so that smaller graphs reuse its memory.

    Args:
        sizes: the user's sizes for both kinds. Empty selects the defaults, and None disables graphs.
        has_adapters: whether the engine supports adapters; each size is then captured with and without them.
    """
    if sizes is None:
        return ()
    decode = _up_to(max_num_seqs, sizes or (*DECODE, max_num_seqs))
    mixed = _up_to(max_num_tokens, sizes or MIXED)
    shapes = [BatchShape(size, size, True) for size in decode]
    shapes += [BatchShape(size, min(size, max_num_seqs), False) for size in mixed]
    if has_adapters:
        shapes += [shape._replace(has_adapters=True) for shape in shapes]
    return tuple(sorted(shapes, reverse=True))


def _up_to(largest: int, sizes: Iterable[int]) -> set[int]:
    return {size for size in sizes if size <= largest}


def shape_of(plan: StepPlan) -> BatchShape:
    """Return the size of a plan without padding. `padded` then finds the captured graph in which the plan fits."""
    return BatchShape(
        sum(plan.num_scheduled_tokens), len(plan.request_slots), max(plan.num_scheduled_tokens) == 1
    )


def padded(shape: BatchShape, captured: Iterable[BatchShape]) -> BatchShape:
    """Return the smallest captured shape that fits this one, or this one itself if none does."""
    fitting = [
        other
        for other in captured
        if (other.is_decode, other.has_adapters) == (shape.is_decode, shape.has_adapters)
        and other.num_tokens >= shape.num_tokens
        and other.num_entries >= shape.num_entries
    ]
    return min(fitting, default=shape)


class Field(NamedTuple):
    """A table within the arena: its first word, its shape [M, …], and the words of each slot."""

    first: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    slot_words: int

    def view(self, arena: Tensor) -> Tensor:
        """Return the table as a view of the arena, with its own shape and dtype.

        Both must be on the same device; nothing is copied.
        """
        words = arena.narrow(0, self.first, self.shape[0] * self.slot_words)
        return words.view(self.dtype).view(self.shape)


class Layout:
    """The layout of the arena: where each table begins.

    Args:
        max_num_blocks: the most KV blocks of one sequence.
    """

    def __init__(
        self, num_slots: int, max_model_len: int, max_num_blocks: int, vocab_size: int
    ) -> None:
        self.num_slots, self.vocab_size = num_slots, vocab_size
        rows = make_sampling_rows(
            num_slots, vocab_size, max_edits=MAX_EDITS, max_condition=MAX_BAD_WORD, device="meta"
        )
        # One token more, because a step in flight may sample a token beyond the length.  It is dropped.
        tokens = torch.empty(num_slots, max_model_len + 1, dtype=torch.int32, device="meta")
        blocks = torch.empty(num_slots, max_num_blocks, dtype=torch.int32, device="meta")
        tables = {**rows._asdict(), "tokens": tokens, "blocks": blocks}
        del tables["history"]
        self.fields: dict[str, Field] = {}
        self.num_words = 0
        for name, table in sorted(tables.items(), key=lambda item: -item[1].itemsize):
            words = table[0].nbytes // 4
            self.fields[name] = Field(self.num_words, tuple(table.shape), table.dtype, words)
            self.num_words += num_slots * words


class TableViews(NamedTuple):
    """The tables of request slots in the form that kernels read.

    They are views of one arena, so a plan's changes are one upload.
    """

    tokens: Tensor  # [M, L + 1] int32
    blocks: Tensor  # [M, …] int32
    sampling: SamplingRows


def views(layout: Layout, arena: Tensor, history: Tensor) -> TableViews:
    """Return the tables as views of the arena, together with `history`."""
    found = {name: field.view(arena) for name, field in layout.fields.items()}
    tokens, blocks = found.pop("tokens"), found.pop("blocks")
    return TableViews(tokens, blocks, SamplingRows(**found, history=history))


class Changes:
    """Collects the words that one plan writes into the arena.

    They are uploaded together, because each transfer to the device takes microseconds.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._addresses: list[np.ndarray] = []
        self._words: list[np.ndarray] = []

    def packed(self) -> np.ndarray | None:
        """Return [2, words] int64, distinct addresses and the new words, or None without changes."""
        if not self._words:
            return None
        return np.stack((np.concatenate(self._addresses), np.concatenate(self._words)))

    def place(self, new: NewSequence) -> None:
        """Write everything about the sequence that takes a slot, except its history."""
        slot, s = new.request_slot, new.sampling
        self.put("tokens", slot, new.token_ids)
        self.put("blocks", slot, new.block_ids)
        edits = _edits(s, new.num_prompt)
        is_masked = bool(s.allowed_token_ids or new.grammar is not None)
        is_edited = bool(edits or is_masked or is_penalised(s))
        scalars = {
            "num_prompt": new.num_prompt,
            "is_edited": is_edited,
            "is_masked": is_masked,
            "num_edits": len(edits),
        }
        self.put("parameters", slot, np.array([row_of(s)], dtype=ROW).view(np.int32))
        for name, value in scalars.items():
            self.put(name, slot, (value,))
        if s.allowed_token_ids:
            self.put("mask", slot, allowed_bits(s.allowed_token_ids, self._layout.vocab_size))
        if edits:
            self._put_edits(slot, edits)

    def lift_min_tokens(self, slot: int, s: Sampling, num_prompt: int) -> None:
        """Allow a sequence to end before its `min_tokens`, because its grammar allows nothing else."""
        if s.min_tokens:
            until = [
                min(edit.until, 0) if edit.is_stop else edit.until for edit in _edits(s, num_prompt)
            ]
            self.put("edit_untils", slot, until)

    def put(self, name: str, slot: int, values: Sequence[float] | np.ndarray, at: int = 0) -> None:
        """Write values into one table of a slot, beginning at its `at`-th word."""
        field = self._layout.fields[name]
        words = np.asarray(values, dtype=str(field.dtype)[6:]).view(np.int32)
        first = field.first + slot * field.slot_words + at
        self._addresses.append(np.arange(first, first + len(words)))
        self._words.append(words.astype(np.int64))

    def _put_edits(self, slot: int, edits: "Sequence[Edit]") -> None:
        if len(edits) > MAX_EDITS or max(len(edit.condition) for edit in edits) > MAX_BAD_WORD:
            raise ValueError(
                f"a request has {len(edits)} edits of logits (maximum {MAX_EDITS}), or a bad word of more than "
                f"{MAX_BAD_WORD} tokens"
            )
        self.put("edit_ids", slot, [edit.token for edit in edits])
        self.put("edit_values", slot, [edit.value for edit in edits])
        self.put("edit_untils", slot, [edit.until for edit in edits])
        self.put("edit_lengths", slot, [len(edit.condition) for edit in edits])
        for i, edit in enumerate(edits):
            self.put("edit_conditions", slot, edit.condition, i * MAX_BAD_WORD)


class Edit(NamedTuple):
    """One edit of a request's logits: a token, a value for it, and the condition under which it applies.

    `kernels/cuda/sampling_rows.py` describes how it is applied.
    """

    token: int
    value: float
    until: int = NEVER
    condition: tuple[int, ...] = ()
    # Whether the edit forbids a stop token because of `min_tokens`.
    is_stop: bool = False


def is_penalised(s: Sampling) -> bool:
    """Whether a penalty needs the counts of the sequence's tokens.

    Counting takes time and memory, so other sequences are skipped.
    """
    return s.repetition_penalty != 1 or s.frequency_penalty != 0 or s.presence_penalty != 0


def _edits(s: Sampling, num_prompt: int) -> list[Edit]:
    edits = [Edit(token, value) for token, value in s.logit_bias]
    if s.min_tokens:
        until = num_prompt + s.min_tokens
        edits += [Edit(token, -np.inf, until, is_stop=True) for token in s.stop_ids]
    edits += [Edit(word[-1], -np.inf, condition=word[:-1]) for word in s.bad_words_ids]
    return edits


def allowed_bits(token_ids: Sequence[int], vocab_size: int) -> np.ndarray:
    """Return a bit mask of the vocabulary as int32 words: bit v % 32 of word v // 32 is set for each allowed token v."""
    bits = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
