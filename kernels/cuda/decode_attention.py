"""Attention of the columns with one query each over a paged cache, split along the keys.

    out = softmax(cap(scale · q Kᵀ)) V per query head;  cap(s) = c · tanh(s / c), or s without a cap

    q       [T, N, D]    tokens × query heads × head width; N = H · G, heads of a group adjacent
    cache   [2, H, S, D] keys and values of one layer × slots; any strides but the last
    bounds  [C + 1]      int32, first token of each column; columns with more or fewer tokens are skipped
    rows, starts [C]     int32, row of the block table and position of the column's first token
    blocks  [rows, …]    int32, block ids of each row
    out     [T, N · D]   only the columns' own rows are written

A sequence is split into parts of SPLIT keys, or of longer parts beyond MAX_SPLITS · SPLIT keys.  The split depends only on
the sequence's own length, and so does every bit of its result.  The parts are merged in order.  The first kernel
finishes a sequence of one part.

Roofline: 2 e H D ΣL bytes, 4 N D ΣL FLOPs for L keys (fewer with a window); bound by memory.
Target 85 % from 64 MB of KV.  Reference: `kernels/reference/paged_attention.py`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from trouper.kernels.cuda.launch import MERGE, Table, config_of, dot_type
from trouper.kernels.cuda.prefill_attention import attend, head_bytes

# Parts of a sequence: one sequence of 16 k keys with 8 KV heads fills 132 processors.
MAX_SPLITS = 64
# Beyond this number a program processes several parts.  This many programs fill every processor ten times over, while a
# captured step, whose grid is for the longest possible sequence, launches few programs without work.
MAX_PROGRAMS = 4096
# Keys of a part.  The number is fixed, because another value changes bits.
SPLIT = 512

# By `head_bytes`.
CONFIGS: Table = {
    "sm_90": (
        (128, {"TILE": 128, "STAGES": 3, "num_warps": 4}),
        (256, {"TILE": 64, "STAGES": 3, "num_warps": 4}),
        (512, {"TILE": 32, "STAGES": 3, "num_warps": 4}),
        (1024, {"TILE": 16, "STAGES": 2, "num_warps": 4}),
    )
}


@triton.jit
def _part_of(length, WINDOW: tl.constexpr, SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr):
    """Return (first visible key, keys of a part, number of parts) of a sequence."""
    begin = tl.maximum(0, length - WINDOW) if WINDOW > 0 else 0
    size = tl.cdiv(tl.cdiv(length - begin, MAX_SPLITS), SPLIT) * SPLIT
    return begin, size, tl.cdiv(length - begin, size)


@triton.jit(do_not_specialize=["max_parts"])
def _decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    bounds_ptr,
    rows_ptr,
    starts_ptr,
    blocks_ptr,
    out_ptr,
    part_ptr,
    lse_ptr,
    q_stride_t,
    cache_stride_h,
    cache_stride_s,
    blocks_stride_r,
    max_parts,
    scale,
    softcap,
    N: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    W: tl.constexpr,
    M: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    DOT: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
):
    column = tl.program_id(0)
    head = tl.program_id(1)
    token = tl.load(bounds_ptr + column).to(tl.int64)
    if tl.load(bounds_ptr + column + 1) - token != 1:
        return
    length = tl.load(starts_ptr + column) + 1
    begin, size, num_parts = _part_of(length, WINDOW, SPLIT, MAX_SPLITS)
    member = tl.arange(0, M)
    width = tl.arange(0, W)
    mask = (member < G)[:, None] & (width < D)[None, :]
    q_head = head * G + member
    q_at = q_ptr + token * q_stride_t + q_head[:, None] * D + width[None, :]
    row = tl.load(rows_ptr + column).to(tl.int64)
    for part in range(tl.program_id(2), num_parts, tl.num_programs(2)):
        first = begin + part * size
        acc, row_max, row_sum = attend(
            tl.zeros([M, W], tl.float32),
            tl.full([M], float("-inf"), tl.float32),
            tl.zeros([M], tl.float32),
            tl.load(q_at, mask=mask, other=0.0).to(DOT),
            # The range of the keys is the only mask.
            tl.full([M], length, tl.int32),
            first,
            tl.minimum(first + size, length),
            k_ptr + head.to(tl.int64) * cache_stride_h,
            v_ptr + head.to(tl.int64) * cache_stride_h,
            blocks_ptr + row * blocks_stride_r,
            cache_stride_s,
            scale,
            softcap,
            D,
            W,
            BLOCK_SIZE,
            TILE,
            0,
            True,
            HAS_CAP,
            DOT,
            STAGES,
        )
        acc = acc / row_sum[:, None]
        if num_parts == 1:
            out_at = out_ptr + (token * N + q_head)[:, None] * D + width[None, :]
            tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=mask)
        else:
            at = (column.to(tl.int64) * N + q_head) * max_parts + part
            tl.store(part_ptr + at[:, None] * D + width[None, :], acc, mask=mask)
            tl.store(lse_ptr + at, row_max + tl.log2(row_sum), mask=member < G)


@triton.jit(do_not_specialize=["max_parts"])
def _combine_kernel(
    part_ptr,
    lse_ptr,
    bounds_ptr,
    starts_ptr,
    out_ptr,
    max_parts,
    N: tl.constexpr,
    D: tl.constexpr,
    W: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    column = tl.program_id(0)
    head = tl.program_id(1)
    token = tl.load(bounds_ptr + column).to(tl.int64)
    if tl.load(bounds_ptr + column + 1) - token != 1:
        return
    _, _, num_parts = _part_of(tl.load(starts_ptr + column) + 1, WINDOW, SPLIT, MAX_SPLITS)
    if num_parts == 1:
        return
    width = tl.arange(0, W)
    acc = tl.zeros([W], tl.float32)
    total = 0.0
    highest = float("-inf")
    at = (column.to(tl.int64) * N + head) * max_parts
    for part in range(num_parts):
        lse = tl.load(lse_ptr + at + part)
        values = tl.load(part_ptr + (at + part) * D + width, mask=width < D, other=0.0)
        new_highest = tl.maximum(highest, lse)
        shrink = tl.exp2(highest - new_highest)
        weight = tl.exp2(lse - new_highest)
        acc = acc * shrink + values * weight
        total = total * shrink + weight
        highest = new_highest
    out = (acc / total).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (token * N + head) * D + width, out, mask=width < D)


def decode_attention(
    q_TND: Tensor,
    cache_2HSD: Tensor,
    bounds: Tensor,
    rows_C: Tensor,
    starts_C: Tensor,
    blocks: Tensor,
    *,
    max_length: int,
    block_size: int,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    split: int = SPLIT,
    out: Tensor | None = None,
) -> Tensor:
    """Return the output [T, N · D].

    Args:
        max_length: the longest decoded sequence; it bounds the grid and changes no result.
    """
    num_tokens, num_q, width = q_TND.shape
    num_kv, num_columns = cache_2HSD.shape[1], len(rows_C)
    assert num_q % num_kv == 0, f"{num_q} query heads on {num_kv} KV heads"
    assert q_TND.stride()[1:] == (width, 1), "a token's q must be contiguous"
    assert cache_2HSD.stride(3) == 1, "a head's row of a slot must be contiguous"
    assert len(bounds) == num_columns + 1, "bounds is not [C + 1]"
    group, padded = num_q // num_kv, max(16, triton.next_power_of_2(width))
    out = q_TND.new_empty(num_tokens, num_q * width) if out is None else out
    assert out.is_contiguous(), "out must be contiguous"
    num_keys = min(max_length, window or max_length)
    max_parts = min(MAX_SPLITS, triton.cdiv(num_keys, split))
    parts = q_TND.new_empty(num_columns, num_q, max_parts, width, dtype=torch.float32)
    lse = q_TND.new_empty(num_columns, num_q, max_parts, dtype=torch.float32)
    constants = {
        "N": num_q,
        "D": width,
        "W": padded,
        "WINDOW": window or 0,
        "SPLIT": split,
        "MAX_SPLITS": MAX_SPLITS,
    }
    num_programs = max(1, MAX_PROGRAMS // (num_columns * num_kv))
    _decode_kernel[(num_columns, num_kv, min(max_parts, num_programs))](
        q_TND,
        cache_2HSD[0],
        cache_2HSD[1],
        bounds,
        rows_C,
        starts_C,
        blocks,
        out,
        parts,
        lse,
        q_TND.stride(0),
        cache_2HSD.stride(1),
        cache_2HSD.stride(2),
        blocks.stride(0),
        max_parts,
        scale,
        softcap or 0.0,
        G=group,
        M=max(16, triton.next_power_of_2(group)),
        BLOCK_SIZE=block_size,
        HAS_CAP=bool(softcap),
        DOT=dot_type(q_TND.dtype),
        **constants,
        **config_of(CONFIGS, q_TND.device, head_bytes(padded, q_TND.dtype)),
    )
    if max_parts > 1:
        _combine_kernel[(num_columns, num_q)](
            parts, lse, bounds, starts_C, out, max_parts, **constants, **MERGE
        )
    return out
