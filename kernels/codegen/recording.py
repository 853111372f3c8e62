"""Record a sequence of kernel launches once and repeat it by one call, like a CUDA graph; and lend memory for its activations.

A decode step of a small model has hundreds of launches of a few microseconds each; Python and ctypes would take longer
than the kernels.

    recording = Recording(arena, inputs, lambda: forward(x))    records without computing
    recording.replay()                                          recording.result is forward(x) of the current inputs
    with Lender(arena): y = forward(x)                          computes without recording, in the arena's memory

An arena gives one step after the other the same memory: inside a `Lender`, and while a recording is made, `torch.empty` allocates
from it, and freed tensors return to it.  The C library would return this much memory to the system after each step: a prompt of
1,024 tokens (473 M parameters) then touched 120,000 pages again, which took a sixth of the step's time.

Laws:
  * Everything that differs between two replays is in the inputs, or is read by the kernels through an address.
  * Only kernels compute from the inputs; torch may allocate and create views.  Values that torch computes from constants
    are computed once and kept.
  * All recordings and lenders of an arena share its memory, so a result is read before the next replay or block begins.
  * A recording does not keep weights or caches alive: drop it before the weights and caches that it refers to.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# torch leaves the types of split, view and some others open.

import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from time import perf_counter
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trouper.kernels.codegen import launch

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


Result = TypeVar("Result")  # tensors


class NotRecordableError(Exception):
    """torch computes something from the inputs, so repeating the launches would not give the result.

    The caller runs such steps normally, without a recording.
    """


class Recording(Generic[Result]):
    """The kernel launches of one call of `function`, as a list of commands.

    Args:
        arena: the memory for the tensors that the function allocates.
        inputs: the tensors that may have different content in each replay.

    Raises:
        NotRecordableError: torch computes from the inputs.
    """

    def __init__(
        self, arena: Arena, inputs: Iterable[Tensor], function: Callable[[], Result]
    ) -> None:
        from trouper.kernels.codegen.replay import num_counters, replay

        self._launches: list[tuple[int, int, tuple[int, ...]]] = []
        self._kept: list[object] = []
        with launch.recorded_by(self), _Allocations(arena, inputs, self._kept):
            self.result = function()
        self._num_threads = max((n for _, n, _ in self._launches), default=1)
        self._commands = self._written()
        self._launches.clear()
        self._counters = np.zeros(num_counters(len(self._commands)), dtype=np.int64)
        self._arguments = (
            self._num_threads,
            self._commands.ctypes.data,
            len(self._commands),
            self._counters.ctypes.data,
            launch.address_in_torch("omp_get_num_threads"),
            launch.address_in_torch("syscall"),
        )
        self._replay = partial(launch.compiled(replay), *self._arguments)

    def __repr__(self) -> str:
        return f"<Recording of {len(self._commands)} launches>"

    def add(self, address: int, num_threads: int, arguments: tuple[int, ...]) -> None:
        """Append a launch.

        Kernels call this during the recording. Arguments are copied, so addresses in them must stay valid. The kernel
        runs only when it is repeated.
        """
        self._launches.append((address, num_threads, arguments))

    def keep(self, memory: object) -> None:
        """Keep memory alive to which a kernel refers by its address.

        It is freed together with the recording. Scratch memory and plans are kept in this way.
        """
        self._kept.append(memory)

    def replay(self) -> None:
        self._counters.fill(0)
        self._replay(num_threads=self._num_threads)

    @property
    def names(self) -> list[str]:
        """The kernel's name of each command."""
        return [launch.name_of(int(address)) for address, _, _ in self._commands]

    def timed_replay(self) -> np.ndarray:
        """Replay once, and return the seconds of each command, with the wait behind it.

        The seconds of all commands are the time of the replay.
        """
        from trouper.kernels.codegen.replay import timed_replay

        times = np.zeros(len(self._commands) + 1, dtype=np.int64)
        self._counters.fill(0)
        started = perf_counter()
        launch.compiled(timed_replay)(
            *self._arguments, times.ctypes.data, num_threads=self._num_threads
        )
        seconds = perf_counter() - started
        cycles = np.diff(times)
        return cycles * (seconds / cycles.sum())

    def _written(self) -> np.ndarray:
        """Write the commands to memory.  The arguments of each launch start at a cache line."""
        from trouper.kernels.codegen.replay import COMMAND, LINE

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


class _Allocations(Lender):
    """Context in which torch allocates from an arena and may not compute from the inputs."""

    def __init__(self, arena: Arena, inputs: Iterable[Tensor], kept: list[object]) -> None:
        super().__init__(arena)
        self._kept = kept
        self._inputs = {_storage(x) for x in inputs}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        lent = self.lent(func, args, kwargs or {})
        if lent is not None:
            return lent
        is_ours = any(map(self._holds, tree_leaves((args, kwargs))))
        if is_ours and not func.is_view:
            raise NotRecordableError(str(func))
        result = func(*args, **(kwargs or {}))
        # The result is a copy, not a view.
        if is_ours and not all(map(self._holds, tree_leaves(result))):
            raise NotRecordableError(str(func))
        if not is_ours:
            self._kept.append(result)
        return result

    def _holds(self, x: object) -> bool:
        if not isinstance(x, Tensor):
            return False
        return (address := _storage(x)) in self._inputs or address in self._arena.blocks


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()
