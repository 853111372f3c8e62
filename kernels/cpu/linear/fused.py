"""A packed `linear` with what an encoder does next.

    linear_act   y = act(x Wᵀ + b),  act = gelu (erf), gelu_tanh, relu, silu or tanh
    linear_add   y = x Wᵀ + b + r    the residual sum

oneDNN applies both while the tile of y is in registers, so nothing is written and read twice, and so does the native
product with gelu.  Elsewhere these are two calls.

Roofline: as `linear`, bytes + e T O for r.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from trouper.kernels.cpu.linear.layer import NATIVE, Linear, linear, native

# oneDNN's name of the function and of its variant
FUSED = {
    "gelu": ("gelu", "none"), "gelu_tanh": ("gelu", "tanh"), "relu": ("relu", ""),
    "silu": ("swish", ""), "tanh": ("tanh", ""),
}  # fmt: skip


def linear_act(x_TI: Tensor, layer: Linear, act: str) -> Tensor:
    if layer.layout == "onednn":
        name, variant = FUSED[act]
        return torch.ops.mkldnn._linear_pointwise(x_TI, layer.weight, layer.bias, name, [], variant)
    if act == "gelu" and layer.layout in NATIVE:
        return native(x_TI, layer, "gelu")
    return activate(linear(x_TI, layer), act)


def linear_add(x_TI: Tensor, layer: Linear, residual_TO: Tensor) -> Tensor:
    if layer.layout == "onednn":
        return torch.ops.mkldnn._linear_pointwise.binary(
            x_TI, residual_TO, layer.weight, layer.bias, "add"
        )
    return linear(x_TI, layer).add_(residual_TO)


def activate(x: Tensor, act: str) -> Tensor:
    match act:
        case "gelu":
            return F.gelu(x)
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        case "relu":
            return x.relu()
        case "silu":
            return F.silu(x)
        case "tanh":
            return x.tanh()
        case "sigmoid":
            return x.sigmoid()
        case "identity":
            return x
        case _:
            raise ValueError(f"no activation {act!r}")


def linear_act_reference(
    x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, act: str
) -> Tensor:
    return activate(F.linear(x_TI.double(), weight_OI.double(), _double(bias_O)), act).to(
        x_TI.dtype
    )


def linear_add_reference(
    x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, residual_TO: Tensor
) -> Tensor:
    y = F.linear(x_TI.double(), weight_OI.double(), _double(bias_O)) + residual_TO.double()
    return y.to(x_TI.dtype)


def _double(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.double()
