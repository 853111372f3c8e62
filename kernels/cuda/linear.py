"""The linear layer of batch-invariant mode on a GPU."""

from torch import Tensor

from trouper.kernels.cuda.matmul import matmul
from trouper.kernels.linear import LinearMethod


class InvariantLinear(LinearMethod):
    """A product whose rows do not depend on the number of rows; see `matmul`."""

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
