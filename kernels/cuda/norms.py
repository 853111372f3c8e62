"""Norms and gates on the device: a residual sum with the next layer's norm, a norm over heads that several ranks share, and act · up.

`fused_add_rms_norm` computes x += α · norm(y) and out = x / √(mean(x²) + ε) · w in one pass:

    x, y, out [T, E]   tokens × hidden size; rows may be strided; x is updated in place
    w [E]              in x's dtype or in float32; the norm of y (Gemma's post norm) is optional, as are y and the norm

The sum is rounded to x's dtype before it is normalised, like in separate operations.
Roofline: 4 e T E bytes (3 reads and writes of E fewer without y), 6 T E FLOPs.  Target 80 %.

For OLMo-2 on several ranks `sum_of_squares_` computes each rank's sum, and `norm_by_sum_` applies the sum of all ranks:

    part [T, X]    a rank's heads of q, or of k, adjacent; rows may be strided; normalised in place
    sums [T]       float32: Σ part² of the rank, then of all ranks
    part = part / √(sums / num + ε) · w      num: the number of elements on all ranks

Roofline: 3 e T X bytes (two reads and a write), 5 T X FLOPs.  A few µs each, which is the cost of a launch.

`act_and_mul` computes y = act(g) · u for the halves g, u of gate_up [T, 2 M]; act is silu, or gelu in its tanh form (Gemma).
Roofline: 3 e T M bytes, about 6 T M FLOPs.  Target 85 %.

References of all: `kernels/reference/norms.py`.
"""

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from trouper.kernels.cuda.launch import Table, config_of
from trouper.kernels.reference.norms import rms_norm_reference

Activation = Literal["silu", "gelu_tanh"]

# By M.
CONFIGS: Table = {
    "sm_90": (
        (2048, {"BLOCK": 1024, "num_warps": 4}),
        (1 << 20, {"BLOCK": 2048, "num_warps": 8}),
    )
}


@triton.jit
def _act_and_mul_kernel(gate_up_ptr, out_ptr, M, BLOCK: tl.constexpr, IS_GELU: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < M
    gate = tl.load(gate_up_ptr + token * 2 * M + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + token * 2 * M + M + column, mask=mask, other=0.0).to(tl.float32)
    if IS_GELU:  # (1 + tanh z) / 2 = sigmoid(2 z)
        z = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        y = gate * tl.sigmoid(2 * z) * up
    else:
        y = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + token * M + column, y.to(out_ptr.dtype.element_ty), mask=mask)


def act_and_mul(gate_up_TM: Tensor, activation: Activation, *, out: Tensor | None = None) -> Tensor:
    num_tokens, width = gate_up_TM.shape[0], gate_up_TM.shape[1] // 2
    out = gate_up_TM.new_empty(num_tokens, width) if out is None else out
    assert gate_up_TM.is_contiguous(), "gate_up must be contiguous"
    assert out.is_contiguous(), "out must be contiguous"
    config = config_of(CONFIGS, gate_up_TM.device, width)
    _act_and_mul_kernel[(num_tokens, triton.cdiv(width, config["BLOCK"]))](
        gate_up_TM, out, width, IS_GELU=activation == "gelu_tanh", **config
    )
    return out


# By X.  A program has one row, so a row's arithmetic never depends on the batch.
HEADS_CONFIGS: Table = {"sm_90": ((1024, {"num_warps": 4}), (16384, {"num_warps": 8}))}


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
    """Write the sum of squares of each row to `sums_T`.

    It is the first half of a norm over several ranks, which add their sums before `norm_by_sum_`.
    """
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
        **config_of(HEADS_CONFIGS, part_TX.device, width),
    )


def norm_by_sum_(
    part_TX: Tensor, sums_T: Tensor, weight_X: Tensor, *, num: int, eps: float
) -> None:
    """Normalise rows in place by their sums of squares over `num` elements, including those of the other ranks."""
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
        **config_of(HEADS_CONFIGS, part_TX.device, width),
    )


def heads_norm_reference(whole_TX: Tensor, weight_X: Tensor, eps: float) -> Tensor:
    """Return the norm over the heads of all ranks, which are adjacent in `whole_TX`.

    Tests compare the ranks' results with it.
    """
    return rms_norm_reference(whole_TX, weight_X, eps)


# By E.  A program has one row, so a row's arithmetic never depends on the batch.
NORM_CONFIGS: Table = {
    "sm_90": (
        (1024, {"num_warps": 4}),
        (8192, {"num_warps": 8}),
        (16384, {"num_warps": 16}),
    )
}


@triton.jit
def _fused_add_rms_norm_kernel(
    x_ptr,
    y_ptr,
    weight_ptr,
    post_weight_ptr,
    out_ptr,
    x_stride_t,
    y_stride_t,
    out_stride_t,
    eps,
    alpha,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_Y: tl.constexpr,
    HAS_POST: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < E
    x = tl.load(x_ptr + token * x_stride_t + column, mask=mask, other=0.0).to(tl.float32)
    if HAS_Y:
        y = tl.load(y_ptr + token * y_stride_t + column, mask=mask, other=0.0).to(tl.float32)
        if HAS_POST:
            post = tl.load(post_weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
            y = y * tl.rsqrt(tl.sum(y * y, 0) / E + eps) * post
            y = y.to(y_ptr.dtype.element_ty).to(tl.float32)
        rounded = (x + alpha * y).to(x_ptr.dtype.element_ty)
        tl.store(x_ptr + token * x_stride_t + column, rounded, mask=mask)
        x = rounded.to(tl.float32)
    if not HAS_NORM:
        return
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    out = x * tl.rsqrt(tl.sum(x * x, 0) / E + eps) * weight
    out = out.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * out_stride_t + column, out, mask=mask)


def fused_add_rms_norm(
    x_TE: Tensor,
    y_TE: Tensor | None,
    weight_E: Tensor | None,
    eps: float,
    *,
    alpha: float = 1.0,
    post_weight_E: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return the normalised rows [T, E], or x without a weight.  `out` may be x itself if there is no y."""
    num_tokens, width = x_TE.shape
    if weight_E is None:
        out = x_TE
    elif out is None:
        out = torch.empty_like(x_TE)
    for name, rows in (("x", x_TE), ("y", y_TE), ("out", out)):
        if rows is not None:
            assert rows.shape == x_TE.shape, f"{name} is {tuple(rows.shape)}"
            assert rows.stride(1) == 1, f"{name} must be contiguous along the hidden size"
    _fused_add_rms_norm_kernel[(num_tokens,)](
        x_TE,
        y_TE,
        weight_E,
        post_weight_E,
        out,
        x_TE.stride(0),
        0 if y_TE is None else y_TE.stride(0),
        out.stride(0),
        eps,
        alpha,
        E=width,
        BLOCK=triton.next_power_of_2(width),
        HAS_Y=y_TE is not None,
        HAS_POST=post_weight_E is not None,
        HAS_NORM=weight_E is not None,
        **config_of(NORM_CONFIGS, x_TE.device, width),
    )
    return out


def fused_add_rms_norm_reference(
    x_TE: Tensor,
    y_TE: Tensor | None,
    weight_E: Tensor,
    eps: float,
    *,
    alpha: float = 1.0,
    post_weight_E: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (x after the sum, out) without changing x. Tests compare the kernel with this computation in torch."""
    if y_TE is not None:
        y_TE = y_TE if post_weight_E is None else rms_norm_reference(y_TE, post_weight_E, eps)
        x_TE = (x_TE.double() + alpha * y_TE.double()).to(x_TE.dtype)
    return x_TE, rms_norm_reference(x_TE, weight_E, eps)
