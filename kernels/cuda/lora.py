"""The adapters of one linear layer on a GPU: their memory, and two launches that add y += B A x to the base's product.

Each row has the A and B of its own adapter.  `lora_shrink` computes h = A x, and `lora_expand_` adds B h.

    x [T, I]            tokens × inputs, rows may be strided
    A [S, P, R, I]      for each slot and part; ranks beyond the slot's own are never read
    h [C, T, P · R]     float32; a sum for each of C ranges of SPLIT inputs, which `lora_expand_` adds in order
    B [S, O, R]         for each slot, including its scale; zeros for a part that an adapter does not change
    y [T, O]            the base's product, rows may be strided
    tiles [N, 3] int32  part, first output, end of the part: no tile of outputs crosses the parts of a fused layer

    ranks [S + 1] int32         by slot, 0 is empty
    order [T] int32             rows with an adapter, ordered by slot
    blocks [1 + B, 3] int32     [0, 0] is the number of blocks; then slot, first index in the order, count ≤ BLOCK_ROWS

A program of `lora_shrink` has one block, one tile of ranks and one range of the inputs.  The ranges have the same length in
every batch, so a row's bits depend on no other row, and a step of one token still occupies several multiprocessors.
A program of `lora_expand_` has one block of rows and one tile of outputs, so no two programs add to one number, and a row's
loop is as long as the rank of its adapter.  Programs beyond the blocks or the rank end at once, because the adapters of
rows are data.

Roofline: lora_shrink e (r I + T I) bytes for each adapter's block, 2 T r I FLOPs; lora_expand_ e r O bytes for each block
plus 2 e T O, 2 T r O FLOPs.  Reference: `PlainLoRA` of `kernels/cpu/linear/by_torch.py`.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trouper.kernels.cuda.launch import Table, config_of, dot_type
from trouper.kernels.cuda.prefill_attention import PRECISION
from trouper.kernels.linear import LoRAWeights, LowRank, rounded_rank

# The smallest number of rows that the matrix units multiply.
BLOCK_ROWS = 16
SPLIT = 1024  # inputs

# By ranks.
SHRINK_CONFIGS: Table = {
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
    """Count the ranges into which the inputs are divided.

    Several programs then share a long product, and their partial sums are added in a fixed order.
    """
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
    """Return h [C, T, P · R].  Rows without an adapter, and ranks beyond those of their adapter, are arbitrary.

    Args:
        max_blocks: an upper bound of the number of blocks.
    """
    num_tokens, (_, num_parts, max_rank, num_in) = len(x_TI), a_SPRI.shape
    assert x_TI.shape[1] == num_in, f"{x_TI.shape[1]} inputs for {num_in}"
    assert x_TI.stride(1) == 1, "a token's inputs must be contiguous"
    assert a_SPRI.is_contiguous(), "A must be contiguous"
    splits, width = num_splits(num_in), num_parts * max_rank
    if out is None:
        out = torch.empty((splits, num_tokens, width), dtype=torch.float32, device=x_TI.device)
    assert out.is_contiguous(), "h must be contiguous"
    config = config_of(SHRINK_CONFIGS, x_TI.device, max_rank)
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


BLOCK_N = 128  # outputs of a tile

# By ranks.
EXPAND_CONFIGS: Table = {
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
    """Add B h to y in place.

    Args:
        max_blocks: an upper bound of the number of blocks.
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
        **config_of(EXPAND_CONFIGS, y_TO.device, max_rank),
    )


class DeviceRows(NamedTuple):
    """A `RowTable` on the device, at a fixed address. Captured graphs read it, and each step uploads new contents."""

    order: Tensor  # [T] int32
    blocks: Tensor  # [1 + B, 3] int32
    # The largest number of adapters in a step.
    max_loras: int


def max_blocks(num_rows: int, max_loras: int) -> int:
    """Return an upper bound of the number of blocks.  The last block of each adapter may be incomplete."""
    return min(num_rows, (num_rows + max_loras * (BLOCK_ROWS - 1)) // BLOCK_ROWS)


class TritonLoRA(LoRAWeights):
    """The adapters in slots at fixed addresses, so that a captured graph reads the current content.

    Args:
        part_sizes: number of outputs of each part.
        num_in: number of inputs.
        num_slots: number of adapters; their memory is allocated at once.
        empty: allocates memory on the device.
    """

    def __init__(
        self,
        part_sizes: Sequence[int],
        num_in: int,
        num_slots: int,
        max_rank: int,
        empty: Callable[[Sequence[int], torch.dtype], Tensor],
        dtype: torch.dtype,
    ) -> None:
        rank, num_parts = rounded_rank(max_rank), len(part_sizes)
        self._part_sizes = tuple(part_sizes)
        self.a = empty((num_slots, num_parts, rank, num_in), dtype)
        self.b = empty((num_slots, sum(part_sizes), rank), dtype)
        self.ranks = empty((num_slots + 1,), torch.int32).zero_()
        found = _tiles(part_sizes)
        self.tiles = empty((len(found), 3), torch.int32)
        self.tiles.copy_(torch.tensor(found, dtype=torch.int32))

    def load(self, slot: int, parts: Sequence[LowRank | None]) -> None:
        rank = rounded_rank(max((len(part.a_RI) for part in parts if part is not None), default=0))
        a_PRI = torch.zeros((len(parts), rank, self.a.shape[3]), dtype=self.a.dtype)
        b_OR = torch.zeros((self.b.shape[1], rank), dtype=self.b.dtype)
        first = 0
        for number, (part, size) in enumerate(zip(parts, self._part_sizes, strict=True)):
            if part is not None:
                own = len(part.a_RI)
                a_PRI[number, :own] = part.a_RI
                b_OR[first : first + size, :own] = part.b_OR
            first += size
        self.a[slot - 1, :, :rank].copy_(a_PRI)
        self.b[slot - 1, :, :rank].copy_(b_OR)
        self.ranks[slot].fill_(rank)

    def clear(self, slot: int) -> None:
        self.ranks[slot].fill_(0)

    def move(self, place: Callable[[Tensor], Tensor]) -> None:
        """Move the slots to the memory that `place` returns.

        Used when weights sleep in host memory and when they return.
        """
        self.a, self.b, self.ranks, self.tiles = map(
            place, (self.a, self.b, self.ranks, self.tiles)
        )

    def add_to(self, y_TO: Tensor, x_TI: Tensor, rows: DeviceRows | None) -> None:
        if rows is None:
            return
        order, blocks, max_loras = rows
        bound = max_blocks(len(x_TI), max_loras)
        h_CTX = lora_shrink(x_TI, self.a, self.ranks, order, blocks, max_blocks=bound)
        lora_expand_(y_TO, h_CTX, self.b, self.ranks, self.tiles, order, blocks, max_blocks=bound)


def _tiles(part_sizes: Sequence[int]) -> list[tuple[int, int, int]]:
    """List part, first output and end of the part for each tile of outputs."""
    found: list[tuple[int, int, int]] = []
    begin = 0
    for part, size in enumerate(part_sizes):
        found += [(part, first, begin + size) for first in range(begin, begin + size, BLOCK_N)]
        begin += size
    return found
