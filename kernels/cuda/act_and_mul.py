"""y = act(g) · u for the halves g, u of a fused gate-and-up product.

    gate_up [T, 2 M] -> y [T, M], rows contiguous;   act is silu, or gelu in its tanh form (Gemma)

Roofline: 3 e T M bytes, about 6 T M FLOPs.  Target 85 %.  Reference: `kernels/reference/activation.py`.
"""

from typing import Literal

import triton
import triton.language as tl
from torch import Tensor

from trouper.kernels.cuda.launch import Table, config_of

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
