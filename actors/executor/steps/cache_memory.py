"""Memory that a model keeps between steps: keys and values by blocks, states of recurrent mixers by rows.

Both are sized before the first step and shared by all sequences.  They may be in a memory file of the engine's process (`KeptMemory`),
which outlives a worker: the next worker finds the keys and values of every answered step where its predecessor left them.

H  KV heads    D  head width    S  slots = blocks × tokens of a block

Row i of the states belongs to request slot i. The rows behind the slots keep snapshots: copies of a state at a block boundary, which the
scheduler names in its plans. Each stage of a pipeline has the states of its own layers, in rows of the same numbers. All mixers
of a row are adjacent, so a copy of a row is one copy of memory.

Laws:
  * Tensors in a memory file are made in the same order, with the same shapes, in each worker.  `layout` describes them, and the engine
    compares it: a worker with another layout must not use what it finds.
  * A row of states is never cleared. A plan from position 0 begins with zeros, whatever the row contains.
  * A plan from any other position must find a state of exactly that position, or the step fails before it computes anything.
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

# The scheduler keeps about a hundred bytes for each block, so their number is limited; an 8 B model has
# 50,000 blocks in 110 GB.
MAX_PREFIX_BLOCKS = 2**17


class KVCache:
    """The keys and values of all layers.

    Args:
        groups: one tensor [layers, 2, H, S, D] for each spec, in the order of the layers.
        places: for each spec, the place of each layer in its tensor; () if it is the order of the layers.
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

        The scheduler asks for copies when sequences fork with a partially filled block.
        """
        size = self._block_size
        for source, target in copies:
            for group in self.groups:
                block = group.narrow(3, source * size, size)
                group.narrow(3, target * size, size).copy_(block)


def kv_layout(
    config: EngineConfig, specs: Sequence[KVCacheSpec] = (), item_bytes: int = 0
) -> KVLayout:
    """Return the groups of layers that take blocks.

    Args:
        specs: what all layers with a block keep.
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
        other_bytes: the part of the memory that is not for blocks.

    Raises:
        TrouperValidationError: a sequence of the requested length or a single block does not fit; the message
            contains the longest length that does.
    """
    size, longest = config.block_size, config.max_model_len
    layout = kv_layout(config, specs, item_bytes)
    num_bytes, of_longest = layout.block_bytes, layout.num_blocks(longest)
    num_groups = len(layout.windows)
    # The option counts blocks of all layers.
    usable = None if config.num_blocks is None else config.num_blocks * num_groups
    if usable is None:
        assert config.kv_cache_bytes is not None
        useful = config.scheduler.max_num_seqs * of_longest
        # GPU memory is meant to be used: blocks beyond the running sequences keep prefixes.
        if config.device == "cuda":
            useful = max(useful, MAX_PREFIX_BLOCKS)
        else:
            useful = min(useful, max(MAX_PREFIX_BLOCKS, of_longest))
        usable = useful = -(-useful // num_groups) * num_groups
        # Without keys in any layer, blocks take no memory.
        if num_bytes:
            usable = min(max(0, config.kv_cache_bytes - other_bytes) // num_bytes, useful)
        # A restarted worker is given the number of blocks of all layers.
        usable = usable // num_groups * num_groups
    fits = layout.num_tokens(usable)
    if fits < 1 or (fits < longest and not config.is_length_open):
        raise TrouperValidationError(
            f"the KV cache holds {usable} blocks of {size} tokens ({usable * num_bytes / 2**20:.0f} MiB), "
            f"and the largest max_model_len that fits is {fits}: set max_model_len='auto' "
            "(--max-model-len auto) for the longest that fits, or more memory by kv_cache_memory_bytes "
            "(--kv-cache-memory-bytes)",
            parameter="max_model_len",
            value=longest,
        )
    return usable + 1


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


# The part of the KV cache's memory that states of running sequences may take, and the part for snapshots.
LIVE_SHARE = 0.5
SNAPSHOT_SHARE = 0.25
# Without a few snapshots, neither prefixes nor the prompts of several completions are shared.
LEAST_SNAPSHOTS = 4
# States begin at multiples of a cache line, which kernels can load with aligned instructions.
ALIGNMENT = 64
NOTHING = -1


class StateBudget(NamedTuple):
    """The rows of a pool: of running sequences, behind them of snapshots, and the bytes of each row."""

    num_live: int = 0
    num_snapshots: int = 0
    row_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the whole pool."""
        return (self.num_live + self.num_snapshots) * self.row_bytes


class StatePool:
    """The states of all sequences on one device.

    Args:
        dtype: the model's dtype, in which convolutions keep their inputs.
        kept: memory that outlives this process; states that a predecessor saved there are found again.
        num_drafts: the most drafts of one step, whose inputs are kept until they are verified: 16 rows of 8,256 numbers for
            18 layers of a small model take 5 MB.
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
        # Not set to zeros: pages of rows that no sequence has used take no memory.
        self._rows = empty((num_rows, row_bytes), dtype=torch.uint8)
        # The same memory, for the tier on disk.
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
        """Note that a pass begins to move these rows forward from these positions, and to write the rows that the plan saves.

        Raises:
            RuntimeError: a row contains a state of another position, so the tokens of its sequence would be wrong.
        """
        are_wrong = (starts > 0) & (self.positions[rows] != starts)
        if are_wrong.any():
            entry = int(np.flatnonzero(are_wrong)[0])
            found = int(self.positions[rows[entry]])
            raise RuntimeError(
                f"row {int(rows[entry])} has a state at position {found}, a plan from {int(starts[entry])}"
            )
        self.positions[rows] = NOTHING
        self.positions[[target for _, target, _ in saves]] = NOTHING

    def finish(
        self, rows: np.ndarray, ends: np.ndarray, saves: Iterable[tuple[int, int, int]] = ()
    ) -> None:
        """Note that the pass has moved these rows forward to these positions, and copy rows that are saved at their ends.

        The pass itself has written those that are saved before an end.

        Args:
            saves: of `StepPlan`.
        """
        self.positions[rows] = ends
        for source, target, position in saves:
            if position == self.positions[source]:
                self.copy(source, target)
            elif position < self.positions[source]:
                self.positions[target] = position

    def spoil(self, rows: np.ndarray) -> None:
        """Note that these rows contain nothing that a sequence can continue."""
        self.positions[rows] = NOTHING

    def _view(self, part: "_Part | None") -> Tensor | None:
        if part is None:
            return None
        flat = self._rows[:, part.first : part.first + part.num_bytes].view(part.dtype)
        return flat.view(len(flat), *part.shape)


class _Part(NamedTuple):
    """The place of one tensor in a row, in bytes."""

    first: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def _layout(
    specs: Sequence[StateSpec], dtype: torch.dtype
) -> tuple[list[tuple[_Part | None, _Part | None]], int]:
    """Arrange the states of one row. Returns the place of each spec's tensors, and the bytes of a row."""
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
    return found, first


def num_state_rows(
    config: EngineConfig,
    specs: Sequence[StateSpec],
    dtype: torch.dtype,
    others: Iterable[Sequence[StateSpec]] = (),
) -> StateBudget:
    """Divide the memory of the KV cache among the states of running sequences, snapshots, and blocks, which get the rest.

    A user's own `max_num_seqs` is kept or refused. Otherwise as many sequences run at once as have room for their states.
    All stages of a pipeline have the same rows, because plans name them: as many as the stage with the largest rows has room for.

    Args:
        specs: the states of this worker.
        others: those of each other stage.

    Raises:
        TrouperValidationError: the states do not fit; the message contains the largest `max_num_seqs` that does.
    """
    own_bytes = _layout(specs, dtype)[1]
    row_bytes = max([own_bytes, *(_layout(of_other, dtype)[1] for of_other in others)])
    if not row_bytes:
        return StateBudget()
    wanted, longest = config.scheduler.max_num_seqs, config.max_model_len
    # A snapshot belongs to a block. The number must not depend on `num_blocks`, which a restarted worker is given.
    num_blocks = min(MAX_PREFIX_BLOCKS, wanted * -(-longest // config.block_size))
    most_snapshots = max(LEAST_SNAPSHOTS, num_blocks)
    if config.kv_cache_bytes is None:
        return StateBudget(wanted, most_snapshots, own_bytes)
    fitting = int(config.kv_cache_bytes * LIVE_SHARE) // row_bytes
    if fitting < 1 or (fitting < wanted and not config.is_num_seqs_open):
        raise TrouperValidationError(
            f"{wanted} sequences keep {wanted} × {row_bytes / 1e6:.3g} MB of states, for which half of "
            f"{config.kv_cache_bytes / 1e9:.2g} GB is set aside: the largest max_num_seqs that fits is {fitting}; "
            "set it (--max-num-seqs), or more memory by kv_cache_memory_bytes (--kv-cache-memory-bytes)",
            parameter="max_num_seqs",
            value=wanted,
        )
    num_snapshots = int(config.kv_cache_bytes * SNAPSHOT_SHARE) // row_bytes
    return StateBudget(
        min(wanted, fitting),
        min(max(num_snapshots, LEAST_SNAPSHOTS), most_snapshots),
        own_bytes,
    )
