"""Linear layers and adapters by torch, where no compiled kernel supports the dtype, the shape or the machine.

    OneDNNLinear   oneDNN with a weight that is packed once, so that no call reorders it
    PlainLinear    torch's own product: float16, odd shapes, and GPUs, where cuBLAS multiplies
    PlainLoRA      adapters, also the reference of the kernels in `cpu/linear/lora.py`

Only this module calls the private functions of torch's mkldnn module.  `packed_dtypes` is empty if a build of torch
lacks one of them, and then `select.py` does not choose oneDNN.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from trouper.kernels.linear import LinearMethod, LoRAWeights, LowRank, RowTable

MKLDNN: Any = torch.ops.mkldnn
NEEDED = ("_linear_pointwise", "_reorder_linear_weight", "_is_mkldnn_bf16_supported")
# oneDNN's names of the function and its variant.
FUSED = {
    "gelu": ("gelu", "none"), "gelu_tanh": ("gelu", "tanh"), "relu": ("relu", ""),
    "silu": ("swish", ""), "tanh": ("tanh", ""),
}  # fmt: skip


def packed_dtypes() -> frozenset[torch.dtype]:
    """Return the dtypes that oneDNN packs on this machine.

    A packed weight is multiplied faster than a plain one, but takes its own memory.
    """
    if not torch.backends.mkldnn.is_available() or not all(hasattr(MKLDNN, x) for x in NEEDED):
        return frozenset()
    if MKLDNN._is_mkldnn_bf16_supported():
        return frozenset((torch.float32, torch.bfloat16))
    return frozenset((torch.float32,))


class OneDNNLinear(LinearMethod):
    """oneDNN's product.  It applies an activation or a sum while a tile of y is in registers."""

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
        # A packed tensor does not know its size.
        return self.shape[0] * self.shape[1] * self.weight.element_size()

    def apply(self, x_TI: Tensor) -> Tensor:
        return MKLDNN._linear_pointwise(x_TI, self.weight, self.bias, "none", [], "")

    def apply_act(self, x_TI: Tensor, act: str) -> Tensor:
        name, variant = FUSED[act]
        return MKLDNN._linear_pointwise(x_TI, self.weight, self.bias, name, [], variant)

    def apply_add(self, x_TI: Tensor, residual_TO: Tensor) -> Tensor:
        return MKLDNN._linear_pointwise.binary(x_TI, residual_TO, self.weight, self.bias, "add")


class PlainLinear(LinearMethod):
    """torch's own product with a weight in the layout of checkpoints.

    It supports every dtype and shape, so it is the last choice. Its results may depend on the number of rows.
    """

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


class PlainLoRA(LoRAWeights):
    """Adapters as plain matrices, applied row by row.

    Used where no compiled kernel supports the dtype or the sizes.
    """

    def __init__(self, part_sizes: Sequence[int]) -> None:
        self._ends = np.cumsum(part_sizes).tolist()
        self._parts: dict[int, list[LowRank | None]] = {}

    def load(self, slot: int, parts: Sequence[LowRank | None]) -> None:
        self._parts[slot] = [*parts]

    def clear(self, slot: int) -> None:
        self._parts.pop(slot, None)

    def add_to(self, y_TO: Tensor, x_TI: Tensor, rows: RowTable) -> None:
        slots = rows.slots[: len(x_TI)]
        for row, slot in enumerate(slots.tolist()):
            begin = 0
            for part, end in zip(self._parts.get(slot, ()), self._ends, strict=False):
                if part is not None:
                    hidden_R = part.a_RI.float() @ x_TI[row].float()
                    y_TO[row, begin:end] += (part.b_OR.float() @ hidden_R).to(y_TO.dtype)
                begin = end
