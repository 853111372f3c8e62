"""Causal attention of stretches of queries over a paged KV cache that holds their own keys, in Numba.

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

import functools

import numpy as np
from numba import types

from trouper.kernels import simd
from trouper.kernels.decode_attention import HIDDEN, LOG2_E, capped
from trouper.kernels.launch import Kernel, compiled
from trouper.kernels.simd import LANES, inner

ROWS = 64
KEYS = 64
PITCH = 272  # cells from one staged key to the next: constant, and no multiple of a power of two


@inner
def _stage_keys(k, table, first, count, block_size, width, keys, pitch):
    """keys [≤ KEYS, pitch] = the keys of the positions first …, zeros up to a multiple of 8."""
    for i in range(count):
        position = first + i
        slot = table[position // block_size] * block_size + position % block_size
        for d in range(0, width, LANES):
            simd.store(keys, i * pitch + d, simd.load(k, slot * width + d))
    for i in range(count, (count + 7) // 8 * 8):
        for d in range(0, width, LANES):
            simd.store(keys, i * pitch + d, simd.fill(np.float32(0.0)))


@inner
def _stage_values(v, table, first, count, block_size, width, values):
    """The same for values, as cells."""
    _stage_keys(v, table, first, count, block_size, width, values, width)


@inner
def _stage_value_pairs(v, table, first, count, block_size, width, values):
    """values [≤ KEYS / 2, D] words: two neighbours in time each."""
    for i in range(0, count, 2):
        position = first + i
        slot = table[position // block_size] * block_size + position % block_size
        position += 1
        other = slot
        if i + 1 < count:
            other = table[position // block_size] * block_size + position % block_size
        for d in range(0, width, LANES):
            low = simd.load(v, slot * width + d)
            high = simd.fill(np.float32(0.0))
            if i + 1 < count:
                high = simd.load(v, other * width + d)
            simd.store(values, (i // 2) * width + d, simd.pair_exact(low, high))


@inner
def _scores(queries, num_rows, keys, count, cells, scores):
    """scores [count, ROWS] = keys · queries."""
    for r in range(0, num_rows, 2 * LANES):
        for key in range(0, count, 8):
            sums0, sums1 = simd.zeros(8), simd.zeros(8)
            for c in range(cells):
                at = key * PITCH + c
                sums0 = simd.dot_broadcast(keys, at, PITCH, simd.load(queries, c * ROWS + r), sums0)
                sums1 = simd.dot_broadcast(
                    keys, at, PITCH, simd.load(queries, c * ROWS + r + LANES), sums1
                )
            simd.store_rows(scores, key * ROWS + r, ROWS, sums0)
            simd.store_rows(scores, key * ROWS + r + LANES, ROWS, sums1)


@inner
def _add_values(weights, num_rows, values, steps, width, out):
    """out [D, ROWS] += valuesᵀ · weights."""
    for r in range(0, num_rows, 2 * LANES):
        for d in range(0, width, 8):
            sums0 = simd.load_rows(out, d * ROWS + r, ROWS, 7, 8)
            sums1 = simd.load_rows(out, d * ROWS + r + LANES, ROWS, 7, 8)
            for t in range(steps):
                at = t * width + d
                sums0 = simd.dot_broadcast(values, at, 1, simd.load(weights, t * ROWS + r), sums0)
                sums1 = simd.dot_broadcast(
                    values, at, 1, simd.load(weights, t * ROWS + r + LANES), sums1
                )
            simd.store_rows(out, d * ROWS + r, ROWS, sums0)
            simd.store_rows(out, d * ROWS + r + LANES, ROWS, sums1)


@inner
def _soften(
    scores,
    num_rows,
    first,
    count,
    places,
    is_masked,
    window,
    scale,
    cap,
    largest,
    totals,
    out,
    width,
):
    """Scores to weights, in place; largest, totals [ROWS] and out follow the new maximum."""
    hidden = simd.fill(np.float32(-np.inf))
    for r in range(0, num_rows, LANES):
        place = simd.load(places, r)
        oldest = simd.sub(place, simd.fill(np.float32(window)))
        before = simd.load(largest, r)
        now = before
        for i in range(count):
            x = simd.mul(simd.load(scores, i * ROWS + r), simd.fill(scale))
            if cap > np.float32(0.0):
                x = capped(x, cap)
            x = simd.mul(x, simd.fill(LOG2_E))
            if is_masked:
                here = simd.fill(np.float32(first + i))
                x = simd.where_less(place, here, hidden, x)
                x = simd.where_less(oldest, here, x, hidden)
            simd.store(scores, i * ROWS + r, x)
            now = simd.maximum(x, now)
        total = simd.fill(np.float32(0.0))
        for i in range(count):
            weight = simd.exp2(simd.sub(simd.load(scores, i * ROWS + r), now))
            simd.store(scores, i * ROWS + r, weight)
            total = simd.add(total, weight)
        shrink = simd.exp2(simd.sub(before, now))
        simd.store(largest, r, now)
        simd.store(totals, r, simd.fma(simd.load(totals, r), shrink, total))
        if simd.max_of(simd.sub(now, before)) > np.float32(0.0):
            for d in range(width):
                simd.store(out, d * ROWS + r, simd.mul(simd.load(out, d * ROWS + r), shrink))


@inner
def _pair_weights(scores, num_rows, count, pairs):
    """pairs [⌈count / 2⌉, ROWS] words of neighbours in time."""
    for i in range(0, count, 2):
        for r in range(0, num_rows, LANES):
            high = simd.fill(np.float32(0.0))
            if i + 1 < count:
                high = simd.load(scores, (i + 1) * ROWS + r)
            low = simd.load(scores, i * ROWS + r)
            simd.store(pairs, (i // 2) * ROWS + r, simd.pair(low, high))


@inner
def _transposed_queries(q, q_stride, count, group, width, cells, plain, plain_cells, queries):
    """queries [cells, ROWS] of rows (token, head of the group), padded with zeros."""
    num_rows = count * group
    padded = (num_rows + 2 * LANES - 1) // (2 * LANES) * 2 * LANES
    size = group * width
    for token in range(count):
        for d in range(0, size, LANES):
            simd.store(plain, token * size + d, simd.load(q, token * q_stride + d))
    for i in range(num_rows * width, padded * width, LANES):
        simd.store(plain, i, simd.fill(np.float32(0.0)))
    for r in range(0, padded, LANES):
        c = 0
        while c + LANES <= cells:
            rows = simd.load_rows(plain_cells, r * cells + c, cells, LANES, 16)
            simd.transpose_store(queries, c * ROWS + r, ROWS, rows)
            c += LANES
        while c < cells:
            for j in range(LANES):
                queries[c * ROWS + r + j] = plain_cells[(r + j) * cells + c]
            c += 1
    return padded


@inner
def _write_out(sums, totals, count, group, width, plain, out, out_stride):
    num_rows = count * group
    for r in range(0, num_rows, LANES):
        inverse = simd.div(simd.fill(np.float32(1.0)), simd.load(totals, r))
        for d in range(0, width, LANES):
            rows = simd.load_rows(sums, d * ROWS + r, ROWS, LANES, 16)
            rows = simd.fma_rows(inverse, rows, simd.zeros(16))
            simd.transpose_store(plain, r * width + d, width, rows)
    size = group * width
    for token in range(count):
        for d in range(0, size, LANES):
            simd.store(out, token * out_stride + d, simd.load(plain, token * size + d))


def scratch_bytes(width: int) -> int:
    """For each thread: queries, plain rows, values, scores, pairs, sums, three rows of numbers."""
    numbers = ROWS * width * 2 + KEYS * (width + PITCH) + KEYS * ROWS * 2 + ROWS * width + 3 * ROWS
    return 4 * numbers + 64


@inner
def _prefill(args, dtype, cell_dtype, per_cell):
    """args: q, q_stride, cache, num_slots, tables, table_stride, tiles, H, G, D, block_size,
    scale, cap, window, out, scratch, scratch_bytes."""
    q_stride, num_slots, table_stride = args[4], args[6], args[8]
    num_kv, group, width, block_size = args[10], args[11], args[12], args[13]
    scale, cap = simd.float_of(args[14]), simd.float_of(args[15])
    window = args[16]
    q, cache, out = (
        simd.pointer(args[3], dtype),
        simd.pointer(args[5], dtype),
        simd.pointer(args[17], dtype),
    )
    tables, tiles = simd.pointer(args[7], types.int64), simd.pointer(args[9], types.int64)
    cells = width // per_cell
    base = args[18] + simd.fetch_add(simd.at(args, 1)) * args[19]
    queries = simd.pointer(base, cell_dtype)
    base += 4 * ROWS * width
    keys, plain, key_cells = (
        simd.pointer(base, dtype), simd.pointer(base, dtype), simd.pointer(base, cell_dtype),
    )  # fmt: skip
    base += 4 * KEYS * PITCH
    values = simd.pointer(base, cell_dtype)
    base += 4 * KEYS * width
    scores = simd.pointer(base, types.float32)
    base += 4 * KEYS * ROWS
    pairs = simd.pointer(base, cell_dtype)
    base += 4 * KEYS * ROWS
    sums = simd.pointer(base, types.float32)
    base += 4 * ROWS * width
    largest = simd.pointer(base, types.float32)
    totals, places = simd.at(largest, ROWS), simd.at(largest, 2 * ROWS)
    size = group * width
    while True:
        piece = simd.fetch_add(args)
        if piece >= args[2]:
            break
        tile = simd.at(tiles, piece // num_kv * 4)
        head = piece % num_kv
        token, count, position = tile[0], tile[1], tile[3]
        table = simd.at(tables, tile[2] * table_stride)
        k = simd.at(cache, head * num_slots * width)
        v = simd.at(cache, (num_kv + head) * num_slots * width)
        num_rows = _transposed_queries(
            simd.at(q, token * q_stride + head * size), q_stride, count, group, width, cells,
            plain, key_cells, queries,
        )  # fmt: skip
        for r in range(num_rows):
            largest[r] = HIDDEN
            totals[r] = np.float32(0.0)
            places[r] = np.float32(position + min(r // group, count - 1))
        for i in range(0, width * ROWS, LANES):
            simd.store(sums, i, simd.fill(np.float32(0.0)))
        end = position + count
        for first in range(max(0, position + 1 - window), end, KEYS):
            num = min(KEYS, end - first)
            is_masked = first + num - 1 > position or first <= end - 1 - window
            _stage_keys(k, table, first, num, block_size, width, keys, PITCH * per_cell)
            _scores(queries, num_rows, key_cells, num, cells, scores)
            _soften(
                scores, num_rows, first, num, places, is_masked, window, scale, cap, largest,
                totals, sums, width,
            )  # fmt: skip
            if per_cell == 2:
                _stage_value_pairs(
                    v, table, first, num, block_size, width, simd.pointer_to(values, types.uint32)
                )
                _pair_weights(scores, num_rows, num, simd.pointer_to(pairs, types.uint32))
                _add_values(pairs, num_rows, values, (num + 1) // 2, width, sums)
            else:
                _stage_values(
                    v, table, first, num, block_size, width, simd.pointer_to(values, types.float32)
                )
                _add_values(simd.pointer_to(scores, cell_dtype), num_rows, values, num, width, sums)
        _write_out(
            sums, totals, count, group, width, plain,
            simd.at(out, (token * num_kv + head) * size), num_kv * size,
        )  # fmt: skip


def prefill_bf16(args):
    _prefill(args, types.uint16, types.uint32, 2)


def prefill_f32(args):
    _prefill(args, types.float32, types.float32, 1)


@functools.cache
def prefill_kernel(dtype: str) -> Kernel:
    return compiled({"bfloat16": prefill_bf16, "float32": prefill_f32}[dtype])


def can_prefill(dtype: str, group: int, width: int) -> bool:
    """Half precision, and bfloat16 without its dot instruction, stay with torch."""
    return (
        group <= ROWS
        and width <= 256
        and (dtype == "float32" or (dtype == "bfloat16" and simd.HAS_BF16_DOT))
    )
