"""Tokens of a row that may be drawn: min-p, then top-k, then top-p, in the language of kernels and without a sort.

    kept: the tokens above `cut`, and by rising id the first `ties` of those that equal it

Of what min-p leaves top-k keeps the k largest; of these top-p keeps, in falling order, each whose predecessors have less
than p of the mass.  Both keep a token while the weight of those before it is below a target: weights of one and k, then
weights e^x and p · mass.

Noise lies in (-2.82, 16.64), so what is 19.5 below the best, after temperature, is never drawn.  The rest is copied, and
the copy narrowed by halves of its range until it holds the equal values among which the target is reached.  What top-k
leaves below that is no mass for top-p: less than k · 3.4e-9 of the best's.

Roofline: bytes = 4 V, twice from the second cache for top-p and once for top-k.  Some 20 instructions for 16 tokens that
have a mass and 15 for those that are copied; to narrow them takes two or three times as many.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from trouper.kernels.codegen.builder import KernelBuilder
from trouper.kernels.codegen.core import Pointer, Value, Var
from trouper.kernels.codegen.units import LANES

REACH = 19.5  # 16.64 + 2.82, rounded up
LOG2_E = 1.4426950408889634


class Row(NamedTuple):
    values: Pointer  # float32, of at least sixteen tokens
    length: Value
    best: Value  # above -inf
    temperature: Value
    log_min_p: Value
    top_k: Value  # 0 = off
    top_p: Value  # 1 = off
    held: Pointer  # memory for `held_bytes`


class Kept(NamedTuple):
    cut: Var
    ties: Var  # a float
    found: Var  # so many equal the cut, where ties may be fewer


def held_bytes(vocab_size: int) -> int:
    """Count the bytes of a copy, of what its last store writes too much, and of what its last load reads."""
    return 4 * (-(-vocab_size // LANES) + 2) * LANES


def top_k_top_p(code: KernelBuilder, row: Row) -> Kept:
    floor = row.best + row.log_min_p * row.temperature
    in_reach = code.maximum(floor, row.best - row.temperature * REACH)
    kept = Kept(code.var(in_reach), code.var(code.f32(row.length)), code.var(0.0))
    counted, of_ties = code.var(-math.inf), code.var(0.0)
    scale = code.f32(LOG2_E) / row.temperature

    def one(x: Value) -> Value:
        return code.f32x16(1.0)

    def probability(x: Value) -> Value:
        return code.exp2((x - row.best) * scale)

    with code.when((row.top_k > 0) & (row.top_k < row.length)):
        copy = _Copy(code, row.held)
        for x in _tokens(code, row):
            copy.add(x, x >= kept.cut)
        _narrow(code, copy, one, code.f32(row.top_k), kept)
        counted.set(kept.cut)
        of_ties.set(kept.ties * code.reduce_max(probability(code.f32x16(kept.cut))))
    with code.when(row.top_p < 1.0):
        mass = code.var(code.f32x16(0.0))
        for x in _tokens(code, row):
            is_counted = (x >= floor) & (x > counted)
            mass.set(mass + code.select(is_counted, probability(x), 0.0))
        total = code.reduce_sum(mass) + of_ties
        # what is less probable than that has less than 1 - p in all; half of it, for rounding
        negligible = (1.0 - row.top_p) * total * 0.5 / code.f32(row.length)
        logarithm = code.reduce_max(code.log(code.f32x16(negligible)))
        needed = code.maximum(row.best + logarithm * row.temperature, kept.cut)
        copy = _Copy(code, row.held)
        for x in _tokens(code, row):
            copy.add(x, x >= needed)
        _narrow(code, copy, probability, row.top_p * total, kept)
    return kept


def _tokens(code: KernelBuilder, row: Row) -> Iterator[Value]:
    """Yield sixteen at a time; the last sixteen overlap those before, which are -inf the second time."""
    for start in code.loop(0, row.length, LANES):
        first = code.minimum(start, row.length - LANES)
        is_new = code.lane_ids() >= code.i32x16(code.truncate(start - first, "i32"))
        yield code.select(is_new, row.values.load(first), -math.inf)


class _Copy:
    """A copy of some values, in their order."""

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
        """Return the least and the most; what the next `values` read beyond the last is nothing."""
        self._held.store(self.count, self._code.f32x16(-math.inf))
        return self._code.reduce_min(self._least), self._code.reduce_max(self._most)

    def values(self) -> Iterator[Value]:
        for i in self._code.loop(0, self.count, LANES):
            yield self._held.load(i)

    def keep(self, above: Value, to: Value) -> None:
        """Keep only what is above the one and not above the other."""
        count = Value(self._code, self.count.ir)
        self._begin()
        for i in self._code.loop(0, count, LANES):
            x = self._held.load(i)
            self.add(x, (x > above) & (x <= to))


def _narrow(
    code: KernelBuilder, copy: _Copy, weigh: Callable[[Value], Value], target: Value, kept: Kept
) -> None:
    """Keep what has less than the target before it, or all of the copy where that is less."""
    low, high = map(code.var, copy.range())
    before = code.var(0.0)
    for _ in code.while_(low, high):
        middle = low + (high - low) * 0.5
        middle = code.select(middle < high, middle, low)  # when it was rounded up, or is too large
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
