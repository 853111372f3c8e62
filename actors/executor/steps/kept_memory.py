"""Memory that outlives a worker: tensors in a memory file of the engine's process.

A worker that is killed loses its own memory.  Its stores into this file stay, because the file belongs to the engine, so the next
worker finds the keys and values of every answered step where its predecessor left them.

Law: tensors are made in the same order, with the same shapes, in each worker.  `layout` describes them, and the engine compares it: a
worker with another layout must not use what it finds.
"""

import math
import mmap
import os
from collections.abc import Sequence

import torch
from torch import Tensor

# Linux's number for "free the pages of this range of the file".
MADV_REMOVE = 9


class KeptMemory:
    """The tensors of one worker in a memory file, which the engine keeps.

    Args:
        file: its descriptor, which belongs to this object from now on.
    """

    def __init__(self, file: int) -> None:
        self._file = file
        self._parts: list[mmap.mmap] = []
        self._end = 0
        self.layout = ""

    def __repr__(self) -> str:
        return f"<KeptMemory: {len(self._parts)} tensors, {self._end} bytes>"

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the next tensor, with the contents that a predecessor left there, or zeros.

        Pages take memory once something is written there.
        """
        num_items = math.prod(shape)
        self.layout += f"{dtype} {tuple(shape)} at {self._end}\n"
        if not num_items:
            return torch.empty(tuple(shape), dtype=dtype)
        page = mmap.ALLOCATIONGRANULARITY
        num_bytes = -(-num_items * dtype.itemsize // page) * page
        first, self._end = self._end, self._end + num_bytes
        if os.fstat(self._file).st_size < self._end:
            os.ftruncate(self._file, self._end)
        part = mmap.mmap(self._file, num_bytes, offset=first)
        self._parts.append(part)
        return torch.frombuffer(part, dtype=dtype, count=num_items).view(tuple(shape))

    def drop(self) -> None:
        """Free all pages, for a sleep.  Later tensors begin at the start of the file again, and contain zeros."""
        for part in self._parts:
            part.madvise(MADV_REMOVE)
        self._parts.clear()
        self._end, self.layout = 0, ""
