"""The half of a decoder's layer that computes each token alone.

T  tokens    E  hidden size    M  MLP width
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from trouper.kernels.linear import LinearMethod
from trouper.kernels.ops import Ops


class Mlp(Protocol):
    """One kind of MLP, with its weights."""

    @property
    def linears(self) -> Sequence[LinearMethod]: ...

    def forward(self, x_TE: Tensor, ops: Ops) -> Tensor:
        """Return [T, E]; x may be overwritten."""
        ...


class GatedMlp:
    """down(act(gate(x)) · up(x)), with gate and up in one product."""

    def __init__(self, gate_up: LinearMethod, down: LinearMethod) -> None:
        self._gate_up = gate_up  # E -> 2 M
        self._down = down  # M -> E

    @property
    def linears(self) -> Sequence[LinearMethod]:
        return self._gate_up, self._down

    def forward(self, x_TE: Tensor, ops: Ops) -> Tensor:
        return self._down.apply(ops.act_and_mul(self._gate_up.apply(x_TE)))
