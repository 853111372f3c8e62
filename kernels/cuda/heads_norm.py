"""A norm over heads that several ranks share out (OLMo-2): each rank's sums of squares, and the norm by the sums of all.

    part [T, X]    a rank's heads of q, or of k, side by side; rows may be strided; normalised in place
    sums [T]       float32: Σ part² of the rank, then of all ranks
    part = part / √(sums / num + ε) · w      num numbers of all ranks together

Roofline: bytes = 3 e T X (two reads and a write), FLOPs = 5 T X.  A few µs each; they count as launches.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from trouper.kernels.cuda.launch import Table, config_of
from trouper.kernels.reference.rms_norm import rms_norm_reference

# By X.  One row a program, so that a row's arithmetic never depends on the batch.
CONFIGS: Table = {"sm_90": ((1024, {"num_warps": 4}), (16384, {"num_warps": 8}))}


@triton.jit
def _sum_of_squares_kernel(
    part_ptr, sums_ptr, part_stride_t, sums_stride_t, X: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    part = tl.load(part_ptr + token * part_stride_t + column, mask=column < X, other=0.0)
    part = part.to(tl.float32)
    tl.store(sums_ptr + token * sums_stride_t, tl.sum(part * part, 0))


@triton.jit
def _norm_by_sum_kernel(
    part_ptr,
    sums_ptr,
    weight_ptr,
    part_stride_t,
    sums_stride_t,
    num,
    eps,
    X: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < X
    at = part_ptr + token * part_stride_t + column
    part = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.load(sums_ptr + token * sums_stride_t) / num + eps)
    tl.store(at, (part * scale * weight).to(part_ptr.dtype.element_ty), mask=mask)


def sum_of_squares_(part_TX: Tensor, sums_T: Tensor) -> None:
    """Write the sum of squares of each row."""
    num_tokens, width = part_TX.shape
    assert part_TX.stride(1) == 1, "part must be contiguous along the heads"
    assert sums_T.shape == (num_tokens,), f"sums is {tuple(sums_T.shape)}"
    assert sums_T.dtype == torch.float32, "sums must be float32"
    _sum_of_squares_kernel[(num_tokens,)](
        part_TX,
        sums_T,
        part_TX.stride(0),
        sums_T.stride(0),
        X=width,
        BLOCK=triton.next_power_of_2(width),
        **config_of(CONFIGS, part_TX.device, width),
    )


def norm_by_sum_(
    part_TX: Tensor, sums_T: Tensor, weight_X: Tensor, *, num: int, eps: float
) -> None:
    """Normalise rows in place by the sums of squares of `num` numbers, those of the other ranks included."""
    num_tokens, width = part_TX.shape
    assert part_TX.stride(1) == 1, "part must be contiguous along the heads"
    assert weight_X.numel() == width, "a weight for each number"
    _norm_by_sum_kernel[(num_tokens,)](
        part_TX,
        sums_T,
        weight_X,
        part_TX.stride(0),
        sums_T.stride(0),
        num,
        eps,
        X=width,
        BLOCK=triton.next_power_of_2(width),
        **config_of(CONFIGS, part_TX.device, width),
    )


def heads_norm_reference(whole_TX: Tensor, weight_X: Tensor, eps: float) -> Tensor:
    """Return the norm of the heads of all ranks, side by side."""
    return rms_norm_reference(whole_TX, weight_X, eps)
