"""Causal attention of a ragged batch over a paged cache: prompts, chunks, prefix hits and mixed batches.

    out = softmax(cap(scale · q Kᵀ) + mask) V per query head;  cap(s) = c · tanh(s / c), or s without a cap

    M     rows: query tokens × the query heads of one KV head      D  head width, padded to W
    TILE  keys of an iteration                                     S  cache slots

The shapes are those of `decode_attention`, which shares the inner loop, `attend`; the cache already contains the keys and values of
this step.  It is read through the block table, a tile at a time, without gathering.  Scores, their maximum, their sum and the output
are float32.  Memory behind the last key may contain NaN, so values are masked like scores.

A program has M = BLOCK_M rows: the queries of BLOCK_M // G consecutive tokens with the G heads of one KV head.  The grid is
an upper bound, with at most C programs too many.  Late queries start first, because they see the most keys.  Tiles of keys
begin at multiples of TILE, and an invisible tile changes nothing in a row, so a query's bits depend neither on its chunk
nor on its batch.

Roofline: 4 N D Σ q (start + q / 2) FLOPs for q queries.  Target 60 % from q = 1024.
Reference: `kernels/reference/paged_attention.py`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from trouper.kernels.cuda.launch import Table, column_of, config_of, dot_type

LOG2_E = tl.constexpr(1.4426950408889634)
# Applies to float32 only: three products of its halves, nearly exact.
PRECISION = tl.constexpr("tf32x3")


def head_bytes(padded: int, dtype: torch.dtype) -> int:
    """Return the key of attention's tables: bytes of a head.  A float32 counts twice, because it is multiplied as two halves."""
    return padded * dtype.itemsize * (2 if dtype == torch.float32 else 1)


@triton.jit
def attend(
    acc,  # M × W
    row_max,  # M
    row_sum,  # M
    q,  # M × W
    position,  # M, of the queries
    first,
    end,  # keys first … end - 1
    k_ptr,  # the head's keys, its values, and the sequence's block ids
    v_ptr,
    block_ptr,
    stride_s,
    scale,
    softcap,
    D: tl.constexpr,
    W: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    IS_MASKED: tl.constexpr,
    HAS_CAP: tl.constexpr,
    DOT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Run one pass of the online softmax.  Without a mask all rows see all keys, and TILE divides the number of keys."""
    column = tl.arange(0, W)
    for at in tl.range(first, end, TILE, num_stages=STAGES):
        key = at + tl.arange(0, TILE)
        in_range = key < end
        block = tl.load(block_ptr + key // BLOCK_SIZE, mask=in_range, other=0).to(tl.int64)
        row = (block * BLOCK_SIZE + key % BLOCK_SIZE) * stride_s  # TILE
        if IS_MASKED or W != D:
            mask = in_range[:, None] & (column < D)[None, :]
            k = tl.load(k_ptr + row[:, None] + column[None, :], mask=mask, other=0.0)
            v = tl.load(v_ptr + row[:, None] + column[None, :], mask=mask, other=0.0)
        else:
            k = tl.load(k_ptr + row[:, None] + column[None, :])
            v = tl.load(v_ptr + row[:, None] + column[None, :])
        score = tl.dot(q, tl.trans(k.to(DOT)), input_precision=PRECISION) * scale  # M × TILE
        if HAS_CAP:  # c tanh(s / c)
            score = softcap * (2 * tl.sigmoid(2 * score / softcap) - 1)
        score *= LOG2_E
        if IS_MASKED:
            is_visible = in_range[None, :] & (key[None, :] <= position[:, None])
            if WINDOW > 0:
                is_visible = is_visible & (key[None, :] > position[:, None] - WINDOW)
            score = tl.where(is_visible, score, float("-inf"))
            new_max = tl.maximum(row_max, tl.max(score, 1))
            new_max = tl.where(new_max == float("-inf"), 0.0, new_max)  # a row without visible keys
        else:
            new_max = tl.maximum(row_max, tl.max(score, 1))
        p = tl.exp2(score - new_max[:, None])
        shrink = tl.exp2(row_max - new_max)
        row_sum = row_sum * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(DOT), v.to(DOT), acc * shrink[:, None], input_precision=PRECISION)
        row_max = new_max
    return acc, row_max, row_sum


# By `head_bytes`.
CONFIGS: Table = {
    "sm_90": (
        (128, {"BLOCK_M": 128, "TILE": 128, "STAGES": 3, "num_warps": 8}),
        (256, {"BLOCK_M": 128, "TILE": 64, "STAGES": 3, "num_warps": 8}),
        (512, {"BLOCK_M": 64, "TILE": 32, "STAGES": 2, "num_warps": 8}),
        (1024, {"BLOCK_M": 16, "TILE": 32, "STAGES": 2, "num_warps": 8}),
    )
}


@triton.jit(do_not_specialize=["num_columns", "min_count"])
def _prefill_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    bounds_ptr,
    rows_ptr,
    starts_ptr,
    blocks_ptr,
    out_ptr,
    num_columns,
    min_count,
    q_stride_t,
    cache_stride_h,
    cache_stride_s,
    blocks_stride_r,
    scale,
    softcap,
    N: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    W: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    DOT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
):
    BLOCK_Q: tl.constexpr = BLOCK_M // G
    index = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    column = column_of(bounds_ptr, num_columns, index, BLOCK_Q)
    token = tl.load(bounds_ptr + column)
    count = tl.load(bounds_ptr + column + 1) - token
    # The offset of the block in its column.
    offset = (index - token // BLOCK_Q - column) * BLOCK_Q
    if (offset >= count) | (count < min_count):
        return
    # The position of the block's first query, and the first key that no query sees.
    start = tl.load(starts_ptr + column) + offset
    end = start + tl.minimum(BLOCK_Q, count - offset)
    member = tl.arange(0, BLOCK_M)
    width = tl.arange(0, W)
    query = member // G
    is_real = (query < BLOCK_Q) & (offset + query < count)
    mask = is_real[:, None] & (width < D)[None, :]
    q_token = (token + offset + query).to(tl.int64)
    q_head = head * G + member % G
    q_at = q_token * q_stride_t + q_head * D
    q = tl.load(q_ptr + q_at[:, None] + width[None, :], mask=mask, other=0.0).to(DOT)
    k_ptr += head.to(tl.int64) * cache_stride_h
    v_ptr += head.to(tl.int64) * cache_stride_h
    blocks_ptr += tl.load(rows_ptr + column).to(tl.int64) * blocks_stride_r
    position = start + query
    acc = tl.zeros([BLOCK_M, W], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    # Keys first … full - 1 are in the window of some queries, all queries see full … causal - 1, and the later queries see
    # causal … end - 1.
    first = 0
    full = 0
    causal = (start + 1) // TILE * TILE
    if WINDOW > 0:
        first = tl.maximum(0, start - WINDOW + 1) // TILE * TILE
        full = tl.minimum(causal, tl.cdiv(tl.maximum(0, end - WINDOW), TILE) * TILE)
        acc, row_max, row_sum = attend(
            acc, row_max, row_sum, q, position, first, full, k_ptr, v_ptr, blocks_ptr,
            cache_stride_s, scale, softcap, D, W, BLOCK_SIZE, TILE, WINDOW, True, HAS_CAP, DOT, STAGES,
        )  # fmt: skip
    acc, row_max, row_sum = attend(
        acc, row_max, row_sum, q, position, full, causal, k_ptr, v_ptr, blocks_ptr,
        cache_stride_s, scale, softcap, D, W, BLOCK_SIZE, TILE, WINDOW, False, HAS_CAP, DOT, STAGES,
    )  # fmt: skip
    acc, row_max, row_sum = attend(
        acc, row_max, row_sum, q, position, causal, end, k_ptr, v_ptr, blocks_ptr,
        cache_stride_s, scale, softcap, D, W, BLOCK_SIZE, TILE, WINDOW, True, HAS_CAP, DOT, STAGES,
    )  # fmt: skip
    out = (acc / row_sum[:, None]).to(out_ptr.dtype.element_ty)
    out_at = (q_token * N + q_head) * D
    tl.store(out_ptr + out_at[:, None] + width[None, :], out, mask=mask)


def prefill_attention(
    q_TND: Tensor,
    cache_2HSD: Tensor,
    bounds: Tensor,
    rows_C: Tensor,
    starts_C: Tensor,
    blocks: Tensor,
    *,
    block_size: int,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    min_count: int = 1,
    out: Tensor | None = None,
) -> Tensor:
    """Return the output [T, N · D].  Columns with fewer than `min_count` tokens, and padding tokens, are not written.

    A mixed batch uses `min_count=2` here, and `decode_attention` with the same `out` for the other columns.  With
    `min_count=1` all columns are computed in one order, which makes a row independent of its chunks.
    """
    num_tokens, num_q, width = q_TND.shape
    num_kv, num_columns = cache_2HSD.shape[1], len(rows_C)
    assert num_q % num_kv == 0, f"{num_q} query heads on {num_kv} KV heads"
    assert q_TND.stride()[1:] == (width, 1), "a token's q must be contiguous"
    assert cache_2HSD.stride(3) == 1, "a head's row of a slot must be contiguous"
    assert num_columns, "a batch has a column, though it may be empty"
    assert len(bounds) == num_columns + 1, "bounds is not [C + 1]"
    group, padded = num_q // num_kv, max(16, triton.next_power_of_2(width))
    out = q_TND.new_empty(num_tokens, num_q * width) if out is None else out
    assert out.is_contiguous(), "out must be contiguous"
    config = config_of(CONFIGS, q_TND.device, head_bytes(padded, q_TND.dtype))
    assert group <= config["BLOCK_M"], f"{group} query heads on one KV head"
    _prefill_kernel[(num_tokens // (config["BLOCK_M"] // group) + num_columns, num_kv)](
        q_TND,
        cache_2HSD[0],
        cache_2HSD[1],
        bounds,
        rows_C,
        starts_C,
        blocks,
        out,
        num_columns,
        min_count,
        q_TND.stride(0),
        cache_2HSD.stride(1),
        cache_2HSD.stride(2),
        blocks.stride(0),
        scale,
        softcap or 0.0,
        N=num_q,
        G=group,
        D=width,
        W=padded,
        BLOCK_SIZE=block_size,
        WINDOW=window or 0,
        HAS_CAP=bool(softcap),
        DOT=dot_type(q_TND.dtype),
        **config,
    )
    return out
