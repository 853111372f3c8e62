"""y = x Wᵀ + b with an order of addition that does not depend on the number of rows: the linear layer of batch-invariant mode.

    x [T, I]   tokens × inputs, rows may be strided
    W [O, I]   the layout of checkpoints;  b [O] optional
    y [T, O]

cuBLAS chooses another algorithm for another T, and so adds in another order.  This kernel cuts every T into tiles of one
shape, and each output is one accumulator over the inputs in their order, without splits.

Roofline: e (O I + T I + T O) bytes, 2 T O I FLOPs; target 75 % of cuBLAS at large T.
Reference: `kernels/reference/linear.py`.
"""

import triton
import triton.language as tl
from torch import Tensor

from trouper.kernels.cuda.launch import Table, config_of, dot_type
from trouper.kernels.cuda.prefill_attention import PRECISION
from trouper.kernels.linear import LinearMethod

# Tiles of rows that share a tile of W in the second cache.
GROUP = 8

# By bytes of a number.  Another tile changes bits, so one tile serves every T.
CONFIGS: Table = {
    "sm_90": (
        (2, {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64, "STAGES": 5, "num_warps": 4}),
        (4, {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32, "STAGES": 3, "num_warps": 4}),
    )
}


@triton.jit(do_not_specialize=["num_tokens"])
def _matmul_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    y_ptr,
    num_tokens,
    x_stride_t,
    O: tl.constexpr,  # noqa: E741  # as in the formula
    I: tl.constexpr,  # noqa: E741
    HAS_BIAS: tl.constexpr,
    DOT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    num_m = tl.cdiv(num_tokens, BLOCK_M)
    num_n: tl.constexpr = (O + BLOCK_N - 1) // BLOCK_N
    group = tl.program_id(0) // (GROUP * num_n)
    height = tl.minimum(num_m - group * GROUP, GROUP)
    index = tl.program_id(0) % (GROUP * num_n)
    token = ((group * GROUP + index % height) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    output = ((index // height) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    column = tl.arange(0, BLOCK_K)
    is_token = (token < num_tokens)[:, None]
    is_output = (output < O)[:, None]
    x_at = x_ptr + token[:, None] * x_stride_t + column[None, :]
    w_at = w_ptr + output[:, None] * I + column[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in tl.range(0, I, BLOCK_K, num_stages=STAGES):
        is_input = (first + column < I)[None, :]
        x = tl.load(x_at + first, mask=is_token & is_input, other=0.0)
        w = tl.load(w_at + first, mask=is_output & is_input, other=0.0)
        acc = tl.dot(x.to(DOT), tl.trans(w.to(DOT)), acc, input_precision=PRECISION)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + output, mask=output < O, other=0.0).to(tl.float32)[None, :]
    mask = is_token & (output < O)[None, :]
    y = acc.to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + token[:, None] * O + output[None, :], y, mask=mask)


def matmul(
    x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None, *, out: Tensor | None = None
) -> Tensor:
    num_tokens, (num_out, num_in) = len(x_TI), weight_OI.shape
    assert x_TI.shape[1] == num_in, f"{x_TI.shape[1]} inputs for {num_in}"
    assert x_TI.stride(1) == 1, "a token's inputs must be contiguous"
    assert weight_OI.is_contiguous(), "the weight must be contiguous"
    out = x_TI.new_empty(num_tokens, num_out) if out is None else out
    assert out.is_contiguous(), "out must be contiguous"
    config = config_of(CONFIGS, x_TI.device, x_TI.dtype.itemsize)
    num_tiles = triton.cdiv(num_tokens, config["BLOCK_M"]) * triton.cdiv(num_out, config["BLOCK_N"])
    _matmul_kernel[(num_tiles,)](
        x_TI,
        weight_OI,
        bias_O,
        out,
        num_tokens,
        x_TI.stride(0),
        O=num_out,
        I=num_in,
        HAS_BIAS=bias_O is not None,
        DOT=dot_type(x_TI.dtype),
        GROUP=GROUP,
        **config,
    )
    return out


class InvariantLinear(LinearMethod):
    """A linear layer with rows that do not depend on the number of rows; see `matmul`."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        num_out, num_in = weight_OI.shape
        self.shape = num_out, num_in
        self.weight, self.bias = weight_OI, bias_O

    @classmethod
    def pack(cls, weight: Tensor, bias_O: Tensor | None = None) -> "InvariantLinear":
        return cls(weight, bias_O)

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes

    def apply(self, x_TI: Tensor) -> Tensor:
        return matmul(x_TI, self.weight, self.bias)
