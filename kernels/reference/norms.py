"""y = x / √(mean(x²) + ε) · w over the last dimension.

    x [..., D]   any leading shape; w [D], in x's dtype or in float32

Gemma stores w - 1; the loader adds the one, and keeps w in float32, where 1 + w is not rounded.

Roofline: bytes = 2 e T D, FLOPs = 4 T D.  At decode that is less than a µs of traffic, so calls count:
one composite torch call, 13 µs at [1, 1024] bf16 and 21 µs at [16, 1024], beats five plain ones.

y = (x - mean(x)) / √(var(x) + ε) · w + b over the last dimension.

x [..., D]   any leading shape; weights and biases in one tensor [2, D]
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    if weight_D.dtype != x.dtype:
        return torch.rms_norm(x.float(), weight_D.shape, weight_D, eps).to(x.dtype)
    return torch.rms_norm(x, weight_D.shape, weight_D, eps)


def rms_norm_heads_(x_TND: Tensor, weight_ND: Tensor, eps: float) -> None:
    """Normalise in place over each head of q and k at once, whose weights differ: half the calls of one by one."""
    torch.mul(torch.rms_norm(x_TND, x_TND.shape[-1:], None, eps), weight_ND, out=x_TND)


def rms_norm_reference(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    wide = x.double()
    scale = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (wide * scale * weight_D.double()).to(x.dtype)


def layer_norm(x: Tensor, weights_2D: Tensor, eps: float) -> Tensor:
    weight_D, bias_D = weights_2D.float()
    return F.layer_norm(x.float(), weight_D.shape, weight_D, bias_D, eps).to(x.dtype)


def layer_norm_heads_(x_TND: Tensor, weights_N2D: Tensor, eps: float) -> None:
    """Normalise each head of q and k in place; their weights differ."""
    weight_ND, bias_ND = weights_N2D.float().unbind(1)
    normed_TND = F.layer_norm(x_TND.float(), x_TND.shape[-1:], None, None, eps)
    x_TND.copy_(torch.addcmul(bias_ND, normed_TND, weight_ND))
