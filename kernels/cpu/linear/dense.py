"""y = act(x Wᵀ + b) of bfloat16 or float32, W packed so that any number of rows reads it in order.

    x [T, I]                tokens × inputs, rows may be strided; I a multiple of 32, of float32 of 16
    W [O / 16, I / 2, 16]   words: panels of sixteen outputs, pairs of inputs; O a multiple of 16; of float32 [O / 16, I, 16]
    b [O]                   or absent
    y [T, O]                rows may be strided
    act                     none, or gelu

Instructions that multiply such words are named by `Unit`:

    dots    AVX512-BF16: a word of W times a pair of x in all lanes is sixteen outputs and two inputs.  Up to
            twelve rows are one block of accumulators in registers.  Elsewhere two FMAs of float32
    tiles   AMX: sixteen pairs of a panel are a tile as they lie, sixteen rows of 32 inputs another, and
            their product sixteen rows of sixteen outputs
    floats  float32: a word is one input, and the same blocks of accumulators

No sum across lanes is ever needed.  Few rows are one block, so that each panel is read once; for more rows
the panels of a piece stay in the second cache.  Rows whose stride is a multiple of 4 KiB fall into one set of
the first cache: activations are padded (`native_ops.py`).

Law: an output is one accumulator over the inputs in their order, whatever the block: a row's result does
not depend on the number of rows.  A machine has one unit for a dtype and a use: their roundings differ
(an encoder's float32, where there are tiles, is that of `split_matmul.py`).

Roofline: bytes = e (O I + T I + T O), FLOPs = 2 T O I; bound by memory below about 10 tokens.
Measured, two EPYC cores that read 41 GB/s, O = 32000, I = 1024: T = 1 41 GB/s (oneDNN's packed weights:
29), T = 4 40 (32); one core: T = 12 16 GB/s = 195 GFLOP/s (146), T = 1024 227 GFLOP/s (221).
Two Xeon cores with AMX, O = 6144: T = 16 0.68 TFLOP/s (0.69), T = 1024 2.1 (2.9).  Of float32 there, GFLOP/s:
O = 1536, I = 384: T = 1 29 (15), T = 16 177 (119), T = 1024 228 (230); O = 1024, I = 3072: 19 (16), 182 (146), 250 (244).
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

from trouper.kernels.codegen.builder import Code, Pointer, Value
from trouper.kernels.codegen.features import has_bf16_dot, num_registers
from trouper.kernels.codegen.units import LANES, Kind, Unit
from trouper.kernels.cpu.linear.gelu import gelu

Act = Literal["none", "gelu"]
Steps = Iterator[tuple[Value, list[Pointer]]]  # first pair of inputs, where each panel has it


class Block(NamedTuple):
    """How much is computed at once."""

    panels: int
    rows: int
    ahead: int = 0  # words to ask for


class Shape(NamedTuple):
    few: tuple[Block, ...]  # the first that holds a step's rows
    many: Block
    most_rows: int = 192  # of a piece of many
    most_bytes: int = 2**20  # of x that one reads: the second cache holds it, and the panels

    @property
    def most_few(self) -> int:
        return self.few[-1].rows

    def num_pieces(self, num_rows: int, num_out: int, num_in: int) -> int:
        """`num_in` of two bytes."""
        fitting = (block for block in (*self.few, self.many) if num_rows <= block.rows)
        panels = next(fitting, self.many).panels
        most, step = min(self.most_rows, self.most_bytes // (2 * num_in)), self.many.rows
        rows = max(most // step * step, step)  # whole blocks: then no stretch of rows is empty
        return -(-num_out // (LANES * panels)) * -(-num_rows // rows)


_IS_WIDE = num_registers() == 32
_WIDE_DOTS = Shape(
    few=(Block(4, 1), Block(4, 2), Block(4, 4), Block(4, 6), Block(3, 8, 1024), Block(2, 12, 1024)),
    many=Block(3, 8, 1024),
)
# Of FMAs: a word is two registers of numbers, and AVX2 has eight in place of thirty-two.
_WIDE_FMAS = Shape(few=(Block(4, 1), Block(4, 2), Block(4, 4), Block(2, 8)), many=Block(8, 8))
_NARROW_FMAS = Shape(few=(Block(4, 1), Block(2, 2), Block(1, 4)), many=Block(8, 5))
SHAPES: dict[Unit, Shape] = {
    "dots": _WIDE_DOTS if has_bf16_dot() else _WIDE_FMAS if _IS_WIDE else _NARROW_FMAS,
    "tiles": Shape(few=(Block(4, 16, 1024),), many=Block(2, 32), most_rows=512),
    "floats": Shape(few=(Block(4, 1), Block(4, 2), Block(4, 4), Block(3, 8, 1024)), many=Block(3, 8, 1024))
    if _IS_WIDE
    else Shape(few=(Block(4, 1), Block(2, 2), Block(1, 4), Block(1, 6)), many=Block(1, 6)),
}  # fmt: skip


def pack(code: Code) -> None:
    """The plain matrix [O, I], its packed form, words of a row.  A piece is a panel."""
    plain, packed, pairs = code.arguments(3)
    for panel in code.pieces():
        rows = code.pointer(plain, "i32") + panel * LANES * pairs
        words = code.pointer(packed, "i32") + panel * LANES * pairs
        for i in code.loop(0, pairs, LANES):
            for j, column in enumerate(
                code.transposed([rows.load(pairs * r + i) for r in range(LANES)])
            ):
                words.store((i + j) * LANES, column)


def matmul(code: Code, unit: Unit, act: Act) -> None:
    """x, its stride in words, W, b or 0, y, its stride, T, words of a row, O / 16.  A piece is panels of a block of rows."""
    x, stride, weight, *others = code.arguments(9)
    product, shape = product_of(unit, code, act, x, stride, *others), SHAPES[unit]
    words, num_rows, before = code.pointer(weight, "i32"), product.num_rows, 0
    with product.begun():
        for block in shape.few:
            with code.when((num_rows > before) & (num_rows <= block.rows)):
                for piece in code.pieces():
                    at_panel = product.panels_from(piece * block.panels, block.panels)
                    weights = [words + p * product.pairs * LANES for p in at_panel]
                    steps = product.plain(weights, block.ahead)
                    product.block(at_panel, code.i64(0), block.rows, steps)
            before = block.rows
        with code.when(num_rows > shape.most_few):
            if unit == "dots" and not has_bf16_dot():
                widened_matmul(product, words, shape.many)
                return
            panels, rows, ahead = shape.many
            for panel, first, stop in pieces_of_many(
                code, shape.many, num_rows, product.num_panels
            ):
                at_panel = product.panels_from(panel, panels)
                weights = [words + p * product.pairs * LANES for p in at_panel]
                for row in code.loop(first, stop, rows):
                    product.block(at_panel, row, rows, product.plain(weights, ahead))


def pieces_of_many(
    code: Code, block: Block, num_rows: Value, num_panels: Value
) -> Iterator[tuple[Value, Value, Value]]:
    """First panel, first row, end of the rows of each piece: all panels with one stretch of rows, then with the next.

    The call's number of pieces says how many stretches: equal ones.
    """
    across = (num_panels + (block.panels - 1)) // block.panels
    num_stretches = code.num_pieces // across
    rows = (num_rows + (num_stretches - 1)) // num_stretches
    length = (rows + (block.rows - 1)) // block.rows * block.rows
    for piece in code.pieces():
        first = piece // across * length
        yield piece % across * block.panels, first, code.smaller(first + length, num_rows)


class Product(ABC):
    """Blocks of panels and rows, whatever form the panels have in memory."""

    step: ClassVar[int]  # words of inputs that are multiplied at once
    kind: ClassVar[Kind] = "bf16"

    def __init__(
        self,
        code: Code,
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

    def panels_from(self, first: Value, panels: int) -> list[Value]:
        """Beyond the last, the last again."""
        return [self.code.smaller(first + p, self.num_panels - 1) for p in range(panels)]

    def plain(self, weights: list[Pointer], ahead: int) -> Steps:
        """The words of packed panels."""
        for i in self.code.loop(0, self.pairs, self.step):
            if ahead:
                for weight in weights:
                    for line in range(0, self.step * LANES, LANES):
                        weight.prefetch(i * LANES + (ahead + line))
            yield i, [weight + i * LANES for weight in weights]

    def begun(self) -> "contextlib.AbstractContextManager[None]":
        """All blocks of a call are computed within it."""
        return contextlib.nullcontext()

    @abstractmethod
    def block(self, at_panel: list[Value], first_row: Value, rows: int, steps: Steps) -> None:
        """Beyond the last row, the last again."""

    def store(self, row: Value, panel: Value, total: Value) -> None:
        found = gelu(self.code, total, self.kind) if self._act == "gelu" else total
        self._y.store(row * self._y_stride + panel * LANES, found)

    def own_bias(self, panel: Value) -> Value:
        return self.code.pointer(self.bias, self.kind).load(panel * LANES)

    def bias_or_zeros(self, panel: Value) -> Value:
        own = self.code.var(self.code.lanes(0.0))
        with self.code.when(self.bias > 0):
            own.set(self.own_bias(panel))
        return own


class Dots(Product):
    step = 1

    def block(self, at_panel: list[Value], first_row: Value, rows: int, steps: Steps) -> None:
        code = self.code
        at_row = [code.smaller(first_row + r, self.num_rows - 1) for r in range(rows)]
        xs = [self.x + r * self.stride for r in at_row]
        sums = [[code.var(code.lanes(0.0)) for _ in range(rows)] for _ in at_panel]
        for i, places in steps:
            words = [self.read(place) for place in places]
            for r, row in enumerate(xs):
                x = self.spread(row + i)
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

    def spread(self, place: Pointer) -> Value:
        return self.code.words(place[0])

    def dot(self, word: Value, x: Value, total: Value) -> Value:
        return self.code.dot(word, x, total)


WIDE = 256  # words of a row that become numbers at once: with a panel's, 26 KiB of the first cache
SOME = 16  # rows that blocks of four fill, and those of five, 1.1 times as fast, do not


def widened_matmul(product: Product, words: Pointer, many: Block) -> None:
    """Many rows where a dot is two FMAs: the numbers of x are taken out of their words once for all panels of a piece.

    The order of every sum is that of `Dots`.
    """
    code, num_rows = product.code, product.num_rows
    fitting = 4 if SOME % many.rows else many.rows
    for rows, is_better in ((fitting, num_rows <= SOME), (many.rows, num_rows > SOME)):
        with code.when(is_better):
            block = many._replace(rows=rows)
            widened = _Widened(product, words, block)
            for panel, first, stop in pieces_of_many(code, block, num_rows, product.num_panels):
                for row in code.loop(first, stop, rows):
                    widened.block(panel, row)


class _Widened:
    def __init__(self, product: Product, words: Pointer, block: Block) -> None:
        code = product.code
        self._product, self._words, self._block = product, words, block
        self._x = code.array("f32", block.rows * 2 * WIDE)  # of each row the low, then the high
        self._sums = code.array("f32", block.panels * block.rows * LANES)

    def block(self, first_panel: Value, first_row: Value) -> None:
        product, code = self._product, self._product.code
        panels, rows, _ = self._block
        at_row = [code.smaller(first_row + r, product.num_rows - 1) for r in range(rows)]
        for i in code.loop(0, panels * rows * LANES, LANES):
            self._sums.store(i, code.lanes(0.0))
        for start in code.loop(0, product.pairs, WIDE):
            num = code.smaller(product.pairs - start, WIDE)
            for r, row in enumerate(at_row):
                for i in code.loop(0, num, LANES):
                    halves = code.unpaired((product.x + row * product.stride).load(start + i))
                    for half, numbers in enumerate(halves):
                        self._x.store((2 * r + half) * WIDE + i, numbers)
            for p in code.loop(0, panels):
                panel = code.smaller(first_panel + p, product.num_panels - 1)
                self._add(self._words + (panel * product.pairs + start) * LANES, num, p)
        for p in code.loop(0, panels):
            panel = code.smaller(first_panel + p, product.num_panels - 1)
            own = product.bias_or_zeros(panel)
            for r, row in enumerate(at_row):
                product.store(row, panel, self._sums.load((p * rows + r) * LANES) + own)

    def _add(self, weights: Pointer, num: Value, p: Value) -> None:
        code, rows = self._product.code, self._block.rows
        places = [(p * rows + r) * LANES for r in range(rows)]
        sums = [code.var(self._sums.load(place)) for place in places]
        for i in code.loop(0, num):
            for half, numbers in enumerate(code.unpaired((weights + i * LANES).load())):
                for r, total in enumerate(sums):
                    x = code.lanes(self._x[(2 * r + half) * WIDE + i])
                    total.set(code.fma(numbers, x, total))
        for place, total in zip(places, sums, strict=True):
            self._sums.store(place, total)


class Floats(Dots):
    """Of float32: a word is one input."""

    kind = "f32"

    def read(self, place: Pointer) -> Value:
        return place.of("f32").load()

    def spread(self, place: Pointer) -> Value:
        return self.code.lanes(place.of("f32")[0])

    def dot(self, word: Value, x: Value, total: Value) -> Value:
        return self.code.fma(word, x, total)


TILE = 16  # rows of a tile, and pairs of inputs of one
TILE_BYTES = 64  # of a row


class Tiles(Product):
    """Registers: the sums, then one or two tiles of rows, then panels."""

    step = TILE

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._sums = self.code.array("f32", TILE * LANES)
        self.tile_rows = self.code.smaller(self.num_rows, TILE)

    @contextlib.contextmanager
    def begun(self) -> Iterator[None]:
        with self.code.tiles(
            self.tile_rows, narrow=range(6)
        ):  # of the first six none holds weights
            yield

    def tile_at(self, row: Value) -> Value:
        """The last tile of rows ends at the last row: some are computed twice, to the same end."""
        return self.code.smaller(row, self.code.larger(self.num_rows - TILE, 0))

    def block(
        self,
        at_panel: list[Value],
        first_row: Value,
        rows: int,
        steps: Steps,
        scales: Sequence[Value] = (),
    ) -> None:
        """`scales`: of each panel."""
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
        """A tile of rows, times the scale, and the bias."""
        own = self.bias_or_zeros(panel)
        for row in self.code.loop(0, self.tile_rows):
            total = sums.load(row * LANES)
            scaled = total if scale is None else total * scale
            self.store(first_row + row, panel, scaled + own)


PRODUCTS = {"dots": Dots, "tiles": Tiles, "floats": Floats}


def product_of(unit: Unit, *arguments: Any) -> Product:
    return PRODUCTS[unit](*arguments)
