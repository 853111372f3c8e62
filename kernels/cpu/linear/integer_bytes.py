"""y = x (s · (q - z) + m)ᵀ + b with rows rounded to integers.

All processors without AMX multiply like this: a dot product of bytes does twice as much work as one of bfloat16, and a nibble
needs no lookup.

Weights have the layout of `integer.py`, rows the layout of `integer_rows.py`.

For every 32 inputs (16 if a scale covers 16) an output computes one exact sum of integers and adds it, times both scales,
to its total.  The two nibbles of a byte of weight are extracted in registers and never widened in memory:

    int4  four products of nibbles and bytes of x in a lane: VNNI adds them to 32 bits, AVX2 adds pairs to 16 bits, which
          hold eight; the factor is (q + 8), and (z + 8) times the sum of x is subtracted
    int5, int6  likewise with q + 16 and q + 32; the other bits of a number are shifted to their place in its byte; for AVX2
                16 bits hold four products
    fp4   likewise with q + 12, from a lookup table; for AVX2 16 bits hold four
    int8  a byte of weight, with w + 128 for VNNI; otherwise |w|, and x with the sign of w, so that 16 bits hold two products

Law: a row's result depends neither on the number of rows nor on the processor.  Sums of integers are exact, and the
groups fix the order of everything else (`kernels/reference/linear.py` has the same bits).

Four interleaved panels are one stream of memory.  For up to eight rows the panels of a group are computed one after the other.
Only the sums of one panel and the totals of all four are then in use, and the rows are loaded again for each panel as operands
of its products.  A fence keeps LLVM from sharing these loads among the panels, which spilled most registers.  More rows are
computed in blocks of eight and one panel; the last block of rows prefetches the weights that follow.

With thirty-two registers up to three rows of int8 read the stream in the order of its addresses.  They wait for memory, and a
prefetch takes one of the core's few places for missing cache lines, so they leave three of four lines to the processor's own
prefetcher.

Roofline: O I (bits / 8 + 2 / G) bytes, T O I products.
"""

from collections.abc import Sequence
from typing import Literal

from trouper.kernels.codegen.builder import KernelBuilder
from trouper.kernels.codegen.core import Pointer, Value, Var
from trouper.kernels.codegen.features import has_byte_dots, num_registers
from trouper.kernels.codegen.units import LANES, Kind
from trouper.kernels.cpu.linear.integer_panels import (
    AHEAD,
    LINE,
    BlockScales,
    PanelStream,
    PlainScales,
    Scales,
)
from trouper.kernels.cpu.linear.integer_rows import (
    LOW_SUM,
    MINUS_OFFSETS,
    RECORD,
    SCALE,
    SCALED_SUM,
    quantize_row,
    words_of_group,
)
from trouper.kernels.cpu.linear.products import AllRows, Block, Blocking, Rows, items_of_many
from trouper.kernels.cpu.linear.quantization import (
    BLOCK,
    E2M1,
    FIFTH,
    PANELS,
    STEP,
    WORDS_OF_CHUNK,
    ScaleKind,
)
from trouper.kernels.formats import CENTRES, OFFSETS, Format

# A block of many rows has the sums and totals of one panel in registers.
MANY = 8 if num_registers() == 32 else 4
_FEW = (1, 2, 3, 4, 5, 6, 8) if num_registers() == 32 else (1, 2, 3)
BYTE_BLOCKING = Blocking(few=tuple(Block(PANELS, rows) for rows in _FEW), many=Block(PANELS, MANY))
# Up to this many rows of int8 the four panels of a step are read in the order of memory.  Numbers of four bits take 1.1 to 1.25
# times as long in this way if one thread reads or others use the memory, and as long if two threads have it to themselves.
IN_ORDER = 3 if num_registers() == 32 else 0
# Steps to prefetch if every line is prefetched.  The first cache requests some two dozen lines at once: with 48 steps five
# rows took 1.03 to 1.1 times as long.
AHEAD_OF_MANY = 24
# Which weights a block prefetches: some or all lines of later steps, the same step of the next panels in memory, or none.
Ask = Literal["some", "each", "next", "none"]
EIGHTS = 0x0F0F0F0F  # the low nibbles of a word
SIGNS = -0x7F7F7F80  # the highest bit of each byte: 0x80808080
FIRST_BITS = 0x01010101  # the lowest bit of each byte
ONES = 0x00010001
# Stored zeros exceed -(z + 8) by this number.
ALL_BITS = 0x20


def scratch_bytes(num_rows: int, num_in: int, group: int) -> int:
    """Count the bytes of scratch memory that a thread needs: the integers and records of few rows, or nothing for many."""
    if num_rows > BYTE_BLOCKING.most_few:
        return 0
    words = num_in // group * words_of_group(group)
    return -(-num_rows * words * 4 // LINE) * LINE


def byte_matmul(
    code: KernelBuilder,
    fmt: Format,
    scale_kind: ScaleKind,
    has_zeros: bool,
    minima_kind: Kind | None,
    group: int,
) -> None:
    """Write the kernel with the arguments x, its stride in words, many rounded rows, q, s, z or 0, m or 0, b or 0, y, T, I / 2,
    O / 16, the stride of y / 16, pairs of a group, threads, scratch, scratch bytes of a thread.

    A work item is the panels of a range of rows.  Each thread rounds few rows for itself, which takes less time than
    another launch.  Many rows are rounded before the call.

    Args:
        group: number of inputs of x that share a scale.
    """
    x, stride, *arguments, scratch, bytes_each = code.arguments(17)
    work = ByteProduct(code, fmt, scale_kind, has_zeros, minima_kind, group, arguments)
    shape, num_rows, before = BYTE_BLOCKING, work.num_rows, 0
    with code.when(num_rows <= shape.most_few):
        work.round_rows(x, stride, scratch + code.thread() * bytes_each)
        for block in shape.few:
            with code.when((num_rows > before) & (num_rows <= block.rows)):
                for item in code.runs_of_items(work.num_threads):
                    work.block(item * block.panels, code.i64(0), block.rows)
            before = block.rows
    with code.when(num_rows > shape.most_few):
        work.take_rows(arguments[0])
        items = code.runs_of_items(work.num_threads)
        for panel, first, stop in items_of_many(code, shape.many, num_rows, work.num_panels, items):
            work.many_rows(panel, first, stop)


class ByteProduct:
    """Computes blocks of four panels and some rows with products of bytes. `arguments` are those of `byte_matmul`."""

    def __init__(
        self,
        code: KernelBuilder,
        fmt: Format,
        scale_kind: ScaleKind,
        has_zeros: bool,
        minima_kind: Kind | None,
        group: int,
        arguments: Sequence[Value],
    ) -> None:
        x, q, s, z, m, bias, y, *sizes = arguments
        self.num_rows, self._pairs, self.num_panels, self._y_panels, *sizes = sizes
        self._length, self.num_threads = sizes
        # A call with few rows takes runs of work items; see `PanelStream`.
        self.num_between = code.i64(0)
        self._code, self._group = code, group // 2
        self._fmt: Format = fmt
        # Words of four bits in a chunk, which a word of other bits follows if there are several.
        self._chunk = WORDS_OF_CHUNK.get(fmt, 1)
        self._kind: ScaleKind = scale_kind
        self._has_zeros = has_zeros
        self._minima_kind: Kind | None = minima_kind
        self.take_rows(x)
        self._y = code.pointer(y, "bf16")
        self.rows: Rows = AllRows(code, self.num_rows)
        self.take_weight(q, s, z, m, bias)

    def take_weight(self, q: Value, s: Value, z: Value, m: Value, bias: Value) -> None:
        """Use the weight at these addresses from now on."""
        code = self._code
        kind: Kind = "i8" if self._kind == "blocks" else self._kind
        self._q, self._scales = code.pointer(q, "i32"), code.pointer(s, kind)
        # The panel whose weights the last block of rows has prefetched.
        self._next_panel = code.var(-1)
        self._bias = bias
        self._zeros = code.pointer(z, "i32") if self._has_zeros else None
        self._minima = None
        if self._minima_kind is not None and self._kind != "blocks":
            self._minima = code.pointer(m, self._minima_kind)

    def take_rows(self, x: Value) -> None:
        """Use the rounded rows at this address from now on: every following block multiplies these rows."""
        self._x = self._code.pointer(x, "i32")

    def round_rows(self, x: Value, stride: Value, target: Value) -> None:
        """Round all rows of x to `target`, and use them from now on.

        With few rows each thread rounds them itself, which saves a launch.
        """
        code = self._code
        self.take_rows(target)
        for row in code.loop(0, self.num_rows):
            source = code.pointer(x, "i32") + row * stride
            quantize_row(code, self._fmt, 2 * self._group, source, self._row(row), self._pairs)

    def _row(self, row: Value) -> Pointer:
        return self._x + row * (self._pairs // self._group * words_of_group(2 * self._group))

    def block(self, first_panel: Value, first_row: Value, rows: int) -> None:
        """Compute four panels of a block of few rows.  Indices beyond the last row or panel repeat the last one."""
        code = self._code
        at_panel = [code.minimum(first_panel + p, self.num_panels - 1) for p in range(PANELS)]
        has_order = self._fmt == "int8" and self._kind != "blocks" and rows <= IN_ORDER
        self._block(at_panel, first_row, rows, "some" if has_order else "each")

    def many_rows(self, first_panel: Value, first_row: Value, stop: Value) -> None:
        """Compute four panels of a range of rows, one panel of a block of rows after the other.

        The first block of rows reads the panels from memory, the others from the second cache.  The last one prefetches the
        four panels that follow in memory, at the rate at which it multiplies.
        """
        code = self._code
        with code.when((first_panel - self._next_panel) * (first_panel - self._next_panel) > 0):
            self._fetch(first_panel)
        self._next_panel.set(first_panel + PANELS)
        last = code.minimum(first_panel + PANELS, self.num_panels)
        for row in code.loop(first_row, stop, MANY):
            is_last, is_short = stop - row <= MANY, stop - row <= MANY // 2
            for panel in code.loop(first_panel, last):
                with code.when(is_short):
                    self._block([panel], row, MANY // 2, "next")
                with code.when(is_last & is_short.equals(0)):
                    self._block([panel], row, MANY, "next")
                with code.when(is_last.equals(0)):
                    self._block([panel], row, MANY, "none")

    def _fetch(self, first_panel: Value) -> None:
        """Prefetch four panels at once, as the first ones of a run of work items."""
        for word in self._code.loop(0, self._num_words):
            own = self._stream(self._q, first_panel, self._words, self._num_words)
            own.ask_entry(word, PANELS)

    @property
    def _num_words(self) -> Value:
        """The stored words of a panel's outputs; for int8 pairs of words."""
        num_words = self._pairs // STEP
        return num_words if self._chunk == 1 else num_words // self._chunk * (self._chunk + 1)

    def _block(self, at_panel: Sequence[Value], first_row: Value, rows: int, ask: Ask) -> None:
        code = self._code
        at_row = [self.rows.row(first_row + r) for r in range(rows)]
        xs = [self._row(self.rows.x_row(row)) for row in at_row]
        weights = [self._stream(self._q, p, self._words, self._num_words) for p in at_panel]
        # A span is a group of the weights, or a block of their scales.
        length = BLOCK // 2 if self._kind == "blocks" else self._length
        num_spans, per_span = self._pairs // length, length // self._group
        scales = [self._scales_of(p, num_spans, asks=not i) for i, p in enumerate(at_panel)]
        zeros = [self._stream(self._zeros, p, LANES, num_spans) for p in at_panel if self._zeros]
        totals = [[code.var(code.f32x16(0.0)) for _ in range(rows)] for _ in at_panel]
        places = range(len(at_panel))
        parts = [places] if ask == "some" else [(p,) for p in places]
        size = words_of_group(2 * self._group)
        for g in code.loop(0, num_spans):
            for each in (*scales, *zeros):
                each.enter(g)
            for k in code.loop(g * per_span, (g + 1) * per_span):
                own = [x + k * size for x in xs]
                records = [x + (size - RECORD) for x in own]
                for part in parts:
                    zero = [zeros[p].at(g).load() for p in part if zeros]
                    sums = self._sums([weights[p] for p in part], own, k, zero, ask)
                    for p, of_panel in zip(part, sums, strict=True):
                        self._add_group(totals[p], of_panel, records, *scales[p].at(g, k))
                    if len(parts) > 1:
                        code.fence()
        for panel, of_panel in zip(at_panel, totals, strict=True):
            self._finish(of_panel, panel, at_row)

    def _scales_of(self, panel: Value, num_spans: Value, *, asks: bool) -> Scales:
        centre = CENTRES[self._fmt]
        if self._kind == "blocks":
            arguments = self._code, self._scales, panel, num_spans, 2 * self._group, centre
            has_minima = self._minima_kind is not None
            return BlockScales(*arguments, has_minima=has_minima, asks=asks)
        minima = self._minima and self._stream(self._minima, panel, LANES, num_spans)
        scales = self._stream(self._scales, panel, LANES, num_spans)
        return PlainScales(self._code, scales, minima, self._minima_kind, centre)

    def _add_group(
        self,
        totals: Sequence[Var],
        sums: Sequence[Value],
        records: Sequence[Pointer],
        scale: Value,
        least: Value | None,
    ) -> None:
        """Add each row's sums over a group to the totals of a panel, times both scales."""
        code = self._code
        for total, part, record in zip(totals, sums, records, strict=True):
            factor = scale * record.of("f32")[SCALE]
            total.set(code.fma(code.to_f32x16(part), factor, total))
            if least is not None:
                x_sum = code.f32x16(record.of("f32")[SCALED_SUM])
                total.set(code.fma(x_sum, least, total))

    @property
    def _words(self) -> int:
        """Words of a panel before the next panel."""
        return LANES * 2 if self._fmt == "int8" else LANES

    def _stream(self, start: Pointer, panel: Value, length: int, count: Value) -> PanelStream:
        return PanelStream(start, panel, length, count, self.num_between)

    def _sums(
        self,
        weights: Sequence[PanelStream],
        xs: Sequence[Pointer],
        group: Value,
        zeros: Sequence[Value],
        ask: Ask,
    ) -> list[list[Value]]:
        """Return the exact sums of some panels over a group of x, for each row.

        Args:
            zeros: the stored zeros of each panel, or nothing.
        """
        code = self._code
        starts = [
            [self._correction(x + self._group // 2, zeros[p] if zeros else None) for x in xs]
            for p in range(len(weights))
        ]
        # For AVX2 the sums of a group of int4 fit in 16 bits.
        is_narrow = self._fmt == "int4" and not has_byte_dots()
        sums = [
            [code.var(code.i16x32(0) if is_narrow else start) for start in of_panel]
            for of_panel in starts
        ]
        chunks = self._group // STEP // self._chunk
        for number in range(chunks):
            self._add_chunk(sums, weights, xs, number, group * chunks + number, ask)
        if not is_narrow:
            return [[Value(code, total.ir) for total in of_panel] for of_panel in sums]
        ones = code.i32x16(ONES)
        return [
            [code.word_pairs(t, ones) + start for t, start in zip(*of_panel, strict=True)]
            for of_panel in zip(sums, starts, strict=True)
        ]

    def _add_chunk(
        self,
        sums: Sequence[Sequence[Var]],
        weights: Sequence[PanelStream],
        xs: Sequence[Pointer],
        number: int,
        chunk: Value,
        ask: Ask,
    ) -> None:
        """Add the products of a chunk of words and the rows to the sums of each panel and row.

        Args:
            number: the chunk's number in its group.
        """
        code, num_words = self._code, self._chunk
        stored = num_words + (num_words > 1)
        first = chunk * stored
        for j in range(stored):
            for p, weight in enumerate(weights):
                self._ask(weight, first, p, ask, more=j)
        others = [weight.at(first, num_words).load() for weight in weights if num_words > 1]
        for j in range(num_words):
            x = [
                [code.i32x16(row[(number * num_words + j) * 2 + i]) for i in range(2)] for row in xs
            ]
            for p, weight in enumerate(weights):
                halves = self._halves(weight.at(first, j))
                if others:
                    halves = [
                        half | self._other_bits(others[p], 2 * j + i)
                        for i, half in enumerate(halves)
                    ]
                for total, own in zip(sums[p], x, strict=True):
                    self._add(total, halves, own)

    def _other_bits(self, word: Value, field: int) -> Value:
        """Return the bits of a field of each byte, moved to the fifth bit of the byte."""
        width = FIFTH // self._chunk
        shift = FIFTH - width * field
        moved = word << shift if shift > 0 else word >> -shift
        return moved & (((1 << width) - 1) << FIFTH) * FIRST_BITS

    def _ask(
        self, weight: PanelStream, word: Value, place: int, ask: Ask, *, more: int = 0
    ) -> None:
        """Prefetch a later word of a panel.

        Args:
            place: number of the panel among those read together.
            more: what is added to `word`.
        """
        if ask == "each":
            weight.ask(word, AHEAD_OF_MANY, more)
        elif ask == "next":
            weight.ask_next(word, more)
        elif ask == "some" and place == 0:
            weight.ask(word, AHEAD, more)

    def _halves(self, place: Pointer) -> list[Value]:
        """Return the bytes of both halves of a step: plus the offset of their format, except int8 without VNNI."""
        code = self._code
        if self._fmt == "int8":
            halves = [place.load(), place.load(LANES)]
            return [half ^ SIGNS for half in halves] if has_byte_dots() else halves
        word = place.load()
        halves = [word & EIGHTS, word >> 4 & EIGHTS]
        if self._fmt != "fp4":
            return halves
        return [code.lookup_bytes([x + OFFSETS["fp4"] for x in E2M1], half) for half in halves]

    def _add(self, total: Var, halves: Sequence[Value], xs: Sequence[Value]) -> None:
        """Add the products of one step."""
        code = self._code
        if has_byte_dots():
            for half, x in zip(halves, xs, strict=True):
                total.set(code.byte_dot(total, half, x))
            return
        if self._fmt == "int8":
            for half, x in zip(halves, xs, strict=True):
                pairs = code.byte_pairs(*code.without_sign(half, x))
                total.set(total + code.word_pairs(pairs, code.i32x16(ONES)))
            return
        first, second = (code.byte_pairs(half, x) for half, x in zip(halves, xs, strict=True))
        if self._fmt == "int4":
            total.set(total + first + second)
        else:
            total.set(total + code.word_pairs(first + second, code.i32x16(ONES)))

    def _correction(self, record: Pointer, zero: Value | None) -> Value:
        """Return the correction for the constant in the bytes, times x: the offset of the format, or 8 + z."""
        code = self._code
        if self._fmt == "int8" and not has_byte_dots():
            return code.i32x16(0)
        if zero is None:
            return code.i32x16(record[MINUS_OFFSETS])
        own = code.as_i32x16(code.as_i16x32(zero) - ALL_BITS)
        return code.word_pairs(own, code.i32x16(record[LOW_SUM]))

    def _finish(self, totals: list[Var], panel: Value, at_row: list[Value]) -> None:
        code = self._code
        with code.when(self._bias > 0):
            own = code.pointer(self._bias, "bf16").load(panel * LANES)
            for total in totals:
                total.set(total + own)
        for row, total in zip(at_row, totals, strict=True):
            self._y.store((row * self._y_panels + panel) * LANES, total)
