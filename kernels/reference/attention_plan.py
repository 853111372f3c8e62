"""The plan of attention in torch: which runs of the KV cache each query of a step reads.

The plan is made once a step with numpy and serves all layers of one window.

Laws:
  * Cache slot = block id · block size + offset.  Blocks with consecutive ids are one *run* of slots, which the kernel reads
    as a strided view without gathering.
  * Keys without a mask may be in any order, so their blocks are sorted first, which makes the runs as long as the ids
    allow.  Masked keys keep the order of their positions.
  * If blocks have at least WHOLE_RUN positions, each block that a single query reads is a run of its own, in the order of
    the positions.  So its bits do not depend on which blocks are adjacent, and hence on other sequences.
  * A *tile* is a range of queries of one sequence.  A single query reads all its keys from the cache, including its own.
    Several queries read the keys before the tile from the cache and attend to the tile's own keys causally.  With a
    sliding window no tile is longer than the window, so a window never cuts into a tile's own keys.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

# Blocks of this size are runs of their own.  Not joining adjacent blocks costs 7 to 25 % of the attention in float16, and
# would cost several times as much for smaller blocks.
WHOLE_RUN = 128


class SlotRun(NamedTuple):
    """Consecutive cache slots that the first `num_queries` queries of a tile read.

    Longer runs need fewer calls of torch, so adjacent blocks are joined.
    """

    slot: int
    length: int
    num_queries: int
    mask: (
        np.ndarray | None
    )  # [num_queries, length] bool, True is visible; all are visible without a mask


class QueryTile(NamedTuple):
    """The queries first … first + num_queries - 1 of the flat batch, all of one sequence."""

    first: int
    num_queries: int
    runs: tuple[SlotRun, ...]


def plan_attention(
    block_tables: Sequence[np.ndarray],
    starts: Sequence[int],
    counts: Sequence[int],
    *,
    block_size: int,
    window: int | None = None,
    max_tile: int | None = None,
    span_ends: Sequence[int] = (),
    ignore_window: bool = False,
) -> tuple[QueryTile, ...]:
    """Return the tiles of a ragged batch, in the order of its tokens.

    Column i has counts[i] tokens at positions starts[i] …; block_tables[i] contains its block ids.

    Args:
        window: the number of most recent keys that a query sees.
        max_tile: the largest number of queries in a tile.
        span_ends: for each column the position before which all its queries see every key, or 0; empty for none.
        ignore_window: the window does not hold for such queries.
    """
    longest = min(window or 2**62, max_tile or 2**62)
    tiles: list[QueryTile] = []
    first = 0
    ends = span_ends or [0] * len(starts)
    for blocks, start, count, end in zip(block_tables, starts, counts, ends, strict=True):
        if end:
            for i in range(count):
                begin = 0 if window is None or ignore_window else max(0, start + i + 1 - window)
                is_by_block = block_size >= WHOLE_RUN
                found = slot_runs(
                    blocks, begin, end, block_size, in_order=False, is_by_block=is_by_block
                )
                runs = (SlotRun(*run, 1, None) for run in zip(*found, strict=True))
                tiles.append(QueryTile(first + i, 1, tuple(runs)))
            first += count
            continue
        for offset in range(0, count, longest):
            num = min(longest, count - offset)
            runs = _runs(blocks, start + offset, num, block_size, window)
            tiles.append(QueryTile(first + offset, num, tuple(runs)))
        first += count
    return tuple(tiles)


def _runs(
    blocks: np.ndarray, start: int, count: int, block_size: int, window: int | None
) -> Iterator[SlotRun]:
    # The positions to read from the cache are begin … end - 1.
    end = start + 1 if count == 1 else start
    begin = 0 if window is None else max(0, start + 1 - window)
    if begin >= end:
        return
    is_masked = window is not None and count > 1 and start + count - window > begin
    is_by_block = count == 1 and block_size >= WHOLE_RUN
    slots, lengths = slot_runs(
        blocks, begin, end, block_size, in_order=is_masked, is_by_block=is_by_block
    )
    position = begin
    for slot, length in zip(slots, lengths, strict=True):
        num_queries, mask = count, None
        if is_masked:
            assert window is not None
            num_queries = min(count, position + length + window - 1 - start)
            # The last position that each query does not see.
            oldest = np.arange(start, start + num_queries) - window
            if oldest[-1] >= position:
                mask = np.arange(position, position + length) > oldest[:, None]
        yield SlotRun(slot, length, num_queries, mask)
        position += length


def slot_runs(
    blocks: np.ndarray,
    begin: int,
    end: int,
    block_size: int,
    *,
    in_order: bool,
    is_by_block: bool = False,
) -> tuple[list[int], list[int]]:
    """Return (first slots, lengths) of the runs that contain the positions begin … end - 1.

    Args:
        in_order: whether the runs must follow the order of the positions.
        is_by_block: whether adjacent blocks remain separate runs.
    """
    first = begin // block_size
    slots = blocks[first : (end - 1) // block_size + 1].astype(np.int64) * block_size
    lengths = np.full(slots.shape, block_size)
    slots[0] += begin % block_size
    lengths[0] -= begin % block_size
    lengths[-1] -= (first + len(slots)) * block_size - end
    if len(slots) == 1 or is_by_block:
        return slots.tolist(), lengths.tolist()
    if not in_order:
        order = np.argsort(slots)
        slots, lengths = slots[order], lengths[order]
    is_new = np.empty(slots.shape, dtype=bool)
    is_new[0] = True
    np.not_equal(slots[1:], slots[:-1] + lengths[:-1], out=is_new[1:])
    heads = np.flatnonzero(is_new)
    return slots[heads].tolist(), np.add.reduceat(lengths, heads).tolist()
