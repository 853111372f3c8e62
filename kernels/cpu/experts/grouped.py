"""Kernels that multiply by all experts of a layer in one launch, so that each expert's weight is read once a step.

    grouped_matmul     weights in bfloat16 or float32, packed like `cpu/linear/dense.py`
    grouped_integers   integer weights, packed like `cpu/linear/integer.py`, with bfloat16 dot products
    grouped_bytes      integer weights, with rows quantized by `cpu/linear/integer_rows.py`

    x [R, I]         the rows, which may be strided
    W                addresses of each expert's tensors, see `routing.py`
    y [T k, O]       row a is the output of choice a
    order, spans     the tokens of each expert, see `routing.py`

The rows of a work item are computed in the blocks of a linear layer, so an output has the bits that the expert's own
layer would give, whatever the other tokens are.  AMX is not used, because its tiles need consecutive rows.

Roofline: e O I bytes (or O I (bits / 8 + 2 / G)) for each expert with tokens, plus e T k (I + O); 2 T k O I FLOPs.
"""

from typing import Any

from trouper.kernels.codegen.builder import KernelBuilder
from trouper.kernels.codegen.core import Value
from trouper.kernels.codegen.features import has_bf16_dot
from trouper.kernels.codegen.units import LANES, Kind, Unit
from trouper.kernels.cpu.experts.routing import ADDRESSES, Choices, ExpertItem, expert_items
from trouper.kernels.cpu.linear.integer_bytes import BYTE_BLOCKING, ByteProduct
from trouper.kernels.cpu.linear.integer_matmul import INTEGER_BLOCKINGS, IntegerDots
from trouper.kernels.cpu.linear.integer_panels import KeptPanel
from trouper.kernels.cpu.linear.products import BLOCKINGS, Block, Dots, Floats
from trouper.kernels.cpu.linear.quantization import ScaleKind
from trouper.kernels.formats import Format


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
