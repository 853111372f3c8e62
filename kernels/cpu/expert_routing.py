"""Kernels that choose each token's experts, and that add the experts' outputs.

`route` reads a router's logits:

    logits [T, S]        any float dtype; S a multiple of 16, at least X, or X + 1 with the gate of a shared expert
    ids [T, k] int64     the experts of a token, the best first; the smaller id if two scores are equal
    weights [T, k + 1]   float32: the weights of those experts, then of the shared expert: the sigmoid of its logit, or 1
    order [T k] int64    t · k + j of each choice, sorted by expert and then by token
    spans [., 3] int64   expert, first index in order, number of choices, for each expert with tokens; then empty spans,
                         up to min(X, T k)

The products between the two kernels read `order` and `spans` (`expert_items`), and write:

    each [T k, E]        output a belongs to choice a; E a multiple of 16
    W [X, 5]             addresses of each expert's weight, scales, zeros, minima and bias, or 0

`combine` adds them: y = Σ weight · output over a token's experts and the shared expert.

    shared [T, E]        output of the shared expert, or absent
    y [T, E]

The sum is float32 in the order of the token's experts, so its bits do not depend on other tokens.

Roofline of combine: e T (k + 2) E bytes.  `route` uses one thread: with X = 128 and k = 8 on one EPYC core 1 row takes
1.0 µs and 16 rows take 10 µs.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from trouper.kernels.codegen.builder import KernelBuilder
from trouper.kernels.codegen.core import Pointer, Value
from trouper.kernels.codegen.units import LANES, Kind
from trouper.kernels.experts import SIGMOID_EPS


def combine(code: KernelBuilder, kind: Kind) -> None:
    """Write the kernel with the arguments each, weights, k, shared or 0, y, E.  A work item is a token."""
    each, weights, k, shared, ys, width = code.arguments(6)
    for t in code.work_items():
        first = code.pointer(each, kind) + t * k * width
        own = code.pointer(weights, "f32") + t * (k + 1)
        other, y = (code.pointer(start, kind) + t * width for start in (shared, ys))
        for d in code.loop(0, width, LANES):
            total = code.var(code.f32x16(0.0))
            for j in code.loop(0, k):
                total.set(code.fma(code.f32x16(own[j]), (first + j * width).load(d), total))
            with code.when(shared > 0):
                total.set(code.fma(code.f32x16(own[k]), other.load(d), total))
            y.store(d, total)


# Panels in a work item: a multiple of the panels of every block.
PANELS = 12
ADDRESSES = 5


class ExpertItem(NamedTuple):
    """Twelve panels of one expert, with all rows of that expert.

    It is one work item: a thread reads these panels once, for all rows.
    """

    first: Value  # index in the order
    num_rows: Value
    addresses: list[Value]
    first_panel: Value
    stop: Value


class Choices:
    """The `Rows` of a product for the current expert.

    They are taken from the order of the routing, so rows need not be copied together.
    """

    def __init__(self, code: KernelBuilder, order: Value, divisor: Value) -> None:
        self._code, self._order, self._divisor = code, code.pointer(order, "i64"), divisor
        self._first = self._num_rows = code.i64(0)

    def begin(self, item: ExpertItem) -> None:
        """Switch to the rows of a work item. The product's other state, such as its registers, stays the same."""
        self._first, self._num_rows = item.first, item.num_rows

    def row(self, index: Value) -> Value:
        return self._order[self._first + self._code.minimum(index, self._num_rows - 1)]

    def x_row(self, row: Value) -> Value:
        return row // self._divisor


def num_items(num_spans: int, num_panels: int) -> int:
    """Count the work items of a call.

    The number of experts with tokens is unknown before the launch, so each span has its maximum.
    """
    return num_spans * -(-num_panels // PANELS)


def expert_items(
    code: KernelBuilder, weights: Value, spans: Value, num_panels: Value
) -> Iterator[ExpertItem]:
    """Yield the work items of the experts with tokens. Items of experts without tokens end at once."""
    per_expert = (num_panels + (PANELS - 1)) // PANELS
    table = code.pointer(weights, "i64")
    for item in code.work_items():
        span = code.pointer(spans, "i64") + item // per_expert * SPAN
        first_panel = item % per_expert * PANELS
        with code.when(span[2] > 0):
            own = table + span[0] * ADDRESSES
            addresses = [own[i] for i in range(ADDRESSES)]
            stop = code.minimum(first_panel + PANELS, num_panels)
            yield ExpertItem(span[1], span[2], addresses, first_panel, stop)


LOG2_E = math.log2(math.e)
# The limit keeps the arrays on the stack at 16 KiB.
MAX_EXPERTS = 1024
LOWEST = -3.0e38
NONE = 2**30
SPAN = 3


def route(
    code: KernelBuilder, kind: Kind, is_normalised: bool, has_shared_gate: bool, is_sigmoid: bool
) -> None:
    """Write the kernel with the arguments logits, S, T, X, k, ids, weights, order, spans, their number, bias or 0, scale.

    The bias of the choice has float32 numbers up to whole registers. The scale is a float. Only sigmoids have both.
    One thread processes the single work item.
    """
    logits, stride, num_rows, num_experts, k, *outputs, num_spans, bias, scale = code.arguments(12)
    ids, order, spans = (code.pointer(outputs[i], "i64") for i in (0, 2, 3))
    weights = code.pointer(outputs[1], "f32")
    counts, room = code.array("i64", MAX_EXPERTS), code.array("f32", LANES)
    chooser = _Chooser(code, num_experts)
    if is_sigmoid:
        chooser = _SigmoidChooser(code, num_experts, bias)
    for _ in code.work_items():
        for expert in code.loop(0, num_experts):
            counts[expert] = 0
        for t in code.loop(0, num_rows):
            row, own = code.pointer(logits, kind) + t * stride, weights + t * (k + 1)
            total = code.var(chooser.read(row))
            if is_normalised:
                total.set(code.like(total, chooser.eps))
            for j in code.loop(0, k):
                expert, power = chooser.take()
                ids[t * k + j], own[j] = expert, power
                counts[expert] = counts[expert] + 1
                if is_normalised:
                    total.set(total + power)
            for j in code.loop(0, k):
                weight = own[j] / total
                own[j] = weight * code.f32_argument(scale) if is_sigmoid else weight
            own[k] = 1.0
            if has_shared_gate:
                last = row.load(num_experts // LANES * LANES)
                room.store(0, 1.0 / (1.0 + code.exp2(last * -LOG2_E)))
                own[k] = room[num_experts % LANES]
        _sort(code, num_experts, num_rows * k, counts, ids, order, spans, num_spans)


class _Chooser:
    """Selects the experts of one token, one after the other, by e^(logit - largest)."""

    # A score below those of all experts that are left.
    taken = -1.0
    # The first summand of normalised weights.
    eps = 0.0

    def __init__(self, code: KernelBuilder, num_experts: Value) -> None:
        self._code, self._num_experts = code, num_experts
        self._stop = (num_experts + (LANES - 1)) // LANES * LANES
        self._powers = code.array("f32", MAX_EXPERTS)
        numbers = code.array("i32", LANES)
        for lane in range(LANES):
            numbers[lane] = lane
        self._numbers = numbers.load()

    def read(self, row: Pointer) -> Value:
        """Read a token's logits.  Returns the sum of e^(logit - largest)."""
        code, powers = self._code, self._powers
        for d in code.loop(0, self._stop, LANES):
            powers.store(d, row.load(d))
        for d in code.loop(self._num_experts, self._stop):
            powers[d] = LOWEST
        largest = code.reduce_max(self._over(code.maximum, code.f32x16(LOWEST)))
        total = code.var(code.f32x16(0.0))
        for d in code.loop(0, self._stop, LANES):
            power = code.exp2((powers.load(d) - largest) * LOG2_E)
            powers.store(d, power)
            total.set(total + power)
        return code.reduce_sum(total)

    def take(self) -> tuple[Value, Value]:
        """Return the most likely expert among the remaining ones, and its power; an arbitrary expert if a logit is NaN."""
        code, powers = self._code, self._powers
        largest = code.reduce_max(self._over(code.maximum, code.f32x16(self.taken)))
        place = code.var(code.i32x16(NONE))
        for d in code.loop(0, self._stop, LANES):
            here = self._numbers + code.truncate(d, "i32")
            is_it = powers.load(d).equals(largest)
            place.set(code.minimum(place, code.select(is_it, here, NONE)))
        first = code.sign_extend(code.reduce_min(place))
        expert = code.minimum(first, self._num_experts - 1)
        power = code.var(self._weight_of(expert))
        powers[expert] = self.taken
        return expert, power

    def _weight_of(self, expert: Value) -> Value:
        return self._powers[expert]

    def _over(self, fold: Callable[[Value, Value], Value], first: Value) -> Value:
        found = self._code.var(first)
        for d in self._code.loop(0, self._stop, LANES):
            found.set(fold(self._powers.load(d), found))
        return found


class _SigmoidChooser(_Chooser):
    """Selects the experts with the largest sigmoid + bias. Their weights are the sigmoids."""

    taken = LOWEST
    eps = SIGMOID_EPS

    def __init__(self, code: KernelBuilder, num_experts: Value, bias: Value) -> None:
        super().__init__(code, num_experts)
        self._bias, self._sigmoids = bias, code.array("f32", MAX_EXPERTS)

    def read(self, row: Pointer) -> Value:
        """Read a token's logits.  Returns 1, by which weights that are not normalised are divided."""
        code, powers = self._code, self._powers
        for d in code.loop(0, self._stop, LANES):
            sigmoid = 1.0 / (1.0 + code.exp2(row.load(d) * -LOG2_E))
            self._sigmoids.store(d, sigmoid)
            powers.store(d, sigmoid)
        with code.when(self._bias > 0):
            bias = code.pointer(self._bias, "f32")
            for d in code.loop(0, self._stop, LANES):
                powers.store(d, powers.load(d) + bias.load(d))
        for d in code.loop(self._num_experts, self._stop):
            powers[d] = LOWEST
        return code.f32(1.0)

    def _weight_of(self, expert: Value) -> Value:
        return self._sigmoids[expert]


def _sort(
    code: KernelBuilder,
    num_experts: Value,
    num_choices: Value,
    counts: Pointer,
    ids: Pointer,
    order: Pointer,
    spans: Pointer,
    num_spans: Value,
) -> None:
    """Write order and spans.  Overwrites `counts`, the number of choices of each expert."""
    num_found, first = code.var(0), code.var(0)
    for expert in code.loop(0, num_experts):
        number = code.var(counts[expert])
        counts[expert] = first
        with code.when(number > 0):
            span = spans + num_found * SPAN
            span[0], span[1], span[2] = expert, first, number
            num_found.set(num_found + 1)
        first.set(first + number)
    for unused in code.loop(num_found, num_spans):
        spans[unused * SPAN + 2] = 0
    for choice in code.loop(0, num_choices):
        expert = code.var(ids[choice])
        place = code.var(counts[expert])
        order[place] = choice
        counts[expert] = place + 1
