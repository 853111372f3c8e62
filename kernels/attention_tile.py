"""What a thread does with a tile of queries and the keys and values they see: the inside of
`prefill_attention.py` and of `whole_attention.py`.

Queries lie along the *lanes* throughout.  A cell is one float32, or two bfloat16 for the machine's products
(`matmul.py` names their units):

    dots    a cell of a key in all lanes times a row of the queries' cells: 8 cells by 32 rows of accumulators
    tiles   sixteen keys as they lie times sixteen pairs of the queries' cells, which lie as AMX wants them;
            of the values the transposed pairs, which cost a transposition of each
"""

import contextlib
import math
from collections.abc import Callable

from trouper.kernels.decode_attention import HIDDEN
from trouper.kernels.matmul import TILE, Unit
from trouper.kernels.simd import LANES, Code, Kind, Operand, Pointer, Value

ROWS = 64
KEYS = 64
PITCH = 272  # cells from one staged key to the next: constant, and no multiple of a power of two
WIDEST = 256  # of a head: a key fits its pitch


def scratch_bytes(width: int) -> int:
    """For each thread: queries, plain rows, values, scores, pairs, sums, three rows of numbers."""
    numbers = ROWS * width * 2 + KEYS * (width + PITCH) + KEYS * ROWS * 2 + ROWS * width + 3 * ROWS
    return 4 * numbers + 64


class Tile:
    """The memory of a thread, and what is done with it."""

    def __init__(self, code: Code, kind: Kind, base: Value, group: Operand, width: Value) -> None:
        self.code = code
        self.kind: Kind = kind
        self.group, self.width = code.i64(group), width
        self.per_cell = 2 if kind == "bf16" else 1
        cell: Kind = "i32" if kind == "bf16" else "f32"
        parts = (ROWS * width, KEYS * PITCH, KEYS * width, KEYS * ROWS, KEYS * ROWS, ROWS * width)
        starts = [code.i64(0)]
        for part in parts:
            starts.append(starts[-1] + part)
        cells = code.pointer(base, cell)
        # plain rows share the memory of the keys
        self.queries, self.keys, self.values, self.scores, self.pairs, self.sums, self.largest = (
            cells + start for start in starts
        )
        self.scores, self.sums, self.largest = (
            pointer.of("f32") for pointer in (self.scores, self.sums, self.largest)
        )
        self.totals, self.places = self.largest + ROWS, self.largest + 2 * ROWS
        if kind != "bf16":
            self.pairs = self.scores

    def begun(self) -> "contextlib.AbstractContextManager[None]":
        """All tiles of a call are computed within it."""
        return contextlib.nullcontext()

    def _dot(self, cells: Pointer, index: Operand, x: Value, total: Value) -> Value:
        """total + the cell in all lanes · x: of bfloat16 two products."""
        if self.per_cell == 2:
            return self.code.dot(self.code.words(cells[index]), x, total)
        return self.code.fma(cells[index], x, total)

    def read_queries(self, q: Pointer, stride: Value, count: Value) -> Value:
        """queries [cells, ROWS] of rows (token, head of the group), padded; the padded number."""
        code, width, size = self.code, self.width, self.group * self.width
        plain = self.keys.of(self.kind)
        num_rows = count * self.group
        padded = (num_rows + (2 * LANES - 1)) // (2 * LANES) * (2 * LANES)
        for token in code.loop(0, count):
            for d in code.loop(0, size, LANES):
                plain.store(token * size + d, q.load(token * stride + d))
        for i in code.loop(num_rows * width, padded * width, LANES):
            plain.store(i, code.lanes(0.0))
        cells = width // self.per_cell
        whole = cells // LANES * LANES
        for r in code.loop(0, padded, LANES):
            for c in code.loop(0, whole, LANES):
                rows = [self.keys.load((r + i) * cells + c) for i in range(LANES)]
                for i, column in enumerate(code.transposed(rows)):
                    self.queries.store((c + i) * ROWS + r, column)
            for c in code.loop(whole, cells):
                for i in range(LANES):
                    self.queries[c * ROWS + r + i] = self.keys[(r + i) * cells + c]
        return padded

    def begin(self, num_rows: Value, position: Value, count: Value) -> None:
        code = self.code
        for r in code.loop(0, num_rows):
            self.largest[r], self.totals[r] = HIDDEN, 0.0
            self.places[r] = code.f32(position + code.smaller(r // self.group, count - 1))
        for i in code.loop(0, self.width * ROWS, LANES):
            self.sums.store(i, code.lanes(0.0))

    def stage_keys(self, row_of: Callable[[Value], Pointer], count: Value) -> None:
        """keys [≤ KEYS, PITCH], zeros up to a multiple of 8.  `row_of`: where key i of them lies."""
        code, keys, pitch = self.code, self.keys.of(self.kind), PITCH * self.per_cell
        for i in code.loop(0, count):
            row = row_of(i)
            for d in code.loop(0, self.width, LANES):
                keys.store(i * pitch + d, row.load(d))
        for i in code.loop(count, (count + 7) // 8 * 8):
            for d in code.loop(0, self.width, LANES):
                keys.store(i * pitch + d, code.lanes(0.0))

    def stage_values(self, row_of: Callable[[Value], Pointer], count: Value) -> None:
        """values [≤ KEYS, D], or of bfloat16 words of two neighbours in time each."""
        code, width = self.code, self.width
        for i in code.loop(0, count, self.per_cell):
            row = row_of(i)
            if self.per_cell == 1:
                for d in code.loop(0, width, LANES):
                    self.values.store(i * width + d, row.load(d))
                continue
            has_other = i + 1 < count
            other = row_of(code.smaller(i + 1, count - 1))
            for d in code.loop(0, width, LANES):
                high = code.select(has_other, other.load(d), 0.0)
                self.values.store(i // 2 * width + d, code.pair(row.load(d), high))

    def write_scores(self, num_rows: Value, count: Value) -> None:
        """scores [count, ROWS] = keys · queries."""
        code = self.code
        for r in code.loop(0, num_rows, 2 * LANES):
            for key in code.loop(0, count, 8):
                sums = [[code.var(code.lanes(0.0)) for _ in range(8)] for _ in range(2)]
                for c in code.loop(0, self.width // self.per_cell):
                    for half in range(2):
                        x = self.queries.load(c * ROWS + r + half * LANES)
                        for i, total in enumerate(sums[half]):
                            cell = self.keys + (key * PITCH + c)
                            total.set(self._dot(cell, i * PITCH, x, total))
                for half in range(2):
                    for i, total in enumerate(sums[half]):
                        self.scores.store((key + i) * ROWS + r + half * LANES, total)

    def hide(self, r: Value, first: Value, count: Value, window: Value, ahead: Operand) -> None:
        """Scores of keys `window` or more behind the queries from r on, or more than `ahead` before them."""
        code, scores = self.code, self.scores
        place = self.places.load(r)
        oldest, newest = place - code.f32(window), place + code.f32(code.i64(ahead))
        for i in code.loop(0, count):
            here = code.lanes(code.f32(first + i))
            x = code.select(newest < here, -math.inf, scores.load(i * ROWS + r))
            scores.store(i * ROWS + r, code.select(oldest < here, x, -math.inf))

    def soften(self, r: Value, count: Value, scale: Value) -> None:
        """Scores of sixteen queries, times the scale, to weights; largest, totals and sums follow the new maximum."""
        code, scores = self.code, self.scores
        before = self.largest.load(r)
        most = code.var(code.lanes(HIDDEN))
        for i in code.loop(0, count):
            most.set(code.larger(scores.load(i * ROWS + r), most))
        now = code.larger(most * scale, before)
        total = code.var(code.lanes(0.0))

        def weight_of(i: Value) -> Value:
            return code.exp2(code.fma(scale, scores.load(i * ROWS + r), 0.0 - now))

        for i in code.loop(0, count, self.per_cell):
            weight = weight_of(i)
            if self.per_cell == 1:
                scores.store(i * ROWS + r, weight)
                total.set(total + weight)
                continue
            other = code.select(i + 1 < count, weight_of(code.smaller(i + 1, count - 1)), 0.0)
            self.pairs.store(i // 2 * ROWS + r, code.pair(weight, other))
            total.set(total + (weight + other))
        shrink = code.exp2(before - now)
        self.largest.store(r, now)
        self.totals.store(r, code.fma(self.totals.load(r), shrink, total))
        with code.when(code.max_of(now - before) > 0.0):
            for d in code.loop(0, self.width):
                self.sums.store(d * ROWS + r, self.sums.load(d * ROWS + r) * shrink)

    def add_values(self, num_rows: Value, count: Value) -> None:
        """sums [D, ROWS] += valuesᵀ · weights."""
        code, steps = self.code, (count + (self.per_cell - 1)) // self.per_cell
        for r in code.loop(0, num_rows, 2 * LANES):
            for d in code.loop(0, self.width, 8):
                places = [
                    [(d + i) * ROWS + r + half * LANES for i in range(8)] for half in range(2)
                ]
                sums = [[code.var(self.sums.load(place)) for place in row] for row in places]
                for t in code.loop(0, steps):
                    for half in range(2):
                        x = self.pairs.load(t * ROWS + r + half * LANES)
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
                rows = [self.sums.load((d + i) * ROWS + r) * inverse for i in range(LANES)]
                for i, column in enumerate(code.transposed(rows)):
                    plain.store((r + i) * width + d, column)
        for token in code.loop(0, count):
            for d in code.loop(0, size, LANES):
                out.store(token * stride + d, plain.load(token * size + d))


class AmxTile(Tile):
    """Of bfloat16.  Cells of queries and keys are zeros up to a multiple of sixteen."""

    def __init__(self, code: Code, kind: Kind, base: Value, group: Operand, width: Value) -> None:
        super().__init__(code, kind, base, group, width)
        self._cells = width // 2
        self._padded = (self._cells + (TILE - 1)) // TILE * TILE

    def begun(self) -> "contextlib.AbstractContextManager[None]":
        return self.code.tiles(TILE, narrow=())

    def read_queries(self, q: Pointer, stride: Value, count: Value) -> Value:
        num_rows = super().read_queries(q, stride, count)
        for c in self.code.loop(self._cells, self._padded):
            for r in self.code.loop(0, num_rows, LANES):
                self.queries.store(c * ROWS + r, self.code.words(0))
        return num_rows

    def stage_keys(self, row_of: Callable[[Value], Pointer], count: Value) -> None:
        """Scores of keys beyond the last are of whatever lies there, and nobody reads them."""
        code, keys = self.code, self.keys.of("bf16")
        for i in code.loop(0, count):
            row = row_of(i)
            for d in code.loop(0, self.width, LANES):
                keys.store(i * (2 * PITCH) + d, row.load(d))
            for d in code.loop(self.width, self._padded * 2, LANES):
                keys.store(i * (2 * PITCH) + d, code.lanes(0.0))

    def stage_values(self, row_of: Callable[[Value], Pointer], count: Value) -> None:
        """values [D, KEYS / 2] of words of two neighbours in time, zeros up to a multiple of 32 in time."""
        code = self.code
        for first in code.loop(0, count, 2 * TILE):
            for d in code.loop(0, self.width, LANES):
                pairs: list[Value] = []
                for i in range(0, 2 * TILE, 2):
                    both = [self._value(row_of, first + (i + j), d, count) for j in range(2)]
                    pairs.append(code.pair(*both))
                for i, column in enumerate(code.transposed(pairs)):
                    self.values.store((d + i) * (KEYS // 2) + first // 2, column)

    def _value(self, row_of: Callable[[Value], Pointer], i: Value, d: Value, count: Value) -> Value:
        row = row_of(self.code.smaller(i, count - 1))
        return self.code.select(i < count, row.load(d), 0.0)

    def write_scores(self, num_rows: Value, count: Value) -> None:
        """Two tiles of keys by two of queries."""
        code = self.code
        for r in code.loop(0, num_rows, 2 * TILE):
            for key in code.loop(0, count, 2 * TILE):
                for sums in range(4):
                    code.tile_zero(sums)
                for c in code.loop(0, self._padded, TILE):
                    for i in range(2):
                        code.tile_load(4 + i, self.keys + ((key + i * TILE) * PITCH + c), 4 * PITCH)
                        code.tile_load(6 + i, self.queries + (c * ROWS + r + i * TILE), 4 * ROWS)
                    for sums in range(4):
                        code.tile_dot(sums, 4 + sums // 2, 6 + sums % 2)
                for sums in range(4):
                    place = (key + sums // 2 * TILE) * ROWS + r + sums % 2 * TILE
                    code.tile_store(sums, self.scores + place, 4 * ROWS)

    def add_values(self, num_rows: Value, count: Value) -> None:
        code, steps = self.code, (count + 1) // 2
        whole = (steps + (TILE - 1)) // TILE * TILE
        for t in code.loop(steps, whole):
            for r in code.loop(0, num_rows, LANES):
                self.pairs.store(t * ROWS + r, code.words(0))
        for r in code.loop(0, num_rows, 2 * TILE):
            for d in code.loop(0, self.width, TILE):
                places = [self.sums + (d * ROWS + r + half * TILE) for half in range(2)]
                for half, place in enumerate(places):
                    code.tile_load(half, place, 4 * ROWS)
                for t in code.loop(0, whole, TILE):
                    code.tile_load(4, self.values + (d * (KEYS // 2) + t), 2 * KEYS)
                    for half in range(2):
                        code.tile_load(
                            6 + half, self.pairs + (t * ROWS + r + half * TILE), 4 * ROWS
                        )
                        code.tile_dot(half, 4, 6 + half)
                for half, place in enumerate(places):
                    code.tile_store(half, place, 4 * ROWS)


def tile_of(unit: Unit, code: Code, kind: Kind, base: Value, group: Operand, width: Value) -> Tile:
    made = AmxTile if kind == "bf16" and unit == "tiles" else Tile
    return made(code, kind, base, group, width)
