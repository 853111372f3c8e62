"""The inner loop of paged attention: some rows of queries over a range of one sequence's keys.

    M     rows: query tokens × the query heads of one KV head      D  head width, padded to W
    TILE  keys of an iteration                                     S  cache slots

`decode_attention` and `prefill_attention` share this device code.  The cache is read through the block table, a tile at a
time, without gathering.  Scores, their maximum, their sum and the output are float32.  Memory behind the last key may
contain NaN, so values are masked like scores.
"""

import torch
import triton
import triton.language as tl

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
