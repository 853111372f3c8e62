"""A linear layer y = x Wᵀ + b, independent of the form of its weight, and one with LoRA adapters: y = base(x) + B A x.

    x [T, I]   tokens × inputs; rows may be strided
    W [O, I]   the layout of checkpoints
    b [O]      optional
    y [T, O]
    A [r, I], B [O, r]   matrices of one adapter; B includes the scale.  Slot 0 has rows without an adapter.

Models call a `LinearMethod`.  Each implementation packs the weight once, into the layout that its kernel reads
fastest; `select.make_linear` chooses the implementation.  A fused layer, such as q, k and v, has an A and a B for each of the
checkpoint matrices that it joins.

Laws of adapters:
  * The slot of each row is data at a fixed address, so a recorded step or a CUDA graph serves every mixture of
    adapters.
  * The bits of a row depend neither on the adapters of other rows nor on the number of rows.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np
from torch import Tensor

from trouper.kernels.formats import Format
from trouper.kernels.reference.norms import activate


class LinearConfig(NamedTuple):
    """Options of a linear layer that do not follow from its weight.

    Args:
        quantization: round the weight to this format at load.
        is_compressed: store bfloat16 in twelve bits, if the machine supports it.
        is_for_many_rows: expect that most products have more than a dozen rows.
        is_batch_invariant: on CUDA, make the bits of a row independent of the number of rows.
    """

    device: Literal["cpu", "cuda"] = "cpu"
    quantization: Format | None = None
    is_compressed: bool = True
    is_for_many_rows: bool = False
    is_batch_invariant: bool = False


class LinearMethod(Protocol):
    """One linear layer: a packed weight and the kernel that reads it.

    The layer owns the only copy of its weight: after `pack` nothing refers to the matrix of the checkpoint.  A wrapper
    of a layer, such as `LoRALinear`, is a method too.
    """

    # Whether `apply` only launches compiled kernels, so that it can be part of a recording.
    is_recordable: ClassVar[bool] = False
    # Whether `pack` accepts integers with scales, or rounds a matrix to them.
    takes_integers: ClassVar[bool] = False
    # Whether the first call with a new number of rows compiles code.
    is_compiled_per_size: ClassVar[bool] = False

    shape: tuple[int, int]  # outputs, inputs
    bias: Tensor | None

    @classmethod
    @abstractmethod
    def pack(cls, weight: Any, bias_O: Tensor | None = None) -> "LinearMethod":
        """Convert a plain matrix to this method's layout, and compile its kernels, so that no step waits for a compiler.

        Args:
            weight: a tensor [O, I], or an `IntegerWeight` if the method takes integers.
        """
        ...

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Count the bytes of weight that a product with one row reads.

        The sum over all layers bounds the speed of decoding.
        """
        ...

    @abstractmethod
    def apply(self, x_TI: Tensor) -> Tensor:
        """Return x Wᵀ + b, [T, O], as a new tensor.

        Rows of x may be strided, but the numbers of a row must be adjacent in memory.
        """
        ...

    def apply_into(self, x_TI: Tensor, y_TO: Tensor) -> None:
        """Write x Wᵀ + b to y.  Implementations may do so without another tensor."""
        y_TO.copy_(self.apply(x_TI))

    def apply_act(self, x_TI: Tensor, act: str) -> Tensor:
        """Return act(x Wᵀ + b).

        Implementations may apply the function while results are in registers.  `activation.activate` lists the names.
        """
        return activate(self.apply(x_TI), act)

    def apply_add(self, x_TI: Tensor, residual_TO: Tensor) -> Tensor:
        """Return x Wᵀ + b + residual, as a new tensor.

        Implementations may add while results are in registers, which saves reading them again.
        """
        return self.apply(x_TI).add_(residual_TO)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.shape[1]} -> {self.shape[0]}>"


# The CPU kernel computes this many rows of one adapter at once, so that they share the reads of A and B.
BLOCK_ROWS = 4


class LowRank(NamedTuple):
    """The matrices of one adapter for one part of a fused layer.

    A fused layer, such as qkv, has several parts with adapters of their own.
    """

    a_RI: Tensor
    b_OR: Tensor  # includes the scale


class RowTable:
    """The adapter slot of each row of a product, and the rows grouped into blocks of one adapter.

    The arrays keep their addresses, so that recordings and graphs read the rows of every step.
    """

    def __init__(self, max_rows: int, block_rows: int = BLOCK_ROWS) -> None:
        self._block_rows = block_rows
        self.slots = np.zeros(max_rows, dtype=np.int64)
        self.order = np.zeros(max_rows, dtype=np.int64)  # rows with an adapter, ordered by slot
        # blocks[0, 0] is the number of blocks.  Each further row is a block: its slot, its first index in `order`, its length.
        self.blocks = np.zeros((max_rows + 1, 3), dtype=np.int64)
        self.num_rows = 0

    def fill(self, slots_T: np.ndarray) -> None:
        """Store the slots of a step's rows, and group the rows by slot.

        Kernels then read each adapter once for all of its rows.
        """
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
    """Provides the adapters of a step's rows in the form that one kind of kernel reads."""

    def of(self, num_rows: int) -> Any:
        """Return the adapters of a product with this number of rows.

        The number distinguishes a whole step from the rows that the last layer continues with.
        """
        ...


class AdapterRows:
    """The adapter slots of a step on the CPU: of all its tokens, and of the tokens whose output is read.

    Args:
        max_rows: the largest number of tokens of a step.
    """

    def __init__(self, max_rows: int) -> None:
        self._all, self._read = RowTable(max_rows), RowTable(max_rows)
        self._none = RowTable(max_rows)

    def begin_step(self, slots_T: np.ndarray, read_R: np.ndarray | None = None) -> None:
        """Store the slot of each token.

        Args:
            read_R: indices of the tokens that the last layer continues with; all tokens by default.
        """
        self._all.fill(slots_T)
        if read_R is not None:
            self._read.fill(slots_T[read_R])

    def of(self, num_rows: int) -> RowTable:
        """Return the table of a product with this number of rows.

        A layer multiplies either all tokens of a step or only those whose output is read, and these numbers identify which.

        Raises:
            RuntimeError: the step has adapters, and neither table has this number of rows.
        """
        for table in (self._all, self._read):
            if table.num_rows == num_rows:
                return table
        if self._all.blocks[0, 0]:
            raise RuntimeError(f"a product of {num_rows} rows in a step of {self._all.num_rows}")
        return self._none


class LoRAWeights(Protocol):
    """The adapters of one linear layer, in the layout that one kernel reads, and that kernel."""

    def load(self, slot: int, parts: Sequence[LowRank | None]) -> None:
        """Copy an adapter into a slot.  Slots start at 1.

        Args:
            parts: the matrices of each part of a fused layer; None for a part that the adapter does not change.
        """
        ...

    def clear(self, slot: int) -> None:
        """Empty a slot.

        Its rows get the product of the base layer. The memory stays allocated for the next adapter. Other slots are
        not touched.
        """
        ...

    def add_to(self, y_TO: Tensor, x_TI: Tensor, rows: Any) -> None:
        """Add the products of the adapters to y in place, row by row.

        Args:
            rows: the result of the `RowSource` of these kernels.
        """
        ...


class LoRALinear(LinearMethod):
    """A linear layer of any kind with adapters on top of it.

    Rows without an adapter have the same result as the base layer, bit for bit.
    """

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
    """Return the rank for which memory is allocated: a multiple of the 16 lanes of a register.

    The matrices are padded with zeros.
    """
    return -(-rank // 16) * 16
