"""Memory for the activations of one step after the other.

    with Lender(arena): y = forward(x)

What torch allocates by `empty` within the block lies in the arena; what is freed there is used again.  The C library
would give so much memory back to the system after a step: of a prompt of 1,024 tokens (473 M parameters) 120,000 pages
were touched anew, a sixth of the step's time.

Law: everything that was allocated in a block is read before the next block begins.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# torch leaves the types of split, view and some others open.

import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

SMALLEST = 64  # bytes


class Arena:
    """Memory in pieces of powers of two bytes, never given back: as many of each size as one block needs at once."""

    def __init__(self) -> None:
        self.pieces: dict[int, Tensor] = {}  # by address

    def __repr__(self) -> str:
        return f"<Arena of {sum(map(len, self.pieces.values()))} bytes>"


class Lender(TorchDispatchMode):
    """Context in which this thread's torch allocates from an arena."""

    def __init__(self, arena: Arena) -> None:
        super().__init__()
        self._arena = arena
        self._free = list(arena.pieces.values())

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or torch imports its compiler: 1.5 s

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        lent = self.lent(func, args, kwargs or {})
        return func(*args, **(kwargs or {})) if lent is None else lent

    def lent(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """Return a tensor in the arena if `func` allocates one, else None."""
        if func is torch.ops.aten.empty.memory_format:
            return self._empty(args[0], kwargs.get("dtype") or torch.get_default_dtype())
        if func is torch.ops.aten.new_empty.default:
            return self._empty(args[1], kwargs.get("dtype") or args[0].dtype)
        return None

    def _empty(self, shape: Iterable[int], dtype: torch.dtype) -> Tensor:
        num_bytes = dtype.itemsize * int(np.prod(list(shape)))
        piece = self._piece(max(SMALLEST, 1 << (num_bytes - 1).bit_length()))
        # the storage refers to this array, and nothing else does: it dies with the last view
        lent = piece.numpy()[:num_bytes]
        weakref.finalize(lent, self._free.append, piece)
        return torch.from_numpy(lent).view(dtype).view(*shape)

    def _piece(self, num_bytes: int) -> Tensor:
        for i, piece in enumerate(self._free):
            if len(piece) == num_bytes:
                return self._free.pop(i)
        piece = torch.empty(num_bytes, dtype=torch.uint8)
        self._arena.pieces[piece.data_ptr()] = piece
        return piece
