"""Kernels of a decoder between its matrix products: norms, activations, rotation with the cache write, and embeddings.

Each is one launch that a recording can contain.  torch's calls hold the interpreter, need several passes over memory, and round
between them; these kernels compute in float32 and round once, except where their text says otherwise.  Rows are tokens, D is their
width, and M is that of an MLP; both are multiples of 16.

Norms, with weights w [D] float32, followed by the biases b [D] of a layer norm:

    rms      x / √(mean(x²) + ε) · w
    layer    (x - mean(x)) / √(mean((x - mean(x))²) + ε) · w + b

Rooflines: fused_add_norm 4 e T D bytes and 6 T D FLOPs; act_and_mul 3 e T M bytes and about 20 T M FLOPs; activate 2 e T M bytes;
finish_logits (e + 4) R V bytes; qk_norm_rope_kv_write 2 e T (N + 2 H) D bytes and 7 T (N + H) D FLOPs; embed 2 e T D bytes.
Measured on one EPYC core, bfloat16: fused_add_norm of 16 rows of 1024 9 µs, 26 µs in torch; act_and_mul of 16 rows with M = 3072
27 µs, 40 µs in torch; qk_norm_rope_kv_write with N = 16, H = 8, D = 128 25 µs for 16 tokens, 116 µs in torch, and 1.5 ms for 1024
tokens, 12.9 ms in torch, spent on the 2 H pages of the cache that each token touches.
"""

import math
from collections.abc import Callable

from trouper.kernels.codegen.builder import KernelBuilder
from trouper.kernels.codegen.core import Pointer, Value
from trouper.kernels.codegen.units import LANES, Kind
from trouper.kernels.cpu.attention.decode import capped
from trouper.kernels.cpu.linear.products import gelu
from trouper.kernels.formats import Activation, Norm

LOG2_E = math.log2(math.e)
GELU_A = 2 * math.sqrt(2 / math.pi) * LOG2_E
GELU_B = 0.044715


def act_and_mul(code: KernelBuilder, kind: Kind, activation: Activation) -> None:
    """Write the kernel with the arguments gate_up, y, its stride, M, parts; then α and the limit if clamped.

    y = act(g) · u     gate_up [T, 2 M] with the halves g and u -> y [T, M]

    A work item is one of the parts of a row.
    """
    is_clamped = activation == "clamped_swiglu"
    gate_up, y, stride, width, parts, *bounds = code.arguments(7 if is_clamped else 5)
    alpha, limit = [code.f32x16(code.f32_argument(x)) for x in bounds] if is_clamped else (1.0, 0.0)
    for item in code.work_items():
        row, part = item // parts, item % parts
        gates = code.pointer(gate_up, kind) + row * 2 * width
        ups = gates + width
        target = code.pointer(y, kind) + row * stride
        # The last part has the columns behind the last whole vector, if there are any.
        begin = width * part // parts // LANES * LANES
        end = code.select(part < parts - 1, width * (part + 1) // parts // LANES * LANES, width)
        for d in code.loop(begin, end, LANES):
            g, u = gates.load(d), ups.load(d)
            # Selections keep NaN, which a minimum would hide.
            if is_clamped:
                g = code.select(g > limit, limit, g)
                u = code.select(u > limit, limit, u)
                u = code.select(u < 0.0 - limit, 0.0 - limit, u) + 1.0
            target.store(d, activated(code, g, activation, alpha) * u)


def activated(
    code: KernelBuilder,
    g: Value,
    activation: Activation,
    alpha: Value | float = 1.0,
) -> Value:
    """Return the activation of sixteen numbers.

        silu            x / (1 + e^-x)
        gelu            with the error function, see `linear/products.py`
        gelu_tanh       x / (1 + e^(-2 a (x + b x³))),  a = √(2 / π),  b = 0.044715
        relu, relu2     max(x, 0), and its square
        clamped_swiglu  y = (u + 1) · g / (1 + e^(-α g)),  with g ≤ limit and -limit ≤ u ≤ limit

    `alpha` is the constant of `clamped_swiglu`; other activations ignore it.
    """
    if activation == "gelu":
        # The form for float32 also serves bfloat16, because the shorter form is off by 6e-6 g far below zero.
        return gelu(code, g, "f32")
    if activation in ("relu", "relu2"):
        # A comparison keeps NaN, which a maximum would hide.
        positive = code.select(g < 0.0, 0.0, g)
        return positive * positive if activation == "relu2" else positive
    power = g * (alpha * -LOG2_E)
    if activation == "gelu_tanh":
        power = g * code.fma(GELU_B, g * g, code.f32x16(1.0)) * -GELU_A
    return g / (1.0 + code.exp2(power))


def activate(code: KernelBuilder, kind: Kind, activation: Activation) -> None:
    """Write the kernel with the arguments x, y, its stride, M.  A work item is a row.

    y = act(x)         x [T, M] -> y [T, M]
    """
    xs, ys, stride, width = code.arguments(4)
    for row in code.work_items():
        x = code.pointer(xs, kind) + row * width
        y = code.pointer(ys, kind) + row * stride
        for d in code.loop(0, width, LANES):
            y.store(d, activated(code, x.load(d), activation))


def finish_logits(code: KernelBuilder, kind: Kind) -> None:
    """Write the kernel with the arguments x, y, V (at least 16), scale, cap or 0.  A work item is a row.

    y = cap(scale · x)     x [R, V] -> y [R, V] float32,  cap(s) = c · tanh(s / c), or s without a cap
    """
    xs, ys, length, scale, cap = code.arguments(5)
    scale, cap = code.f32_argument(scale), code.f32_argument(cap)
    for row in code.work_items():
        x, y = code.pointer(xs, kind) + row * length, code.pointer(ys, "f32") + row * length
        for start in code.loop(0, length, LANES):
            # The last vector overlaps the one before it.
            first = code.minimum(start, length - LANES)
            y.store(first, capped(code, x.load(first) * scale, cap))


Load = Callable[[Value], Value]


def row_norm(
    code: KernelBuilder, load: Load, width: Value, weight: Pointer, eps: Value, norm: Norm
) -> Load:
    """Write the instructions that sum over a row.

    Returns a function from a column to the norm of the sixteen numbers that start there.
    """
    if norm == "rms":
        inverse = _inverse_root(code, load, width, eps)
        return lambda d: load(d) * inverse * weight.load(d)
    total = code.var(code.f32x16(0.0))
    for d in code.loop(0, width, LANES):
        total.set(total + load(d))
    mean = code.reduce_sum(total) / code.f32(width)
    inverse = _inverse_root(code, lambda d: load(d) - mean, width, eps)
    bias = weight + width
    return lambda d: code.fma((load(d) - mean) * inverse, weight.load(d), bias.load(d))


def _inverse_root(code: KernelBuilder, load: Load, width: Value, eps: Value) -> Value:
    """Return 1 / √(mean of squares + ε) of a row."""
    squares = code.var(code.f32x16(0.0))
    for d in code.loop(0, width, LANES):
        value = load(d)
        squares.set(code.fma(value, value, squares))
    return 1.0 / code.sqrt(code.reduce_sum(squares) / code.f32(width) + eps)


def center_norm(code: KernelBuilder, kind: Kind) -> None:
    """Write the kernel with the arguments x, r or 0, w, b or 0, y, D, ε.  A work item is a row.

    y = layer norm of x + r: three passes over each row, two of them in the first cache.
    """
    xs, others, weights, biases, ys, width, eps = code.arguments(7)
    weight, bias = code.pointer(weights, "f32"), code.pointer(biases, "f32")
    eps, size = code.f32_argument(eps), code.f32(width)
    for row in code.work_items():
        x, other, y = (code.pointer(start, kind) + row * width for start in (xs, others, ys))

        def sum_at(d: Value, x: Pointer = x, other: Pointer = other) -> Value:
            found = code.var(x.load(d))
            with code.when(others > 0):
                found.set(found + other.load(d))
            return found

        total = code.var(code.f32x16(0.0))
        for d in code.loop(0, width, LANES):
            total.set(total + sum_at(d))
        mean = code.reduce_sum(total) / size
        square = code.var(code.f32x16(0.0))
        for d in code.loop(0, width, LANES):
            away = sum_at(d) - mean
            square.set(code.fma(away, away, square))
        inverse = 1.0 / code.sqrt(code.reduce_sum(square) / size + eps)
        for d in code.loop(0, width, LANES):
            z = code.var((sum_at(d) - mean) * inverse * weight.load(d))
            with code.when(biases > 0):
                z.set(z + bias.load(d))
            y.store(d, z)


def fused_add_norm(code: KernelBuilder, kind: Kind, norm: Norm) -> None:
    """Write the kernel with the arguments x, its stride, y or 0, its stride, w or 0, z, its stride, D, α, ε.

    x += α · y in place, then z = norm(x): a residual sum and the next norm.

        x, y, z [T, D], rows may be strided; y is optional, and so are w and z together

    The sum is rounded to x's dtype before it is squared, so that it has the bits of two separate calls.
    A work item is a row.
    """
    xs, x_stride, ys, y_stride, weights, zs, z_stride, width, alpha, eps = code.arguments(10)
    alpha, eps = code.f32_argument(alpha), code.f32_argument(eps)
    weight = code.pointer(weights, "f32")
    for row in code.work_items():
        x = code.pointer(xs, kind) + row * x_stride
        z = code.pointer(zs, kind) + row * z_stride
        with code.when(ys > 0):
            y = code.pointer(ys, kind) + row * y_stride
            for d in code.loop(0, width, LANES):
                x.store(d, code.fma(alpha, y.load(d), x.load(d)))
        with code.when(weights > 0):
            normed = row_norm(code, x.load, width, weight, eps, norm)
            for d in code.loop(0, width, LANES):
                z.store(d, normed(d))


def qk_norm_rope_kv_write(
    code: KernelBuilder, kind: Kind, norm: Norm, is_norm_last: bool = False
) -> None:
    """Write the kernel with the arguments qkv, its stride, weight or 0, tables of q and of k, positions, cache, slots, S, N, H, D, R, ε,
    parts, scratch, scratch bytes.

    It is the kernel between the QKV product and attention, one pass over each token:

        q, k  <- rotate(norm(q), p), rotate(norm(k), p);   cache[:, h, slot] <- k, v
        q, k  <- norm(rotate(q, p)), norm(rotate(k, p))    with `is_norm_last`

        qkv       [T, N + 2 H, D]  q is changed in place; rows may be strided
        weight    [N + H, D]       float32 weights of the norm of each head, or [N + H, 2, D] for layer norms; optional
        tables    [P, 2, R]        float32 cos and signed sin, see `rope_table`; R = 0 rotates nothing.  Queries may have
                                   another table than keys, because some models scale queries by their position
        cache     [2, H, S, D]
        positions, slots [T]       int64

    A work item is one of the parts of a token's heads.
    """
    (
        qkv, stride, weight, q_table, k_table, positions, cache, slots, num_slots, num_q, num_kv, width, rotated, eps,
        parts, scratch, scratch_bytes,
    ) = code.arguments(17)  # fmt: skip
    eps = code.f32_argument(eps)
    wide = code.pointer(scratch + code.thread() * scratch_bytes, "f32")
    num_heads = num_q + 2 * num_kv
    for item in code.work_items():
        token, part = item // parts, item % parts
        first, stop = num_heads * part // parts, num_heads * (part + 1) // parts
        heads = code.pointer(qkv, kind) + token * stride
        slot = code.pointer(slots, "i64")[token]
        position = code.pointer(positions, "i64")[token]
        own = code.pointer(cache, kind) + slot * width
        # Each head writes to another page of the cache, so the lines are requested early.
        for head in code.loop(code.maximum(first - num_q, 0), stop - num_q):
            for d in code.loop(0, width, 2 * LANES):
                (own + head * num_slots * width).prefetch(d, level=1)
        for head in code.loop(first, code.minimum(stop, num_q + num_kv)):
            table = code.select(head < num_q, q_table, k_table)
            angles = code.pointer(table, "f32") + position * 2 * rotated
            x = heads + head * width
            if is_norm_last:
                _copy(code, wide, x, width)
                _rotate(code, wide, angles, rotated)
                _normalise(code, wide, wide, weight, head, width, eps, norm)
            else:
                with code.when(weight.equals(0)):
                    _copy(code, wide, x, width)
                _normalise(code, wide, x, weight, head, width, eps, norm)
                _rotate(code, wide, angles, rotated)
            with code.when(head < num_q):
                _copy(code, heads + head * width, wide, width)
            with code.when(head >= num_q):
                _copy(code, own + (head - num_q) * num_slots * width, wide, width)
        for head in code.loop(code.maximum(first, num_q + num_kv), stop):
            _copy(code, own + (head - num_q) * num_slots * width, heads + head * width, width)


def _normalise(
    code: KernelBuilder,
    wide: Pointer,
    x: Pointer,
    weight: Value,
    head: Value,
    width: Value,
    eps: Value,
    norm: Norm,
) -> None:
    """Write the norm of x to `wide` if there is a weight."""
    with code.when(weight > 0):
        own = code.pointer(weight, "f32") + head * (width * (1 if norm == "rms" else 2))
        normed = row_norm(code, x.load, width, own, eps, norm)
        for d in code.loop(0, width, LANES):
            wide.store(d, normed(d))


def _rotate(code: KernelBuilder, wide: Pointer, angles: Pointer, rotated: Value) -> None:
    half = rotated // 2
    sines = angles + (rotated + half)
    whole = half // LANES * LANES
    for d in code.loop(0, whole, LANES):
        low, high = wide.load(d), wide.load(half + d)
        cos, sin = angles.load(d), sines.load(d)
        wide.store(d, code.fma(0.0 - high, sin, low * cos))
        wide.store(half + d, code.fma(low, sin, high * cos))
    for i in code.loop(whole, half):
        low, high = wide[i], wide[half + i]
        cos, sin = angles[i], sines[i]
        wide[i] = low * cos - high * sin
        wide[half + i] = high * cos + low * sin


def _copy(code: KernelBuilder, target: Pointer, source: Pointer, width: Value) -> None:
    for d in code.loop(0, width, LANES):
        target.store(d, source.load(d))


def embed(code: KernelBuilder, kind: Kind) -> None:
    """Write the kernel with the arguments table, D, ids, scale, y.  A work item is a row.

    y = scale · table[id]     table [V, D], ids [T] int64, y [T, D].  Admission has checked that ids are below V.
    """
    table, width, ids, scale, ys = code.arguments(5)
    scale = code.f32_argument(scale)
    for row in code.work_items():
        x = code.pointer(table, kind) + code.pointer(ids, "i64")[row] * width
        y = code.pointer(ys, kind) + row * width
        for d in code.loop(0, width, LANES):
            y.store(d, x.load(d) * scale)


def embed_tokens(code: KernelBuilder, kind: Kind) -> None:
    """Write the kernel with the arguments of three tables, each followed by its row ids, then D and y.

    y is the sum of a row of each table, added in float32 (encoders).
    The address of the second and the third table may be 0.  A work item is a token.
    """
    words, ids, types, type_ids, positions, position_ids, width, ys = code.arguments(8)
    for token in code.work_items():
        word, kind_of_text, place = (
            code.pointer(table, kind) + code.pointer(rows, "i64")[token] * width
            for table, rows in ((words, ids), (types, type_ids), (positions, position_ids))
        )
        y = code.pointer(ys, kind) + token * width
        for d in code.loop(0, width, LANES):
            x = code.var(word.load(d))
            with code.when(types > 0):
                x.set(x + kind_of_text.load(d))
            with code.when(positions > 0):
                x.set(x + place.load(d))
            y.store(d, x)


def mean_of_spans(code: KernelBuilder, kind: Kind) -> None:
    """Write the kernel with the arguments x, its stride, spans [C, 2] int64, D, y.  A work item is a span.

    A span is its first row and its number of rows, at least one.  The mean of one row is that row, except for the sign of a zero.
    """
    xs, stride, spans, width, ys = code.arguments(5)
    for i in code.work_items():
        span = code.pointer(spans, "i64") + i * 2
        x = code.pointer(xs, kind) + span[0] * stride
        y = code.pointer(ys, "f32") + i * width
        for d in code.loop(0, width, LANES):
            total = code.var(code.f32x16(0.0))
            for row in code.loop(0, span[1]):
                total.set(total + (x + row * stride).load(d))
            y.store(d, total / code.f32(span[1]))
