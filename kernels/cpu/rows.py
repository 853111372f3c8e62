"""Memory for rows of activations, and how many threads are worth waking for them."""

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
