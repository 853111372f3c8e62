"""Memory for rows of activations, and how many threads are worth waking for them.

Small weights in float32, as kernels read them.
"""

import torch
from torch import Tensor

FEW = 16  # rows that one thread computes sooner than it wakes another: a row of a norm costs 0.5 µs, a thread 3
PAD = 32  # bfloat16 of a cache line


def num_threads_for(num_rows: int) -> int:
    """Return 1, or all of torch's threads: a team of another size would be ended and made anew."""
    return 1 if num_rows < FEW else torch.get_num_threads()


def padded(num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Allocate rows a cache line apart from each other, so that a column of them is not one set of the cache.

    Rows of float32 have no gaps: the products of float32 want none.
    """
    pad = PAD if dtype == torch.bfloat16 else 0
    return torch.empty((num_rows, width + pad), dtype=dtype).narrow(1, 0, width)


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
