"""The products of all experts of a layer with their tokens, by the kernel for the form of their weights.

`apply` takes rows x [R, I] and returns y [T k, O]: choice a of a token reads row a // divisor and writes row a.  The
divisor is k for the first product, which reads the tokens, and 1 for the second, which reads the choices.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from trouper.kernels.codegen import launch
from trouper.kernels.codegen.units import LANES, Kind
from trouper.kernels.cpu.experts.grouped import grouped_bytes, grouped_integers, grouped_matmul
from trouper.kernels.cpu.experts.routing import SPAN, num_items
from trouper.kernels.cpu.linear.dense import DenseLinear
from trouper.kernels.cpu.linear.integer import IntegerLinear
from trouper.kernels.cpu.linear.integer_matmul import scratch_bytes
from trouper.kernels.linear import LinearMethod


class Routed(NamedTuple):
    """The experts that a step's tokens chose, as `routing.route` writes them.

    `order` sorts the rows by expert, and `spans` contains the range of each expert in it.
    """

    num_tokens: int
    order: Tensor
    spans: Tensor

    @property
    def num_spans(self) -> int:
        return len(self.spans) // SPAN


class ExpertProducts(Protocol):
    """The products of all experts with their rows.

    An implementation stores the weights of all experts in the layout that its kernel reads.
    """

    kind: Kind  # dtype of the rows

    @property
    def linears(self) -> Sequence[LinearMethod]: ...

    def apply(self, x_RI: Tensor, divisor: int, routed: Routed) -> Tensor:
        """Return the products [T k, O]."""
        ...


def make_product(linears: Sequence[LinearMethod]) -> ExpertProducts | None:
    """Choose the kernel.  Returns None if no launch supports all experts, because their methods or forms differ."""
    dense = [x for x in linears if isinstance(x, DenseLinear)]
    if len(dense) == len(linears):
        return DenseExpertProducts(dense)
    integers = [x for x in linears if isinstance(x, IntegerLinear)]
    is_one = len(integers) == len(linears) and len({_form(x) for x in integers}) == 1
    return IntegerExpertProducts(integers) if is_one and integers[0].order is None else None


class DenseExpertProducts:
    """The products of all experts with bfloat16 or float32 weights.

    Each expert is packed like a `DenseLinear`, so results are the same bit for bit.
    """

    def __init__(self, linears: Sequence[DenseLinear]) -> None:
        self.linears = linears
        is_float = linears[0].weight.dtype == torch.float32
        self.kind: Kind = "f32" if is_float else "bf16"
        self._matmul = launch.compiled(grouped_matmul, "floats" if is_float else "dots")
        self._addresses = _addresses([(x.weight, None, None, None, x.bias) for x in linears])

    def apply(self, x_RI: Tensor, divisor: int, routed: Routed) -> Tensor:
        num_out, num_in = self.linears[0].shape
        per_word = 4 // x_RI.itemsize
        y = x_RI.new_empty((len(routed.order), num_out))
        self._matmul(
            num_items(routed.num_spans, num_out // LANES),
            x_RI.data_ptr(),
            x_RI.stride(0) // per_word,
            divisor,
            self._addresses.ctypes.data,
            y.data_ptr(),
            len(routed.order),
            num_in // per_word,
            num_out // LANES,
            routed.order.data_ptr(),
            routed.spans.data_ptr(),
            num_threads=torch.get_num_threads(),
        )
        return y


class IntegerExpertProducts:
    """Products of bfloat16 rows with integer weights, bit for bit like the linear layer of each expert."""

    kind: Kind = "bf16"

    def __init__(self, linears: Sequence[IntegerLinear]) -> None:
        self.linears, first = linears, linears[0]
        self._is_bytes = first.unit == "bytes"
        if self._is_bytes:
            self._matmul = launch.compiled(grouped_bytes, *first.options, first.row_group)
        else:
            self._matmul = launch.compiled(grouped_integers, *first.options)
        self._addresses = _addresses(
            [(x.weight, x.scales, x.zeros, x.minima, x.bias) for x in linears]
        )

    def apply(self, x_RI: Tensor, divisor: int, routed: Routed) -> Tensor:
        first = self.linears[0]
        num_out, num_in = first.shape
        num_groups, num_threads = first.num_groups, torch.get_num_threads()
        y = x_RI.new_empty((len(routed.order), num_out))
        if self._is_bytes:
            rows = first.quantized_rows(x_RI)
            x, scratch = [rows.data_ptr()], []
        else:
            x, num_sums = [x_RI.data_ptr(), x_RI.stride(0) // 2], 0
            if first.minima is not None:
                num_sums = num_groups
            # Scratch memory must suffice for the fewest and for the most rows of an expert.
            sizes = (1, routed.num_tokens)
            each = max(scratch_bytes(n, num_in, "dots", first.fmt, num_sums) for n in sizes)
            scratch = [launch.scratch(num_threads * each), each]
        self._matmul(
            num_items(routed.num_spans, num_out // LANES),
            *x,
            divisor,
            self._addresses.ctypes.data,
            y.data_ptr(),
            len(routed.order),
            num_in // 2,
            num_out // LANES,
            num_in // num_groups // 2,
            *scratch,
            routed.order.data_ptr(),
            routed.spans.data_ptr(),
            num_threads=num_threads,
        )
        return y


def _form(linear: IntegerLinear) -> tuple[object, ...]:
    """Return the properties that must be equal for one launch."""
    return linear.options, linear.scales.shape, linear.order is None


def _addresses(parts: Sequence[tuple[Tensor | None, ...]]) -> np.ndarray:
    """Collect the addresses of each expert's tensors, with 0 for an absent one."""
    return np.array(
        [[0 if part is None else part.data_ptr() for part in each] for each in parts], np.int64
    )
