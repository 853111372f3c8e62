"""Adapters by plain torch: what computes where the kernels of `lora.py` cannot, and their reference."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from trouper.kernels.lora import LoRAWeights, LowRank, RowTable


class PlainLoRA(LoRAWeights):
    """The matrices as they came, a product for each adapter of a step."""

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
