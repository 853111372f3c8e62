"""Blocks of panels and rows by each unit that multiplies, for any layout of the panels in memory; and gelu of their sums.

    dots    AVX512-BF16: a word of W times a pair of x in all lanes is sixteen outputs and two inputs.  Up to twelve rows
            are one block of accumulators in registers.  Machines without it use two FMAs of float32
    tiles   AMX: sixteen pairs of a panel are one tile in memory order, sixteen rows of 32 inputs are another, and their
            product is sixteen rows of sixteen outputs
    floats  float32: a word is one input, with the same blocks of accumulators

No sum crosses lanes.  Few rows are one block, so each panel is read once; for more rows the panels of a work item stay in
the second cache.

Law: an output is one accumulator over the inputs in their order, in every block, so a row's result does not depend on the
number of rows.

gelu is y = x Φ(x).  In bfloat16 Φ is ½ + x Q(x²) for |x| ≤ EDGE.  Q is the minimax polynomial of degree 8 for the error of
y: 6e-5, half a unit of bfloat16 at 0.03.  It needs neither a division nor an exponential: 16 instructions for sixteen
numbers.  In float32 y = max(x, 0) - |x| Φ(-|x|), and Φ(-|x|) = ½ R(t) exp(-x² / 2) with t = 1 / (1 + P |x|), from
Abramowitz and Stegun 7.1.26; the error is at most 8e-8 |x|.
"""

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

from trouper.kernels.codegen.builder import KernelBuilder
from trouper.kernels.codegen.core import Pointer, Value
from trouper.kernels.codegen.features import has_bf16_dot, num_registers
from trouper.kernels.codegen.units import LANES, Kind, Unit

Act = Literal["none", "gelu"]
Steps = Iterator[
    tuple[Value, list[Pointer]]
    # Yields the index of the first pair of inputs, and its address in each panel.
]


class Block(NamedTuple):
    """The panels and rows that are computed together in registers.

    More of both means fewer loads for each product, up to the number of registers.
    """

    panels: int
    rows: int
    ahead: int = 0  # words to prefetch


class Blocking(NamedTuple):
    # The blocks for few rows; the first one with enough rows is used.
    few: tuple[Block, ...]
    many: Block
    most_rows: int = 192  # in a work item of many
    # The bytes of x that a work item reads; the second cache holds them and the panels.
    most_bytes: int = 2**20

    @property
    def most_few(self) -> int:
        return self.few[-1].rows

    def num_items(self, num_rows: int, num_out: int, num_in: int) -> int:
        """Count the work items of a call.  `num_in` counts inputs of two bytes."""
        fitting = (block for block in (*self.few, self.many) if num_rows <= block.rows)
        panels = next(fitting, self.many).panels
        most, step = min(self.most_rows, self.most_bytes // (2 * num_in)), self.many.rows
        # With whole blocks no range of rows is empty.
        rows = max(most // step * step, step)
        return -(-num_out // (LANES * panels)) * -(-num_rows // rows)


_IS_WIDE = num_registers() == 32
_WIDE_DOTS = Blocking(
    few=(Block(4, 1), Block(4, 2), Block(4, 4), Block(4, 6), Block(3, 8, 1024), Block(2, 12, 1024)),
    many=Block(3, 8, 1024),
)
# With FMAs a word is two registers of numbers, and AVX2 has eight registers instead of thirty-two.
_WIDE_FMAS = Blocking(few=(Block(4, 1), Block(4, 2), Block(4, 4), Block(2, 8)), many=Block(8, 8))
_NARROW_FMAS = Blocking(few=(Block(4, 1), Block(2, 2), Block(1, 4)), many=Block(8, 5))
BLOCKINGS: dict[Unit, Blocking] = {
    "dots": _WIDE_DOTS if has_bf16_dot() else _WIDE_FMAS if _IS_WIDE else _NARROW_FMAS,
    "tiles": Blocking(few=(Block(4, 16, 1024),), many=Block(2, 32), most_rows=512),
    "floats": Blocking(few=(Block(4, 1), Block(4, 2), Block(4, 4), Block(3, 8, 1024)), many=Block(3, 8, 1024))
    if _IS_WIDE
    else Blocking(few=(Block(4, 1), Block(2, 2), Block(1, 4), Block(1, 6)), many=Block(1, 6)),
}  # fmt: skip


def items_of_many(
    code: KernelBuilder,
    block: Block,
    num_rows: Value,
    num_panels: Value,
    items: Iterator[Value] | None = None,
) -> Iterator[tuple[Value, Value, Value]]:
    """Yield the first panel, the first row and the end of the rows of each work item.

    All panels of one range of rows come before the next range.  The ranges are equal, and the call's number of work items
    determines how many there are.
    """
    across = (num_panels + (block.panels - 1)) // block.panels
    num_stretches = code.num_items // across
    rows = (num_rows + (num_stretches - 1)) // num_stretches
    length = (rows + (block.rows - 1)) // block.rows * block.rows
    for item in items or code.work_items():
        first = item // across * length
        yield item % across * block.panels, first, code.minimum(first + length, num_rows)


class Rows(Protocol):
    """The rows of a product, which may be a selection in any order.

    Dense products use all rows, and experts those of their tokens.
    """

    def row(self, index: Value) -> Value:
        """Return the row of y with this index.  Indices beyond the last row repeat the last one."""
        ...

    def x_row(self, row: Value) -> Value:
        """Return the row of x that a row of y is computed from."""
        ...


class AllRows:
    """All rows in memory order. The index of a row is its position, limited to the last row."""

    def __init__(self, code: KernelBuilder, num_rows: Value) -> None:
        self._code, self._num_rows = code, num_rows

    def row(self, index: Value) -> Value:
        return self._code.minimum(index, self._num_rows - 1)

    def x_row(self, row: Value) -> Value:
        return row


class Product(ABC):
    """Computes blocks of panels and rows.

    Subclasses implement a unit; the layout of the weights is given by `Steps`.
    """

    # The number of input words that one step multiplies.
    step: ClassVar[int]
    kind: ClassVar[Kind] = "bf16"

    def __init__(
        self,
        code: KernelBuilder,
        act: Act,
        x: Value,
        stride: Value,
        bias: Value,
        y: Value,
        y_stride: Value,
        num_rows: Value,
        pairs: Value,
        num_panels: Value,
    ) -> None:
        self.code, self.bias, self.stride = code, bias, stride
        self.x, self._act = code.pointer(x, "i32"), act
        self._y, self._y_stride = code.pointer(y, self.kind), y_stride
        self.num_rows, self.pairs, self.num_panels = num_rows, pairs, num_panels
        self.rows: Rows = AllRows(code, num_rows)

    def panels_from(self, first: Value, panels: int) -> list[Value]:
        """Return the indices of `panels` panels.  Indices beyond the last panel repeat the last one."""
        return [self.code.minimum(first + p, self.num_panels - 1) for p in range(panels)]

    def plain(self, weights: list[Pointer], ahead: int) -> Steps:
        """Yield the words of packed panels, step by step.

        With `ahead`, later words are prefetched, because the hardware does not follow so many streams.
        """
        for i in self.code.loop(0, self.pairs, self.step):
            if ahead:
                for weight in weights:
                    for line in range(0, self.step * LANES, LANES):
                        weight.prefetch(i * LANES + (ahead + line))
            yield i, [weight + i * LANES for weight in weights]

    def begun(self) -> "contextlib.AbstractContextManager[None]":
        """Configure the state that all blocks of a call share.

        Only tiles need it; other units return an empty context. Blocks run inside of it.
        """
        return contextlib.nullcontext()

    @abstractmethod
    def block(self, at_panel: list[Value], first_row: Value, rows: int, steps: Steps) -> None:
        """Compute a block of rows; indices beyond the last row repeat the last one."""

    def store(self, row: Value, panel: Value, total: Value) -> None:
        found = gelu(self.code, total, self.kind) if self._act == "gelu" else total
        self._y.store(row * self._y_stride + panel * LANES, found)

    def own_bias(self, panel: Value) -> Value:
        return self.code.pointer(self.bias, self.kind).load(panel * LANES)

    def bias_or_zeros(self, panel: Value) -> Value:
        own = self.code.var(self.code.f32x16(0.0))
        with self.code.when(self.bias > 0):
            own.set(self.own_bias(panel))
        return own


class Dots(Product):
    step = 1

    def block(self, at_panel: list[Value], first_row: Value, rows: int, steps: Steps) -> None:
        code = self.code
        at_row = [self.rows.row(first_row + r) for r in range(rows)]
        xs = [self.x + self.rows.x_row(row) * self.stride for row in at_row]
        sums = [[code.var(code.f32x16(0.0)) for _ in range(rows)] for _ in at_panel]
        for i, places in steps:
            words = [self.read(place) for place in places]
            for r, row in enumerate(xs):
                x = self.broadcast(row + i)
                for p, word in enumerate(words):
                    sums[p][r].set(self.dot(word, x, sums[p][r]))
        for p, panel in enumerate(at_panel):
            with code.when(self.bias > 0):
                own = self.own_bias(panel)
                for total in sums[p]:
                    total.set(total + own)
            for r in range(rows):
                self.store(at_row[r], panel, sums[p][r])

    def read(self, place: Pointer) -> Value:
        return place.load()

    def broadcast(self, place: Pointer) -> Value:
        return self.code.i32x16(place[0])

    def dot(self, word: Value, x: Value, total: Value) -> Value:
        return self.code.dot(word, x, total)


class Floats(Dots):
    """Blocks of float32, in which a word is one input.

    Products and sums are FMAs, in the order of the inputs. A panel is read once for a block of rows.
    """

    kind = "f32"

    def read(self, place: Pointer) -> Value:
        return place.of("f32").load()

    def broadcast(self, place: Pointer) -> Value:
        return self.code.f32x16(place.of("f32")[0])

    def dot(self, word: Value, x: Value, total: Value) -> Value:
        return self.code.fma(word, x, total)


TILE = 16  # rows of a tile, and pairs of inputs
TILE_BYTES = 64  # bytes of a row


class Tiles(Product):
    """Blocks by AMX.  The registers hold the sums, then one or two tiles of rows, then panels."""

    step = TILE

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._sums = self.code.array("f32", TILE * LANES)
        self.tile_rows = self.code.minimum(self.num_rows, TILE)

    @contextlib.contextmanager
    def begun(self) -> Generator[None]:
        with self.code.tiles(
            self.tile_rows,
            narrow=range(6),
            # The first six registers hold no weights.
        ):
            yield

    def tile_at(self, row: Value) -> Value:
        """Return the first row of a tile.

        The last tile ends at the last row, so some rows are computed twice, with equal results.
        """
        return self.code.minimum(row, self.code.maximum(self.num_rows - TILE, 0))

    def block(
        self,
        at_panel: list[Value],
        first_row: Value,
        rows: int,
        steps: Steps,
        scales: Sequence[Value] = (),
    ) -> None:
        """Compute a block of rows.  `scales` multiply the sums of each panel."""
        code, num_tiles = self.code, rows // TILE
        num_sums = len(at_panel) * num_tiles
        at_row = [self.tile_at(first_row + r * TILE) for r in range(num_tiles)]
        xs = [self.x + r * self.stride for r in at_row]
        for tile in range(num_sums):
            code.tile_zero(tile)
        for i, places in steps:
            for r, row in enumerate(xs):
                code.tile_load(num_sums + r, row + i, self.stride * 4)
            for p, place in enumerate(places):
                weights = 6 + p % 2
                code.tile_load(weights, place, TILE_BYTES)
                for r in range(num_tiles):
                    code.tile_dot(p * num_tiles + r, num_sums + r, weights)
        for p, panel in enumerate(at_panel):
            for r, start in enumerate(at_row):
                code.tile_store(p * num_tiles + r, self._sums, TILE_BYTES)
                self.write(self._sums, panel, start, scales[p] if scales else None)

    def write(
        self, sums: Pointer, panel: Value, first_row: Value, scale: Value | None = None
    ) -> None:
        """Store a tile of rows, times the scale, plus the bias.

        Rows beyond the last one were computed twice, with equal results.
        """
        own = self.bias_or_zeros(panel)
        for row in self.code.loop(0, self.tile_rows):
            total = sums.load(row * LANES)
            scaled = total if scale is None else total * scale
            self.store(first_row + row, panel, scaled + own)


PRODUCTS = {"dots": Dots, "tiles": Tiles, "floats": Floats}


def product_of(unit: Unit, *arguments: Any) -> Product:
    return PRODUCTS[unit](*arguments)


EDGE = 4.5
Q = (
    0.398708517, -0.0659771813, 0.00958060547, -0.00103624066, 8.12078696e-05, -4.43152813e-06,
    1.5801801e-07, -3.28370832e-09, 2.99978262e-11,
)  # fmt: skip
P = 0.3275911 / math.sqrt(2)
R = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)


def gelu(code: KernelBuilder, x: Value, kind: Kind) -> Value:
    return _fine(code, x) if kind == "f32" else _coarse(code, x)


def _fine(code: KernelBuilder, x: Value) -> Value:
    size = code.maximum(x, 0.0 - x)
    t = 1.0 / code.fma(P, size, code.f32x16(1.0))
    sum_ = code.f32x16(R[-1] / 2)
    for c in reversed(R[:-1]):
        sum_ = code.fma(sum_, t, code.f32x16(c / 2))
    tail = sum_ * t * code.exp2(size * size * (-math.log2(math.e) / 2))
    return code.maximum(x, 0.0) - size * tail


def _coarse(code: KernelBuilder, x: Value) -> Value:
    near = code.select(x > EDGE, EDGE, x)
    near = code.select(near < -EDGE, -EDGE, near)
    square = near * near
    sum_ = code.f32x16(Q[-1])
    for c in reversed(Q[:-1]):
        sum_ = code.fma(sum_, square, code.f32x16(c))
    return x * code.fma(near, sum_, code.f32x16(0.5))
