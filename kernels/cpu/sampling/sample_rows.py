"""The kernel of `sample.py`.

A row takes one pass that tests whether it is finite, two passes over the tokens that have occurred, one that finds the
largest logit, the passes of `top_k_top_p.py`, and one that finds the largest sum of logit and noise.

Roofline: 4 V bytes from memory, then 8 V from the second cache.  For sixteen tokens the test takes 2 instructions and the
largest logit 2; the last pass takes 4 if no token is kept, about 25 if one is kept, and 70 if its noise may be large
enough, which happens about ten times in a row.
"""

import math

from trouper.kernels.codegen.builder import KernelBuilder
from trouper.kernels.codegen.core import Pointer, Value
from trouper.kernels.codegen.units import LANES
from trouper.kernels.cpu.sampling.row_layout import (
    LOG_MIN_P,
    NOT_FINITE,
    NOTHING_LEFT,
    REPETITION,
    ROW_WORDS,
    SEED,
    TEMPERATURE,
    TOP_K,
    TOP_P,
)
from trouper.kernels.cpu.sampling.top_k_top_p import LOG2_E, Kept, Row, top_k_top_p
from trouper.kernels.reference.noise import MULTIPLIERS

# The tolerance in logarithms to base 2, far more than the real error.
ROUNDING = 2.0**-6
# A comparison or addition takes four cycles, so four run at once.
UNROLLED = 4


def sample_rows(code: KernelBuilder) -> None:
    """Write the kernel with the arguments logits, their stride, picked, parameters, rows, ends, tokens that have occurred, their
    stride, masks, tokens, V, scratch memory, its bytes for a thread.

    A work item is a row.
    """
    logits, stride, picked, parameters, rows, ends, occurred, *others = code.arguments(13)
    occurred_stride, masks, tokens, length, memory, memory_bytes = others
    held = code.pointer(memory + code.thread() * memory_bytes, "f32")
    for i in code.work_items():
        place, row = code.pointer(picked, "i64")[i], code.pointer(rows, "i64")[i]
        token, end = code.pointer(tokens, "i64") + i, code.pointer(ends, "i64")[i]
        values = code.pointer(logits, "f32") + place * stride
        words = code.pointer(parameters, "i32") + row * ROW_WORDS
        ids = code.pointer(occurred, "i64") + row * occurred_stride
        with code.when(place >= 0):
            repetition = words.of("f32")[REPETITION]
            is_spoiled = code.var(0)
            with code.when(repetition > 0.0):
                is_spoiled.set(code.select(_is_finite(code, values, length), 0, 1))
            with code.when(is_spoiled > 0):
                token[0] = NOT_FINITE
            with code.when(is_spoiled < 1):
                with code.when((repetition > 0.0) & ((repetition < 1.0) | (repetition > 1.0))):
                    _apply_penalties(code, values, length, ids, end, repetition, held)
                mask = code.pointer(masks, "i64")[row]
                with code.when(mask > 0):
                    _apply_mask(code, values, length, code.pointer(mask, "i32"))
                token[0] = NOTHING_LEFT
                _draw(code, token, values, length, words, end, held)


def _is_finite(code: KernelBuilder, values: Pointer, length: Value) -> Value:
    """Test whether the sum of all numbers times 0 is 0."""
    zeros = [code.var(code.f32x16(0.0)) for _ in range(UNROLLED)]
    for start in code.loop(0, length, UNROLLED * LANES):
        for i, zero in enumerate(zeros):
            x = values.load(
                code.minimum(start + i * LANES, length - LANES)
                # The last vector may overlap the one before it.
            )
            zero.set(code.fma(x, code.f32x16(0.0), zero))
    total: Value = zeros[0]
    for zero in zeros[1:]:
        total = total + zero
    return code.reduce_sum(total).equals(0.0)


def _apply_penalties(
    code: KernelBuilder,
    values: Pointer,
    length: Value,
    ids: Pointer,
    count: Value,
    penalty: Value,
    held: Pointer,
) -> None:
    for j in code.loop(0, count):
        with code.when((ids[j] >= 0) & (ids[j] < length)):
            x = values[ids[j]]
            held[j] = code.select(x > 0.0, x / penalty, x * penalty)
    for j in code.loop(0, count):
        with code.when((ids[j] >= 0) & (ids[j] < length)):
            values[ids[j]] = held[j]


def _apply_mask(code: KernelBuilder, values: Pointer, length: Value, words: Pointer) -> None:
    whole = length - length % LANES
    for first in code.loop(0, whole, LANES):
        # The sixteen bits of these tokens become the lowest.
        word = words[first >> 5] >> code.truncate(first & 31, "i32")
        is_allowed = ((code.i32x16(word) >> code.lane_ids()) & 1) > 0
        values.store(first, code.select(is_allowed, values.load(first), code.f32x16(-math.inf)))
    for token in code.loop(whole, length):
        is_allowed = ((words[token >> 5] >> code.truncate(token & 31, "i32")) & 1) > 0
        values[token] = code.select(is_allowed, values[token], code.f32(-math.inf))


def _draw(
    code: KernelBuilder,
    token: Pointer,
    values: Pointer,
    length: Value,
    words: Pointer,
    position: Value,
    held: Pointer,
) -> None:
    numbers = words.of("f32")
    temperature = numbers[TEMPERATURE]
    row = Row(
        values,
        length,
        _largest(code, values, length),
        temperature,
        log_min_p=numbers[LOG_MIN_P],
        top_k=code.sign_extend(words[TOP_K]),
        top_p=numbers[TOP_P],
        held=held,
    )
    with code.when((row.best > -math.inf) & temperature.equals(0.0)):
        token[0] = _first_of_largest(code, row)
    with code.when((row.best > -math.inf) & (temperature > 0.0)):
        seed = words + SEED
        position = code.truncate(position, "i32")
        keys = _keys(code, *(code.i32x16(x) for x in (position, seed[0], seed[1])))
        token[0] = _drawn(code, row, keys)


def _largest(code: KernelBuilder, values: Pointer, length: Value) -> Value:
    best = [code.var(code.f32x16(-math.inf)) for _ in range(UNROLLED)]
    for start in code.loop(0, length, UNROLLED * LANES):
        for i, lanes in enumerate(best):
            # The last vector may overlap the one before it.
            first = code.minimum(start + i * LANES, length - LANES)
            lanes.set(code.maximum(values.load(first), lanes))
    largest: Value = best[0]
    for lanes in best[1:]:
        largest = code.maximum(largest, lanes)
    return code.reduce_max(largest)


def _first_of_largest(code: KernelBuilder, row: Row) -> Value:
    first, is_found = code.var(0), code.var(0)
    token = code.var(0)
    for _ in code.while_(is_found, 1):
        start = code.minimum(first, row.length - LANES)
        is_best = row.values.load(start).equals(row.best)
        with code.when(code.any(is_best)):
            is_found.set(1)
            token.set(_least(code, is_best, _ids(code, start)))
        first.set(first + LANES)
    return token


def _ids(code: KernelBuilder, first: Value) -> Value:
    """Return sixteen ids, from `first` on."""
    return code.i32x16(code.truncate(first, "i32")) + code.lane_ids()


def _least(code: KernelBuilder, is_one: Value, ids: Value) -> Value:
    return 0 - code.sign_extend(code.reduce_max(code.select(is_one, 0 - ids, -(2**31))))


def _drawn(code: KernelBuilder, row: Row, keys: tuple[Value, Value]) -> Value:
    kept = top_k_top_p(code, row)
    last_tie = code.i32x16(code.truncate(_last_tie(code, row, kept), "i32"))
    best, at = code.var(code.f32x16(-math.inf)), code.var(code.i32x16(0))
    to_beat = code.var(-math.inf)
    for start in code.loop(0, row.length, LANES):
        first = code.minimum(start, row.length - LANES)
        x = row.values.load(first)
        is_kept = x >= kept.cut
        with code.when(code.any(is_kept)):
            ids = _ids(code, first)
            bits = _hash32(ids, *keys)
            with code.when(code.any(is_kept & _may_beat(code, x, bits, to_beat, row.temperature))):
                is_kept = (x > kept.cut) | (x.equals(kept.cut) & (ids <= last_tie))
                noisy = x / row.temperature + _gumbel(code, bits)
                is_better = is_kept & (noisy > best)
                at.set(code.select(is_better, ids, at))
                best.set(code.select(is_better, noisy, best))
                to_beat.set(code.reduce_max(best))
    return _least(code, best.equals(to_beat), at)


def _may_beat(
    code: KernelBuilder, x: Value, bits: Value, to_beat: Value, temperature: Value
) -> Value:
    """Return false if x / temperature + noise is certainly smaller.  This saves two logarithms for nearly all tokens.

    -log(-log u) ≤ -log(1 - u), and the bits of a float, read as an integer, are at most 2²³ (log2 + 127).
    """
    complement = code.to_f32x16(_shifted(bits ^ -1, 8) | 1)  # 2²⁴ (1 - u), exactly
    logarithm = code.to_f32x16(code.as_i32x16(complement))
    most = LOG2_E / temperature * 2.0**23
    offset = (ROUNDING + 127 + 24) * 2.0**23 - to_beat * (LOG2_E * 2.0**23)
    return logarithm < code.fma(most, x, code.f32x16(offset))


def _last_tie(code: KernelBuilder, row: Row, kept: Kept) -> Value:
    """Return the id of the last kept token among those equal to the cut, or at least V if all are kept."""
    last, left = code.var(row.length), code.var(kept.ties)
    with code.when(kept.ties < kept.found):
        for start in code.loop(0, row.length, LANES):
            x = row.values.load(code.minimum(start, row.length - LANES))
            with code.when(code.any(x.equals(kept.cut)) & (left > 0.0)):
                for token in code.loop(start, code.minimum(start + LANES, row.length)):
                    with code.when(row.values[token].equals(kept.cut) & (left > 0.0)):
                        last.set(token)
                        left.set(left - 1.0)
    return last


def _keys(code: KernelBuilder, position: Value, low: Value, high: Value) -> tuple[Value, Value]:
    """Compute `noise.row_keys`."""
    mixed = _hash32(_hash32(position, low, high), high, low)
    return mixed, _hash32(mixed ^ low, high, code.i32x16(0))


def _hash32(x: Value, key0: Value, key1: Value) -> Value:
    """Compute `noise.hash32`."""
    first, second = MULTIPLIERS
    x = x ^ key0
    x = (x ^ _shifted(x, 16)) * first + key1
    x = (x ^ _shifted(x, 15)) * second
    return x ^ _shifted(x, 16)


def _shifted(x: Value, count: int) -> Value:
    """Shift right, inserting zeros."""
    return (x >> count) & (2 ** (32 - count) - 1)


def _gumbel(code: KernelBuilder, bits: Value) -> Value:
    u = (code.to_f32x16(_shifted(bits, 9)) + 0.5) * 2.0**-23
    return 0.0 - code.log(0.0 - code.log(u))
