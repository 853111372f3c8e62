"""Attention of single query tokens over a paged KV cache, read in place.

    out[t, n] = softmax(cap(scale · q[t, n] Kᵀ)) V,   cap(s) = c · tanh(s / c), or s without a cap
                with sinks, over one more key with the score sinks[n] and the value 0

    q      [T, N, D]     rows may be strided;  N = H · G, the G heads of a group adjacent
    cache  [2, H, S, D]  slot = block id · block size + offset
    tables [C, B]        int64 block ids
    spans  [P, 8]        int64: token, row of the table, begin, end, partial result or -1; number of tokens, and the
                         differences of end and partial result from each token to the next
    merges [M, 3]        int64: token, first partial result, number of them
    sinks  [N]           float32, or absent
    plan                 int64: tables, their stride, spans, P, heads of a work item, partials, merges, M
    out    [T, N · D]

A work item is some KV heads of one span of positions begin … end - 1.  Its keys are read once for all G heads of up to
`MOST_TOKENS` tokens of one sequence, which a step that verifies drafts has.  Sixteen lanes run along D, with accumulators
for eight keys by two heads; then follow an online softmax over the block and rows of the output for four heads.  A longer
context is several spans, so that one request keeps all cores busy.  Spans are cut at multiples of SPAN in every batch, and
`merge_partials` adds them in order.  The plan contains everything that differs between steps, so that a recorded launch
finds it there.

Scores are dot products of bfloat16 pairs if the machine has the instruction (`dots`), else products of float32.

Laws:
  * A token's result does not depend on other tokens of its span.  Each token has its own state, over the same keys.
  * It does not depend on the size of blocks, or on which of them are neighbours.  Sums run over keys in order, and the maximum
    changes only at multiples of KEYS.

Roofline: 2 e H L D bytes, 4 N L D FLOPs for L keys; bound by memory.
Measured on one EPYC core with busy neighbours, H = 8, G = 2, D = 128, bfloat16, where a torch sum read 20-22 GB/s:
    16 x 1024 keys  20.4 GB/s    64 x 1024  16-20    1 x 1024 (from the last cache)  32
torch's flash attention: 4, 4 and 8.6.  Prefetching the values during the scores, and the next keys during the values,
improved the first from 11 to 17.  2 MiB pages add a tenth, but each head of a sequence then touches 2 MiB.
"""

import math
from collections.abc import Iterator

from trouper.kernels.codegen.builder import KernelBuilder
from trouper.kernels.codegen.core import Operand, Pointer, Value, Var
from trouper.kernels.codegen.features import has_bf16_dot
from trouper.kernels.codegen.units import LANES, Kind, Unit

# Positions of a span: 512 KiB of K and V at D = 128, enough to amortise a work item.
SPAN = 1024
# The number of keys with scores in memory, and the numbers between the scores of two heads: eight scores are stored at a time.
KEYS = 128
PITCH = KEYS + LANES
LOG2_E = math.log2(math.e)
# Below every score, and finite, so that its difference to itself is 0.
HIDDEN = -1e30
# The number of bfloat16 in a cache line.
LINE = 2 * LANES
# The largest number of tokens with several spans in one launch, at least that of a recorded step.  Their partial results take
# 68 MiB at N = 32, D = 128 and 8,192 keys.
ROUND = 512
# Tokens of a span, and its query heads for more than four tokens.  Scratch memory is 50 KiB for 32 heads with D = 128.
MOST_TOKENS, MOST_HEADS = 8, 32


def unit_of(kind: Kind, width: int) -> Unit:
    """Return the unit that multiplies queries and keys.

    Dots need bfloat16, whole cache lines in a head and the processor's instruction; floats always work.
    """
    return "dots" if kind == "bf16" and width % LINE == 0 and has_bf16_dot() else "floats"


def tokens_of_span(group: int) -> int:
    """Return how many tokens of a sequence a span may serve.  `group` is the number of query heads of a KV head."""
    return max(4, min(MOST_TOKENS, MOST_HEADS // group))


def scratch_bytes(group: int, width: int) -> int:
    """Count the bytes of scratch memory that each thread needs.

    They hold queries, scores and sums of the tokens of one span. It does not depend on the context's length.
    """
    return -(-4 * MOST_TOKENS * group * (2 * width + PITCH + 2) // 64) * 64 + 64


def decode_attention(code: KernelBuilder, kind: Kind, unit: Unit) -> None:
    """Write the kernel with the arguments q, its stride, cache, S, plan, H, G, D, block size, scale, cap, sinks or 0, out, its
    stride, scratch, scratch bytes of a thread.
    """
    (
        q, q_stride, cache, num_slots, plan, num_kv, group, width, block_size, scale, cap, sinks, out,
        out_stride, scratch, scratch_bytes,
    ) = code.arguments(16)  # fmt: skip
    q, cache, out = (code.pointer(x, kind) for x in (q, cache, out))
    plan = code.pointer(plan, "i64")
    tables, spans = code.pointer(plan[0], "i64"), code.pointer(plan[2], "i64")
    table_stride, num_spans, heads, partials = plan[1], plan[3], plan[4], plan[5]
    size = group * width
    wide_q = code.pointer(scratch + code.thread() * scratch_bytes, "f32")
    sums = wide_q + MOST_TOKENS * size
    scores = sums + MOST_TOKENS * size
    span = _Span(
        code, unit, wide_q, sums, scores, scores + MOST_TOKENS * group * PITCH, group, width, block_size,
        code.f32_argument(scale), code.f32_argument(cap),
    )  # fmt: skip
    parts = num_kv // heads
    for item in code.work_items(num_spans * parts):
        row = spans + item // parts * 8
        token, begin, end, partial = row[0], row[2], row[3], row[4]
        num_tokens, growth, partial_step = row[5], row[6], row[7]
        table = tables + row[1] * table_stride
        first_slot = table[begin // block_size] * block_size + begin % block_size
        first_head = item % parts * heads
        for head in code.loop(first_head, first_head + heads):
            for t in code.loop(0, num_tokens):
                span.keep_query(t, q + ((token + t) * q_stride + head * size))
                span.begin(t)
            # `merge_partials` adds the sinks to partial results.
            with code.when((partial < 0) & (sinks > 0)):
                for t in code.loop(0, num_tokens):
                    span.add_sinks(t, code.pointer(sinks, "f32") + head * group)
            k = cache + head * num_slots * width
            v = cache + (num_kv + head) * num_slots * width
            following = cache + ((head + 1) % num_kv * num_slots + first_slot) * width
            span.write(k, v, following, table, begin, end, num_tokens, growth)
            for t in code.loop(0, num_tokens):
                target = out + ((token + t) * out_stride + head * size)
                number = (partial + t * partial_step) * num_kv + head
                part = code.pointer(partials, "f32") + number * group * (width + 2)
                for g in code.loop(0, group):
                    own, states = sums + (t * group + g) * width, span.states + 2 * (t * group + g)
                    with code.when(partial < 0):
                        inverse = 1.0 / states[1]
                        for d in code.loop(0, width, LANES):
                            target.store(g * width + d, own.load(d) * inverse)
                    with code.when(partial >= 0):
                        mine = part + g * (width + 2)
                        mine[0], mine[1] = states[0], states[1]
                        for d in code.loop(0, width, LANES):
                            mine.store(2 + d, own.load(d))


class _Span:
    """One KV head of a span: for each token and head a state [2] (maximum, sum) and sums [D]."""

    def __init__(
        self,
        code: KernelBuilder,
        unit: Unit,
        q: Pointer,
        sums: Pointer,
        scores: Pointer,
        states: Pointer,
        group: Value,
        width: Value,
        block_size: Value,
        scale: Value,
        cap: Value,
    ) -> None:
        self.code, self.unit = code, unit
        self.q, self.sums, self.scores, self.states = q, sums, scores, states
        self.group, self.width, self.block_size = group, width, block_size
        self.scale, self.cap = scale, cap

    def keep_query(self, token: Value, query: Pointer) -> None:
        """Store the heads of a token: as float32, or unchanged for dots."""
        size = self.group * self.width
        if self.unit == "dots":
            target, query = self.q.of("i32") + token * (size // 2), query.of("i32")
            for i in self.code.loop(0, size // 2, LANES):
                target.store(i, query.load(i))
            return
        for i in self.code.loop(0, size, LANES):
            self.q.store(token * size + i, query.load(i))

    def begin(self, token: Value) -> None:
        """Reset the state of a token."""
        code, size = self.code, self.group * self.width
        for q in code.loop(token * self.group, (token + 1) * self.group):
            self.states[2 * q], self.states[2 * q + 1] = HIDDEN, 0.0
        for i in code.loop(token * size, (token + 1) * size, LANES):
            self.sums.store(i, code.f32x16(0.0))

    def add_sinks(self, token: Value, sinks: Pointer) -> None:
        """Start with the sinks of the heads as keys: each has weight one and no value."""
        for g in self.code.loop(0, self.group):
            q = token * self.group + g
            self.states[2 * q], self.states[2 * q + 1] = sinks[g] * LOG2_E, 1.0

    def write(
        self,
        k: Pointer,
        v: Pointer,
        following: Pointer,
        table: Pointer,
        begin: Value,
        end: Value,
        num_tokens: Value,
        growth: Value,
    ) -> None:
        """Compute the span.

        Args:
            following: the keys that the thread reads next; the first ones are prefetched at the end.
            end: the end for the first token; each further token sees `growth` more keys.
        """
        code, group, width, size = self.code, self.group, self.width, self.block_size
        num_heads, last_end = num_tokens * group, end + (num_tokens - 1) * growth
        position = code.var(begin)
        for _ in code.while_(position, last_end):
            # The softmax is over keys from a multiple of KEYS to the next, wherever their blocks are.
            stop = code.minimum((position // KEYS + 1) * KEYS, last_end)
            count = stop - position
            for first, num, slot in self._runs(position, stop, table):
                for q, heads in self._heads(code.i64(0), num_heads, (2, 1)):
                    self._write_scores(
                        q, heads, k + slot * width, num, v + slot * width, first - position
                    )
            # The keys that the first token sees.
            seen = code.minimum(count, end - position)
            for t in code.loop(0, num_tokens):
                own = code.minimum(count, end + t * growth - position)
                with code.when(own > 0):
                    for g in code.loop(0, group):
                        self._softmax(t * group + g, own)
            for first, num, slot in self._runs(position, stop, table):
                value, offset = v + slot * width, first - position
                # The next keys are prefetched during the sums, and the values during the scores.  The index is
                # not used at the end of the span.
                after = first + num
                index = code.minimum(after, last_end - 1)
                slot = table[index // size] * size + index % size
                next_key = Pointer(
                    code,
                    code.builder.select(
                        (after >= last_end).ir, following.ir, (k + slot * width).ir
                    ),
                    k.kind,
                )
                shared = code.minimum(num, seen - offset)
                self._sum_values(num_heads, value, shared, next_key, offset)
                for t in code.loop(1, num_tokens):
                    own = code.minimum(num, end + t * growth - first)
                    with code.when(own > shared):
                        for g in code.loop(0, group):
                            for d in code.loop(0, width, LANES):
                                q = t * group + g
                                begin_at = code.maximum(shared, 0)
                                self._add_values(q, 1, d, 1, value, own, next_key, offset, begin_at)
            position.set(stop)

    def _runs(
        self, begin: Value, end: Value, table: Pointer
    ) -> Iterator[tuple[Value, Value, Value]]:
        """Yield the first position, the number and the first slot of keys that lie together in memory."""
        code, size = self.code, self.block_size
        first = code.var(begin)
        for _ in code.while_(first, end):
            offset = first % size
            slot = table[first // size] * size + offset
            count = code.var(code.minimum(size - offset, end - first))
            self._extend(count, first, slot, table, end)
            yield Value(code, first.ir), Value(code, count.ir), slot
            first.set(first + count)

    def _sum_values(
        self, num_heads: Value, value: Pointer, count: Value, ahead: Pointer, offset: Value
    ) -> None:
        """Add the values of some keys to the sums, for as many columns and heads at once as fit in registers.

        One dependent addition takes as long as eight independent ones.
        """
        code, width = self.code, self.width
        fours, wide = num_heads // 4 * 4, width // (4 * LANES) * (4 * LANES)
        for d in code.loop(0, wide, 4 * LANES):
            for q, heads in self._heads(code.i64(0), fours, (4,)):
                self._add_values(q, heads, d, 4, value, count, ahead, offset)
        done = code.i64(0)
        for num in (8, 4):
            stop = done + (width - done) // (num * LANES) * (num * LANES)
            for d in code.loop(done, stop, num * LANES):
                for q, heads in self._heads(fours, num_heads, (2, 1)):
                    self._add_values(q, heads, d, num, value, count, ahead, offset)
            done = stop
        for d in code.loop(wide, width, LANES):
            for q in code.loop(0, num_heads):
                self._add_values(q, 1, d, 1, value, count, ahead, offset)

    def _extend(self, count: Var, position: Value, slot: Value, table: Pointer, end: Value) -> None:
        """Extend `count` over blocks with consecutive ids: they are contiguous in memory."""
        code, size = self.code, self.block_size
        limit = end - position
        goal = code.var(limit)
        for _ in code.while_(count, goal):
            following = position + count
            is_next = (table[following // size] * size).equals(slot + count)
            more = code.minimum(count + code.minimum(size, limit - count), limit)
            goal.set(code.select(is_next, limit, 0))
            count.set(code.select(is_next, more, count))

    def _heads(
        self, start: Value, stop: Value, sizes: tuple[int, ...]
    ) -> Iterator[tuple[Value, int]]:
        """Yield (first head, number of heads): groups of the first size, then the remaining heads in groups of the next sizes."""
        for size in sizes:
            whole = start + (stop - start) // size * size
            for q in self.code.loop(start, whole, size):
                yield q, size
            start = whole

    def _write_scores(
        self, q: Value, heads: int, key: Pointer, count: Value, ahead: Pointer, offset: Value
    ) -> None:
        """Write scores[q + h, offset + i] = q[q + h] · key[i], and up to seven more, which are replaced later."""
        code, width = self.code, self.width
        for first in code.loop(0, count, 8):
            last = count - first - 1
            with code.when(q < 1):
                for d in code.loop(0, 8 * width, LINE):
                    ahead.prefetch(first * width + d)
            rows = [key + (first + code.minimum(i, last)) * width for i in range(8)]
            sums = [[code.var(code.f32x16(0.0)) for _ in rows] for _ in range(heads)]
            if self.unit == "dots":
                self._add_dots(sums, q, [row.of("i32") for row in rows])
            else:
                self._add_floats(sums, q, rows)
            for h in range(heads):
                self.scores.store((q + h) * PITCH + offset + first, code.sums8(sums[h]))

    def _add_dots(self, sums: list[list[Var]], q: Value, rows: list[Pointer]) -> None:
        code, pairs = self.code, self.width // 2
        for d in code.loop(0, pairs, LANES):
            keys = [row.load(d) for row in rows]
            for h, of_head in enumerate(sums):
                x = self.q.of("i32").load((q + h) * pairs + d)
                for total, words in zip(of_head, keys, strict=True):
                    total.set(code.dot(x, words, total))

    def _add_floats(self, sums: list[list[Var]], q: Value, rows: list[Pointer]) -> None:
        code, width = self.code, self.width
        for d in code.loop(0, width, LANES):
            keys = [row.load(d) for row in rows]
            for h, of_head in enumerate(sums):
                x = self.q.load((q + h) * width + d)
                for total, numbers in zip(of_head, keys, strict=True):
                    total.set(code.fma(x, numbers, total))

    def _softmax(self, g: Value, count: Value) -> None:
        """Convert scores to weights, and adjust the state and the sums to the new maximum.

        Scores are multiplied by log2(e), so that a weight is one exp2.
        """
        code, scores = self.code, self.scores + g * PITCH
        state, sums = self.states + 2 * g, self.sums + g * self.width
        padded = (count + (LANES - 1)) // LANES * LANES
        for i in code.loop(count, padded):
            scores[i] = -math.inf
        largest = code.var(code.f32x16(HIDDEN))
        for i in code.loop(0, padded, LANES):
            x = capped(code, scores.load(i) * self.scale, self.cap) * LOG2_E
            scores.store(i, x)
            largest.set(code.maximum(x, largest))
        for i in code.loop(count, padded):
            scores[i] = -math.inf
        before = state[0]
        now = code.maximum(before, code.reduce_max(largest))
        total = code.var(code.f32x16(0.0))
        for i in code.loop(0, padded, LANES):
            weight = code.exp2(scores.load(i) - now)
            scores.store(i, weight)
            total.set(total + weight)
        with code.when(now > before):
            shrink = code.exp2(code.f32x16(before - now))
            state[1] = state[1] * code.reduce_max(shrink)
            for d in code.loop(0, self.width, LANES):
                sums.store(d, sums.load(d) * shrink)
        state[0] = now
        state[1] = state[1] + code.reduce_sum(total)

    def _add_values(
        self,
        g: Value,
        heads: int,
        d: Value,
        num: int,
        value: Pointer,
        count: Value,
        ahead: Pointer,
        offset: Value,
        first: Operand = 0,
    ) -> None:
        """Add weights[g + h, offset + i] · value[i] to sums[g + h, d …], for `num` times sixteen columns and i from `first` on."""
        code, width = self.code, self.width
        rows = [self.sums + ((g + h) * width + d) for h in range(heads)]
        sums = [[code.var(row.load(LANES * j)) for j in range(num)] for row in rows]
        for i in code.loop(first, count):
            for j in range(0, num * LANES, LINE):
                ahead.prefetch(i * width + d + j)
            line = [value.load(i * width + d + LANES * j) for j in range(num)]
            for h in range(heads):
                weight = code.f32x16(self.scores[(g + h) * PITCH + offset + i])
                for j, total in enumerate(sums[h]):
                    total.set(code.fma(weight, line[j], total))
        for row, totals in zip(rows, sums, strict=True):
            for j, total in enumerate(totals):
                row.store(LANES * j, total)


def capped(code: KernelBuilder, x: Value, cap: Value) -> Value:
    """Return cap · tanh(x / cap), computed as cap · (1 - 2 / (e^(2 x / cap) + 1)), or x without a cap."""
    found = code.var(x)
    with code.when(cap > 0.0):
        power = code.exp2(x * (2 * LOG2_E / cap))
        found.set((1.0 - 2.0 / (power + 1.0)) * cap)
    return found


def merge_partials(code: KernelBuilder, kind: Kind) -> None:
    """Write the kernel with the arguments plan, N, D, sinks or 0, out, its stride.  A work item is one head of one token."""
    plan, num_q, width, sinks, out, stride = code.arguments(6)
    plan = code.pointer(plan, "i64")
    partials, merges = plan[5], plan[6]
    step = num_q * (width + 2)
    for item in code.work_items(plan[7] * num_q):
        row = code.pointer(merges, "i64") + item // num_q * 3
        token, first, count = row[0], row[1], row[2]
        head = item % num_q
        part = code.pointer(partials, "f32") + (first * num_q + head) * (width + 2)
        largest = code.var(part[0])
        for i in code.loop(1, count):
            largest.set(code.maximum(largest, part[i * step]))
        total = code.var(0.0)
        with code.when(sinks > 0):
            sink = code.pointer(sinks, "f32")[head] * LOG2_E
            largest.set(code.maximum(largest, sink))
            total.set(code.reduce_max(code.exp2(code.f32x16(sink - largest))))
        for i in code.loop(0, count):
            weight = code.reduce_max(code.exp2(code.f32x16(part[i * step] - largest)))
            total.set(total + part[i * step + 1] * weight)
            part[i * step] = weight
        target = code.pointer(out, kind) + (token * stride + head * width)
        for d in code.loop(0, width, LANES):
            x = code.var(code.f32x16(0.0))
            for i in code.loop(0, count):
                weight = code.f32x16(part[i * step] / total)
                x.set(code.fma(weight, part.load(i * step + 2 + d), x))
            target.store(d, x)
