"""A linear layer with adapters: y = base(x) + B A x, where A and B are those of the row's adapter.

    x [T, I]    rows of a step            A [r, I], B [O, r]    one adapter's, its scale in B
    y [T, O]    the base's product        slot 0                no adapter

A fused layer has an A and a B for each of its parts, the outputs of one checkpoint matrix.

Laws:
  * Which adapter a row has is data, found at a fixed address: a step that was recorded, or captured in a graph,
    serves every mixture.
  * A row's bits do not depend on the adapters of other rows, nor on their number.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from torch import Tensor

from trouper.kernels.linear import LinearMethod

BLOCK_ROWS = (
    4  # rows of one adapter that a CPU's kernel computes at once, the reads of A and B shared
)


class LowRank(NamedTuple):
    """One adapter's matrices of one part."""

    a_RI: Tensor
    b_OR: Tensor  # times the scale


class RowTable:
    """The adapter slots of the rows of one product, and the same rows in blocks of one adapter each."""

    def __init__(self, max_rows: int, block_rows: int = BLOCK_ROWS) -> None:
        self._block_rows = block_rows
        self.slots = np.zeros(max_rows, dtype=np.int64)
        self.order = np.zeros(max_rows, dtype=np.int64)  # rows that have an adapter, by slot
        # [0, 0] is their number; each further row is slot, first in the order, count
        self.blocks = np.zeros((max_rows + 1, 3), dtype=np.int64)
        self.num_rows = 0

    def fill(self, slots_T: np.ndarray) -> None:
        """Take the slots of the rows."""
        self.num_rows = len(slots_T)
        self.slots[: self.num_rows] = slots_T
        rows = np.flatnonzero(slots_T)
        self.blocks[0, 0] = 0
        if not len(rows):
            return
        rows = rows[np.argsort(slots_T[rows], kind="stable")]
        sorted_slots = slots_T[rows]
        is_new = np.append(True, sorted_slots[1:] != sorted_slots[:-1])
        numbers = np.arange(len(rows))
        in_group = numbers - np.maximum.accumulate(np.where(is_new, numbers, 0))
        firsts = np.flatnonzero(in_group % self._block_rows == 0)
        self.order[: len(rows)] = rows
        self.blocks[0, 0] = len(firsts)
        columns = sorted_slots[firsts], firsts, np.diff(firsts, append=len(rows))
        self.blocks[1 : len(firsts) + 1] = np.stack(columns, axis=1)


class RowSource(Protocol):
    """Source of the adapters of a step's rows, in the form that one kind of kernels reads."""

    def of(self, num_rows: int) -> Any:
        """Return those of a product of so many rows."""
        ...


class AdapterRows:
    """The adapter slots of a step's rows: of all its tokens, and of those that are read.

    Args:
        max_rows: tokens of a step.
    """

    def __init__(self, max_rows: int) -> None:
        self._all, self._read = RowTable(max_rows), RowTable(max_rows)
        self._none = RowTable(max_rows)

    def begin_step(self, slots_T: np.ndarray, read_R: np.ndarray | None = None) -> None:
        """Take the slot of each token, and which tokens the last layer goes on with; None = all."""
        self._all.fill(slots_T)
        if read_R is not None:
            self._read.fill(slots_T[read_R])

    def of(self, num_rows: int) -> RowTable:
        """Return the table of a product of so many rows: a step reads fewer tokens than it computes, or all.

        Raises:
            RuntimeError: these are other rows, so whose adapters they want is not known.
        """
        for table in (self._all, self._read):
            if table.num_rows == num_rows:
                return table
        if self._all.blocks[0, 0]:
            raise RuntimeError(f"a product of {num_rows} rows in a step of {self._all.num_rows}")
        return self._none


class LoRAWeights(Protocol):
    """The adapters of one linear layer, in the form that one kernel reads, and that kernel."""

    def load(self, slot: int, parts: Sequence[LowRank | None]) -> None:
        """Put an adapter into a slot, from 1 on; a part that it leaves alone is None."""
        ...

    def clear(self, slot: int) -> None:
        """Empty a slot: its rows get the base's product."""
        ...

    def add_to(self, y_TO: Tensor, x_TI: Tensor, rows: Any) -> None:
        """Add the adapters' product to y, row by row; `rows` is what the `RowSource` of these kernels gives."""
        ...


class LoRALinear(LinearMethod):
    """Any linear layer, and adapters on top of it."""

    def __init__(self, base: LinearMethod, weights: LoRAWeights, rows: RowSource) -> None:
        self.shape, self.bias = base.shape, base.bias
        self.base = base
        self._weights, self._rows = weights, rows

    @classmethod
    def pack(cls, weight: Any, bias_O: Tensor | None = None) -> "LoRALinear":
        raise TypeError("a layer is packed by its own method, and then wrapped")

    @property
    def num_bytes(self) -> int:
        return self.base.num_bytes

    def apply(self, x_TI: Tensor) -> Tensor:
        y_TO = self.base.apply(x_TI)
        self._weights.add_to(y_TO, x_TI, self._rows.of(len(x_TI)))
        return y_TO


def rounded_rank(rank: int) -> int:
    """Return the rank that memory is laid out for: whole registers of sixteen."""
    return -(-rank // 16) * 16
