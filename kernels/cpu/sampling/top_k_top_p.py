"""Select the tokens of a row that may be drawn: min-p, then top-k, then top-p, in the kernel language and without a sort.

    kept: the tokens above `cut`, and the first `ties` tokens equal to it, by rising id

Top-k keeps the k largest logits that min-p leaves.  Of these, in falling order, top-p keeps each token if its
predecessors have less than p of the mass.  Both are the same search: keep a token while the weight of the tokens before
it is below a target.  For top-k the weights are one and the target is k; for top-p they are e^x and p · mass.

The noise is in (-2.82, 16.64), so a logit more than 19.5 below the best, after temperature, is never drawn.  The others are
copied, and the copy is narrowed by halving its range until it contains the equal values at which the target is reached.
The tokens out of reach that top-k keeps are not part of the mass for top-p: less than k · 3.4e-9 of the best token's.

Roofline: 4 V bytes, twice from the second cache for top-p and once for top-k.  About 20 instructions for sixteen tokens
with a mass and 15 for sixteen copied ones; narrowing takes two or three times as many.
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
    values: Pointer  # float32, at least sixteen tokens
    length: Value
    best: Value  # above -inf
    temperature: Value
    log_min_p: Value
    top_k: Value  # 0 is off
    top_p: Value  # 1 is off
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
        # Tokens below this probability have less than 1 - p together.  Half of it allows for rounding.
        negligible = (1.0 - row.top_p) * total * 0.5 / code.f32(row.length)
        logarithm = code.reduce_max(code.log(code.f32x16(negligible)))
        needed = code.maximum(row.best + logarithm * row.temperature, kept.cut)
        copy = _Copy(code, row.held)
        for x in _tokens(code, row):
            copy.add(x, x >= needed)
        _narrow(code, copy, probability, row.top_p * total, kept)
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
