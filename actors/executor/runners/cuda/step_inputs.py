"""The inputs of a step on a GPU: the numbers that its kernels read, and the size to which it is padded. Pure.

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
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from trouper.actors.messages.steps import StepPlan


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
