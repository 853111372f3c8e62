"""The sizes that batches are padded to, so that their launches can be captured.  Pure.

    decode   every entry has one token: 1, 2, 4, 8, then in steps of 8 to 256 and of 16 to 512
    mixed    prompts and chunks among them: powers of two from 16 to 2048 tokens

A larger batch runs as it is, uncaptured: a layer of it takes longer on the GPU than its launches on the CPU.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from trouper.actors.messages.plans import StepPlan

DECODE = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
MIXED = tuple(2**i for i in range(4, 12))


class BatchShape(NamedTuple):
    """The size of a batch, its padding included."""

    num_tokens: int
    num_entries: int
    is_decode: bool
    has_adapters: bool = False  # of some of its tokens


def graph_shapes(
    sizes: Sequence[int] | None,
    max_num_seqs: int,
    max_num_tokens: int,
    *,
    has_adapters: bool = False,
) -> tuple[BatchShape, ...]:
    """List the shapes to capture, the largest first, so that the smaller ones find room in its memory.

    Args:
        sizes: of both kinds, as the user wishes; empty = the defaults; None = none at all.
        has_adapters: whether the engine has any: then each size is captured with and without.
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
    """Return the size of a plan without padding."""
    return BatchShape(
        sum(plan.num_scheduled_tokens), len(plan.request_slots), max(plan.num_scheduled_tokens) == 1
    )


def padded(shape: BatchShape, captured: Iterable[BatchShape]) -> BatchShape:
    """Return the least captured shape that holds this one, or this one where none does."""
    fitting = [
        other
        for other in captured
        if other[2:] == shape[2:]  # of the same kind
        and other.num_tokens >= shape.num_tokens
        and other.num_entries >= shape.num_entries
    ]
    return min(fitting, default=shape)
