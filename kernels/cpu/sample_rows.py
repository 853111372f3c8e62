"""The kernel of `sample.py`: which tokens of a row may be drawn, and the draw, in the kernel language and without a sort.

    kept: the tokens above `cut`, and the first `ties` tokens equal to it, by rising id

min-p comes first.  Top-k keeps the k largest of the logits that min-p leaves.  Of these, in falling order, top-p keeps
each token if its predecessors have less than p of the mass.  Both are the same search: keep a token while the weight of
the tokens before it is below a target.  For top-k the weights are one and the target is k; for top-p they are e^x and
p · mass.

The noise is in (-2.82, 16.64), so a logit more than 19.5 below the best, after temperature, is never drawn.  The others are
copied, and the copy is narrowed by halving its range until it contains the equal values at which the target is reached.
The tokens out of reach that top-k keeps are not part of the mass for top-p: less than k · 3.4e-9 of the best token's.

Roofline: 4 V bytes from memory; later passes read the second cache.  For sixteen tokens the test for finite logits takes 2
instructions, the largest logit 2, a mass about 20, sixteen copied tokens 15, and narrowing two or three times as many.
The last pass takes 4 if no token is kept, about 25 if one is kept, and 70 if its noise may be large enough, which happens
about ten times in a row.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from trouper.kernels.codegen.builder import KernelBuilder
from trouper.kernels.codegen.core import Pointer, Value, Var
from trouper.kernels.codegen.units import LANES
from trouper.kernels.reference.sampling import (
    MULTIPLIERS,
    NOT_FINITE,
    NOTHING_LEFT,
    ROW_WORDS,
    WORD,
)

REACH = 19.5  # 16.64 + 2.82, rounded up
LOG2_E = 1.4426950408889634


class Row(NamedTuple):
    values: Pointer  # float32, at least sixteen tokens
    length: Value
    best: Value  # above -inf
    temperature: Value
    words: Pointer  # the row's `ROW`
    held: Pointer  # memory for `held_bytes`


class Kept(NamedTuple):
    cut: Var
    ties: Var  # as a float
    # The number of tokens equal to the cut, if `ties` may be smaller.
    found: Var


def held_bytes(vocab_size: int) -> int:
    """Count the bytes for a copy of a row of logits.

    The last store and load may reach beyond the row, and this excess is included.
    """
    return 4 * (-(-vocab_size // LANES) + 2) * LANES


def top_k_top_p(code: KernelBuilder, row: Row) -> Kept:
    numbers = row.words.of("f32")
    top_p, top_k = numbers[WORD["top_p"]], code.sign_extend(row.words[WORD["top_k"]])
    floor = row.best + numbers[WORD["log_min_p"]] * row.temperature
    in_reach = code.maximum(floor, row.best - row.temperature * REACH)
    kept = Kept(code.var(in_reach), code.var(code.f32(row.length)), code.var(0.0))
    counted, of_ties = code.var(-math.inf), code.var(0.0)
    scale = code.f32(LOG2_E) / row.temperature

    def one(x: Value) -> Value:
        return code.f32x16(1.0)

    def probability(x: Value) -> Value:
        return code.exp2((x - row.best) * scale)

    with code.when((top_k > 0) & (top_k < row.length)):
        copy = _Copy(code, row.held)
        for x in _tokens(code, row):
            copy.add(x, x >= kept.cut)
        _narrow(code, copy, one, code.f32(top_k), kept)
        counted.set(kept.cut)
        of_ties.set(kept.ties * code.reduce_max(probability(code.f32x16(kept.cut))))
    with code.when(top_p < 1.0):
        mass = code.var(code.f32x16(0.0))
        for x in _tokens(code, row):
            is_counted = (x >= floor) & (x > counted)
            mass.set(mass + code.select(is_counted, probability(x), 0.0))
        total = code.reduce_sum(mass) + of_ties
        # Tokens below this probability have less than 1 - p together.  Half of it allows for rounding.
        negligible = (1.0 - top_p) * total * 0.5 / code.f32(row.length)
        logarithm = code.reduce_max(code.log(code.f32x16(negligible)))
        needed = code.maximum(row.best + logarithm * row.temperature, kept.cut)
        copy = _Copy(code, row.held)
        for x in _tokens(code, row):
            copy.add(x, x >= needed)
        _narrow(code, copy, probability, top_p * total, kept)
    return kept


def _tokens(code: KernelBuilder, row: Row) -> Iterator[Value]:
    """Yield sixteen logits at a time.

    The last vector overlaps the one before, and its repeated lanes are -inf.
    """
    for start in code.loop(0, row.length, LANES):
        first = code.minimum(start, row.length - LANES)
        is_new = code.lane_ids() >= code.i32x16(code.truncate(start - first, "i32"))
        yield code.select(is_new, row.values.load(first), -math.inf)


class _Copy:
    """A copy of some logits in order."""

    def __init__(self, code: KernelBuilder, held: Pointer) -> None:
        self._code, self._held = code, held
        self.count = code.var(0)
        self._least, self._most = code.var(code.f32x16(0.0)), code.var(code.f32x16(0.0))
        self._begin()

    def _begin(self) -> None:
        self.count.set(0)
        self._least.set(math.inf)
        self._most.set(-math.inf)

    def add(self, x: Value, is_wanted: Value) -> None:
        code = self._code
        with code.when(code.any(is_wanted)):
            self._held.store(self.count, code.compress(x, is_wanted))
            self.count.set(self.count + code.count(is_wanted))
            least, most = code.minimum(x, self._least), code.maximum(x, self._most)
            self._least.set(code.select(is_wanted, least, self._least))
            self._most.set(code.select(is_wanted, most, self._most))

    def range(self) -> tuple[Value, Value]:
        """Return the smallest and the largest value.  Writes -inf behind the last value, where `values` may read."""
        self._held.store(self.count, self._code.f32x16(-math.inf))
        return self._code.reduce_min(self._least), self._code.reduce_max(self._most)

    def values(self) -> Iterator[Value]:
        for i in self._code.loop(0, self.count, LANES):
            yield self._held.load(i)

    def keep(self, above: Value, to: Value) -> None:
        """Keep only the values that are greater than `above` and at most `to`."""
        count = Value(self._code, self.count.ir)
        self._begin()
        for i in self._code.loop(0, count, LANES):
            x = self._held.load(i)
            self.add(x, (x > above) & (x <= to))


def _narrow(
    code: KernelBuilder, copy: _Copy, weigh: Callable[[Value], Value], target: Value, kept: Kept
) -> None:
    """Keep the values with less than the target before them, or the whole copy if its weight is smaller."""
    low, high = map(code.var, copy.range())
    before = code.var(0.0)
    for _ in code.while_(low, high):
        middle = low + (high - low) * 0.5
        # The middle may have been rounded up, or be infinite.
        middle = code.select(middle < high, middle, low)
        weight = code.var(code.f32x16(0.0))
        for x in copy.values():
            weight.set(weight + code.select(x > middle, weigh(x), 0.0))
        above = before + code.reduce_sum(weight)
        is_above = above >= target
        before.set(code.select(is_above, before, above))
        copy.keep(code.select(is_above, middle, -math.inf), code.select(is_above, high, middle))
        least, most = copy.range()
        low.set(least)
        high.set(most)
    found = code.f32(copy.count)
    wanted = code.f32x16(target - before) / weigh(code.f32x16(high))
    wanted = code.minimum(code.maximum(wanted, code.f32x16(1.0)), code.f32x16(found))
    whole = code.to_f32x16(code.round_i32x16(wanted))
    ties = code.reduce_max(whole + code.select(whole < wanted, code.f32x16(1.0), 0.0))
    fewer = code.minimum(ties, kept.ties)
    kept.ties.set(code.select(kept.cut.equals(high), fewer, ties))
    kept.cut.set(high)
    kept.found.set(found)


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
            repetition = words.of("f32")[WORD["repetition"]]
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
    temperature = words.of("f32")[WORD["temperature"]]
    row = Row(values, length, _largest(code, values, length), temperature, words, held)
    with code.when((row.best > -math.inf) & temperature.equals(0.0)):
        token[0] = _first_of_largest(code, row)
    with code.when((row.best > -math.inf) & (temperature > 0.0)):
        seed = words + WORD["seed"]
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
