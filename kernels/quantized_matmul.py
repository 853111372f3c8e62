"""y = x (s · q)ᵀ + b: bfloat16 times integers of 4 or 8 bits with a scale for each group of inputs.

    x [T, I]                  tokens × inputs, rows may be strided
    q [O / 16, I / P, 16]     words of P = 8 (int4) or 4 (int8) inputs, panels as in `matmul.py`
    s [O / 16, I / G, 16]     bfloat16; G = 32 inputs share a scale of int4, all of an output one of int8
    b [O]                     or absent
    y [T, O]

Integers become pairs of bfloat16 in registers, exactly, and go into the same dot instruction:

    int4  q + 8 in the mantissa of 128: 128 + (q + 8), by a shift, an and, an or; what that adds to a
          group's sum, 136 · Σ x, is what the sum begins with, negative, made once (`group_sums`)
    int8  converted to float32, whose upper half it fits

Law: as in `matmul.py`, a row's result does not depend on the number of rows.

Roofline: bytes = O I (bits / 8 + 2 / G), FLOPs = 2 T O I.
"""

from trouper.kernels.quantization import PER_WORD, Format
from trouper.kernels.simd import LANES, Code, Pointer, Value, Var

MAGIC = 0x43004300  # two bfloat16 of 128, whose last seven bits count ones
OFFSET = 136.0
FEW = ((4, 1), (4, 2), (4, 4))  # panels, rows
MANY = (2, 8)
MOST_FEW = 4
BLOCK = 192
ONES = 0x3F803F80


def num_pieces(num_rows: int, num_out: int) -> int:
    panels = next((panels for panels, rows in FEW if num_rows <= rows), MANY[0])
    return -(-num_out // (LANES * panels)) * -(-num_rows // BLOCK)


def group_sums(code: Code) -> None:
    """x, its stride in words, sums [T, I / G] float32 of -136 · x, words of a group, I / G.  A piece is a row."""
    x, stride, sums, length, num_groups = code.arguments(5)
    for row in code.pieces():
        words = code.pointer(x, "i32") + row * stride
        mine = code.pointer(sums, "f32") + row * num_groups
        for g in code.loop(0, num_groups):
            total = code.var(code.lanes(0.0))
            for i in code.loop(0, length, LANES):
                total.set(code.dot(words.load(g * length + i), code.words(ONES), total))
            mine[g] = code.sum_of(total) * -OFFSET


def quantized_matmul(code: Code, fmt: Format) -> None:
    """x, its stride in words, q, s, b or 0, sums of x, y, T, I / 2, O / 16, pairs of a group.

    A piece is panels of a block of rows.
    """
    work = _Work(code, fmt)
    num_rows, before = work.num_rows, 0
    for panels, rows in FEW:
        with code.when((num_rows > before) & (num_rows <= rows)):
            for piece in code.pieces():
                work.tile(piece * panels, panels, code.i64(0), rows)
        before = rows
    with code.when(num_rows > MOST_FEW):
        panels, rows = MANY
        blocks = (num_rows + (BLOCK - 1)) // BLOCK
        for piece in code.pieces():
            first = piece % blocks * BLOCK
            stop = code.smaller(first + BLOCK, num_rows)
            for row in code.loop(first, stop, rows):
                work.tile(piece // blocks * panels, panels, row, rows)


class _Work:
    def __init__(self, code: Code, fmt: Format) -> None:
        x, stride, q, s, bias, sums, y, num_rows, pairs, num_panels, length = code.arguments(11)
        self.code, self.fmt, self.bias, self.stride = code, fmt, bias, stride
        self.x, self.q = code.pointer(x, "i32"), code.pointer(q, "i32")
        self.scales, self.y = code.pointer(s, "bf16"), code.pointer(y, "bf16")
        self.sums = code.pointer(sums, "f32")
        self.num_rows, self.pairs, self.num_panels = num_rows, pairs, num_panels
        self.length = length

    def tile(self, first_panel: Value, panels: int, first_row: Value, rows: int) -> None:
        """Beyond the last row or panel, the last again."""
        code, per_load = self.code, PER_WORD[self.fmt] // 2
        num_words, num_groups = self.pairs // per_load, self.pairs // self.length
        at_row = [code.smaller(first_row + r, self.num_rows - 1) for r in range(rows)]
        at_panel = [code.smaller(first_panel + p, self.num_panels - 1) for p in range(panels)]
        xs = [self.x + r * self.stride for r in at_row]
        numbers = [self.q + p * num_words * LANES for p in at_panel]
        scales = [self.scales + p * num_groups * LANES for p in at_panel]
        totals = [[code.var(code.lanes(0.0)) for _ in range(rows)] for _ in range(panels)]
        words_of_group = self.length // per_load
        for g in code.loop(0, num_groups):
            starts = [code.lanes(0.0)] * rows
            if self.fmt == "int4":
                starts = [code.lanes(self.sums[r * num_groups + g]) for r in at_row]
            sums = [[code.var(start) for start in starts] for _ in range(panels)]
            first = g * words_of_group
            for i in code.loop(first, first + words_of_group):
                self._add(sums, [p.load(i * LANES) for p in numbers], xs, i * per_load)
            for p in range(panels):
                scale = scales[p].load(g * LANES)
                for total, part in zip(totals[p], sums[p], strict=True):
                    total.set(code.fma(part, scale, total))
        for p in range(panels):
            with code.when(self.bias > 0):
                own = code.pointer(self.bias, "bf16").load(at_panel[p] * LANES)
                for total in totals[p]:
                    total.set(total + own)
            for r in range(rows):
                self.y.store((at_row[r] * self.num_panels + at_panel[p]) * LANES, totals[p][r])

    def _add(
        self, sums: list[list[Var]], words: list[Value], xs: list[Pointer], first: Value
    ) -> None:
        """sums[panel][row] += the integers of a word · the row's inputs."""
        code = self.code
        for j in range(PER_WORD[self.fmt] // 2):
            pairs = [self._pair(word, j) for word in words]
            for r, row in enumerate(xs):
                both = code.words(row[first + j])
                for p, pair in enumerate(pairs):
                    sums[p][r].set(code.dot(pair, both, sums[p][r]))

    def _pair(self, word: Value, j: int) -> Value:
        """Inputs 2 j and 2 j + 1 of a word of integers, as bfloat16."""
        code = self.code
        if self.fmt == "int4":
            return ((word >> 4 * j) & 0x000F000F) | MAGIC
        low = code.bits(word << (24 - 16 * j) >> 24)
        return code.halves(low, code.bits(word << (16 - 16 * j) >> 24))
