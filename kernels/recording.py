"""Launches that are recorded once and repeated by one call, as a CUDA graph repeats kernels.

    recording = Recording(arena, inputs, lambda: forward(x))    nothing is computed
    recording.replay()    recording.result is what forward(x) gives, of what the inputs hold now

Laws:
  * What differs between two replays lies in the inputs, or in what kernels find through an address.
  * Only kernels compute from the inputs; torch may allocate and view.  What torch computes from
    constants is computed once and kept.
  * Memory that is freed while recording is used again by what is recorded later, and all recordings of
    an arena share it: a result is read before the next replay.
  * A recording keeps neither weights nor caches: who drops these drops it first.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trouper.kernels import launch

SMALLEST = 64  # bytes


class NotRecordableError(Exception):
    """torch computes something from the inputs."""


class Arena:
    """Memory that recordings share: pieces of powers of two bytes, never given back."""

    def __init__(self) -> None:
        self.pieces: list[Tensor] = []

    def __repr__(self) -> str:
        return f"<Arena of {sum(map(len, self.pieces))} bytes>"


class Recording:
    """What the kernels are asked for while `function` runs.

    Args:
        arena: where what it allocates lies.
        inputs: the tensors whose content may differ in each replay.

    Raises:
        NotRecordableError: torch computes from the inputs.
    """

    def __init__(
        self, arena: Arena, inputs: Iterable[Tensor], function: Callable[[], Tensor]
    ) -> None:
        self._launches: list[tuple[int, int, tuple[int, ...]]] = []
        self._kept: list[object] = []
        with launch.recorded_by(self), _Allocations(arena, inputs, self._kept):
            self.result = function()
        self._num_threads = max((n for _, n, _ in self._launches), default=1)
        self._commands = self._written()
        self._launches.clear()

    def __repr__(self) -> str:
        return f"<Recording of {len(self._commands)} launches>"

    def add(self, address: int, num_threads: int, arguments: tuple[int, ...]) -> None:
        """For kernels, while recording."""
        self._launches.append((address, num_threads, arguments))

    def keep(self, memory: object) -> None:
        """For memory whose address a kernel was given, while recording."""
        self._kept.append(memory)

    def replay(self) -> None:
        from trouper.kernels.replay import LINE, replay

        counters = np.zeros(2 * LINE, dtype=np.int64)
        launch.compiled(replay)(
            self._num_threads,
            self._commands.ctypes.data,
            len(self._commands),
            counters.ctypes.data,
            launch.address_in_torch("omp_get_num_threads"),
            launch.address_in_torch("syscall"),
            num_threads=self._num_threads,
        )

    def _written(self) -> np.ndarray:
        """The commands; each block of arguments begins with a cache line."""
        from trouper.kernels.replay import COMMAND, LINE

        lengths = [-(-len(arguments) // LINE) * LINE for _, _, arguments in self._launches]
        blocks = np.zeros(sum(lengths) + LINE, dtype=np.int64)
        first = -(blocks.ctypes.data // 8) % LINE
        commands = np.empty((len(lengths), COMMAND), dtype=np.int64)
        self._kept.append(blocks)
        for i, (address, num_threads, arguments) in enumerate(self._launches):
            blocks[first : first + len(arguments)] = arguments
            commands[i] = address, blocks.ctypes.data + 8 * first, num_threads > 1
            first += lengths[i]
        return commands


class _Allocations(TorchDispatchMode):
    """Gives memory of an arena to what torch allocates, and refuses what it would compute."""

    def __init__(self, arena: Arena, inputs: Iterable[Tensor], kept: list[object]) -> None:
        super().__init__()
        self._arena, self._kept = arena, kept
        self._free = list(arena.pieces)
        self._ours = {_storage(x) for x in (*arena.pieces, *inputs)}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or torch imports its compiler: 1.5 s

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.empty.memory_format:
            return self._empty(args[0], kwargs.get("dtype") or torch.get_default_dtype())
        if func is torch.ops.aten.new_empty.default:
            return self._empty(args[1], kwargs.get("dtype") or args[0].dtype)
        is_ours = any(map(self._holds, tree_leaves((args, kwargs))))
        if is_ours and not func.is_view:
            raise NotRecordableError(str(func))
        result = func(*args, **kwargs)
        if is_ours and not all(map(self._holds, tree_leaves(result))):  # no view, but a copy
            raise NotRecordableError(str(func))
        if not is_ours:
            self._kept.append(result)
        return result

    def _holds(self, x: object) -> bool:
        return isinstance(x, Tensor) and _storage(x) in self._ours

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
        self._arena.pieces.append(piece)
        self._ours.add(_storage(piece))
        return piece


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()
