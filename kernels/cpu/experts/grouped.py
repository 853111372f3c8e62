"""Products of all experts in one launch: each reads its own tokens' rows, and is read once a step.

    x [R, I]         bfloat16 or float32, rows may be strided
    W                of `chosen.py`: panels as `cpu/linear/dense.py` packs them, and biases
    y [T k, O]       row a is that of choice a
    order, spans     of `route.py`

A piece's rows are computed in the blocks of `cpu/linear/products.py`: the law of one accumulator holds, so a row's bits
do not depend on the other tokens.  AMX is not used: its tiles want rows that follow each other.

Roofline: bytes = e (O I of each expert that has tokens + T k (I + O)), FLOPs = 2 T k O I.
"""

from typing import Any

from trouper.kernels.codegen.builder import KernelBuilder
from trouper.kernels.codegen.core import Value
from trouper.kernels.codegen.features import has_bf16_dot
from trouper.kernels.codegen.units import LANES, Unit
from trouper.kernels.cpu.experts.chosen import Choices, expert_pieces
from trouper.kernels.cpu.linear.products import BLOCKINGS, Block, Dots, Floats


def grouped_matmul(code: KernelBuilder, unit: Unit) -> None:
    """Write the kernel of the arguments x, its stride in words, divisor, W, y, T k, words of a row, O / 16, order, spans."""
    x, stride, divisor, weights, y, num_rows, words, num_panels, order, spans = code.arguments(10)
    choices, no_bias, width = Choices(code, order, divisor), code.i64(0), num_panels * LANES
    kind = Floats if unit == "floats" else Dots
    product = kind(code, "none", x, stride, no_bias, y, width, num_rows, words, num_panels)
    product.rows = choices
    shape = BLOCKINGS[unit]
    many = shape.few[-1] if unit == "dots" and not has_bf16_dot() else shape.many
    for piece in expert_pieces(code, weights, spans, num_panels):
        choices.begin(piece)
        weight, *_, product.bias = piece.addresses
        words_of = code.pointer(weight, "i32")
        before = 0
        for i, block in enumerate((*shape.few, many)):
            is_last = i == len(shape.few)
            fits = piece.num_rows > before
            with code.when(fits if is_last else fits & (piece.num_rows <= block.rows)):
                for panel in code.loop(piece.first_panel, piece.stop, block.panels):
                    _rows(product, piece.num_rows, words_of, panel, block)
            before = block.rows


def _rows(product: Dots, num_rows: Value, weight: Any, panel: Value, block: Block) -> None:
    code = product.code
    at_panel = product.panels_from(panel, block.panels)
    weights = [weight + p * product.pairs * LANES for p in at_panel]
    for row in code.loop(0, num_rows, block.rows):
        product.block(at_panel, row, block.rows, product.plain(weights, block.ahead))
