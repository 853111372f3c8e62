"""A linear layer y = x Wᵀ + b as models call it, whatever form its weight has in memory.

x [T, I]   tokens × inputs, rows may be strided
W [O, I]   as checkpoints store it
b [O]      or absent
y [T, O]
"""

from abc import abstractmethod
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

from torch import Tensor

from trouper.kernels.formats import Format
from trouper.kernels.reference.activation import activate


class LinearConfig(NamedTuple):
    """Wishes of the caller about a linear layer, beyond its weight."""

    device: Literal["cpu", "cuda"] = "cpu"
    quantization: Format | None = None  # round the weight at load
    is_compressed: bool = True  # keep bfloat16 in twelve bits where the machine can
    is_for_many_rows: bool = False  # most products have more than a dozen rows
    is_batch_invariant: bool = False  # on CUDA: a row's bits do not depend on the number of rows


class LinearMethod(Protocol):
    """One linear layer: its weight in the form that one kernel reads, and that kernel.

    It owns the only copy of the weight: after `pack` nothing refers to the plain matrix.  What wraps a layer is a
    method too.
    """

    is_recordable: ClassVar[bool] = False  # `apply` is launches of compiled kernels alone
    takes_integers: ClassVar[bool] = (
        False  # `pack` rounds a matrix, or takes one that was rounded before
    )
    is_compiled_per_size: ClassVar[bool] = False  # a new number of rows costs a compilation

    shape: tuple[int, int]  # outputs, inputs
    bias: Tensor | None

    @classmethod
    @abstractmethod
    def pack(cls, weight: Any, bias_O: Tensor | None = None) -> "LinearMethod":
        """Bring a plain matrix into this method's form, and compile what no step should wait for.

        `weight` is a tensor [O, I], or an `IntegerWeight` for a method that takes one.
        """
        ...

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Count the bytes of the weight that a product of one row reads."""
        ...

    @abstractmethod
    def apply(self, x_TI: Tensor) -> Tensor:
        """Return x Wᵀ + b, [T, O]."""
        ...

    def apply_act(self, x_TI: Tensor, act: str) -> Tensor:
        """Return act(x Wᵀ + b); see `activation.activate` for the names of the functions."""
        return activate(self.apply(x_TI), act)

    def apply_add(self, x_TI: Tensor, residual_TO: Tensor) -> Tensor:
        """Return x Wᵀ + b + residual, a new tensor."""
        return self.apply(x_TI).add_(residual_TO)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.shape[1]} -> {self.shape[0]}>"
