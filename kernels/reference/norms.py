"""The operations between a decoder's matrix products in torch: norms, activations, rotation, and the write to the KV cache.

They define correct results for `kernels/cpu/norms.py` and the kernels of GPUs, and run where no kernel is compiled.  The functions
with `_reference` in their names compute in float64 and are the oracles of tests.

    rms             y = x / √(mean(x²) + ε) · w                     x [..., D]; w [D] in x's dtype or in float32
    layer           y = (x - mean(x)) / √(var(x) + ε) · w + b       x [..., D]; weights and biases in one tensor [2, D]
    activate        y = act(x), by the name of act in model configs
    act_and_mul     y = act(g) · u for the halves g, u of a fused gate-and-up product: gate_up [T, 2 M] -> y [T, M]
    clamped_swiglu  y = (u + 1) · g / (1 + e^(-α g)), with g ≤ limit and -limit ≤ u ≤ limit (gpt-oss)
    rope            (x₁, x₂) -> (x₁ cos - x₂ sin, x₂ cos + x₁ sin), x₁, x₂ the halves of the rotated part of a head
    kv_write        cache[:, h, slot_t] = kv[t, :, h]

Gemma stores w - 1.  The loader adds the one and keeps w in float32, where 1 + w is not rounded.

Rooflines: RMS norm 2 e T D bytes, 4 T D FLOPs; act_and_mul 3 e T M bytes, about 6 T M FLOPs; rope_ 2 e T N D bytes, 3 T N R FLOPs;
kv_write_ 4 e T H D bytes.  A decode step moves less than a microsecond of data, so the number of torch's calls matters: one composite
call of the RMS norm, 13 µs at [1, 1024] bfloat16 and 21 µs at [16, 1024], is faster than five plain ones.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# torch leaves the types of split, view and some others open.


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


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    if weight_D.dtype != x.dtype:
        return torch.rms_norm(x.float(), weight_D.shape, weight_D, eps).to(x.dtype)
    return torch.rms_norm(x, weight_D.shape, weight_D, eps)


def rms_norm_heads_(x_TND: Tensor, weight_ND: Tensor, eps: float) -> None:
    """Normalise each head of q and k in place, with weights for each head.  One call serves both."""
    torch.mul(torch.rms_norm(x_TND, x_TND.shape[-1:], None, eps), weight_ND, out=x_TND)


def rms_norm_reference(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    wide = x.double()
    scale = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (wide * scale * weight_D.double()).to(x.dtype)


def layer_norm(x: Tensor, weights_2D: Tensor, eps: float) -> Tensor:
    weight_D, bias_D = weights_2D.float()
    return F.layer_norm(x.float(), weight_D.shape, weight_D, bias_D, eps).to(x.dtype)


def layer_norm_heads_(x_TND: Tensor, weights_N2D: Tensor, eps: float) -> None:
    """Normalise each head of q and k in place, with weights and biases for each head."""
    weight_ND, bias_ND = weights_N2D.float().unbind(1)
    normed_TND = F.layer_norm(x_TND.float(), x_TND.shape[-1:], None, None, eps)
    x_TND.copy_(torch.addcmul(bias_ND, normed_TND, weight_ND))


def rope_table(
    inverse_frequencies: Tensor, num_positions: int, scale: float, dtype: torch.dtype
) -> Tensor:
    """Return the table [P, 2, R] for `inverse_frequencies` [R/2]: positions × (cos, signed sin) × rotated width.

    The table has the model's dtype, rounded like in transformers, and its angles are computed in float32.  The halves convention is
    that of GPT-NeoX (`rotate_half` in transformers).

    Args:
        scale: factor of cos and sin (yarn, longrope).
    """
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies.float())
    cos, sin = angles.cos() * scale, angles.sin() * scale
    return torch.stack(
        (torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)),
        dim=1,
    ).to(dtype)


def rotation_of(table: Tensor, positions_T: Tensor) -> Tensor:
    """Gather the rows of the table for a batch, [2, T, 1, R], once a step."""
    return table.index_select(0, positions_T).transpose(0, 1).unsqueeze(2)


def rope_(x_TND: Tensor, rotation: Tensor) -> None:
    """Rotate the heads of q, then of k, in place: `x_TND`, whose rows may be strided.

    The table includes the sign of x₂ sin, so the rotation is x · cos + roll(x, R/2) · sin: three calls of torch.
    """
    cos_T1R, sin_T1R = rotation
    width = cos_T1R.shape[-1]
    x_TNR = x_TND if width == x_TND.shape[-1] else x_TND[..., :width]
    torch.addcmul(x_TNR * cos_T1R, x_TNR.roll(width // 2, -1), sin_T1R, out=x_TNR)


def rope_reference(
    x_TND: Tensor, positions_T: Tensor, inverse_frequencies: Tensor, scale: float = 1.0
) -> Tensor:
    """Rotate a copy in float64, as a product of complex numbers."""
    half = inverse_frequencies.numel()
    angles_TR = torch.outer(positions_T.double(), inverse_frequencies.double())
    x1, x2, rest = x_TND.double().split((half, half, x_TND.shape[-1] - 2 * half), dim=-1)
    turned = (
        torch.complex(x1, x2) * torch.polar(torch.full_like(angles_TR, scale), angles_TR)[:, None]
    )
    return torch.cat((turned.real, turned.imag, rest), dim=-1).to(x_TND.dtype)


def kv_write_(cache_2HSD: Tensor, kv_T2HD: Tensor, slots_T: Tensor) -> None:
    """Write keys and values of one layer in one call, 9 µs at T = 16, H = 8, D = 128.

    Rows of `kv_T2HD` may be strided; the int64 slots are all different.
    """
    cache_2HSD.index_copy_(2, slots_T, kv_T2HD.permute(1, 2, 0, 3))


def kv_write_reference(cache_2HSD: Tensor, kv_T2HD: Tensor, slots_T: Tensor) -> Tensor:
    out = cache_2HSD.clone()
    for kv_2HD, slot in zip(kv_T2HD, slots_T.tolist(), strict=True):
        out[:, :, slot] = kv_2HD
    return out
