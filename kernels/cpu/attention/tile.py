"""The inner loops of `prefill.py`: one thread's work on a tile of queries with the keys and values that they see.

A tile has at most `side` queries and `side` keys.  Queries are the *lanes* throughout.  A cell is one float32, or two
bfloat16, for the units of `linear/products.py`:

    dots    a cell of a key in all lanes times a row of the queries' cells: accumulators for 8 cells by 32 rows
    tiles   sixteen keys in memory order times sixteen pairs of the queries' cells, which have AMX's layout already; the
            pairs of the values are transposed
"""

import contextlib
import copy
import math
from collections.abc import Callable
from typing import Self, TypeVar

from trouper.kernels.codegen.builder import KernelBuilder
from trouper.kernels.codegen.core import Operand, Pointer, Value
from trouper.kernels.codegen.features import num_registers
from trouper.kernels.codegen.units import LANES, Kind, Unit
from trouper.kernels.cpu.attention.decode import HIDDEN, LOG2_E
from trouper.kernels.cpu.linear.products import TILE

# Cells between two staged keys: a constant, and not a multiple of a power of two, so that keys use all sets of the cache.
PITCH = 272
# The widest head with keys that fit the pitch.
WIDEST = 256
# Accumulators of a product: cells that are broadcast to all lanes, by registers of rows.
CELLS, HALVES = (8, 2) if num_registers() > 8 else (4, 1)
# A weight is at most 2^8: a maximum may grow by this much before the sums are rescaled, which is rare.
SLACK = 8.0

N = TypeVar("N", int, Value)


def scratch_bytes(width: int, side: int, parts: int = 1) -> int:
    """Count the bytes that each thread needs.

    They hold keys (or plain rows), values, scores and pairs, and for each part queries, sums and three rows of numbers.
    """
    return 4 * side * (width + PITCH + 2 * side + parts * _part(width)) + 64


def _part(width: N) -> N:
    """Count the rows of `side` cells that a part needs."""
    return 2 * width + 3


class Tile:
    """The memory of a thread, and the operations on it.

    Tiles of queries that see the same keys share everything except their queries and sums; see `part`.
    """

    # The number of rows in one block of accumulators.
    num_lanes = HALVES * LANES

    def __init__(
        self, code: KernelBuilder, kind: Kind, base: Value, group: Operand, width: Value, side: int
    ) -> None:
        self.code, self.side = code, side
        self.kind: Kind = kind
        self.group, self.width = code.i64(group), width
        self.per_cell = 2 if kind == "bf16" else 1
        cell: Kind = "i32" if kind == "bf16" else "f32"
        starts = [code.i64(0)]
        for rows in (PITCH, width, side, side):
            starts.append(starts[-1] + rows * side)
        cells = code.pointer(base, cell)
        # Plain rows share the memory of the keys.
        self.keys, self.values, self.scores, self.pairs, self._parts = (
            cells + start for start in starts
        )
        self.scores = self.scores.of("f32")
        if kind != "bf16":
            self.pairs = self.scores
        self._lies_at(code.i64(0))

    def part(self, number: Value) -> Self:
        """Return a part of the tile: the same memory with its own queries and sums.

        Each part has its own softmax state.
        """
        part = copy.copy(self)
        part._lies_at(number)
        return part

    def _lies_at(self, number: Value) -> None:
        side, width = self.side, self.width
        self.queries = self._parts + number * _part(width) * side
        self.sums = (self.queries + width * side).of("f32")
        self.largest = self.sums + width * side
        self.totals, self.places = self.largest + side, self.largest + 2 * side

    def begun(self) -> "contextlib.AbstractContextManager[None]":
        """Configure the state that all tiles of a call share.

        Only AMX needs it; other units return an empty context. Blocks of one call run inside it.
        """
        return contextlib.nullcontext()

    def _dot(self, cells: Pointer, index: Operand, x: Value, total: Value) -> Value:
        """Return total + the cell in all lanes · x.  A bfloat16 cell contributes two products."""
        if self.per_cell == 2:
            return self.code.dot(self.code.i32x16(cells[index]), x, total)
        return self.code.fma(cells[index], x, total)

    def padded_rows(self, count: Value) -> Value:
        step = self.num_lanes
        return (count * self.group + (step - 1)) // step * step

    def read_queries(self, q: Pointer, stride: Value, count: Value) -> None:
        """Write queries [cells, side] from rows (token, head of the group), padded with zeros.

        Tokens of several heads become rows of one tile.
        """
        code, width, size = self.code, self.width, self.group * self.width
        plain = self.keys.of(self.kind)
        num_rows, padded = count * self.group, self.padded_rows(count)
        for token in code.loop(0, count):
            for d in code.loop(0, size, LANES):
                plain.store(token * size + d, q.load(token * stride + d))
        for i in code.loop(num_rows * width, padded * width, LANES):
            plain.store(i, code.f32x16(0.0))
        cells = width // self.per_cell
        whole = cells // LANES * LANES
        for r in code.loop(0, padded, LANES):
            for c in code.loop(0, whole, LANES):
                rows = [self.keys.load((r + i) * cells + c) for i in range(LANES)]
                for i, column in enumerate(code.transpose(rows)):
                    self.queries.store((c + i) * self.side + r, column)
            for c in code.loop(whole, cells):
                for i in range(LANES):
                    self.queries[c * self.side + r + i] = self.keys[(r + i) * cells + c]

    def begin(self, position: Value, count: Value) -> None:
        code = self.code
        for r in code.loop(0, self.padded_rows(count)):
            self.largest[r], self.totals[r] = HIDDEN, 0.0
            self.places[r] = code.f32(position + code.minimum(r // self.group, count - 1))
        for i in code.loop(0, self.width * self.side, LANES):
            self.sums.store(i, code.f32x16(0.0))

    def add_sinks(self, sinks: Pointer, count: Value) -> None:
        """Start with the sinks of the group's heads as keys: each has weight one and no value.

        The softmax then includes them.
        """
        for r in self.code.loop(0, count * self.group):
            self.largest[r], self.totals[r] = sinks[r % self.group] * LOG2_E, 1.0

    def stage_keys(self, row_of: Callable[[Value], Pointer], count: Value) -> None:
        """Write keys [≤ side, PITCH], with zeros up to a multiple of 8.

        They are read from the paged cache once.

        Args:
            row_of: returns the address of key i.
        """
        code, keys, pitch = self.code, self.keys.of(self.kind), PITCH * self.per_cell
        for i in code.loop(0, count):
            row = row_of(i)
            for d in code.loop(0, self.width, LANES):
                keys.store(i * pitch + d, row.load(d))
        for i in code.loop(count, (count + 7) // 8 * 8):
            for d in code.loop(0, self.width, LANES):
                keys.store(i * pitch + d, code.f32x16(0.0))

    def stage_values(self, row_of: Callable[[Value], Pointer], count: Value) -> None:
        """Write values [≤ side, D]; for bfloat16, words that pair the values of two consecutive positions.

        They are read from the paged cache once for all queries of the tile.
        """
        code, width = self.code, self.width
        for i in code.loop(0, count, self.per_cell):
            row = row_of(i)
            if self.per_cell == 1:
                for d in code.loop(0, width, LANES):
                    self.values.store(i * width + d, row.load(d))
                continue
            has_other = i + 1 < count
            other = row_of(code.minimum(i + 1, count - 1))
            for d in code.loop(0, width, LANES):
                high = code.select(has_other, other.load(d), 0.0)
                self.values.store(i // 2 * width + d, code.interleave_bf16(row.load(d), high))

    def write_scores(self, num_rows: Value, count: Value) -> None:
        """Write scores [count, side] = keys · queries.

        `softmax` converts them to weights, and `add_values` uses these. Scores are not scaled yet.
        """
        code = self.code
        for r in code.loop(0, num_rows, self.num_lanes):
            for key in code.loop(0, count, CELLS):
                sums = [[code.var(code.f32x16(0.0)) for _ in range(CELLS)] for _ in range(HALVES)]
                for c in code.loop(0, self.width // self.per_cell):
                    for half in range(HALVES):
                        x = self.queries.load(c * self.side + r + half * LANES)
                        for i, total in enumerate(sums[half]):
                            cell = self.keys + (key * PITCH + c)
                            total.set(self._dot(cell, i * PITCH, x, total))
                for half in range(HALVES):
                    for i, total in enumerate(sums[half]):
                        self.scores.store((key + i) * self.side + r + half * LANES, total)

    def hide(self, r: Value, first: Value, count: Value, window: Value, ahead: Operand) -> None:
        """Hide the scores of keys that are `window` or more positions behind a query, or more than `ahead` before it.

        Applies to the sixteen queries from r on.
        """
        code, scores = self.code, self.scores
        place = self.places.load(r)
        oldest, newest = place - code.f32(window), place + code.f32(code.i64(ahead))
        for i in code.loop(0, count):
            here = code.f32x16(code.f32(first + i))
            x = code.select(newest < here, -math.inf, scores.load(i * self.side + r))
            scores.store(i * self.side + r, code.select(oldest < here, x, -math.inf))

    def softmax(self, r: Value, count: Value, scale: Value) -> None:
        """Convert the scores of sixteen queries, times the scale, to weights.

        Rescales totals and sums only if a maximum grew by more than SLACK.
        """
        code, scores = self.code, self.scores
        before = self.largest.load(r)
        most = code.var(code.f32x16(HIDDEN))
        for i in code.loop(0, count):
            most.set(code.maximum(scores.load(i * self.side + r), most))
        most.set(most * scale)
        now = code.select(before + SLACK < most, most, before)
        total = code.var(code.f32x16(0.0))

        def weight_of(i: Value) -> Value:
            return code.exp2(code.fma(scale, scores.load(i * self.side + r), 0.0 - now))

        for i in code.loop(0, count, self.per_cell):
            weight = weight_of(i)
            if self.per_cell == 1:
                scores.store(i * self.side + r, weight)
                total.set(total + weight)
                continue
            other = code.select(i + 1 < count, weight_of(code.minimum(i + 1, count - 1)), 0.0)
            self.pairs.store(i // 2 * self.side + r, code.interleave_bf16(weight, other))
            total.set(total + (weight + other))
        shrink = code.exp2(before - now)
        self.largest.store(r, now)
        self.totals.store(r, code.fma(self.totals.load(r), shrink, total))
        with code.when(code.reduce_max(now - before) > 0.0):
            for d in code.loop(0, self.width):
                self.sums.store(d * self.side + r, self.sums.load(d * self.side + r) * shrink)

    def add_values(self, num_rows: Value, count: Value) -> None:
        """Add valuesᵀ · weights to sums [D, side].

        The sums of all tiles of keys, divided by the totals, are the output. They are kept in float32.
        """
        code, steps = self.code, (count + (self.per_cell - 1)) // self.per_cell
        for r in code.loop(0, num_rows, self.num_lanes):
            for d in code.loop(0, self.width, CELLS):
                places = [
                    [(d + i) * self.side + r + half * LANES for i in range(CELLS)]
                    for half in range(HALVES)
                ]
                sums = [[code.var(self.sums.load(place)) for place in row] for row in places]
                for t in code.loop(0, steps):
                    for half in range(HALVES):
                        x = self.pairs.load(t * self.side + r + half * LANES)
                        for i, total in enumerate(sums[half]):
                            cell = self.values + (t * self.width + d)
                            total.set(self._dot(cell, i, x, total))
                for row, totals in zip(places, sums, strict=True):
                    for place, total in zip(row, totals, strict=True):
                        self.sums.store(place, total)

    def write_out(self, out: Pointer, stride: Value, count: Value) -> None:
        code, width, size = self.code, self.width, self.group * self.width
        plain = self.keys.of(self.kind)
        for r in code.loop(0, count * self.group, LANES):
            inverse = 1.0 / self.totals.load(r)
            for d in code.loop(0, width, LANES):
                rows = [self.sums.load((d + i) * self.side + r) * inverse for i in range(LANES)]
                for i, column in enumerate(code.transpose(rows)):
                    plain.store((r + i) * width + d, column)
        for token in code.loop(0, count):
            for d in code.loop(0, size, LANES):
                out.store(token * stride + d, plain.load(token * size + d))


class AmxTile(Tile):
    """A tile of bfloat16 that AMX multiplies.

    Cells of queries and keys are padded with zeros to a multiple of sixteen.  Other operations are those of the plain
    tile.
    """

    num_lanes = 2 * TILE

    def __init__(
        self, code: KernelBuilder, kind: Kind, base: Value, group: Operand, width: Value, side: int
    ) -> None:
        super().__init__(code, kind, base, group, width, side)
        self._cells = width // 2
        self._padded = (self._cells + (TILE - 1)) // TILE * TILE

    def begun(self) -> "contextlib.AbstractContextManager[None]":
        return self.code.tiles(TILE, narrow=())

    def read_queries(self, q: Pointer, stride: Value, count: Value) -> None:
        super().read_queries(q, stride, count)
        for c in self.code.loop(self._cells, self._padded):
            for r in self.code.loop(0, self.padded_rows(count), LANES):
                self.queries.store(c * self.side + r, self.code.i32x16(0))

    def stage_keys(self, row_of: Callable[[Value], Pointer], count: Value) -> None:
        """Write keys.

        Scores of keys beyond the last are computed from arbitrary memory and never read.  Keys are copied from the
        paged cache, padded to whole cells.
        """
        code, whole = self.code, self._cells // LANES * LANES
        for i in code.loop(0, count):
            row = row_of(i).of("i32")
            for cell in code.loop(0, whole, LANES):
                self.keys.store(i * PITCH + cell, row.load(cell))
            for cell in code.loop(whole, self._cells):
                self.keys[i * PITCH + cell] = row[cell]
            for cell in code.loop(self._cells, self._padded):
                self.keys[i * PITCH + cell] = 0

    def stage_values(self, row_of: Callable[[Value], Pointer], count: Value) -> None:
        """Write values [D, side / 2], words that pair two consecutive positions.

        The last value is repeated up to a multiple of 32 positions.
        """
        code = self.code
        for first in code.loop(0, count, 2 * TILE):
            places = [code.minimum(first + i, count - 1) for i in range(2 * TILE)]
            rows = [row_of(place).of("i16") for place in places]
            for d in code.loop(0, self.width, LANES):
                pairs = [
                    (low.load(d) & 0xFFFF) | high.load(d) << 16
                    for low, high in zip(rows[::2], rows[1::2], strict=True)
                ]
                for i, column in enumerate(code.transpose(pairs)):
                    self.values.store((d + i) * (self.side // 2) + first // 2, column)

    def write_scores(self, num_rows: Value, count: Value) -> None:
        """Write scores, for two tiles of keys by two tiles of queries at a time.

        The four sums stay in tile registers until all cells are multiplied.
        """
        code = self.code
        for r in code.loop(0, num_rows, 2 * TILE):
            for key in code.loop(0, count, 2 * TILE):
                for sums in range(4):
                    code.tile_zero(sums)
                for c in code.loop(0, self._padded, TILE):
                    for i in range(2):
                        code.tile_load(4 + i, self.keys + ((key + i * TILE) * PITCH + c), 4 * PITCH)
                        code.tile_load(
                            6 + i, self.queries + (c * self.side + r + i * TILE), 4 * self.side
                        )
                    for sums in range(4):
                        code.tile_dot(sums, 4 + sums // 2, 6 + sums % 2)
                for sums in range(4):
                    place = (key + sums // 2 * TILE) * self.side + r + sums % 2 * TILE
                    code.tile_store(sums, self.scores + place, 4 * self.side)

    def add_values(self, num_rows: Value, count: Value) -> None:
        code, steps = self.code, (count + 1) // 2
        whole = (steps + (TILE - 1)) // TILE * TILE
        for t in code.loop(steps, whole):
            for r in code.loop(0, num_rows, LANES):
                self.pairs.store(t * self.side + r, code.i32x16(0))
        for r in code.loop(0, num_rows, 2 * TILE):
            for d in code.loop(0, self.width, 2 * TILE):
                # Beyond the width the last tile is computed again; it is read before it is written.
                ds = [d, code.minimum(d + TILE, self.width - TILE)]
                places = [self.sums + (ds[i // 2] * self.side + r + i % 2 * TILE) for i in range(4)]
                for sums, place in enumerate(places):
                    code.tile_load(sums, place, 4 * self.side)
                for t in code.loop(0, whole, TILE):
                    for i in range(2):
                        code.tile_load(
                            4 + i, self.values + (ds[i] * (self.side // 2) + t), 2 * self.side
                        )
                        code.tile_load(
                            6 + i, self.pairs + (t * self.side + r + i * TILE), 4 * self.side
                        )
                    for sums in range(4):
                        code.tile_dot(sums, 4 + sums // 2, 6 + sums % 2)
                for sums, place in enumerate(places):
                    code.tile_store(sums, place, 4 * self.side)


def tile_of(
    unit: Unit,
    code: KernelBuilder,
    kind: Kind,
    base: Value,
    group: Operand,
    width: Value,
    side: int,
) -> Tile:
    made = AmxTile if kind == "bf16" and unit == "tiles" else Tile
    return made(code, kind, base, group, width, side)
