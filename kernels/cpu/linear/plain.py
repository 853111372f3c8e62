"""Linear layers whose weight stays as checkpoints store it: float16, odd shapes, and GPUs, where cuBLAS multiplies."""

from typing import Self

import torch.nn.functional as F
from torch import Tensor

from trouper.kernels.linear import LinearMethod


class PlainLinear(LinearMethod):
    """torch's own product."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        num_out, num_in = weight_OI.shape
        self.shape = num_out, num_in
        self.weight, self.bias = weight_OI, bias_O

    @classmethod
    def pack(cls, weight: Tensor, bias_O: Tensor | None = None) -> Self:
        return cls(weight, bias_O)

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes

    def apply(self, x_TI: Tensor) -> Tensor:
        return F.linear(x_TI, self.weight, self.bias)
