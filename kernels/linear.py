"""A linear layer y = x Wᵀ + b, independent of the form of its weight.

    x [T, I]   tokens × inputs; rows may be strided
    W [O, I]   the layout of checkpoints
    b [O]      optional
    y [T, O]

Models call a `LinearMethod`.  Each implementation packs the weight once, into the layout that its kernel reads
fastest; `select.make_linear` chooses the implementation.
"""

from abc import abstractmethod
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

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
