"""y = (x - mean(x)) / √(var(x) + ε) · w + b over the last dimension.

x [..., D]   any leading shape; weights and biases in one tensor [2, D]
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def layer_norm(x: Tensor, weights_2D: Tensor, eps: float) -> Tensor:
    weight_D, bias_D = weights_2D.float()
    return F.layer_norm(x.float(), weight_D.shape, weight_D, bias_D, eps).to(x.dtype)


def layer_norm_heads_(x_TND: Tensor, weights_N2D: Tensor, eps: float) -> None:
    """Normalise each head of q and k in place; their weights differ."""
    weight_ND, bias_ND = weights_N2D.float().unbind(1)
    normed_TND = F.layer_norm(x_TND.float(), x_TND.shape[-1:], None, None, eps)
    x_TND.copy_(torch.addcmul(bias_ND, normed_TND, weight_ND))
