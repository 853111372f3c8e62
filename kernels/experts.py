"""The experts of a layer as models call them: gated MLPs of which each token uses some, whatever form their weights have.

x [T, E]        tokens × hidden size
logits [T, ≥ X] of the router: X experts, then that of the shared expert's gate, if there is one; the rest is ignored
k               experts of a token

A token's output is the sum over its k experts, the likeliest first, of weight · down(act(gate(x)) · up(x)); its weights
are the softmax of its logits in float32, among all experts, or among the k.

The experts of each token, and their weights, from a router's logits; the formula is that of `kernels/experts.py`.
"""


# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# torch leaves the types of some functions open.

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from trouper.kernels.linear import LinearMethod

# pyright: reportUnknownMemberType=false
# torch leaves the types of some functions open.


class Routing(NamedTuple):
    """How a router's logits become experts and their weights."""

    num_experts: int
    top_k: int
    is_normalised: bool  # the weights of a token's experts add up to one
    has_shared_gate: bool = (
        False  # the shared expert's output is times the sigmoid of one more logit
    )


class Experts(Protocol):
    """The experts of one layer, with their weights."""

    @property
    def linears(self) -> Sequence[LinearMethod]:
        """The products of all experts."""
        ...

    def forward(
        self,
        x_TE: Tensor,
        logits_TX: Tensor,
        shared_TE: Tensor | None,
        act_and_mul: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Return the sum over each token's experts, a new tensor [T, E].

        Args:
            shared_TE: the output of the expert that all tokens use; None = there is none.
            act_and_mul: from the product of gate and up [., 2 M] to [., M].
        """
        ...


class PlainExperts:
    """Experts whose products are linear layers of any kind: of different forms, of shapes that no kernel takes."""

    def __init__(
        self, gate_up: Sequence[LinearMethod], down: Sequence[LinearMethod], routing: Routing
    ) -> None:
        self._gate_up, self._down, self._routing = gate_up, down, routing

    @property
    def linears(self) -> Sequence[LinearMethod]:
        return *self._gate_up, *self._down

    def forward(
        self,
        x_TE: Tensor,
        logits_TX: Tensor,
        shared_TE: Tensor | None,
        act_and_mul: Callable[[Tensor], Tensor],
    ) -> Tensor:
        routing = self._routing
        ids_TK, weights_TK = route(
            logits_TX, routing.num_experts, routing.top_k, is_normalised=routing.is_normalised
        )
        each_TKE = x_TE.new_empty((*ids_TK.shape, x_TE.shape[1]))
        for expert in ids_TK.unique().tolist():
            tokens, places = (ids_TK == expert).nonzero(as_tuple=True)
            gate_up = self._gate_up[expert].apply(x_TE[tokens])
            each_TKE[tokens, places] = self._down[expert].apply(act_and_mul(gate_up))
        y_TE = (each_TKE.float() * weights_TK[..., None]).sum(dim=1)
        if shared_TE is not None:
            shared_TE = shared_TE.float()
            if routing.has_shared_gate:
                gate_T1 = logits_TX.narrow(1, routing.num_experts, 1).float().sigmoid()
                shared_TE = shared_TE * gate_T1
            y_TE += shared_TE
        return y_TE.to(x_TE.dtype)


def route(
    logits_TX: Tensor, num_experts: int, top_k: int, *, is_normalised: bool
) -> tuple[Tensor, Tensor]:
    """Return each token's experts [T, k] int64, the likeliest first, and their weights [T, k] float32."""
    scores_TX = logits_TX.narrow(1, 0, num_experts).float()
    # stable: of two equal ones the first
    best_TX, ids_TX = scores_TX.sort(dim=1, descending=True, stable=True)
    best_TK, ids_TK = (x.narrow(1, 0, top_k) for x in (best_TX, ids_TX))
    among = best_TK if is_normalised else scores_TX
    return ids_TK, (best_TK - among.logsumexp(dim=1, keepdim=True)).exp()
