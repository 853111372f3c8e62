"""Memory for activations that one step after the other reuses.

    with Lender(arena): y = forward(x)

Inside the block `torch.empty` allocates from the arena, and freed tensors return to it.  The C library would return
this much memory to the system after each step: a prompt of 1,024 tokens (473 M parameters) then touched 120,000 pages
again, which took a sixth of the step's time.

Law: everything allocated in a block is read before the next block begins.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# torch leaves the types of split, view and some others open.

import math
import weakref
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

SMALLEST = 64  # bytes


class Arena:
    """Blocks of memory, each a power of two bytes, that are never returned to the system.

    The arena grows to the number of blocks of each size that one step needs at the same time.
    """

    def __init__(self) -> None:
        self.blocks: dict[int, Tensor] = {}  # by address

    def __repr__(self) -> str:
        return f"<Arena of {sum(map(len, self.blocks.values()))} bytes>"


class Lender(TorchDispatchMode):
    """A context in which torch allocates tensors from an arena, on this thread.

    Every step then gets the same addresses for its activations, which recorded launches require.
    """

    def __init__(self, arena: Arena) -> None:
        super().__init__()
        self._arena = arena
        # By size.  The block freed last is lent first, because the processor's caches still hold it.
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)
        for block in arena.blocks.values():
            self._free[block.nbytes].append(block)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise torch imports its compiler, which takes 1.5 s.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        lent = self.lent(func, args, kwargs or {})
        return func(*args, **(kwargs or {})) if lent is None else lent

    def lent(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """Return a tensor in the arena if `func` allocates memory, or else None.

        Only allocations without contents are replaced; torch computes everything else itself. `func` is an operator
        of torch.
        """
        if func is torch.ops.aten.empty.memory_format:
            return self._empty(args[0], kwargs.get("dtype") or torch.get_default_dtype())
        if func is torch.ops.aten.new_empty.default:
            return self._empty(args[1], kwargs.get("dtype") or args[0].dtype)
        return None

    def _empty(self, shape: Iterable[int], dtype: torch.dtype) -> Tensor:
        num_bytes = dtype.itemsize * math.prod(shape)
        size = max(SMALLEST, 1 << (num_bytes - 1).bit_length())
        free = self._free[size]
        block = free.pop() if free else self._new_block(size)
        # Only the storage of the returned tensor refers to this array, so it is freed together with the last view.
        lent = block.numpy()[:num_bytes]
        weakref.finalize(lent, free.append, block)
        return torch.from_numpy(lent).view(dtype).view(*shape)

    def _new_block(self, size: int) -> Tensor:
        block = torch.empty(size, dtype=torch.uint8)
        self._arena.blocks[block.data_ptr()] = block
        return block
