"""Memory for the states of recurrent mixers: one pool of rows, and the number of rows that fit.

Row i belongs to request slot i. The rows behind the slots keep snapshots: copies of a state at a block boundary, which the
scheduler names in its plans. Each stage of a pipeline has the states of its own layers, in rows of the same numbers. All mixers
of a row are adjacent, so a copy of a row is one copy of memory.

Laws:
  * A row is never cleared. A plan from position 0 begins with zeros, whatever the row contains.
  * A plan from any other position must find a state of exactly that position, or the step fails before it computes anything.
  * While a pass writes a row, and after a pass that raised, the row has no position, so no plan can continue it.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from trouper.actors.executor.models.decoder import MixerState, StateSpec
from trouper.actors.executor.steps.kept_memory import KeptMemory
from trouper.actors.executor.steps.kv_memory import MAX_PREFIX_BLOCKS
from trouper.config.engine_config import EngineConfig
from trouper.errors import TrouperValidationError

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
