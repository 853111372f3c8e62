"""The start of a step on the device: token ids, positions and cache slots of a batch, and the embeddings.

    token t of column i:  position = starts[i] + t - bounds[i],  id = tokens[rows[i], position]
                          slot = blocks[rows[i], position // B] · B + position % B,  x[t] = α · embedding[id]

    rows, starts [C], bounds [C + 1]   int32, the plan; padding columns are empty
    tokens [rows, …], blocks [rows, …] int32, the permanent rows of the device
    embedding [V, E] -> x [T, E], positions [T] int32, slots [T] int32

A token behind the last bound is padding: position 0, slot -1 and a row of zeros.

Roofline: 2 e T E bytes.  A few µs, which is the cost of a launch.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trouper.kernels.cuda.launch import Table, column_of, config_of

# By E.
CONFIGS: Table = {"sm_90": ((1024, {"num_warps": 2}), (1 << 16, {"num_warps": 8}))}


class Embedded(NamedTuple):
    x: Tensor  # [T, E]
    positions: Tensor  # [T] int32
    slots: Tensor  # [T] int32


@triton.jit(do_not_specialize=["num_columns"])
def _embed_kernel(
    bounds_ptr,
    rows_ptr,
    starts_ptr,
    tokens_ptr,
    blocks_ptr,
    embedding_ptr,
    x_ptr,
    positions_ptr,
    slots_ptr,
    num_columns,
    tokens_stride_r,
    blocks_stride_r,
    alpha,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    token = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    mask = column < E
    x_at = x_ptr + token.to(tl.int64) * E + column
    if token >= tl.load(bounds_ptr + num_columns):
        tl.store(positions_ptr + token, 0)
        tl.store(slots_ptr + token, -1)
        tl.store(x_at, tl.zeros([BLOCK], x_ptr.dtype.element_ty), mask=mask)
        return
    i = column_of(bounds_ptr, num_columns, token, 0)
    row = tl.load(rows_ptr + i).to(tl.int64)
    position = tl.load(starts_ptr + i) + token - tl.load(bounds_ptr + i)
    token_id = tl.load(tokens_ptr + row * tokens_stride_r + position).to(tl.int64)
    block = tl.load(blocks_ptr + row * blocks_stride_r + position // BLOCK_SIZE)
    tl.store(positions_ptr + token, position)
    tl.store(slots_ptr + token, block * BLOCK_SIZE + position % BLOCK_SIZE)
    x = tl.load(embedding_ptr + token_id * E + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(x_at, (x * alpha).to(x_ptr.dtype.element_ty), mask=mask)


def embed(
    bounds: Tensor,
    rows_C: Tensor,
    starts_C: Tensor,
    tokens: Tensor,
    blocks: Tensor,
    embedding_VE: Tensor,
    *,
    num_tokens: int,
    block_size: int,
    alpha: float = 1.0,
    out: Embedded | None = None,
) -> Embedded:
    """Embed `num_tokens` tokens, including those that pad the batch."""
    num_columns, width = len(rows_C), embedding_VE.shape[1]
    assert len(bounds) == num_columns + 1, "bounds is not [C + 1]"
    assert embedding_VE.is_contiguous(), "embedding must be contiguous"
    if out is None:
        numbers = torch.empty(2, num_tokens, dtype=torch.int32, device=bounds.device)
        out = Embedded(embedding_VE.new_empty(num_tokens, width), numbers[0], numbers[1])
    assert out.x.shape == (num_tokens, width), f"x is {tuple(out.x.shape)}"
    _embed_kernel[(num_tokens,)](
        bounds,
        rows_C,
        starts_C,
        tokens,
        blocks,
        embedding_VE,
        out.x,
        out.positions,
        out.slots,
        num_columns,
        tokens.stride(0),
        blocks.stride(0),
        alpha,
        E=width,
        BLOCK=triton.next_power_of_2(width),
        BLOCK_SIZE=block_size,
        **config_of(CONFIGS, embedding_VE.device, width),
    )
    return out


def embed_reference(
    bounds: Tensor,
    rows_C: Tensor,
    starts_C: Tensor,
    tokens: Tensor,
    blocks: Tensor,
    embedding_VE: Tensor,
    *,
    num_tokens: int,
    block_size: int,
    alpha: float = 1.0,
) -> Embedded:
    positions = torch.zeros(num_tokens, dtype=torch.int32)
    slots = torch.full((num_tokens,), -1, dtype=torch.int32)
    x_TE = embedding_VE.new_zeros(num_tokens, embedding_VE.shape[1])
    for i, (row, start) in enumerate(zip(rows_C.tolist(), starts_C.tolist(), strict=True)):
        for t in range(int(bounds[i]), int(bounds[i + 1])):
            position = positions[t] = start + t - int(bounds[i])
            slots[t] = blocks[row, position // block_size] * block_size + position % block_size
            x_TE[t] = (alpha * embedding_VE[tokens[row, position]].double()).to(x_TE.dtype)
    return Embedded(x_TE, positions, slots)
