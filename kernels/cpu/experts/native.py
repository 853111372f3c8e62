"""Experts by the kernels of this folder: five launches, whatever the number of experts, and recordable."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from trouper.kernels.codegen.launch import compiled
from trouper.kernels.codegen.units import LANES, Kind
from trouper.kernels.cpu.experts.combine import combine
from trouper.kernels.cpu.experts.grouped import PANELS, grouped_matmul
from trouper.kernels.cpu.experts.route import MAX_EXPERTS, SPAN, route
from trouper.kernels.cpu.linear.dense import DenseLinear
from trouper.kernels.cpu.rows import num_threads_for
from trouper.kernels.experts import Routing
from trouper.kernels.linear import LinearMethod


class NativeExperts:
    """Experts whose products are `DenseLinear`s of bfloat16 or float32.

    Args:
        gate_up: of each expert, E -> 2 M.
        down: of each expert, M -> E.
    """

    def __init__(
        self, gate_up: Sequence[DenseLinear], down: Sequence[DenseLinear], routing: Routing
    ) -> None:
        self._gate_up, self._down, self._routing = gate_up, down, routing
        is_float = gate_up[0].weight.dtype == torch.float32
        self._kind: Kind = "f32" if is_float else "bf16"
        self._matmul = compiled(grouped_matmul, "floats" if is_float else "dots")
        self._route = compiled(route, self._kind, routing.is_normalised, routing.has_shared_gate)
        self._combine = compiled(combine, self._kind)
        self._addresses = [
            np.array([linear.weight.data_ptr() for linear in linears], np.int64)
            for linears in (gate_up, down)
        ]

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
        )
        gate_up = self._product(x_TE, 0, k, order, spans)
        each = self._product(act_and_mul(gate_up), 1, 1, order, spans)
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

    def _product(
        self, x_RI: Tensor, which: int, divisor: int, order: Tensor, spans: Tensor
    ) -> Tensor:
        num_out, num_in = (self._gate_up, self._down)[which][0].shape
        per_word = 4 // x_RI.itemsize
        y = x_RI.new_empty((len(order), num_out))
        num_spans, num_panels = len(spans) // SPAN, num_out // LANES
        self._matmul(
            num_spans * -(-num_panels // PANELS),
            x_RI.data_ptr(),
            x_RI.stride(0) // per_word,
            divisor,
            self._addresses[which].ctypes.data,
            y.data_ptr(),
            len(order),
            num_in // per_word,
            num_panels,
            order.data_ptr(),
            spans.data_ptr(),
            num_threads=torch.get_num_threads(),
        )
        return y


def can_group(
    gate_up: Sequence[LinearMethod], down: Sequence[LinearMethod], routing: Routing
) -> bool:
    """Tell whether the kernels compute these experts."""
    linears = (*gate_up, *down)
    are_plain = all(isinstance(x, DenseLinear) and x.bias is None for x in linears)
    width = down[0].shape[1]
    return are_plain and width % LANES == 0 and routing.num_experts < MAX_EXPERTS
