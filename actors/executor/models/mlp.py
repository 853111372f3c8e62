"""The MLPs of a decoder's layers, which compute each token independently of all others.

A layer calls its MLP without knowing the kind: gated, plain, or a mixture of experts.

T  tokens    E  hidden size    M  MLP width
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from trouper.kernels.experts import Experts
from trouper.kernels.linear import LinearMethod
from trouper.kernels.ops import Ops


class Mlp(Protocol):
    """One kind of MLP, with its weights.

    A layer calls it without distinguishing dense MLPs from mixtures of experts.
    """

    @property
    def linears(self) -> Sequence[LinearMethod]:
        """Return all matrix products, in a fixed order.

        Adapters and the moving of weights between memories iterate over them.
        """
        ...

    def forward(self, x_TE: Tensor, ops: Ops) -> Tensor:
        """Compute the output [T, E] of all tokens. The input may be overwritten."""
        ...


class GatedMlp:
    """The MLP down(act(gate(x)) · up(x)), with gate and up in one product.

    One product of twice the width reads the input only once. Most decoders have this kind.
    """

    def __init__(self, gate_up: LinearMethod, down: LinearMethod) -> None:
        self._gate_up = gate_up  # E -> 2 M
        self._down = down  # M -> E

    @property
    def linears(self) -> Sequence[LinearMethod]:
        return self._gate_up, self._down

    def forward(self, x_TE: Tensor, ops: Ops) -> Tensor:
        return self._down.apply(ops.act_and_mul(self._gate_up.apply(x_TE)))


class PlainMlp:
    """The MLP down(act(up(x))), without a gate. GPT-2 and other older families have it, usually with biases."""

    def __init__(self, up: LinearMethod, down: LinearMethod) -> None:
        self._up = up  # E -> M
        self._down = down  # M -> E

    @property
    def linears(self) -> Sequence[LinearMethod]:
        return self._up, self._down

    def forward(self, x_TE: Tensor, ops: Ops) -> Tensor:
        return self._down.apply(ops.activate(self._up.apply(x_TE)))


class SparseMlp:
    """A mixture of experts: the router chooses a few experts for each token. A shared expert, if any, computes all tokens.

    Args:
        router: E -> experts, and the gate of the shared expert; rounded up to whole registers.
    """

    def __init__(self, router: LinearMethod, experts: Experts, shared: GatedMlp | None) -> None:
        self._router = router
        self._experts = experts
        self._shared = shared

    @property
    def linears(self) -> Sequence[LinearMethod]:
        shared = () if self._shared is None else self._shared.linears
        return self._router, *shared, *self._experts.linears

    def forward(self, x_TE: Tensor, ops: Ops) -> Tensor:
        shared_TE = None if self._shared is None else self._shared.forward(x_TE, ops)
        logits_TX = self._router.apply(x_TE)
        return self._experts.forward(x_TE, logits_TX, shared_TE, ops.act_and_mul)
