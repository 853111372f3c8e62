"""Memory for activations, float32 copies of small weights, and the number of threads for a launch."""

import torch
from torch import Tensor

from trouper.kernels.codegen.launch import is_recorded

# One thread computes this many rows faster than it wakes another one: a row of a norm takes 0.5 µs, a wake-up 3 µs.
FEW = 16
# A row is divided among at most this many threads.
MOST_PARTS = 4
PAD = 32  # bfloat16 in a cache line


def num_threads_for(num_rows: int) -> int:
    """Return 1 for few rows, or else all of torch's threads.

    There is nothing in between: OpenMP would end the team of threads and create one of another size. The threads of a
    recorded step are awake, so two rows are enough.
    """
    return 1 if num_rows < (2 if is_recorded() else FEW) else torch.get_num_threads()


def num_parts_for(num_rows: int) -> int:
    """Return into how many work items to divide a row of several microseconds.

    It is 1 unless a recorded step has fewer rows than threads.
    """
    return (
        max(1, min(MOST_PARTS, torch.get_num_threads() // max(1, num_rows))) if is_recorded() else 1
    )


def padded(num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Allocate rows that end a cache line apart.

    Without the gap the rows of a column would map to the same set of the cache, because widths are powers of two.
    Rows of float32 have no gap, because their matrix products read them without one.
    """
    pad = PAD if dtype == torch.bfloat16 else 0
    return torch.empty((num_rows, width + pad), dtype=dtype).narrow(1, 0, width)


class Float32Copies:
    """Float32 copies of small weights, which kernels read in this dtype only.

    Each copy is kept together with its source, so that no other tensor can get the source's id.
    """

    def __init__(self) -> None:
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}  # by id(weight): copy, weight

    def __repr__(self) -> str:
        return f"<Float32Copies of {len(self._copies)} weights>"

    def of(self, weight: Tensor) -> Tensor:
        """Return a contiguous float32 copy of a weight, or the weight itself if it is one.

        Copies are kept, because norms use their weights in each step.
        """
        if weight.dtype == torch.float32 and weight.is_contiguous():
            return weight
        held = self._copies.get(id(weight))
        if held is None:
            held = self._copies[id(weight)] = weight.float().contiguous(), weight
        return held[0]

    def clear(self) -> None:
        """Free all copies. Called when weights are released, since copies keep them alive."""
        self._copies.clear()
