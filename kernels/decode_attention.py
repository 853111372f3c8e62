"""Attention of lone queries over a paged KV cache, in Numba: nothing is gathered.

    out[t, n] = softmax(cap(scale · q[t, n] Kᵀ)) V,   cap(s) = c · tanh(s / c), if there is a c

    q      [T, N, D]     rows may be strided;  N = H · G, the G heads of a group adjacent
    cache  [2, H, S, D]  slot = block id · block size + offset
    tables [C, B]        int64 block ids
    spans  [P, 5]        int64: token, row of the table, begin, end, partial result or -1
    out    [T, N · D]

A piece of work is some KV heads of one span of positions begin … end - 1.  Its keys are read once for
all G heads: sixteen lanes along D, eight keys by two heads of accumulators; then an online softmax
over the block, then eight lanes-wide rows of the output by two heads.  A context longer than `SPAN`
is several spans, so that one long request keeps all cores busy; they are cut at multiples of
SPAN whatever the batch and the number of threads, and `merge` adds them up in order.

Roofline: bytes = 2 e H L D, FLOPs = 4 N L D for L keys; bound by memory.
Measured, one EPYC core with neighbours, H = 8, G = 2, D = 128, bf16, where a torch sum read 20-22 GB/s:
    16 x 1024 keys  20.4 GB/s    64 x 1024  16-20    1 x 1024 (from the last cache)  32
torch's flash attention over the same runs: 4, 4 and 8.6.  Asking for the values while the scores are
computed, and for the next keys during the values, took the first from 11 to 17; 2 MiB pages add a
tenth, but touch 2 MiB for each head of a sequence.
"""

import functools

import numpy as np
from numba import types

from trouper.kernels import simd
from trouper.kernels.launch import Kernel, compiled
from trouper.kernels.simd import LANES, inner

SPAN = 1024  # positions; 512 KiB of K and V at D = 128, enough to hide what a piece costs
KEYS = 128  # whose scores are held at a time
LOG2_E = np.float32(1.4426950408889634)
HIDDEN = np.float32(-1e30)  # below every score, and finite: its difference to itself is 0


@inner
def _scores_2(q, q_stride, k, stride, count, width, scores, ahead):
    """scores[0 or KEYS + i] = q · k[i] of two heads."""
    for first in range(0, count, 8):
        last = min(count - first, 8) - 1
        for d in range(0, 8 * width, 32):
            simd.prefetch(ahead, first * width + d)
        sums0 = simd.zeros(8)
        sums1 = simd.zeros(8)
        for d in range(0, width, LANES):
            rows = simd.load_rows(k, first * stride + d, stride, last, 8)
            sums0 = simd.fma_rows(simd.load(q, d), rows, sums0)
            sums1 = simd.fma_rows(simd.load(q, q_stride + d), rows, sums1)
        simd.store_sums8(scores, first, sums0)
        simd.store_sums8(scores, KEYS + first, sums1)


@inner
def _scores_1(q, k, stride, count, width, scores, ahead):
    for first in range(0, count, 8):
        last = min(count - first, 8) - 1
        for d in range(0, 8 * width, 32):
            simd.prefetch(ahead, first * width + d)
        sums = simd.zeros(8)
        for d in range(0, width, LANES):
            rows = simd.load_rows(k, first * stride + d, stride, last, 8)
            sums = simd.fma_rows(simd.load(q, d), rows, sums)
        simd.store_sums8(scores, first, sums)


@inner
def capped(x, cap):
    """cap · tanh(x / cap), as cap · (1 - 2 / (e^(2 x / cap) + 1))."""
    one = simd.fill(np.float32(1.0))
    power = simd.exp2(simd.mul(x, simd.fill(np.float32(2.0) * LOG2_E / cap)))
    rest = simd.div(simd.fill(np.float32(-2.0)), simd.add(power, one))
    return simd.mul(simd.add(rest, one), simd.fill(cap))


@inner
def _soften(scores, count, scale, cap, state, out, width):
    """Scores to weights; state = (maximum, sum) and out are brought up to the new maximum.

    Scores are in units of log 2, so that a weight is one exp2.
    """
    padded = (count + LANES - 1) // LANES * LANES
    for i in range(count, padded):
        scores[i] = -np.inf
    largest = simd.fill(HIDDEN)
    for i in range(0, padded, LANES):
        x = simd.mul(simd.load(scores, i), simd.fill(scale))
        if cap > np.float32(0.0):
            x = capped(x, cap)
        x = simd.mul(x, simd.fill(LOG2_E))
        simd.store(scores, i, x)
        largest = simd.maximum(x, largest)
    for i in range(count, padded):
        scores[i] = -np.inf
    before = state[0]
    now = max(before, simd.max_of(largest))
    total = simd.fill(np.float32(0.0))
    shift = simd.fill(now)
    for i in range(0, padded, LANES):
        weight = simd.exp2(simd.sub(simd.load(scores, i), shift))
        simd.store(scores, i, weight)
        total = simd.add(total, weight)
    if now > before:
        shrink = simd.exp2(simd.fill(before - now))
        state[1] = state[1] * simd.sum_of(shrink) * np.float32(0.0625)
        for d in range(0, width, LANES):
            simd.store(out, d, simd.mul(simd.load(out, d), shrink))
    state[0] = now
    state[1] += simd.sum_of(total)


@inner
def _values_2x8(weights, v, stride, count, out, out_stride, ahead):
    sums0 = simd.load_line(out, 0, 8)
    sums1 = simd.load_line(out, out_stride, 8)
    for i in range(count):
        for d in range(0, 128, 32):
            simd.prefetch(ahead, i * stride + d)
        row = simd.load_line(v, i * stride, 8)
        sums0 = simd.fma_rows(simd.fill(weights[i]), row, sums0)
        sums1 = simd.fma_rows(simd.fill(weights[KEYS + i]), row, sums1)
    simd.store_line(out, 0, sums0)
    simd.store_line(out, out_stride, sums1)


@inner
def _values_1x8(weights, v, stride, count, out, ahead):
    sums = simd.load_line(out, 0, 8)
    for i in range(count):
        for d in range(0, 128, 32):
            simd.prefetch(ahead, i * stride + d)
        sums = simd.fma_rows(simd.fill(weights[i]), simd.load_line(v, i * stride, 8), sums)
    simd.store_line(out, 0, sums)


@inner
def _values_1x4(weights, v, stride, count, out, ahead):
    sums = simd.load_line(out, 0, 4)
    for i in range(count):
        for d in range(0, 64, 32):
            simd.prefetch(ahead, i * stride + d)
        sums = simd.fma_rows(simd.fill(weights[i]), simd.load_line(v, i * stride, 4), sums)
    simd.store_line(out, 0, sums)


@inner
def _values_1x1(weights, v, stride, count, out):
    sums = simd.load(out, 0)
    for i in range(count):
        sums = simd.fma(simd.fill(weights[i]), simd.load(v, i * stride), sums)
    simd.store(out, 0, sums)


@inner
def _span(  # noqa: C901 - a function of its own for each loop is compiled again in each caller
    q, k, v, after, table, begin, end, block_size, group, width, scale, cap, scores, states, sums
):
    """One KV head: states [G, 2] and sums [G, D] over the positions begin … end - 1.

    `after` is what will be read next; its first KEYS keys are asked for at the end.
    """
    for g in range(group):
        states[2 * g] = HIDDEN
        states[2 * g + 1] = np.float32(0.0)
    for i in range(0, group * width, LANES):
        simd.store(sums, i, simd.fill(np.float32(0.0)))
    position = begin
    while position < end:
        offset = position % block_size
        slot = table[position // block_size] * block_size + offset
        count = min(min(block_size - offset, KEYS), end - position)
        # blocks with consecutive ids are one stretch of memory
        while count < KEYS and position + count < end:
            following = position + count
            if table[following // block_size] * block_size != slot + count:
                break
            count += min(min(block_size, KEYS - count), end - following)
        key, value = simd.at(k, slot * width), simd.at(v, slot * width)
        next_key = after  # asked for while the values are summed, as these are during the scores
        following = position + count
        if following < end:
            slot = table[following // block_size] * block_size + following % block_size
            next_key = simd.at(k, slot * width)
        g = 0
        while g + 1 < group:
            _scores_2(
                simd.at(q, g * width),
                width,
                key,
                width,
                count,
                width,
                simd.at(scores, g * KEYS),
                value,
            )
            g += 2
        if g < group:
            _scores_1(
                simd.at(q, g * width), key, width, count, width, simd.at(scores, g * KEYS), value
            )
        for g in range(group):
            _soften(
                simd.at(scores, g * KEYS), count, scale, cap,
                simd.at(states, 2 * g), simd.at(sums, g * width), width,
            )  # fmt: skip
        d = 0
        while d + 8 * LANES <= width:
            g = 0
            while g + 1 < group:
                _values_2x8(
                    simd.at(scores, g * KEYS), simd.at(value, d), width, count,
                    simd.at(sums, g * width + d), width, simd.at(next_key, d),
                )  # fmt: skip
                g += 2
            if g < group:
                _values_1x8(
                    simd.at(scores, g * KEYS), simd.at(value, d), width, count,
                    simd.at(sums, g * width + d), simd.at(next_key, d),
                )  # fmt: skip
            d += 8 * LANES
        while d + 4 * LANES <= width:
            for g in range(group):
                _values_1x4(
                    simd.at(scores, g * KEYS), simd.at(value, d), width, count,
                    simd.at(sums, g * width + d), simd.at(next_key, d),
                )  # fmt: skip
            d += 4 * LANES
        while d < width:
            for g in range(group):
                _values_1x1(
                    simd.at(scores, g * KEYS), simd.at(value, d), width, count,
                    simd.at(sums, g * width + d),
                )  # fmt: skip
            d += LANES
        position += count


def scratch_bytes(group: int, width: int) -> int:
    """For each thread."""
    return -(-4 * group * (2 * width + KEYS + 2 + 2 * LANES) // 64) * 64 + 64


@inner
def _decode(args, dtype):
    """args: q, q_stride, cache, num_slots, tables, table_stride, spans, H, G, D, block_size,
    scale, cap, out, partials, scratch, scratch_bytes, heads a piece."""
    q_stride, num_slots, table_stride = args[4], args[6], args[8]
    num_kv, group, width, block_size = args[10], args[11], args[12], args[13]
    scale, cap = simd.float_of(args[14]), simd.float_of(args[15])
    q, cache, out = (
        simd.pointer(args[3], dtype),
        simd.pointer(args[5], dtype),
        simd.pointer(args[16], dtype),
    )
    tables, spans = simd.pointer(args[7], types.int64), simd.pointer(args[9], types.int64)
    partials = simd.pointer(args[17], types.float32)
    heads = args[20]
    parts = num_kv // heads
    mine = simd.fetch_add(simd.at(args, 1))
    wide_q = simd.pointer(args[18] + mine * args[19], types.float32)
    sums = simd.at(wide_q, group * width)
    scores = simd.at(sums, group * width)
    states = simd.at(scores, group * KEYS)
    size = group * width
    while True:
        piece = simd.fetch_add(args)
        if piece >= args[2]:
            break
        span = simd.at(spans, piece // parts * 5)
        token, begin, end = span[0], span[2], span[3]
        table = simd.at(tables, span[1] * table_stride)
        first_slot = table[begin // block_size] * block_size + begin % block_size
        for head in range(piece % parts * heads, (piece % parts + 1) * heads):
            for i in range(0, size, LANES):
                simd.store(wide_q, i, simd.load(q, token * q_stride + head * size + i))
            k = simd.at(cache, head * num_slots * width)
            v = simd.at(cache, (num_kv + head) * num_slots * width)
            after = simd.at(cache, ((head + 1) % num_kv * num_slots + first_slot) * width)
            _span(
                wide_q, k, v, after, table, begin, end, block_size, group, width, scale, cap,
                scores, states, sums,
            )  # fmt: skip
            target = simd.at(out, (token * num_kv + head) * size)
            part = simd.at(partials, (span[4] * num_kv + head) * group * (width + 2))
            for g in range(group):
                if span[4] < 0:
                    inverse = simd.fill(np.float32(1.0) / states[2 * g + 1])
                    for d in range(0, width, LANES):
                        x = simd.mul(simd.load(sums, g * width + d), inverse)
                        simd.store(target, g * width + d, x)
                else:
                    mine_ = simd.at(part, g * (width + 2))
                    mine_[0], mine_[1] = states[2 * g], states[2 * g + 1]
                    for d in range(0, width, LANES):
                        simd.store(mine_, 2 + d, simd.load(sums, g * width + d))


@inner
def _merge(args, dtype):
    """args: merges [M, 3] int64 (token, first partial, count), N, D, out, partials.

    A piece is one head of one token.
    """
    merges = simd.pointer(args[3], types.int64)
    num_q, width = args[4], args[5]
    out, partials = simd.pointer(args[6], dtype), simd.pointer(args[7], types.float32)
    while True:
        piece = simd.fetch_add(args)
        if piece >= args[2]:
            break
        row = simd.at(merges, piece // num_q * 3)
        head = piece % num_q
        first = simd.at(partials, (row[1] * num_q + head) * (width + 2))
        step = num_q * (width + 2)
        largest = first[0]
        for i in range(1, row[2]):
            largest = max(largest, first[i * step])
        total = np.float32(0.0)
        for i in range(row[2]):
            weight = simd.max_of(simd.exp2(simd.fill(first[i * step] - largest)))
            total += first[i * step + 1] * weight
            first[i * step] = weight
        for d in range(0, width, LANES):
            x = simd.fill(np.float32(0.0))
            for i in range(row[2]):
                weight = simd.fill(first[i * step] / total)
                x = simd.fma(simd.load(first, i * step + 2 + d), weight, x)
            simd.store(out, (row[0] * num_q + head) * width + d, x)


def decode_bf16(args):
    _decode(args, types.uint16)


def decode_f32(args):
    _decode(args, types.float32)


def decode_f16(args):
    _decode(args, types.float16)


def merge_bf16(args):
    _merge(args, types.uint16)


def merge_f32(args):
    _merge(args, types.float32)


def merge_f16(args):
    _merge(args, types.float16)


FUNCTIONS = {
    "bfloat16": (decode_bf16, merge_bf16),
    "float32": (decode_f32, merge_f32),
    "float16": (decode_f16, merge_f16),
}


@functools.cache
def decode_kernels(dtype: str) -> tuple[Kernel, Kernel]:
    """(attention, merge) for a cache of that dtype."""
    decode, merge = FUNCTIONS[dtype]
    return compiled(decode), compiled(merge)
