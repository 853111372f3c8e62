"""Small weights in float32, as kernels read them."""

import torch
from torch import Tensor


class Float32Copies:
    """The copies that have been made, each kept together with its source, so that no other tensor gets its id."""

    def __init__(self) -> None:
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}  # and sources, by the ids of those

    def __repr__(self) -> str:
        return f"<Float32Copies of {len(self._copies)} weights>"

    def of(self, weight: Tensor) -> Tensor:
        """Return a weight in float32: itself, if it is."""
        if weight.dtype == torch.float32 and weight.is_contiguous():
            return weight
        held = self._copies.get(id(weight))
        if held is None:
            held = self._copies[id(weight)] = weight.float().contiguous(), weight
        return held[0]

    def clear(self) -> None:
        """Give all of them back."""
        self._copies.clear()
