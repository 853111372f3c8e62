"""h = A x, each row with the A of its own adapter: the first half of the adapters' product.

    x [T, I]            tokens × inputs, rows may be strided
    A [S, P, R, I]      of each slot and part; ranks beyond the slot's own are never read
    h [C, T, P · R]     float32; of C stretches of SPLIT inputs each, which `lora_expand` adds up in their order
    ranks [S + 1]       int32, by slot, 0 = empty

    order [T] int32             rows that have an adapter, by slot
    blocks [1 + B, 3] int32     [0, 0] is their number; then slot, first in the order, count: BLOCK_ROWS rows at most

A program has one block, one tile of ranks and one stretch of the inputs.  The stretches have one length for every
batch, so a row's bits depend on no other row, and a step of one token still has work for more than one multiprocessor.
Programs beyond the blocks, and beyond a slot's rank, end at once: which rows have which adapter is data.

Roofline: bytes = e (r I + T I) for each adapter's block, FLOPs = 2 T r I.  Reference: `kernels/cpu/linear/plain_lora.py`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from trouper.kernels.cuda.attention import PRECISION
from trouper.kernels.cuda.launch import Table, config_of, dot_type

BLOCK_ROWS = 16  # the least that the matrix units take
SPLIT = 1024  # inputs

# By ranks.
CONFIGS: Table = {
    "sm_90": (
        (16, {"BLOCK_R": 16, "BLOCK_K": 128, "STAGES": 4, "num_warps": 4}),
        (32, {"BLOCK_R": 32, "BLOCK_K": 128, "STAGES": 3, "num_warps": 4}),
        (1 << 16, {"BLOCK_R": 64, "BLOCK_K": 64, "STAGES": 3, "num_warps": 4}),
    )
}


@triton.jit(do_not_specialize=["num_tokens"])
def _lora_shrink_kernel(
    x_ptr,
    a_ptr,
    ranks_ptr,
    order_ptr,
    blocks_ptr,
    h_ptr,
    num_tokens,
    x_stride_t,
    P: tl.constexpr,
    R: tl.constexpr,
    I: tl.constexpr,  # noqa: E741  # as in the formula
    SPLIT: tl.constexpr,
    DOT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    number = tl.program_id(0)
    if number >= tl.load(blocks_ptr):
        return
    slot = tl.load(blocks_ptr + 3 * number + 3)
    num_tiles: tl.constexpr = (R + BLOCK_R - 1) // BLOCK_R
    part = tl.program_id(1) // num_tiles
    tile = tl.program_id(1) % num_tiles
    slot_rank = tl.load(ranks_ptr + slot)
    if tile * BLOCK_R >= slot_rank:
        return
    lane = tl.arange(0, BLOCK_M)
    is_row = lane < tl.load(blocks_ptr + 3 * number + 5)
    at = tl.load(blocks_ptr + 3 * number + 4) + lane
    row = tl.load(order_ptr + at, mask=is_row, other=0).to(tl.int64)
    rank = tile * BLOCK_R + tl.arange(0, BLOCK_R)
    is_rank = rank < slot_rank
    column = tl.program_id(2) * SPLIT + tl.arange(0, BLOCK_K)
    matrix = (slot - 1).to(tl.int64) * P + part
    x_at = x_ptr + row[:, None] * x_stride_t + column[None, :]
    a_at = a_ptr + (matrix * R + rank)[:, None] * I + column[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    for first in tl.range(0, SPLIT, BLOCK_K, num_stages=STAGES):
        is_input = (first + column < I)[None, :]
        x = tl.load(x_at + first, mask=is_row[:, None] & is_input, other=0.0)
        a = tl.load(a_at + first, mask=is_rank[:, None] & is_input, other=0.0)
        acc = tl.dot(x.to(DOT), tl.trans(a.to(DOT)), acc, input_precision=PRECISION)
    h_row = tl.program_id(2).to(tl.int64) * num_tokens + row
    h_at = h_ptr + h_row[:, None] * (P * R) + (part * R + rank)[None, :]
    tl.store(h_at, acc, mask=is_row[:, None] & is_rank[None, :])


def num_splits(num_in: int) -> int:
    """Count the stretches of the inputs."""
    return triton.cdiv(num_in, SPLIT)


def lora_shrink(
    x_TI: Tensor,
    a_SPRI: Tensor,
    ranks: Tensor,
    order_T: Tensor,
    blocks: Tensor,
    *,
    max_blocks: int,
    out: Tensor | None = None,
) -> Tensor:
    """Return h [C, T, P · R]; rows without an adapter, and ranks that their adapter lacks, are arbitrary.

    Args:
        max_blocks: a bound of their number.
    """
    num_tokens, (_, num_parts, max_rank, num_in) = len(x_TI), a_SPRI.shape
    assert x_TI.shape[1] == num_in, f"{x_TI.shape[1]} inputs for {num_in}"
    assert x_TI.stride(1) == 1, "a token's inputs must be contiguous"
    assert a_SPRI.is_contiguous(), "A must be contiguous"
    splits, width = num_splits(num_in), num_parts * max_rank
    if out is None:
        out = torch.empty((splits, num_tokens, width), dtype=torch.float32, device=x_TI.device)
    assert out.is_contiguous(), "h must be contiguous"
    config = config_of(CONFIGS, x_TI.device, max_rank)
    num_tiles = num_parts * triton.cdiv(max_rank, config["BLOCK_R"])
    _lora_shrink_kernel[(max_blocks, num_tiles, splits)](
        x_TI,
        a_SPRI,
        ranks,
        order_T,
        blocks,
        out,
        num_tokens,
        x_TI.stride(0),
        P=num_parts,
        R=max_rank,
        I=num_in,
        SPLIT=min(SPLIT, triton.cdiv(num_in, config["BLOCK_K"]) * config["BLOCK_K"]),
        DOT=dot_type(x_TI.dtype),
        BLOCK_M=BLOCK_ROWS,
        **config,
    )
    return out
