"""Compute the experts of a layer by compiled kernels: five launches for any number of experts, which a recording can contain.

The launches are the choice of experts, the product of gate and up, the activation, the product of down, and the sum.
For integer weights on machines without bfloat16 instructions, one more launch quantizes the rows before each product.
One launch multiplies by all experts, so that each expert's weight is read once a step.  The form of the weights decides about its kernel:

    grouped_matmul     weights in bfloat16 or float32, packed like `cpu/linear/dense.py`
    grouped_integers   integer weights, packed like `cpu/linear/integer.py`, with bfloat16 dot products
    grouped_bytes      integer weights, with rows quantized by `cpu/linear/integer_rows.py`

    x [R, I]         the rows, which may be strided
    W                addresses of each expert's tensors, see `expert_routing.py`
    y [T k, O]       row a is the output of choice a
    order, spans     the tokens of each expert, see `expert_routing.py`

Choice a of a token reads row a // divisor of x.  The divisor is k for the first product, which reads the tokens, and 1 for the
second, which reads the choices.

The rows of a work item are computed in the blocks of a linear layer, so an output has the bits that the expert's own
layer would give, whatever the other tokens are.  AMX is not used, because its tiles need consecutive rows.

Roofline: e O I bytes (or O I (bits / 8 + 2 / G)) for each expert with tokens, plus e T k (I + O); 2 T k O I FLOPs.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from trouper.kernels.codegen import launch
from trouper.kernels.codegen.builder import KernelBuilder
from trouper.kernels.codegen.core import Value
from trouper.kernels.codegen.features import has_bf16_dot
from trouper.kernels.codegen.launch import compiled, float_bits
from trouper.kernels.codegen.units import LANES, Kind, Unit
from trouper.kernels.cpu.expert_routing import (
    ADDRESSES,
    MAX_EXPERTS,
    SPAN,
    Choices,
    ExpertItem,
    combine,
    expert_items,
    num_items,
    route,
)
from trouper.kernels.cpu.linear.dense import DenseLinear
from trouper.kernels.cpu.linear.integer import IntegerLinear
from trouper.kernels.cpu.linear.integer_bytes import BYTE_BLOCKING, ByteProduct
from trouper.kernels.cpu.linear.integer_matmul import INTEGER_BLOCKINGS, IntegerDots, scratch_bytes
from trouper.kernels.cpu.linear.integer_panels import KeptPanel
from trouper.kernels.cpu.linear.products import BLOCKINGS, Block, Dots, Floats
from trouper.kernels.cpu.linear.quantization import ScaleKind
from trouper.kernels.cpu.memory import num_threads_for
from trouper.kernels.experts import Routing
from trouper.kernels.formats import Format
from trouper.kernels.linear import LinearMethod


def grouped_matmul(code: KernelBuilder, unit: Unit) -> None:
    """Write the kernel with the arguments x, its stride in words, divisor, W, y, T k, words of a row, O / 16, order, spans."""
    x, stride, divisor, weights, y, num_rows, words, num_panels, order, spans = code.arguments(10)
    choices, no_bias, width = Choices(code, order, divisor), code.i64(0), num_panels * LANES
    kind = Floats if unit == "floats" else Dots
    product = kind(code, "none", x, stride, no_bias, y, width, num_rows, words, num_panels)
    product.rows = choices
    shape = BLOCKINGS[unit]
    many = shape.few[-1] if unit == "dots" and not has_bf16_dot() else shape.many
    for item in expert_items(code, weights, spans, num_panels):
        choices.begin(item)
        weight, *_, product.bias = item.addresses
        words_of = code.pointer(weight, "i32")
        before = 0
        for i, block in enumerate((*shape.few, many)):
            is_last = i == len(shape.few)
            fits = item.num_rows > before
            with code.when(fits if is_last else fits & (item.num_rows <= block.rows)):
                for panel in code.loop(item.first_panel, item.stop, block.panels):
                    _rows(product, item.num_rows, words_of, panel, block)
            before = block.rows


def _rows(product: Dots, num_rows: Value, weight: Any, panel: Value, block: Block) -> None:
    code = product.code
    at_panel = product.panels_from(panel, block.panels)
    weights = [weight + p * product.pairs * LANES for p in at_panel]
    for row in code.loop(0, num_rows, block.rows):
        product.block(at_panel, row, block.rows, product.plain(weights, block.ahead))


def grouped_bytes(
    code: KernelBuilder,
    fmt: Format,
    scale_kind: ScaleKind,
    has_zeros: bool,
    minima_kind: Kind | None,
    group: int,
) -> None:
    """Write the kernel with the arguments rounded rows, divisor, W, y, T k, I / 2, O / 16, pairs of a group, order, spans."""
    x, divisor, weights, y, *sizes, order, spans = code.arguments(10)
    choices, none, alone = Choices(code, order, divisor), [code.i64(0)] * ADDRESSES, code.i64(1)
    num_rows, pairs, num_panels, length = sizes
    arguments = [x, *none, y, num_rows, pairs, num_panels, num_panels, length, alone]
    options = fmt, scale_kind, has_zeros, minima_kind, group
    work = ByteProduct(code, *options, arguments)
    work.rows = choices
    for item in expert_items(code, weights, spans, work.num_panels):
        choices.begin(item)
        work.take_weight(*item.addresses)
        before = 0
        for block in BYTE_BLOCKING.few:
            with code.when((item.num_rows > before) & (item.num_rows <= block.rows)):
                for panel in code.loop(item.first_panel, item.stop, block.panels):
                    work.block(panel, code.i64(0), block.rows)
            before = block.rows
        with code.when(item.num_rows > before):
            for panel in code.loop(item.first_panel, item.stop, BYTE_BLOCKING.many.panels):
                work.many_rows(panel, code.i64(0), item.num_rows)


def grouped_integers(
    code: KernelBuilder, fmt: Format, scale_kind: Kind, has_zeros: bool, minima_kind: Kind | None
) -> None:
    """Write the kernel with the arguments x, its stride in words, divisor, W, y, T k, I / 2, O / 16, pairs of a group, scratch,
    scratch bytes of a thread, order, spans.
    """
    x, stride, divisor, weights, y, *sizes, scratch, each, order, spans = code.arguments(13)
    choices, none, alone = Choices(code, order, divisor), [code.i64(0)] * ADDRESSES, code.i64(1)
    num_rows, pairs, num_panels, length = sizes
    sizes = [num_rows, pairs, num_panels, num_panels, length, alone]
    arguments = [x, stride, *none, y, *sizes, scratch, each]
    work = IntegerDots(code, fmt, scale_kind, has_zeros, minima_kind, arguments)
    work.rows = choices
    thread = code.thread()
    shape = INTEGER_BLOCKINGS["dots", fmt]
    for item in expert_items(code, weights, spans, work.num_panels):
        choices.begin(item)
        work.take_weight(*item.addresses)
        before = 0
        for block in shape.few:
            with code.when((item.num_rows > before) & (item.num_rows <= block.rows)):
                work.begin_few(block.rows, thread)
                for panel in code.loop(item.first_panel, item.stop, block.panels):
                    work.block(work.panels(panel, block.panels), code.i64(0), block.rows)
            before = block.rows
        with code.when(item.num_rows > before):
            _many_by_dots(work, item, thread)


def _many_by_dots(work: IntegerDots, item: ExpertItem, thread: Value) -> None:
    """Compute blocks of many rows.  The first block keeps its panels as bfloat16 for the following ones."""
    code = work.code
    panels, rows, _ = INTEGER_BLOCKINGS["dots", work.fmt].many
    mine = work.scratch_of(thread)
    kept = [KeptPanel(mine + p * work.pairs * LANES) for p in range(panels)]
    for panel in code.loop(item.first_panel, item.stop, panels):
        at_panel = work.panels(panel, panels)
        work.block(at_panel, code.i64(0), rows, kept)
        for row in code.loop(rows, item.num_rows, rows):
            work.block(at_panel, row, rows, kept, is_first=False)


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
