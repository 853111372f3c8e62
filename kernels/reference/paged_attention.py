"""Causal attention of a ragged batch over a paged KV cache, read through views without copies.

    out = softmax(cap(scale · q Kᵀ) + mask) V per query head;  cap(s) = c · tanh(s / c), or s without a cap

    q      [T, N, D]      tokens × query heads × head width;  N = H · G, heads of a group adjacent
    k, v   [T, H, D]      this step's own keys and values, already written to the cache
    cache  [2, H, S, D]   keys and values of one layer × slots
    out    [T, N · D]

A plan says which *runs* of the cache each query of a step reads (`plan_attention`).  It is made once a step with numpy and serves all
layers of one window.  Each *tile* of the plan attends to every run as a view, then to its own keys, and the parts are merged by their
log-sum-exp.  A single query turns the G heads of its group into rows, so that each key is read once for all of them (one
call of 8 x [2, 128] x [128, 1024]: 460 µs on one core, and 3377 µs with separate heads).  A longer tile expands K and V
over the group with stride 0.

Laws:
  * Cache slot = block id · block size + offset.  Blocks with consecutive ids are one run of slots, which the kernel reads
    as a strided view without gathering.
  * Keys without a mask may be in any order, so their blocks are sorted first, which makes the runs as long as the ids
    allow.  Masked keys keep the order of their positions.
  * If blocks have at least WHOLE_RUN positions, each block that a single query reads is a run of its own, in the order of
    the positions.  So its bits do not depend on which blocks are adjacent, and hence on other sequences.
  * A tile is a range of queries of one sequence.  A single query reads all its keys from the cache, including its own.
    Several queries read the keys before the tile from the cache and attend to the tile's own keys causally.  With a
    sliding window no tile is longer than the window, so a window never cuts into a tile's own keys.

Roofline of a decode: 2 e H L D bytes, 4 N L D FLOPs for L keys; bound by memory.
Measured at L = 1024, H = 8, D = 128, bfloat16 on one EPYC core: 459 µs = 9 GB/s, of about 20.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# torch leaves the types of split, view and some others open.
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

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


# The largest number of queries in a tile with a cap, whose scores are a matrix in memory: 8 heads x 256 x 8192 x 4 B = 64 MiB.
MAX_TILE_CAPPED = 256


class AttendedPart(NamedTuple):
    """The attention of some queries over some of the keys."""

    out: Tensor  # [..., rows, D]
    lse: Tensor  # [..., rows] float32: log of the sum of exp(score)


Attend = Callable[[Tensor, Tensor, Tensor, bool, Tensor | None], AttendedPart]


def paged_attention(
    q_TND: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    cache_2HSD: Tensor,
    tiles: Sequence[QueryTile],
    masks: dict[int, Tensor],
    *,
    scale: float,
    softcap: float | None = None,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """Return the output [T, N · D].

    Args:
        masks: the plan's masks as tensors, by the id of the array; see `mask_tensors`.
        sinks_N: for each head the score of an extra key without a value, visible to every query.
    """
    num_tokens, num_q, width = q_TND.shape
    num_kv = cache_2HSD.shape[1]
    # The last layer attends only for tokens that are read, and the first chunk of a long prompt has none.
    if num_tokens == 0:
        return q_TND.new_empty((0, num_q * width))
    q_THGD = q_TND.view(num_tokens, num_kv, num_q // num_kv, width)
    k_1HSD, v_1HSD = cache_2HSD.unsqueeze(1)
    attend = _capped(scale, softcap) if softcap else _flash(scale)
    sinks_HG = None if sinks_N is None else sinks_N.float().view(num_kv, -1)
    # One call splits the rows for all single queries.
    rows_1HGD = q_THGD.split(1)
    outs: list[Tensor] = []
    for first, count, runs in tiles:
        if count == 1:
            q = rows_1HGD[first]
            parts = [
                attend(q, k_1HSD.narrow(2, r.slot, r.length), v_1HSD.narrow(2, r.slot, r.length), False, None)
                for r in runs
            ]  # fmt: skip
            outs.append(_sunk(_merge(parts, q.dtype), sinks_HG))
            continue
        q = q_THGD.narrow(0, first, count).permute(1, 2, 0, 3)
        parts = [_over_run(attend, q, k_1HSD, v_1HSD, run, masks) for run in runs]
        k, v = (
            x.narrow(0, first, count).transpose(0, 1).unsqueeze(1).expand(q.shape)
            for x in (k_THD, v_THD)
        )
        parts.append(attend(q, k, v, True, None))
        sinks_HG1 = None if sinks_HG is None else sinks_HG.unsqueeze(2)
        outs.append(_sunk(_merge(parts, q.dtype), sinks_HG1).permute(2, 0, 1, 3))
    out_THGD = outs[0] if len(outs) == 1 else torch.cat(outs)
    return out_THGD.reshape(num_tokens, num_q * width)


def mask_tensors(tiles: Sequence[QueryTile], dtype: torch.dtype) -> dict[int, Tensor]:
    """Return the masks of a plan as numbers to add to the scores: 0 or -inf."""
    found = {}
    for mask in (run.mask for tile in tiles for run in tile.runs):
        if mask is None:
            continue
        hidden = torch.from_numpy(~mask)
        found[id(mask)] = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)
    return found


def _over_run(
    attend: Attend,
    q_HGCD: Tensor,
    k_1HSD: Tensor,
    v_1HSD: Tensor,
    run: SlotRun,
    masks: dict[int, Tensor],
) -> AttendedPart:
    """Return the attention over one run.  Queries that see none of its keys get weight zero."""
    num_kv, group, count, width = q_HGCD.shape
    shape = (num_kv, group, run.length, width)
    k, v = (
        x.narrow(2, run.slot, run.length).transpose(0, 1).expand(shape) for x in (k_1HSD, v_1HSD)
    )
    mask = None if run.mask is None else masks[id(run.mask)]
    part = attend(q_HGCD.narrow(2, 0, run.num_queries), k, v, False, mask)
    missing = count - run.num_queries
    if not missing:
        return part
    return AttendedPart(
        F.pad(part.out, (0, 0, 0, missing)), F.pad(part.lse, (0, missing), value=-torch.inf)
    )


def _merge(parts: list[AttendedPart], dtype: torch.dtype) -> AttendedPart:
    if len(parts) == 1:
        return parts[0]
    lse = torch.stack([part.lse for part in parts])
    weights = lse.softmax(0).unsqueeze(-1)
    out = torch.stack([part.out for part in parts])
    return AttendedPart((out * weights).sum(0).to(dtype), lse.logsumexp(0))


def _sunk(part: AttendedPart, sinks: Tensor | None) -> Tensor:
    """Return the output of attention with one more key of score `sinks` and value 0."""
    if sinks is None:
        return part.out
    return (part.out * torch.sigmoid(part.lse - sinks).unsqueeze(-1)).to(part.out.dtype)


def _flash(scale: float) -> Attend:
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def attend(
        q: Tensor, k: Tensor, v: Tensor, is_causal: bool, mask: Tensor | None
    ) -> AttendedPart:
        return AttendedPart(*flash(q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale))

    return attend


def _capped(scale: float, softcap: float) -> Attend:
    def attend(
        q: Tensor, k: Tensor, v: Tensor, is_causal: bool, mask: Tensor | None
    ) -> AttendedPart:
        scores = (q @ k.transpose(-1, -2)).float().mul_(scale / softcap).tanh_().mul_(softcap)
        if is_causal:
            rows = scores.shape[-2:]
            scores.masked_fill_(torch.ones(rows, dtype=torch.bool).triu_(1), -torch.inf)
        if mask is not None:
            scores += mask
        lse = scores.logsumexp(-1)
        return AttendedPart(scores.sub_(lse.unsqueeze(-1)).exp_().to(v.dtype) @ v, lse)

    return attend


def paged_attention_reference(
    q_TND: Tensor,
    cache_2HSD: Tensor,
    slots: Sequence[Sequence[int]],
    starts: Sequence[int],
    counts: Sequence[int],
    *,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """Gather all keys and compute in float64.  slots[i][p] is the cache slot of position p of column i."""
    outs = []
    queries = q_TND.double().split(list(counts))
    for q, where, start, count in zip(queries, slots, starts, counts, strict=True):
        group = q.shape[1] // cache_2HSD.shape[1]
        index = torch.tensor(where[: start + count])
        k, v = cache_2HSD[:, :, index].double().repeat_interleave(group, dim=1)
        scores = torch.einsum("tnd,nld->ntl", q, k) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        query_T1 = torch.arange(start, start + count)[:, None]
        key_1L = torch.arange(start + count)[None]
        hidden = key_1L > query_T1
        if window:
            hidden |= key_1L <= query_T1 - window
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks_N is not None:
            sinks_NT1 = sinks_N.double()[:, None, None].expand(-1, count, 1)
            scores = torch.cat((scores, sinks_NT1), -1)
        weights = scores.softmax(-1)[..., : start + count]
        outs.append(torch.einsum("ntl,nld->tnd", weights, v).flatten(1))
    return torch.cat(outs).to(q_TND.dtype)
