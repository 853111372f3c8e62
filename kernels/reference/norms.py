"""RMS norm and layer norm over the last dimension.

    rms      y = x / √(mean(x²) + ε) · w                     x [..., D]; w [D] in x's dtype or in float32
    layer    y = (x - mean(x)) / √(var(x) + ε) · w + b       x [..., D]; weights and biases in one tensor [2, D]

Gemma stores w - 1.  The loader adds the one and keeps w in float32, where 1 + w is not rounded.

Roofline of the RMS norm: 2 e T D bytes, 4 T D FLOPs.  A decode step moves less than a microsecond of data, so calls matter:
one composite torch call, 13 µs at [1, 1024] bfloat16 and 21 µs at [16, 1024], is faster than five plain ones.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


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
