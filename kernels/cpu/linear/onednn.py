"""Linear layers by oneDNN, its weight packed once: no reorder in every call.

Every private function of torch's mkldnn module is called here and nowhere else; `packed_dtypes` is empty where a
build of torch lacks one of them, and then nothing is packed.
"""

from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from trouper.kernels.linear import LinearMethod

MKLDNN: Any = torch.ops.mkldnn
NEEDED = ("_linear_pointwise", "_reorder_linear_weight", "_is_mkldnn_bf16_supported")
# oneDNN's name of the function and of its variant
FUSED = {
    "gelu": ("gelu", "none"), "gelu_tanh": ("gelu", "tanh"), "relu": ("relu", ""),
    "silu": ("swish", ""), "tanh": ("tanh", ""),
}  # fmt: skip


def packed_dtypes() -> frozenset[torch.dtype]:
    """Name the dtypes that oneDNN packs on this machine."""
    if not torch.backends.mkldnn.is_available() or not all(hasattr(MKLDNN, x) for x in NEEDED):
        return frozenset()
    if MKLDNN._is_mkldnn_bf16_supported():
        return frozenset((torch.float32, torch.bfloat16))
    return frozenset((torch.float32,))


class OneDNNLinear(LinearMethod):
    """oneDNN's product; an activation or a sum is applied while a tile of y is in registers."""

    is_compiled_per_size: ClassVar[bool] = True

    def __init__(self, shape: tuple[int, int], weight: Tensor, bias_O: Tensor | None) -> None:
        self.shape, self.weight, self.bias = shape, weight, bias_O

    @classmethod
    def pack(cls, weight: Tensor, bias_O: Tensor | None = None) -> Self:
        num_out, num_in = weight.shape
        packed = MKLDNN._reorder_linear_weight(weight.contiguous(), None)
        return cls((num_out, num_in), packed, bias_O)

    @property
    def num_bytes(self) -> int:
        return (
            self.shape[0] * self.shape[1] * self.weight.element_size()
        )  # it knows no size of its own

    def apply(self, x_TI: Tensor) -> Tensor:
        return MKLDNN._linear_pointwise(x_TI, self.weight, self.bias, "none", [], "")

    def apply_act(self, x_TI: Tensor, act: str) -> Tensor:
        name, variant = FUSED[act]
        return MKLDNN._linear_pointwise(x_TI, self.weight, self.bias, name, [], variant)

    def apply_add(self, x_TI: Tensor, residual_TO: Tensor) -> Tensor:
        return MKLDNN._linear_pointwise.binary(x_TI, residual_TO, self.weight, self.bias, "add")
