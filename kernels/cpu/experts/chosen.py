"""Rows and weights of one expert after the other, for the kernels that multiply by all of them in one launch.

    order, spans     of `route.py`; choice a of a token reads row a // divisor of x, and is row a of y
    W [X, 5]         addresses of each expert's weight, scales, zeros, minima and bias; 0 where there is none

A piece is twelve panels of an expert with all its rows; there are as many times as an expert has pieces as there are
spans.
"""

from collections.abc import Iterator
from typing import NamedTuple

from trouper.kernels.codegen.builder import KernelBuilder
from trouper.kernels.codegen.core import Value
from trouper.kernels.cpu.experts.route import SPAN

PANELS = 12  # of a piece: a multiple of the panels of every block
ADDRESSES = 5


class ExpertPiece(NamedTuple):
    """A piece of work of one expert."""

    first: Value  # of its choices, in the order
    num_rows: Value
    addresses: list[Value]
    first_panel: Value
    stop: Value


class Choices:
    """The `Rows` of a product that belong to the expert at hand."""

    def __init__(self, code: KernelBuilder, order: Value, divisor: Value) -> None:
        self._code, self._order, self._divisor = code, code.pointer(order, "i64"), divisor
        self._first = self._num_rows = code.i64(0)

    def begin(self, piece: ExpertPiece) -> None:
        """Take the rows of a piece."""
        self._first, self._num_rows = piece.first, piece.num_rows

    def row(self, index: Value) -> Value:
        return self._order[self._first + self._code.minimum(index, self._num_rows - 1)]

    def x_row(self, row: Value) -> Value:
        return row // self._divisor


def num_pieces(num_spans: int, num_panels: int) -> int:
    """Count the pieces of a call."""
    return num_spans * -(-num_panels // PANELS)


def expert_pieces(
    code: KernelBuilder, weights: Value, spans: Value, num_panels: Value
) -> Iterator[ExpertPiece]:
    """Yield the pieces of experts that have tokens."""
    per_expert = (num_panels + (PANELS - 1)) // PANELS
    table = code.pointer(weights, "i64")
    for piece in code.pieces():
        span = code.pointer(spans, "i64") + piece // per_expert * SPAN
        first_panel = piece % per_expert * PANELS
        with code.when(span[2] > 0):
            own = table + span[0] * ADDRESSES
            addresses = [own[i] for i in range(ADDRESSES)]
            stop = code.minimum(first_panel + PANELS, num_panels)
            yield ExpertPiece(span[1], span[2], addresses, first_panel, stop)
