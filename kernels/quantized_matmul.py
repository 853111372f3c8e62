"""y = x (s · (q - z))ᵀ + b: bfloat16 times integers of 4 or 8 bits with a scale for each group of inputs.

    x [T, I]                  tokens × inputs, rows may be strided
    q [O / 64, I / 8, 4, 16]        int4: words of eight inputs
      [O / 64, I / 8, 4, 4, 16, 2]  int8: bytes of four pairs of inputs
    s [O / 64, I / G, 4, 16]        bfloat16 or float32; G, a multiple of 32, inputs of an output share a scale
    z [O / 64, I / G, 4, 16]        words of 32 - z twice, of int4; or absent
    b [O]                           or absent
    y [T, O]

Sixteen outputs are a panel, and four panels lie side by side, O rounded up, so that what one row reads
is one stream: of panels one after the other a third is over before anybody has asked ahead.

Integers become pairs of bfloat16, exactly, and go into the same dot instruction:

    int4  by a lookup of the lowest five bits of each half word; without z the fifth is the next
          integer's, and the table holds everything twice
    int8  converted to float32, and those to bfloat16

in registers; where there are more rows than a tile has, the first tile keeps the pairs for the others in
memory of the thread, which stays in its second cache.

Law: as in `matmul.py`, a row's result does not depend on the number of rows: the sum of a group begins
at 0, follows its inputs, and goes into the total times the scale, whatever the tile.

Roofline: bytes = O I (bits / 8 + 2 / G), FLOPs = 2 T O I.
"""

from collections.abc import Sequence

from trouper.kernels.quantization import PANELS, STEP, Format
from trouper.kernels.simd import LANES, Code, Kind, Pointer, Value, Var

# panels, rows: accumulators and totals fill the registers of int4; int8 has one group, so no totals
FEW = {"int4": ((4, 1), (4, 2), (3, 4), (2, 6)), "int8": ((4, 1), (4, 2), (4, 4))}
MANY = (3, 4)  # panels, rows
BLOCK = 192
AHEAD = 48  # steps asked for, into the second cache
GROUPS_AHEAD = 8  # of scales
LINE = 64  # bytes
NIBBLES = [float(i % 16 - 8) for i in range(32)]
DIFFERENCES = [float((i + 16) % 32 - 16) for i in range(32)]


def num_pieces(num_rows: int, num_out: int, fmt: Format) -> int:
    fitting = (panels for panels, rows in FEW[fmt] if num_rows <= rows)
    panels = next(fitting, MANY[0])
    return -(-num_out // (LANES * panels)) * -(-num_rows // BLOCK)


def scratch_bytes(num_in: int) -> int:
    """Of a thread, for more rows than few."""
    return MANY[0] * num_in * LANES * 2


def quantized_matmul(code: Code, fmt: Format, scale_kind: Kind, has_zeros: bool) -> None:
    """x, its stride in words, q, s, z or 0, b or 0, y, T, I / 2, O / 16, pairs of a group, threads,
    scratch, its bytes a thread.

    A piece is panels of a block of rows.
    """
    work = _Work(code, fmt, scale_kind, has_zeros)
    num_rows, before = work.num_rows, 0
    for panels, rows in FEW[fmt]:
        with code.when((num_rows > before) & (num_rows <= rows)):
            for piece in code.pieces():
                at_panel = work.panels(piece * panels, panels)
                work.tile(at_panel, [work.packed(p) for p in at_panel], code.i64(0), rows)
        before = rows
    with code.when(num_rows > before):
        panels, rows = MANY
        blocks = (num_rows + (BLOCK - 1)) // BLOCK
        mine = work.scratch_of(code.thread())
        kept = [_Kept(mine + p * work.pairs * LANES) for p in range(panels)]
        for piece in code.pieces():
            at_panel = work.panels(piece // blocks * panels, panels)
            first = piece % blocks * BLOCK
            keeping = [_Keeping(work.packed(p), k) for p, k in zip(at_panel, kept, strict=True)]
            work.tile(at_panel, keeping, first, rows)
            stop = code.smaller(first + BLOCK, num_rows)
            for row in code.loop(first + rows, stop, rows):
                work.tile(at_panel, kept, row, rows)


class _Work:
    def __init__(self, code: Code, fmt: Format, scale_kind: Kind, has_zeros: bool) -> None:
        x, stride, q, s, z, bias, y, *sizes, scratch, bytes_each = code.arguments(14)
        self.num_rows, self.pairs, self.num_panels, self.length, self.num_threads = sizes
        self.num_groups = self.pairs // self.length
        self.code, self.fmt, self.bias, self.stride = code, fmt, bias, stride
        self.x, self.y = code.pointer(x, "i32"), code.pointer(y, "bf16")
        self.q, self.scales = code.pointer(q, "i8"), code.pointer(s, scale_kind)
        self.zeros = code.pointer(z, "i32") if has_zeros else None
        self._scratch, self._bytes_each = scratch, bytes_each

    def scratch_of(self, thread: Value) -> Pointer:
        return self.code.pointer(self._scratch + thread * self._bytes_each, "i32")

    def panels(self, first: Value, num: int) -> list[Value]:
        """Beyond the last, the last again."""
        return [self.code.smaller(first + p, self.num_panels - 1) for p in range(num)]

    def packed(self, panel: Value) -> "_Packed":
        steps = self.pairs // STEP
        q = _Stream(self.q.of("i32"), panel, LANES * (1 if self.fmt == "int4" else 2), steps, self)
        if self.fmt == "int8":
            return _Bytes(self.code, q)
        zeros = self.zeros and _Stream(self.zeros, panel, LANES, self.num_groups, self)
        return _Nibbles(self.code, q, zeros)

    def tile(
        self,
        at_panel: list[Value],
        weights: "Sequence[_Packed | _Keeping | _Kept]",
        first_row: Value,
        rows: int,
    ) -> None:
        """Beyond the last row, the last again."""
        code, panels, num_groups = self.code, len(at_panel), self.num_groups
        at_row = [code.smaller(first_row + r, self.num_rows - 1) for r in range(rows)]
        xs = [self.x + r * self.stride for r in at_row]
        scales = [_Stream(self.scales, p, LANES, num_groups, self) for p in at_panel]
        totals = [[code.var(code.lanes(0.0)) for _ in range(rows)] for _ in range(panels)]
        steps = self.length // STEP
        for g in code.loop(0, num_groups):
            sums = [[code.var(code.lanes(0.0)) for _ in range(rows)] for _ in range(panels)]
            for stream in (*scales, *weights):
                stream.enter(g)
            for i in code.loop(g * steps, g * steps + steps):
                pairs = [weight.pairs(i) for weight in weights]
                for j in range(STEP):
                    for r, row in enumerate(xs):
                        both = code.words(row[i * STEP + j])
                        for p in range(panels):
                            sums[p][r].set(code.dot(pairs[p][j], both, sums[p][r]))
            for p in range(panels):
                scale = scales[p].at(g).load()
                for total, part in zip(totals[p], sums[p], strict=True):
                    total.set(code.fma(part, scale, total))
        for panel, of_panel in zip(at_panel, totals, strict=True):
            self._finish(of_panel, panel, at_row)

    def _finish(self, totals: list[Var], panel: Value, at_row: list[Value]) -> None:
        with self.code.when(self.bias > 0):
            own = self.code.pointer(self.bias, "bf16").load(panel * LANES)
            for total in totals:
                total.set(total + own)
        for row, total in zip(at_row, totals, strict=True):
            self.y.store((row * self.num_panels + panel) * LANES, total)


class _Stream:
    """What a panel has for each step or group, side by side with the other panels'."""

    def __init__(
        self, start: Pointer, panel: Value, length: int, count: Value, work: _Work
    ) -> None:
        self._own = start + (panel // PANELS * (count * PANELS) + panel % PANELS) * length
        self._stride, self._count, self._work = length * PANELS, count, work

    def at(self, i: Value) -> Pointer:
        return self._own + i * self._stride

    def enter(self, group: Value) -> None:
        """Of scales."""
        self.ask(group, GROUPS_AHEAD)

    def ask(self, i: Value, ahead: int) -> None:
        """For a later one, or for one of the panels that this thread will probably take next."""
        work, later = self._work, i + ahead
        beyond = later + (work.num_threads - 1) * self._count
        there = self.at(work.code.select(later < self._count, later, beyond))
        for line in range(0, self._stride // PANELS, LINE // 4):
            there.prefetch(line)


class _Nibbles:
    """A panel of int4, read as pairs of bfloat16."""

    def __init__(self, code: Code, words: _Stream, zeros: _Stream | None) -> None:
        self._code, self._words, self._zeros = code, words, zeros
        self._zero: Value | None = None

    def enter(self, group: Value) -> None:
        self._zero = self._zeros and self._zeros.at(group).load()

    def pairs(self, i: Value) -> list[Value]:
        """Of step i."""
        word = self._words.at(i).load()
        self._words.ask(i, AHEAD)
        shifted = [word >> 4 * j for j in range(STEP)]
        if self._zero is None:
            return [self._code.lookup(NIBBLES, index) for index in shifted]
        zero = self._zero
        return [self._code.lookup(DIFFERENCES, (x & 0x000F000F) + zero) for x in shifted]


class _Bytes:
    """A panel of int8, likewise."""

    def __init__(self, code: Code, words: _Stream) -> None:
        self._code, self._words = code, words

    def enter(self, group: Value) -> None:
        """One group has no zeros."""

    def pairs(self, i: Value) -> list[Value]:
        code = self._code
        self._words.ask(i, AHEAD)
        here = self._words.at(i).of("i8")
        numbers = [code.numbers(here.load(half * LANES)) for half in range(2 * STEP)]
        return [code.packed(*numbers[j : j + 2]) for j in range(0, 2 * STEP, 2)]


_Packed = _Nibbles | _Bytes


class _Kept:
    """A panel that is pairs of bfloat16 already."""

    def __init__(self, words: Pointer) -> None:
        self._words = words

    def enter(self, group: Value) -> None:
        """Zeros were taken off."""

    def pairs(self, i: Value) -> list[Value]:
        return [self._words.load((i * STEP + j) * LANES) for j in range(STEP)]

    def keep(self, i: Value, pairs: list[Value]) -> None:
        for j, pair in enumerate(pairs):
            self._words.store((i * STEP + j) * LANES, pair)


class _Keeping:
    """A packed panel that is kept as it is read."""

    def __init__(self, packed: _Packed, kept: _Kept) -> None:
        self._packed, self._kept = packed, kept

    def enter(self, group: Value) -> None:
        self._packed.enter(group)

    def pairs(self, i: Value) -> list[Value]:
        pairs = self._packed.pairs(i)
        self._kept.keep(i, pairs)
        return pairs
