"""y += B h, each row with the B of its own adapter: the second half of the adapters' product.

    h [C, T, P · R]     float32, as `lora_shrink` leaves it: C sums, which are added up in their order
    B [S, O, R]         of each slot, its scale in it; of a part that an adapter leaves alone zeros
    y [T, O]            the base's product, rows may be strided
    tiles [N, 3] int32  part, first output, the part's end: no tile of outputs crosses the parts of a fused layer

`order`, `blocks` and `ranks` are those of `lora_shrink`.  A program has one block of rows and one tile of outputs, so
nothing is added by two.  A row's loop is as long as its own adapter's rank.

Roofline: bytes = e r O for each adapter's block + 2 e T O, FLOPs = 2 T r O.  Reference: `kernels/cpu/linear/plain_lora.py`.
"""

import triton
import triton.language as tl
from torch import Tensor

from trouper.kernels.cuda.attention import PRECISION
from trouper.kernels.cuda.launch import Table, config_of, dot_type
from trouper.kernels.cuda.lora_shrink import BLOCK_ROWS

BLOCK_N = 128  # outputs of a tile

# By ranks.
CONFIGS: Table = {
    "sm_90": (
        (16, {"BLOCK_R": 16, "num_warps": 4}),
        (1 << 16, {"BLOCK_R": 32, "num_warps": 4}),
    )
}


@triton.jit(do_not_specialize=["num_tokens"])
def _lora_expand_kernel(
    h_ptr,
    b_ptr,
    ranks_ptr,
    tiles_ptr,
    order_ptr,
    blocks_ptr,
    y_ptr,
    num_tokens,
    y_stride_t,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    R: tl.constexpr,
    O: tl.constexpr,  # noqa: E741  # as in the formula
    DOT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    number = tl.program_id(0)
    if number >= tl.load(blocks_ptr):
        return
    slot = tl.load(blocks_ptr + 3 * number + 3)
    slot_rank = tl.load(ranks_ptr + slot)
    if slot_rank == 0:
        return
    lane = tl.arange(0, BLOCK_M)
    is_row = (lane < tl.load(blocks_ptr + 3 * number + 5))[:, None]
    at = tl.load(blocks_ptr + 3 * number + 4) + lane
    row = tl.load(order_ptr + at, mask=lane < tl.load(blocks_ptr + 3 * number + 5), other=0)
    row = row.to(tl.int64)[:, None]
    tile_at = tiles_ptr + 3 * tl.program_id(1)
    part = tl.load(tile_at)
    output = tl.load(tile_at + 1) + tl.arange(0, BLOCK_N)
    is_output = output < tl.load(tile_at + 2)
    b_row = (slot - 1).to(tl.int64) * O + output
    rank = tl.arange(0, BLOCK_R)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, slot_rank, BLOCK_R):
        is_rank = (first + rank < slot_rank)[None, :]
        h_at = h_ptr + row * WIDTH + (part * R + first + rank)[None, :]
        h = tl.load(h_at, mask=is_row & is_rank, other=0.0)
        for split in tl.static_range(1, C):
            more_at = h_at + (split * WIDTH) * num_tokens.to(tl.int64)
            h += tl.load(more_at, mask=is_row & is_rank, other=0.0)
        b_at = b_ptr + b_row[:, None] * R + (first + rank)[None, :]
        b = tl.load(b_at, mask=is_output[:, None] & is_rank, other=0.0)
        acc = tl.dot(h.to(DOT), tl.trans(b.to(DOT)), acc, input_precision=PRECISION)
    y_at = y_ptr + row * y_stride_t + output[None, :]
    mask = is_row & is_output[None, :]
    y = tl.load(y_at, mask=mask, other=0.0).to(tl.float32) + acc
    tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=mask)


def lora_expand_(
    y_TO: Tensor,
    h_CTX: Tensor,
    b_SOR: Tensor,
    ranks: Tensor,
    tiles: Tensor,
    order_T: Tensor,
    blocks: Tensor,
    *,
    max_blocks: int,
) -> None:
    """Add in place.

    Args:
        max_blocks: a bound of their number.
    """
    (splits, num_tokens, width), (_, num_out, max_rank) = h_CTX.shape, b_SOR.shape
    assert y_TO.shape == (num_tokens, num_out), f"y is {tuple(y_TO.shape)}"
    assert y_TO.stride(1) == 1, "a token's outputs must be contiguous"
    assert b_SOR.is_contiguous(), "B must be contiguous"
    _lora_expand_kernel[(max_blocks, len(tiles))](
        h_CTX,
        b_SOR,
        ranks,
        tiles,
        order_T,
        blocks,
        y_TO,
        num_tokens,
        y_TO.stride(0),
        C=splits,
        WIDTH=width,
        R=max_rank,
        O=num_out,
        DOT=dot_type(y_TO.dtype),
        BLOCK_M=BLOCK_ROWS,
        BLOCK_N=BLOCK_N,
        **config_of(CONFIGS, y_TO.device, max_rank),
    )
