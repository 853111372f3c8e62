"""Products of all experts in one launch: each reads its own tokens' rows, and is read once a step.

    x [R, I]         rows may be strided; choice a of a token reads row a // divisor
    W                address of each expert's panels, as `cpu/linear/dense.py` packs them
    y [T k, O]       row a is that of choice a
    order, spans     of `route.py`

A piece is twelve panels of an expert with all its rows, in the blocks of `cpu/linear/products.py`: the law of one
accumulator holds, so a row's bits do not depend on the other tokens.  AMX is not used: its tiles want rows that
follow each other.

Roofline: bytes = e (O I of each expert that has tokens + T k (I + O)), FLOPs = 2 T k O I.
"""

from typing import Any

from trouper.kernels.codegen.builder import KernelBuilder
from trouper.kernels.codegen.core import Value
from trouper.kernels.codegen.features import has_bf16_dot
from trouper.kernels.codegen.units import LANES, Unit
from trouper.kernels.cpu.experts.route import SPAN
from trouper.kernels.cpu.linear.products import BLOCKINGS, Block, Dots, Floats

PANELS = 12  # of a piece: a multiple of the panels of every block


class _Chosen(Dots):
    """Blocks of bfloat16 rows that `order` chooses."""

    def __init__(self, code: KernelBuilder, order: Value, divisor: Value, *arguments: Any) -> None:
        super().__init__(code, "none", *arguments)
        self._order, self._divisor = code.pointer(order, "i64"), divisor
        self._first = code.var(0)
        self.num_rows = code.var(0)

    def begin(self, first: Value, num_rows: Value) -> None:
        """Take the rows of one expert."""
        self._first.set(first)
        self.num_rows.set(num_rows)

    def row(self, index: Value) -> Value:
        return self._order[self._first + super().row(index)]

    def x_row(self, row: Value) -> Value:
        return row // self._divisor


class _ChosenFloats(_Chosen, Floats):
    """Blocks of float32 rows that `order` chooses."""


def grouped_matmul(code: KernelBuilder, unit: Unit) -> None:
    """Write the kernel of the arguments x, its stride in words, divisor, W, y, T k, words of a row, O / 16, order, spans.

    There are as many times as an expert has pieces as there are spans.
    """
    x, stride, divisor, addresses, y, num_rows, words, num_panels, order, spans = code.arguments(10)
    no_bias = code.i64(0)
    kind = _ChosenFloats if unit == "floats" else _Chosen
    width = num_panels * LANES
    product = kind(code, order, divisor, x, stride, no_bias, y, width, num_rows, words, num_panels)
    per_expert = (num_panels + (PANELS - 1)) // PANELS
    shape, before = BLOCKINGS[unit], 0
    many = shape.few[-1] if unit == "dots" and not has_bf16_dot() else shape.many
    blocks = [*shape.few, many]
    for piece in code.pieces():
        span = code.pointer(spans, "i64") + piece // per_expert * SPAN
        first_panel = piece % per_expert * PANELS
        with code.when(span[2] > 0):
            product.begin(span[1], span[2])
            weight = code.pointer(code.pointer(addresses, "i64")[span[0]], "i32")
            stop = code.minimum(first_panel + PANELS, num_panels)
            for i, block in enumerate(blocks):
                is_last = i == len(shape.few)
                fits = product.num_rows > before
                with code.when(fits if is_last else fits & (product.num_rows <= block.rows)):
                    for panel in code.loop(first_panel, stop, block.panels):
                        _rows(product, weight, panel, block)
                before = block.rows


def _rows(product: _Chosen, weight: Any, panel: Value, block: Block) -> None:
    code = product.code
    at_panel = product.panels_from(panel, block.panels)
    weights = [weight + p * product.pairs * LANES for p in at_panel]
    for row in code.loop(0, product.num_rows, block.rows):
        product.block(at_panel, row, block.rows, product.plain(weights, block.ahead))
