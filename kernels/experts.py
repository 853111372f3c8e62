"""The experts of a mixture-of-experts layer, independent of the form of their weights.

    x [T, E]          tokens × hidden size
    logits [T, ≥ X]   router logits of X experts, then the logit of the shared expert's gate, if the model has one;
                      further columns are ignored
    k                 experts that each token uses

An expert is a gated MLP.  A token's output is the sum over its k best experts of
weight · down(act(gate(x)) · up(x)).  The weights are a float32 softmax of the logits, over all experts or over the k, or the
sigmoid of each logit.  Sigmoids are divided by their sum over the k if weights are normalised, and a bias of each expert may
be added to them for the choice only (LFM2).

`PlainExperts` calls the linear layers of one expert after the other; `cpu/experts.py` computes all of them in one launch.
"""


# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# torch leaves the types of some functions open.

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from trouper.kernels.linear import LinearMethod

# Added to the sum of sigmoids before the division, as transformers does.
SIGMOID_EPS = 1e-6


class Routing(NamedTuple):
    """The rule that turns router logits into experts and weights.

    With `is_normalised` the weights of a token's experts add up to one.  With `has_shared_gate` the output of the shared
    expert is multiplied by the sigmoid of one more logit.  With `is_sigmoid` weights are sigmoids instead of a softmax;
    only then may weights have a `scale`, and the choice a bias [X] in float32.
    """

    num_experts: int
    top_k: int
    is_normalised: bool
    has_shared_gate: bool = False
    is_sigmoid: bool = False
    scale: float = 1.0
    choice_bias: Tensor | None = None


class Experts(Protocol):
    """The experts of one layer with their weights.

    Implementations differ in the form of the weights; the routing is the same for all.
    """

    @property
    def linears(self) -> Sequence[LinearMethod]:
        """All linear layers of all experts. A caller can thus count their bytes, or move them to other memory."""
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
            shared_TE: the output of the expert that every token uses, if the model has one.
            act_and_mul: the activation: maps the fused product of gate and up [., 2 M] to [., M].
        """
        ...


class PlainExperts:
    """Experts of arbitrary linear layers, computed one after the other.

    Used for weight formats and shapes that no expert kernel accepts. Each expert reads only the rows of its own
    tokens.
    """

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
        ids_TK, weights_TK = route(logits_TX, routing)
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


def route(logits_TX: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """Choose each token's experts.

    Returns their ids [T, k] int64, the best first, and their weights [T, k] float32. Ties go to the smaller id, on every
    device.
    """
    scores_TX = logits_TX.narrow(1, 0, routing.num_experts).float()
    if routing.is_sigmoid:
        return _route_by_sigmoids(scores_TX.sigmoid(), routing)
    # A stable sort prefers the smaller id if two logits are equal.
    best_TX, ids_TX = scores_TX.sort(dim=1, descending=True, stable=True)
    best_TK, ids_TK = (x.narrow(1, 0, routing.top_k) for x in (best_TX, ids_TX))
    among = best_TK if routing.is_normalised else scores_TX
    return ids_TK, (best_TK - among.logsumexp(dim=1, keepdim=True)).exp()


def _route_by_sigmoids(sigmoids_TX: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    bias_X = routing.choice_bias
    scores_TX = sigmoids_TX if bias_X is None else sigmoids_TX + bias_X
    order_TX = scores_TX.sort(dim=1, descending=True, stable=True).indices
    ids_TK = order_TX.narrow(1, 0, routing.top_k)
    weights_TK = sigmoids_TX.gather(1, ids_TK)
    if routing.is_normalised:
        weights_TK = weights_TK / (weights_TK.sum(dim=1, keepdim=True) + SIGMOID_EPS)
    return ids_TK, weights_TK * routing.scale
