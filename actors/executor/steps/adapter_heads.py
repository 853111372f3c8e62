"""Heads that adapters replace: an adapter trained with `modules_to_save=["lm_head"]` stores a whole output matrix of its own.

Rows of such an adapter get their logits from this matrix instead of the model's.  It is multiplied outside of recorded steps, only with the
rows of its adapter, and a row's bits do not depend on the others.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from trouper.actors.executor.steps.batch import from_numpy
from trouper.kernels.linear import LinearMethod
from trouper.kernels.select import make_linear

Compute = Callable[[Tensor, LinearMethod], Tensor]
"""Returns the logits of hidden states by a head."""


class AdapterHeads:
    """The heads of the loaded adapters, by slot.  Each takes as much memory as the model's own head in the model's dtype.

    Args:
        shape: outputs and inputs of the model's head.
        has_bias: whether the model's head has a bias, so that an adapter's head has one too.
        is_here: whether logits are computed in this process.  Other stages only check the files.
    """

    def __init__(
        self, shape: tuple[int, int], *, has_bias: bool = False, is_here: bool = True
    ) -> None:
        self.shape, self.has_bias = shape, has_bias
        self._is_here = is_here
        self._heads: dict[int, LinearMethod] = {}

    def __repr__(self) -> str:
        return f"<AdapterHeads of slots {sorted(self._heads)}>"

    def put(self, slot: int, tensors: tuple[Tensor, Tensor | None] | None) -> None:
        """Store the weight and bias of a slot's head.  None means that its adapter uses the model's."""
        self._heads.pop(slot, None)
        if tensors is not None and self._is_here:
            self._heads[slot] = make_linear(*tensors)

    def of(self, slot: int) -> LinearMethod | None:
        """Return the head of a slot's adapter; None means the model's."""
        return self._heads.get(slot)

    def are_used(self, slots_R: np.ndarray) -> bool:
        """Whether an adapter of these rows has a head of its own."""
        return bool(self._heads) and not self._heads.keys().isdisjoint(slots_R.tolist())

    def replace(
        self, logits_RV: Tensor, hidden_RE: Tensor, slots_R: np.ndarray, compute: Compute
    ) -> None:
        """Overwrite the logits of the rows whose adapters have heads of their own."""
        for slot in np.unique(slots_R).tolist():
            if (head := self._heads.get(slot)) is not None:
                rows = from_numpy(np.flatnonzero(slots_R == slot))
                logits_RV.index_copy_(
                    0, rows, compute(hidden_RE.index_select(0, rows), head).to(logits_RV.dtype)
                )


def finite(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor of an adapter's file in the model's dtype.

    Raises:
        ValueError: its shape is another one, or a value is not finite.
    """
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {list(tensor.shape)} instead of {list(shape)}")
    if not tensor.is_floating_point():
        raise ValueError(f"{name} has the unsupported dtype {tensor.dtype}")
    converted = tensor.to(dtype)
    if not bool(converted.isfinite().all()):
        raise ValueError(f"{name} has non-finite values")
    return converted
