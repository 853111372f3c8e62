"""Activation functions by their names in model configs, with and without a gate.

    activate          y = act(x)
    act_and_mul       y = act(g) · u for the halves g, u of a fused gate-and-up product: gate_up [T, 2 M] -> y [T, M]
    clamped_swiglu    y = (u + 1) · g / (1 + e^(-α g)), with g ≤ limit and -limit ≤ u ≤ limit (gpt-oss)

The functions with `_reference` in their names compute in float64 and are the oracles of tests.

Roofline of act_and_mul: 3 e T M bytes, about 6 T M FLOPs, in two torch calls.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def activate(x: Tensor, act: str) -> Tensor:
    """Return act(x).

    Raises:
        ValueError: the name is unknown.
    """
    match act:
        case "gelu":
            return F.gelu(x)
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        case "relu":
            return x.relu()
        case "relu2":
            return x.relu().square()
        case "silu":
            return F.silu(x)
        case "tanh":
            return x.tanh()
        case "sigmoid":
            return x.sigmoid()
        case "identity":
            return x
        case _:
            raise ValueError(f"unknown activation {act!r}")


def silu_and_mul(gate_up_TM: Tensor) -> Tensor:
    gate_TM, up_TM = gate_up_TM.chunk(2, dim=-1)
    return F.silu(gate_TM).mul_(up_TM)


def gelu_and_mul(gate_up_TM: Tensor) -> Tensor:
    gate_TM, up_TM = gate_up_TM.chunk(2, dim=-1)
    return F.gelu(gate_TM).mul_(up_TM)


def gelu_tanh_and_mul(gate_up_TM: Tensor) -> Tensor:
    gate_TM, up_TM = gate_up_TM.chunk(2, dim=-1)
    return F.gelu(gate_TM, approximate="tanh").mul_(up_TM)


def act_and_mul(gate_up_TM: Tensor, act: str) -> Tensor:
    """Return act(gate) · up for the two halves of the input.

    `activate` lists the names.  The result is a new tensor.
    """
    gate_TM, up_TM = gate_up_TM.chunk(2, dim=-1)
    return activate(gate_TM, act).mul_(up_TM)


def clamped_swiglu(gate_up_TM: Tensor, alpha: float, limit: float) -> Tensor:
    gate_TM, up_TM = gate_up_TM.chunk(2, dim=-1)
    gate_TM, up_TM = gate_TM.clamp(max=limit), up_TM.clamp(-limit, limit)
    return (up_TM + 1) * (gate_TM * torch.sigmoid(gate_TM * alpha))


def silu_and_mul_reference(gate_up_TM: Tensor) -> Tensor:
    gate_TM, up_TM = gate_up_TM.double().chunk(2, dim=-1)
    return (gate_TM / (1 + (-gate_TM).exp()) * up_TM).to(gate_up_TM.dtype)


def gelu_and_mul_reference(gate_up_TM: Tensor) -> Tensor:
    gate_TM, up_TM = gate_up_TM.double().chunk(2, dim=-1)
    return (gate_TM * (1 + (gate_TM / 2**0.5).erf()) / 2 * up_TM).to(gate_up_TM.dtype)


def gelu_tanh_and_mul_reference(gate_up_TM: Tensor) -> Tensor:
    gate_TM, up_TM = gate_up_TM.double().chunk(2, dim=-1)
    inner = (2 / torch.pi) ** 0.5 * (gate_TM + 0.044715 * gate_TM**3)
    return (gate_TM * (1 + inner.tanh()) / 2 * up_TM).to(gate_up_TM.dtype)


def clamped_swiglu_reference(gate_up_TM: Tensor, alpha: float, limit: float) -> Tensor:
    gate_TM, up_TM = gate_up_TM.double().chunk(2, dim=-1)
    gate_TM, up_TM = gate_TM.clamp(max=limit), up_TM.clamp(-limit, limit)
    return ((up_TM + 1) * gate_TM / (1 + (-alpha * gate_TM).exp())).to(gate_up_TM.dtype)
