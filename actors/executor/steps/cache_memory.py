"""Allocate the memory that a model keeps between steps: keys and values in blocks, states of recurrent mixers in rows.

Both are sized before the first step and shared by all sequences.  They may be in a memory file of the engine's process (`KeptMemory`),
which outlives a worker: a restarted worker finds in it the keys and values of every answered step.

H  KV heads    D  head width    S  slots = blocks × tokens of a block

Row i of the states belongs to request slot i. The rows after the request slots hold snapshots: copies of a state at a block boundary,
to which the scheduler's plans refer by row. Each stage of a pipeline has the states of its own layers, with the same row numbers as the
other stages. All mixers of a row are adjacent, so copying a row is one copy of memory.

Laws:
  * Every worker allocates the tensors of a memory file in the same order, with the same shapes.  `layout` describes them.  The engine
    compares layouts, because a worker with another layout must not use the contents.
  * A row of states is never cleared. A plan from position 0 begins with zeros, whatever the row contains.
  * A plan from any other position needs a state of exactly that position, or the step fails before it computes anything.
  * While a pass writes a row, and after a pass that raised, the row has no position, so no plan can continue it.
"""

import math
import mmap
import os
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from trouper.actors.executor.models.decoder import KVCacheSpec, MixerState, StateSpec, windows_of
from trouper.config.engine_config import EngineConfig
from trouper.config.kv_layout import KVLayout, short_step
from trouper.errors import TrouperValidationError

# The scheduler needs about a hundred bytes for each block, so their number is limited. For scale: an 8 B model has 50,000 blocks in 110 GB.
MAX_PREFIX_BLOCKS = 2**17


class KVCache:
    """Hold the keys and values of all layers.

    Args:
        groups: one tensor [layers, 2, H, S, D] for each spec, in the order of the layers.
        places: for each spec, the index of each layer in its tensor; () if the tensor is in layer order.
        block_size: tokens of a block.
    """

    def __init__(
        self, groups: Sequence[Tensor], places: Sequence[Sequence[int]], block_size: int
    ) -> None:
        self.groups = tuple(groups)
        self.layers = tuple(
            group[place]
            for group, order in zip(groups, places, strict=True)
            for place in order or range(len(group))
        )
        self._block_size = block_size

    @classmethod
    def allocate(
        cls,
        specs: Sequence[KVCacheSpec],
        *,
        num_blocks: int,
        block_size: int,
        empty: Callable[[tuple[int, ...]], Tensor],
    ) -> Self:
        groups = [empty(spec.shape(num_blocks * block_size)) for spec in specs]
        return cls(groups, [spec.places for spec in specs], block_size)

    @property
    def num_bytes(self) -> int:
        return sum(group.nbytes for group in self.groups)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy each source block to its target, one pair after another.

        The scheduler plans copies when sequences fork with a partially filled block.
        """
        size = self._block_size
        for source, target in copies:
            for group in self.groups:
                block = group.narrow(3, source * size, size)
                group.narrow(3, target * size, size).copy_(block)


def kv_layout(
    config: EngineConfig, specs: Sequence[KVCacheSpec] = (), item_bytes: int = 0
) -> KVLayout:
    """Describe the KV cache to the scheduler: the attention window of each group of layers, and the bytes of a block.

    Args:
        specs: the specs of all attention layers.
        item_bytes: bytes of one element in the cache.
    """
    size = sum(spec.token_size for spec in specs) * config.block_size * item_bytes
    step = short_step(config.scheduler, config.media)
    return KVLayout(config.block_size, windows_of(specs), step, size)


def num_kv_blocks(
    config: EngineConfig,
    specs: Sequence[KVCacheSpec],
    item_bytes: int,
    other_bytes: int = 0,
) -> int:
    """Compute the number of blocks, including the null block.

    Args:
        item_bytes: bytes of one element in the cache.
        other_bytes: bytes of the cache memory reserved for other things.

    Raises:
        TrouperValidationError: a sequence of the requested length or a single block does not fit; the message
            contains the longest length that fits.
    """
    size, longest = config.block_size, config.max_model_len
    layout = kv_layout(config, specs, item_bytes)
    num_bytes, of_longest = layout.block_bytes, layout.num_blocks(longest)
    num_groups = len(layout.windows)
    # One block of the option covers all layers, one block here covers one group of layers.
    usable = None if config.num_blocks is None else config.num_blocks * num_groups
    if usable is None:
        assert config.kv_cache_bytes is not None
        useful = config.scheduler.max_num_seqs * of_longest
        # Users expect a GPU's memory to be filled: blocks beyond those of running sequences cache prefixes.
        if config.device == "cuda":
            useful = max(useful, MAX_PREFIX_BLOCKS)
        else:
            useful = min(useful, max(MAX_PREFIX_BLOCKS, of_longest))
        usable = useful = -(-useful // num_groups) * num_groups
        # Without keys in any layer, blocks take no memory.
        if num_bytes:
            usable = min(max(0, config.kv_cache_bytes - other_bytes) // num_bytes, useful)
        # A restarted worker gets this number as `num_blocks`, which counts blocks of all layers.
        usable = usable // num_groups * num_groups
    fits = layout.num_tokens(usable)
    if fits < 1 or (fits < longest and not config.is_length_open):
        raise TrouperValidationError(
            f"the KV cache holds {usable} blocks of {size} tokens ({usable * num_bytes / 2**20:.0f} MiB), "
            f"and the largest max_model_len that fits is {fits}: set max_model_len='auto' "
            "(--max-model-len auto) for the longest that fits, or increase kv_cache_memory_bytes "
            "(--kv-cache-memory-bytes)",
            parameter="max_model_len",
            value=longest,
        )
    return usable + 1


class KeptMemory:
    """Allocate the tensors of one worker in a memory file that the engine's process keeps open.

    Args:
        file: the descriptor of the file, which this object owns from now on.
    """

    def __init__(self, file: int) -> None:
        self._file = file
        self._parts: list[mmap.mmap] = []
        self._end = 0
        self.layout = ""

    def __repr__(self) -> str:
        return f"<KeptMemory: {len(self._parts)} tensors, {self._end} bytes>"

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the next tensor, with the contents that the previous worker left, or zeros in a new file.

        A page takes memory only once it is written.
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
        """Free all pages when the engine sleeps.  Later tensors begin at the start of the file again, and contain zeros."""
        for part in self._parts:
            part.madvise(mmap.MADV_REMOVE)
        self._parts.clear()
        self._end, self.layout = 0, ""


# The shares of the KV cache's memory for the states of running sequences, and for snapshots.
LIVE_SHARE = 0.5
SNAPSHOT_SHARE = 0.25
# With fewer snapshots, neither prefixes nor the prompts of several completions could be shared.
LEAST_SNAPSHOTS = 4
# States begin at multiples of a cache line, so that kernels can use aligned loads.
ALIGNMENT = 64
# The position of a row without a usable state.
NOTHING = -1


class StateBudget(NamedTuple):
    """Count the rows of a pool: those of running sequences, the snapshots after them, and the bytes of each row."""

    num_live: int = 0
    num_snapshots: int = 0
    row_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the whole pool."""
        return (self.num_live + self.num_snapshots) * self.row_bytes


class StatePool:
    """Hold the states of all sequences on one device.

    Args:
        dtype: the model's dtype, in which convolutions store their inputs.
        kept: memory that outlives this process, with the states that the previous worker saved.
        num_drafts: the most drafted tokens of one step. Their inputs are stored until the drafts are verified: 16 rows of 8,256 numbers
            for 18 layers of a small model take 5 MB.
    """

    def __init__(
        self,
        specs: Sequence[StateSpec],
        num_rows: int,
        dtype: torch.dtype,
        kept: KeptMemory | None = None,
        *,
        num_drafts: int = 0,
    ) -> None:
        empty = torch.empty if kept is None else kept.empty
        parts, row_bytes = _layout(specs, dtype)
        # Uninitialized, because the pages of unused rows then take no memory.
        self._rows = empty((num_rows, row_bytes), dtype=torch.uint8)
        # The same memory as an array, for the tier on disk.
        self.rows = self._rows.numpy()
        # The number of tokens that the state of each row has seen.
        self.positions = empty((num_rows,), dtype=torch.int64).numpy()
        if kept is None:
            self.positions[:] = NOTHING
        self.mixers = {
            (spec.layer, spec.index): MixerState(
                self._view(conv),
                self._view(matrix),
                tuple(torch.zeros((num_drafts, width), dtype=dtype) for width in spec.inputs)
                if num_drafts
                else (),
            )
            for spec, (conv, matrix) in zip(specs, parts, strict=True)
        }

    def __repr__(self) -> str:
        num_rows, row_bytes = self._rows.shape
        return f"<StatePool of {num_rows} rows, {row_bytes} bytes each>"

    def copy(self, source: int, target: int) -> None:
        """Copy a row over another one, with its position."""
        self._rows[target] = self._rows[source]
        self.positions[target] = self.positions[source]

    def fill(self, row: int, value: float) -> None:
        """Overwrite the states of a row, for checks and tests."""
        for view in (view for mixer in self.mixers.values() for view in mixer[:2]):
            if view is not None:
                view[row].fill_(value)

    def begin(
        self, rows: np.ndarray, starts: np.ndarray, saves: Iterable[tuple[int, int, int]] = ()
    ) -> None:
        """Check that these rows hold states at these positions, and invalidate them and the rows of `saves` while the pass writes them.

        Raises:
            RuntimeError: a row contains a state of another position, so the tokens of its sequence would be wrong.
        """
        are_wrong = (starts > 0) & (self.positions[rows] != starts)
        if are_wrong.any():
            entry = int(np.flatnonzero(are_wrong)[0])
            found = int(self.positions[rows[entry]])
            raise RuntimeError(
                f"row {int(rows[entry])} has a state at position {found}, but the plan continues it from {int(starts[entry])}"
            )
        self.positions[rows] = NOTHING
        self.positions[[target for _, target, _ in saves]] = NOTHING

    def finish(
        self, rows: np.ndarray, ends: np.ndarray, saves: Iterable[tuple[int, int, int]] = ()
    ) -> None:
        """Set the positions of these rows after a pass, and copy the rows that the plan saves at an entry's end.

        Snapshots before an entry's end were written by the pass itself.

        Args:
            saves: `StepPlan.saves`: source row, target row, position.
        """
        self.positions[rows] = ends
        for source, target, position in saves:
            if position == self.positions[source]:
                self.copy(source, target)
            elif position < self.positions[source]:
                self.positions[target] = position

    def spoil(self, rows: np.ndarray) -> None:
        """Invalidate these rows: no plan can continue them."""
        self.positions[rows] = NOTHING

    def _view(self, part: "_Part | None") -> Tensor | None:
        if part is None:
            return None
        flat = self._rows[:, part.first : part.first + part.num_bytes].view(part.dtype)
        return flat.view(len(flat), *part.shape)


class _Part(NamedTuple):
    """Locate one tensor within a row, in bytes."""

    first: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def _layout(
    specs: Sequence[StateSpec], dtype: torch.dtype
) -> tuple[list[tuple[_Part | None, _Part | None]], int]:
    """Arrange the states of one row. Returns where each spec's tensors are, and the bytes of a row."""
    first, found = 0, list[tuple[_Part | None, _Part | None]]()

    def place(shape: tuple[int, ...] | None, kind: torch.dtype) -> _Part | None:
        nonlocal first
        if shape is None:
            return None
        part = _Part(first, shape, kind)
        first += -(-part.num_bytes // ALIGNMENT) * ALIGNMENT
        return part

    for spec in specs:
        found.append((place(spec.conv, dtype), place(spec.matrix, torch.float32)))
    # Convolutions of a single tap keep no inputs. Torch cannot view rows of 0 bytes as another dtype.
    return found, max(first, ALIGNMENT) if found else 0


def num_state_rows(
    config: EngineConfig,
    specs: Sequence[StateSpec],
    dtype: torch.dtype,
    others: Iterable[Sequence[StateSpec]] = (),
) -> StateBudget:
    """Divide the memory of the KV cache among states of running sequences, snapshots, and blocks, which get the rest.

    A `max_num_seqs` set by the user is used or refused. Otherwise it becomes the largest number for which all states fit.
    Plans refer to rows by number, so all stages of a pipeline have equally many: as many as fit in the stage with the largest rows.

    Args:
        specs: the states of this worker's layers.
        others: the states of each other stage.

    Raises:
        TrouperValidationError: the states do not fit; the message contains the largest `max_num_seqs` that fits, or the memory
            that one sequence needs.
    """
    own_bytes = _layout(specs, dtype)[1]
    row_bytes = max([own_bytes, *(_layout(of_other, dtype)[1] for of_other in others)])
    if not row_bytes:
        return StateBudget()
    wanted, longest = config.scheduler.max_num_seqs, config.max_model_len
    # A snapshot belongs to a block. `num_blocks` must not be used here, because it is set only for a restarted worker.
    num_blocks = min(MAX_PREFIX_BLOCKS, wanted * -(-longest // config.block_size))
    most_snapshots = max(LEAST_SNAPSHOTS, num_blocks)
    if config.kv_cache_bytes is None:
        return StateBudget(wanted, most_snapshots, own_bytes)
    fitting = int(config.kv_cache_bytes * LIVE_SHARE) // row_bytes
    if fitting < 1:
        raise TrouperValidationError(
            f"one sequence needs {row_bytes / 1e6:.3g} MB for its states, but only half of the KV cache memory of "
            f"{config.kv_cache_bytes / 1e6:.3g} MB is for states: set at least {math.ceil(row_bytes / LIVE_SHARE)} bytes "
            "(--kv-cache-memory-bytes)",
            parameter="kv_cache_memory_bytes",
            value=config.kv_cache_bytes,
        )
    if fitting < wanted and not config.is_num_seqs_open:
        raise TrouperValidationError(
            f"{wanted} sequences need {wanted} × {row_bytes / 1e6:.3g} MB for their states, but only half of the KV cache memory of "
            f"{config.kv_cache_bytes / 1e9:.2g} GB is for states: the largest max_num_seqs that fits is {fitting}; "
            "set it (--max-num-seqs), or increase kv_cache_memory_bytes (--kv-cache-memory-bytes)",
            parameter="max_num_seqs",
            value=wanted,
        )
    num_snapshots = int(config.kv_cache_bytes * SNAPSHOT_SHARE) // row_bytes
    return StateBudget(
        min(wanted, fitting),
        min(max(num_snapshots, LEAST_SNAPSHOTS), most_snapshots),
        own_bytes,
    )
