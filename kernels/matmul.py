"""y = x Wᵀ + b of bfloat16, W packed so that any number of rows reads it in order.

    x [T, I]                tokens × inputs, rows may be strided; I a multiple of 32
    W [O / 16, I / 2, 16]   words: panels of sixteen outputs, pairs of inputs; O a multiple of 16
    b [O]                   or absent
    y [T, O]

A word of W times a pair of x in all lanes is one dot instruction for sixteen outputs and two inputs, and
no sum across lanes is ever needed.  A tile is `panels` × `rows` of accumulators in registers; up to
twelve rows are one tile, so that each panel is read once, and for more rows the panels of a piece stay in
the second cache.  Rows whose stride is a multiple of 4 KiB fall into one set of the first cache:
activations are padded (`native_ops.py`).

Law: an output is one accumulator over the inputs in their order, whatever the tile: a row's result does
not depend on the number of rows.

Roofline: bytes = e (O I + T I + T O), FLOPs = 2 T O I; bound by memory below about 10 tokens.
Measured, two EPYC cores that read 41 GB/s, O = 32000, I = 1024: T = 1 41 GB/s (oneDNN's packed weights:
29), T = 4 40 (32); one core: T = 12 16 GB/s = 195 GFLOP/s (146), T = 1024 227 GFLOP/s (221).
"""

from collections.abc import Iterator

from trouper.kernels.simd import LANES, Code, Pointer, Value

Pairs = tuple[Value, list[Value]]  # a pair of inputs, its words in each panel

# panels, rows, words asked for ahead; the least that holds a step's rows
FEW = ((4, 1, 0), (4, 2, 0), (4, 4, 0), (4, 6, 0), (3, 8, 1024), (2, 12, 1024))
MANY = (3, 8, 1024)
MOST_FEW = 12
BLOCK = 192  # rows of a piece, of many


def num_pieces(num_rows: int, num_out: int, few: tuple[tuple[int, int, int], ...] = FEW) -> int:
    panels = next((panels for panels, rows, _ in few if num_rows <= rows), MANY[0])
    return -(-num_out // (LANES * panels)) * -(-num_rows // BLOCK)


def pack(code: Code) -> None:
    """The plain matrix [O, I], its packed form, I / 2.  A piece is a panel."""
    plain, packed, pairs = code.arguments(3)
    for panel in code.pieces():
        rows = code.pointer(plain, "i32") + panel * LANES * pairs
        words = code.pointer(packed, "i32") + panel * LANES * pairs
        for i in code.loop(0, pairs, LANES):
            for j, column in enumerate(
                code.transposed([rows.load(pairs * r + i) for r in range(LANES)])
            ):
                words.store((i + j) * LANES, column)


def matmul(code: Code) -> None:
    """x, its stride in words, W, b or 0, y, T, I / 2, O / 16.  A piece is panels of a block of rows."""
    x, stride, weight, *others = code.arguments(8)
    tiles = Tiles(code, x, stride, *others)
    words, num_rows, before = code.pointer(weight, "i32"), tiles.num_rows, 0
    for panels, rows, ahead in FEW:
        with code.when((num_rows > before) & (num_rows <= rows)):
            for piece in code.pieces():
                at_panel = tiles.panels_from(piece * panels, panels)
                weights = [words + p * tiles.pairs * LANES for p in at_panel]
                tiles.tile(at_panel, code.i64(0), rows, tiles.plain(weights, ahead))
        before = rows
    with code.when(num_rows > MOST_FEW):
        panels, rows, ahead = MANY
        blocks = (num_rows + (BLOCK - 1)) // BLOCK
        for piece in code.pieces():
            first = piece % blocks * BLOCK
            stop = code.smaller(first + BLOCK, num_rows)
            at_panel = tiles.panels_from(piece // blocks * panels, panels)
            weights = [words + p * tiles.pairs * LANES for p in at_panel]
            for row in code.loop(first, stop, rows):
                tiles.tile(at_panel, row, rows, tiles.plain(weights, ahead))


class Tiles:
    """Products of some panels and rows, whatever form the panels have in memory."""

    def __init__(
        self,
        code: Code,
        x: Value,
        stride: Value,
        bias: Value,
        y: Value,
        num_rows: Value,
        pairs: Value,
        num_panels: Value,
    ) -> None:
        self.code, self.bias, self.stride = code, bias, stride
        self.x, self.y = code.pointer(x, "i32"), code.pointer(y, "bf16")
        self.num_rows, self.pairs, self.num_panels = num_rows, pairs, num_panels

    def panels_from(self, first: Value, panels: int) -> list[Value]:
        """Beyond the last, the last again."""
        return [self.code.smaller(first + p, self.num_panels - 1) for p in range(panels)]

    def plain(self, weights: list[Pointer], ahead: int) -> Iterator[Pairs]:
        """The words of packed panels."""
        for i in self.code.loop(0, self.pairs):
            words = [weight.load(i * LANES) for weight in weights]
            if ahead:
                for weight in weights:
                    weight.prefetch(i * LANES + ahead)
            yield i, words

    def tile(
        self, at_panel: list[Value], first_row: Value, rows: int, words_of: Iterator[Pairs]
    ) -> None:
        """Beyond the last row, the last again."""
        code = self.code
        at_row = [code.smaller(first_row + r, self.num_rows - 1) for r in range(rows)]
        xs = [self.x + r * self.stride for r in at_row]
        sums = [[code.var(code.lanes(0.0)) for _ in range(rows)] for _ in at_panel]
        for i, words in words_of:
            for r, row in enumerate(xs):
                both = code.words(row[i])
                for p, word in enumerate(words):
                    sums[p][r].set(code.dot(word, both, sums[p][r]))
        for p, panel in enumerate(at_panel):
            with code.when(self.bias > 0):
                own = code.pointer(self.bias, "bf16").load(panel * LANES)
                for total in sums[p]:
                    total.set(total + own)
            for r in range(rows):
                self.y.store((at_row[r] * self.num_panels + panel) * LANES, sums[p][r])
