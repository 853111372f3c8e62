"""Activation functions by the names that model configs give them."""

import torch.nn.functional as F
from torch import Tensor


def activate(x: Tensor, act: str) -> Tensor:
    """Return act(x).

    Raises:
        ValueError: there is no function of that name here.
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
            raise ValueError(f"no activation {act!r}")
