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

Integers become pairs of bfloat16, exactly, and go into the units of `matmul.py`:

    int4  by a lookup of the lowest five bits of each half word; without z the fifth is the next
          integer's, and the table holds everything twice
    int8  converted to float32, and those to bfloat16

`dots` takes them from registers, `tiles` from memory in the first cache.  Of more rows than a block has
the first block keeps the pairs for the others in memory of the thread, which stays in its second cache.

Law: as in `matmul.py`, a row's result does not depend on the number of rows: a sum begins at 0, follows
its inputs, and goes into the total times the scale, whatever the block.  A sum is that of a group; by
tiles of int4 that of 32 inputs, one product, whatever the group.

Roofline: bytes = O I (bits / 8 + 2 / G), FLOPs = 2 T O I.
Measured, two Xeon cores with AMX, O = 6144, I = 1024, weights in memory, by tiles (dots): int4 T = 1 19.2 GB/s
(21.2), T = 16 0.78 TFLOP/s (0.21), T = 512 1.3 (0.24); int8 T = 1 24.1 GB/s (22.7), T = 16 0.65 TFLOP/s (0.19),
T = 512 2.3 (0.24).
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from trouper.kernels.codegen.builder import Code, Pointer, Value, Var
from trouper.kernels.codegen.units import LANES, Kind
from trouper.kernels.cpu.linear.dense import (
    TILE,
    TILE_BYTES,
    Block,
    Shape,
    Steps,
    Tiles,
    Unit,
    pieces_of_many,
)
from trouper.kernels.cpu.linear.quantization import PANELS, STEP, Format

# of dots accumulators and totals fill the registers of int4; int8 has one group, so no totals
SHAPES: dict[tuple[Unit, Format], Shape] = {
    ("dots", "int4"): Shape(
        few=(Block(4, 1), Block(4, 2), Block(3, 4), Block(2, 6)), many=Block(3, 4)
    ),
    ("dots", "int8"): Shape(few=(Block(4, 1), Block(4, 2), Block(4, 4)), many=Block(3, 4)),
    ("tiles", "int4"): Shape(few=(Block(4, TILE),), many=Block(4, TILE), most_rows=512),
    ("tiles", "int8"): Shape(few=(Block(4, TILE),), many=Block(2, 2 * TILE), most_rows=512),
}
CHUNK = 4  # tiles of a panel that are decoded, then multiplied, then added; with 8 one row took 1.1 times as long
AHEAD = 48  # steps asked for, into the second cache
GROUPS_AHEAD = 8  # of scales
LINE = 64  # bytes
NIBBLES = [float(i % 16 - 8) for i in range(32)]
DIFFERENCES = [float((i + 16) % 32 - 16) for i in range(32)]


def scratch_bytes(num_rows: int, num_in: int, unit: Unit, fmt: Format) -> int:
    """Of a thread."""
    shape = SHAPES[unit, fmt]
    return 0 if num_rows <= shape.most_few else shape.many.panels * num_in * LANES * 2


def quantized_matmul(
    code: Code, unit: Unit, fmt: Format, scale_kind: Kind, has_zeros: bool
) -> None:
    """x, its stride in words, q, s, z or 0, b or 0, y, T, I / 2, O / 16, pairs of a group, threads,
    scratch, its bytes a thread.

    A piece is panels of a block of rows.
    """
    work = (_Dots if unit == "dots" else _Tiles)(code, fmt, scale_kind, has_zeros)
    shape, num_rows, before = SHAPES[unit, fmt], work.num_rows, 0
    with work.begun():
        for block in shape.few:
            with code.when((num_rows > before) & (num_rows <= block.rows)):
                for piece in code.pieces():
                    at_panel = work.panels(piece * block.panels, block.panels)
                    work.block(at_panel, code.i64(0), block.rows)
            before = block.rows
        with code.when(num_rows > before):
            panels, rows, _ = shape.many
            mine = work.scratch_of(code.thread())
            kept = [_Kept(mine + p * work.pairs * LANES) for p in range(panels)]
            for panel, first, stop in pieces_of_many(code, shape.many, num_rows, work.num_panels):
                at_panel = work.panels(panel, panels)
                work.block(at_panel, first, rows, kept)
                for row in code.loop(first + rows, stop, rows):
                    work.block(at_panel, row, rows, kept, is_first=False)


class _Work(ABC):
    def __init__(self, code: Code, fmt: Format, scale_kind: Kind, has_zeros: bool) -> None:
        x, stride, q, s, z, bias, y, *sizes, scratch, bytes_each = code.arguments(14)
        self.addresses = x, stride, bias, y
        self.num_rows, self.pairs, self.num_panels, self.length, self.num_threads = sizes
        self.num_groups = self.pairs // self.length
        self.code, self.fmt = code, fmt
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

    def scales_of(self, at_panel: list[Value]) -> "list[_Stream]":
        return [_Stream(self.scales, p, LANES, self.num_groups, self) for p in at_panel]

    def begun(self) -> "contextlib.AbstractContextManager[None]":
        """All blocks of a call are computed within it."""
        return contextlib.nullcontext()

    def reading(self, at_panel: list[Value], kept: "Sequence[_Kept]") -> "list[_Keeping]":
        return [_Keeping(self.packed(p), k) for p, k in zip(at_panel, kept, strict=True)]

    @abstractmethod
    def block(
        self,
        at_panel: list[Value],
        first_row: Value,
        rows: int,
        kept: "Sequence[_Kept]" = (),
        *,
        is_first: bool = True,
    ) -> None:
        """Beyond the last row, the last again.  The first block of `kept` panels keeps them."""


class _Dots(_Work):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        x, self._stride, self._bias, y = self.addresses
        self._x, self._y = self.code.pointer(x, "i32"), self.code.pointer(y, "bf16")

    def block(
        self,
        at_panel: list[Value],
        first_row: Value,
        rows: int,
        kept: "Sequence[_Kept]" = (),
        *,
        is_first: bool = True,
    ) -> None:
        weights = self._read(at_panel, kept) if is_first else kept
        code, panels, num_groups = self.code, len(at_panel), self.num_groups
        at_row = [code.smaller(first_row + r, self.num_rows - 1) for r in range(rows)]
        xs = [self._x + r * self._stride for r in at_row]
        scales = self.scales_of(at_panel)
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

    def _read(self, at_panel: list[Value], kept: "Sequence[_Kept]") -> "Sequence[_Panel]":
        return self.reading(at_panel, kept) if kept else [self.packed(p) for p in at_panel]

    def _finish(self, totals: list[Var], panel: Value, at_row: list[Value]) -> None:
        with self.code.when(self._bias > 0):
            own = self.code.pointer(self._bias, "bf16").load(panel * LANES)
            for total in totals:
                total.set(total + own)
        for row, total in zip(at_row, totals, strict=True):
            self._y.store((row * self.num_panels + panel) * LANES, total)


class _Tiles(_Work):
    """A tile is decoded to the first cache, and loaded when others are there too, because a load of tiles
    waits for stores that are still on their way; so does the sum of what was multiplied.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        code = self.code
        sizes = self.num_rows, self.pairs, self.num_panels
        self._product = Tiles(code, "none", *self.addresses, self.num_panels * LANES, *sizes)
        self._rooms = [_Room(code.array("i32", CHUNK * TILE * LANES)) for _ in range(PANELS)]
        self._parts = code.array("f32", CHUNK * TILE * LANES)
        self._totals = code.array("f32", PANELS * TILE * LANES)

    def begun(self) -> "contextlib.AbstractContextManager[None]":
        return self._product.begun()

    def block(
        self,
        at_panel: list[Value],
        first_row: Value,
        rows: int,
        kept: "Sequence[_Kept]" = (),
        *,
        is_first: bool = True,
    ) -> None:
        weights: Sequence[_Keeping | _Kept] = kept
        if is_first:
            weights = self.reading(at_panel, kept or self._rooms[: len(at_panel)])
        if self.fmt == "int4":
            self._groups(at_panel, weights, self._product.tile_at(first_row))
            return
        steps, zero = self._steps(weights), self.code.i64(0)
        scales = [scale.at(zero).load() for scale in self.scales_of(at_panel)]
        self._product.block(at_panel, first_row, rows, steps, scales)

    def _steps(self, weights: "Sequence[_Keeping | _Kept]") -> Steps:
        """Of one group."""
        for i in self.code.loop(0, self.pairs // STEP, TILE // STEP):
            for weight in weights:
                weight.decode(i)
            yield i * STEP, [weight.tile(i) for weight in weights]

    def _groups(
        self, at_panel: list[Value], weights: "Sequence[_Keeping | _Kept]", first_row: Value
    ) -> None:
        code, product, num_tiles = self.code, self._product, self.pairs // TILE
        scales, whole = self.scales_of(at_panel), num_tiles // CHUNK * CHUNK
        totals = [self._totals + p * (TILE * LANES) for p in range(len(at_panel))]
        for row in code.loop(0, product.tile_rows):
            for total in totals:
                total.store(row * LANES, code.lanes(0.0))
        x = product.x + first_row * product.stride
        of_panel = list(zip(weights, scales, totals, strict=True))
        for first in code.loop(0, whole, CHUNK):
            for panel in of_panel:
                self._chunk(x, *panel, first, CHUNK)
        for first in code.loop(whole, num_tiles):
            for panel in of_panel:
                self._chunk(x, *panel, first, 1)
        for total, panel in zip(totals, at_panel, strict=True):
            product.write(total, panel, first_row)

    def _chunk(
        self,
        x: Pointer,
        weight: "_Keeping | _Kept",
        scales: "_Stream",
        totals: Pointer,
        first: Value,
        length: int,
    ) -> None:
        """Totals += the product of each tile times its scale."""
        code, step, tile = self.code, first * (TILE // STEP), TILE * LANES
        per_group = self.length // TILE
        groups = [(first + t) // per_group for t in range(length)]
        for t, group in enumerate(groups):
            scales.ask(groups[0], GROUPS_AHEAD, t)
            weight.enter(group)
            weight.decode(step, t * (TILE // STEP))
        for t in range(length):
            code.tile_load(4, x + first * TILE + t * TILE, self._product.stride * 4)
            code.tile_load(6 + t % 2, weight.tile(step, t * (TILE // STEP)), TILE_BYTES)
            code.tile_zero(t % 4)
            code.tile_dot(t % 4, 4, 6 + t % 2)
            code.tile_store(t % 4, self._parts + t * tile, TILE_BYTES)
        factors = [scales.at(group).load() for group in groups]
        for row in code.loop(0, self._product.tile_rows):
            total = totals.load(row * LANES)
            for t, factor in enumerate(factors):
                part = (self._parts + t * tile).load(row * LANES)
                total = code.fma(part, factor, total)
            totals.store(row * LANES, total)


class _Stream:
    """What a panel has for each step or group, side by side with the other panels'."""

    def __init__(
        self, start: Pointer, panel: Value, length: int, count: Value, work: _Work
    ) -> None:
        self._own = start + (panel // PANELS * (count * PANELS) + panel % PANELS) * length
        self._stride, self._count, self._work = length * PANELS, count, work

    def at(self, i: Value, more: int = 0) -> Pointer:
        """Of i + more."""
        return self._own + i * self._stride + more * self._stride

    def enter(self, group: Value) -> None:
        """Of scales."""
        self.ask(group, GROUPS_AHEAD)

    def ask(self, i: Value, ahead: int, more: int = 0) -> None:
        """For a later one, or for one of the panels that this thread will probably take next."""
        work, later = self._work, i + ahead
        beyond = later + (work.num_threads - 1) * self._count
        there = self.at(work.code.select(later < self._count, later, beyond), more)
        for line in range(0, self._stride // PANELS, LINE // 4):
            there.prefetch(line)


class _Nibbles:
    """A panel of int4, read as pairs of bfloat16."""

    def __init__(self, code: Code, words: _Stream, zeros: _Stream | None) -> None:
        self._code, self._words, self._zeros = code, words, zeros
        self._zero: Value | None = None

    def enter(self, group: Value) -> None:
        self._zero = self._zeros and self._zeros.at(group).load()

    def pairs(self, i: Value, more: int = 0) -> list[Value]:
        """Of step i + more."""
        word = self._words.at(i, more).load()
        self._words.ask(i, AHEAD, more)
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

    def pairs(self, i: Value, more: int = 0) -> list[Value]:
        code = self._code
        self._words.ask(i, AHEAD, more)
        here = self._words.at(i, more).of("i8")
        numbers = [code.numbers(here.load(half * LANES)) for half in range(2 * STEP)]
        return [code.packed(*numbers[j : j + 2]) for j in range(0, 2 * STEP, 2)]


_Packed = _Nibbles | _Bytes


class _Kept:
    """A panel that is pairs of bfloat16 already."""

    def __init__(self, words: Pointer) -> None:
        self._words = words

    def enter(self, group: Value) -> None:
        """Zeros were taken off."""

    def pairs(self, i: Value, more: int = 0) -> list[Value]:
        place = self.tile(i, more)
        return [place.load(j * LANES) for j in range(STEP)]

    def decode(self, i: Value, more: int = 0) -> None:
        """It is."""

    def tile(self, i: Value, more: int = 0) -> Pointer:
        """Where step i + more and those after it are."""
        return self._words + i * (STEP * LANES) + more * (STEP * LANES)


class _Room(_Kept):
    """For a chunk, whichever: no step but `more` counts."""

    def tile(self, i: Value, more: int = 0) -> Pointer:
        return self._words + more * (STEP * LANES)


class _Keeping:
    """A packed panel that is kept as it is read."""

    def __init__(self, packed: _Packed, kept: _Kept) -> None:
        self._packed, self._kept = packed, kept

    def enter(self, group: Value) -> None:
        self._packed.enter(group)

    def pairs(self, i: Value, more: int = 0) -> list[Value]:
        pairs, place = self._packed.pairs(i, more), self.tile(i, more)
        for j, pair in enumerate(pairs):
            place.store(j * LANES, pair)
        return pairs

    def decode(self, i: Value, more: int = 0) -> None:
        """A tile."""
        for step in range(TILE // STEP):
            self.pairs(i, more + step)

    def tile(self, i: Value, more: int = 0) -> Pointer:
        return self._kept.tile(i, more)


_Panel = _Packed | _Keeping | _Kept
