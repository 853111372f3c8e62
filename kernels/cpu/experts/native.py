"""Experts by compiled kernels: five launches for any number of experts, which a recording can contain.

The launches are the choice of experts, the product of gate and up, the activation, the product of down, and the sum.
For integer weights on machines without bfloat16 instructions, one more launch quantizes the rows before each product.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from trouper.kernels.codegen.launch import compiled, float_bits
from trouper.kernels.codegen.units import LANES
from trouper.kernels.cpu.experts.products import ExpertProducts, Routed, make_product
from trouper.kernels.cpu.experts.routing import MAX_EXPERTS, SPAN, combine, route
from trouper.kernels.cpu.memory import num_threads_for
from trouper.kernels.experts import Routing
from trouper.kernels.linear import LinearMethod


class NativeExperts:
    """Experts that compute each product of a layer in one launch.

    Args:
        gate_up: the fused gate and up products of all experts, E -> 2 M.
        down: the down products of all experts, M -> E.
    """

    def __init__(self, gate_up: ExpertProducts, down: ExpertProducts, routing: Routing) -> None:
        self._gate_up, self._down, self._routing = gate_up, down, routing
        options = routing.is_normalised, routing.has_shared_gate, routing.is_sigmoid
        self._route = compiled(route, gate_up.kind, *options)
        self._choice_bias = _padded(routing.choice_bias)
        self._combine = compiled(combine, gate_up.kind)

    @property
    def linears(self) -> Sequence[LinearMethod]:
        return *self._gate_up.linears, *self._down.linears

    def forward(
        self,
        x_TE: Tensor,
        logits_TX: Tensor,
        shared_TE: Tensor | None,
        act_and_mul: Callable[[Tensor], Tensor],
    ) -> Tensor:
        (num_tokens, width), k = x_TE.shape, self._routing.top_k
        num_choices = num_tokens * k
        num_spans = min(self._routing.num_experts, num_choices)
        ids, order = (torch.empty(num_choices, dtype=torch.int64) for _ in range(2))
        spans = torch.empty(num_spans * SPAN, dtype=torch.int64)
        weights = torch.empty(num_tokens * (k + 1), dtype=torch.float32)
        self._route(
            1,
            logits_TX.data_ptr(),
            logits_TX.stride(0),
            num_tokens,
            self._routing.num_experts,
            k,
            ids.data_ptr(),
            weights.data_ptr(),
            order.data_ptr(),
            spans.data_ptr(),
            num_spans,
            0 if self._choice_bias is None else self._choice_bias.data_ptr(),
            float_bits(self._routing.scale),
        )
        routed = Routed(num_tokens, order, spans)
        gate_up = self._gate_up.apply(x_TE, k, routed)
        each = self._down.apply(act_and_mul(gate_up), 1, routed)
        y_TE = x_TE.new_empty((num_tokens, width))
        self._combine(
            num_tokens,
            each.data_ptr(),
            weights.data_ptr(),
            k,
            0 if shared_TE is None else shared_TE.data_ptr(),
            y_TE.data_ptr(),
            width,
            num_threads=num_threads_for(num_tokens),
        )
        return y_TE


def _padded(bias_X: Tensor | None) -> Tensor | None:
    """Return a bias with zeros up to whole registers, which the kernel reads."""
    if bias_X is None:
        return None
    padded = bias_X.new_zeros(-(-len(bias_X) // LANES) * LANES, dtype=torch.float32)
    padded[: len(bias_X)] = bias_X
    return padded


def grouped(
    gate_up: Sequence[LinearMethod], down: Sequence[LinearMethod], routing: Routing
) -> NativeExperts | None:
    """Combine the linear layers of all experts into launches for any number of experts.

    Returns None if the kernels do not support their sizes or the form of their weights.
    """
    if down[0].shape[0] % LANES or routing.num_experts >= MAX_EXPERTS:
        return None
    first, second = make_product(gate_up), make_product(down)
    if first is None or second is None or first.kind != second.kind:
        return None
    return NativeExperts(first, second, routing)
