"""Causal attention of stretches of queries over a paged KV cache that holds their own keys.

    out[t, n] = softmax(cap(scale · q[t, n] Kᵀ) + mask) V

    q      [T, N, D]     rows may be strided;  N = H · G, the G heads of a group adjacent
    cache  [2, H, S, D]  slot = block id · block size + offset
    tables [C, B]        int64 block ids
    tiles  [P, 4]        int64: first token, number of tokens (≤ ROWS / G), row of the table, position
    out    [T, N · D]

A piece of work is one KV head of one tile: its tokens and group heads are R ≤ ROWS query rows, which
lie along the *lanes* throughout.  For each KEYS keys of the past and of the tile itself

    scores [KEYS, R]  = K q      each key's cells in all lanes, times the transposed queries
    weights           = an online softmax down the columns: no sum across lanes anywhere
    out    [D, R]    += Vᵀ weights

so that of K nothing is rearranged, of V neighbours are paired (bfloat16), and both products are the
same inner loop: 8 cells by 32 rows of accumulators.  Keys that no query of a tile sees are not read.
A cell is one float32, or two bfloat16 for the machine's dot instruction.

Roofline: FLOPs = 4 N D · (visible pairs of a query and a key), bytes as a decode per ROWS / G tokens.
Measured, one EPYC core, N = 16, H = 8, D = 128, bf16, where a packed GEMM reached 223 GFLOP/s:
    0 + 1024 tokens  161 GFLOP/s    1024 + 1024  164    0 + 4096  159
torch's flash attention: 56, 61, 74.  Both products alone run at 225-230; 64 or 128 rows or keys are
equal within noise.
"""

import math
from collections.abc import Callable

from trouper.kernels.decode_attention import HIDDEN, LOG2_E, capped
from trouper.kernels.simd import LANES, Code, Kind, Operand, Pointer, Value

ROWS = 64
KEYS = 64
PITCH = 272  # cells from one staged key to the next: constant, and no multiple of a power of two
WIDEST = 256  # of a head: a key fits its pitch


def scratch_bytes(width: int) -> int:
    """For each thread: queries, plain rows, values, scores, pairs, sums, three rows of numbers."""
    numbers = ROWS * width * 2 + KEYS * (width + PITCH) + KEYS * ROWS * 2 + ROWS * width + 3 * ROWS
    return 4 * numbers + 64


def prefill_attention(code: Code, kind: Kind) -> None:
    """q, its stride, cache, S, tables, their stride, tiles, H, G, D, block size, scale, cap,
    window, out, its stride, scratch, its bytes."""
    (
        q, q_stride, cache, num_slots, tables, table_stride, tiles, num_kv, group, width, block_size,
        scale, cap, window, out, out_stride, scratch, scratch_bytes,
    ) = code.arguments(18)  # fmt: skip
    q, cache, out = (code.pointer(x, kind) for x in (q, cache, out))
    tables, tiles = code.pointer(tables, "i64"), code.pointer(tiles, "i64")
    size = group * width
    base = scratch + code.thread() * scratch_bytes
    tile = Tile(code, kind, base, group, width)
    scale, cap = code.f32_argument(scale), code.f32_argument(cap)
    for piece in code.pieces():
        row = tiles + piece // num_kv * 4
        head = piece % num_kv
        token, count, position = row[0], row[1], row[3]
        table = tables + row[2] * table_stride
        k = cache + head * num_slots * width
        v = cache + (num_kv + head) * num_slots * width

        def slot(place: Value, table: Pointer = table) -> Value:
            return table[place // block_size] * block_size + place % block_size

        num_rows = tile.read_queries(q + (token * q_stride + head * size), q_stride, count)
        tile.begin(num_rows, position, count)
        end = position + count
        for first in code.loop(code.larger(position + 1 - window, 0), end, KEYS):
            num = code.smaller(end - first, KEYS)
            tile.stage_keys(lambda i, k=k, first=first: k + slot(first + i) * width, num)
            tile.write_scores(num_rows, num)
            is_masked = (first + num - 1 > position) | (end - 1 - window >= first)
            for r in code.loop(0, num_rows, LANES):
                for i in code.loop(0, num):
                    x = capped(code, tile.scores.load(i * ROWS + r) * scale, cap) * LOG2_E
                    tile.scores.store(i * ROWS + r, x)
                with code.when(is_masked):
                    tile.hide(r, first, num, window, 0)
                tile.soften(r, num)
            tile.stage_values(lambda i, v=v, first=first: v + slot(first + i) * width, num)
            tile.add_values(num_rows, num)
        tile.write_out(out + (token * out_stride + head * size), out_stride, count)


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

    def soften(self, r: Value, count: Value) -> None:
        """Scores of sixteen queries to weights; largest, totals and sums follow the new maximum."""
        code, scores = self.code, self.scores
        before = self.largest.load(r)
        now = code.var(before)
        for i in code.loop(0, count):
            now.set(code.larger(scores.load(i * ROWS + r), now))
        total = code.var(code.lanes(0.0))
        for i in code.loop(0, count):
            weight = code.exp2(scores.load(i * ROWS + r) - now)
            scores.store(i * ROWS + r, weight)
            total.set(total + weight)
        shrink = code.exp2(before - now)
        self.largest.store(r, now)
        self.totals.store(r, code.fma(self.totals.load(r), shrink, total))
        with code.when(code.max_of(now - before) > 0.0):
            for d in code.loop(0, self.width):
                self.sums.store(d * ROWS + r, self.sums.load(d * ROWS + r) * shrink)
        if self.per_cell == 2:
            for i in code.loop(0, count, 2):
                low, high = scores.load(i * ROWS + r), scores.load((i + 1) * ROWS + r)
                high = code.select(i + 1 < count, high, 0.0)
                self.pairs.store(i // 2 * ROWS + r, code.pair(low, high))

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


def can_prefill(group: int, width: int) -> bool:
    return group <= ROWS and width <= WIDEST
