"""The kernels of gated delta nets and of Mamba-2: the gates of all tokens, and the recurrence token by token.

Gated delta nets:

    g = exp(rate · softplus(a + bias)),   β = σ(b)                                     g, β [T, H] float32
    S ← g S;   δ = β (v - Sᵀ k);   S ← S + k δᵀ;   o = Sᵀ q                            S [H, dk, dv] float32

q and k are divided by their length if desired, and q is multiplied by dk^-½.  Consecutive value heads share a key head.
dk and dv are multiples of 16.  A work item is a tile of columns of one head's S, because columns are independent.
Entries of several tokens copy the tile to scratch memory in the first cache, and a single token works on the state
itself, in wider tiles.  Every sum runs over the rows of S in order, so the bits depend neither on the tile nor on the division of
tokens into steps; a chunked form would need chunk boundaries that every division respects.

Mamba-2:

    Δ = clamp(softplus(dt + bias)),   a = exp(rate · Δ)                         Δ, a [T, H] float32
    h ← a h + (Δ x) ⊗ B;   y = h C + D x                                        x, y [T, H, P];  h [H, P, N] float32

B and C are [T, groups, N].  P and N are multiples of 16.  A work item is sixteen rows of one head's state, which lie
together in memory and in the first cache.  Sums over N have a fixed order, too.  Drafts work on a copy of these rows in scratch memory.

Roofline: a decoding token reads and writes the state once, 8 H dk dv or 8 H P N bytes; a token of a prompt takes 7 H dk dv or
5 H P N FLOPs.
"""

from typing import NamedTuple

from trouper.kernels.codegen.builder import KernelBuilder
from trouper.kernels.codegen.core import Pointer, Value, Var
from trouper.kernels.codegen.features import num_registers
from trouper.kernels.codegen.units import LANES, Kind
from trouper.kernels.cpu.recurrent_entries import (
    NUM_ARGUMENTS,
    Saves,
    address,
    exp,
    lanes_left,
    load_few,
    parts,
    sigmoid,
    softplus,
    store_few,
)
from trouper.kernels.reference.recurrent import L2_EPS

# Bytes of a tile: half of the first cache or more, next to the vectors of a token.
TILE_BYTES = 32 * 1024


def tile_of(k_dim: int, v_dim: int, *, is_single: bool) -> int:
    """Return the columns of a tile: as many as registers and the first cache allow, and a divisor of `v_dim`.

    Args:
        is_single: there are as many entries as tokens.  Then a state is used once and comes from memory.  A tile as wide as the state
            is read in the order of its addresses, in a third of the time of two narrow ones, although it exceeds the first cache.
    """
    most = 4 * LANES if num_registers() > 8 else LANES
    if is_single and num_registers() > 16:
        most = 8 * LANES
    sizes = (n for n in (8 * LANES, 4 * LANES, 2 * LANES, LANES) if n <= most and v_dim % n == 0)
    return next((n for n in sizes if is_single or 4 * n * k_dim <= TILE_BYTES), LANES)


def delta_scratch_bytes(k_dim: int, tile: int) -> int:
    """Return the scratch memory of a thread: a tile, and three vectors of a key's width."""
    return 4 * k_dim * (tile + 3)


def delta_gates(code: KernelBuilder, kind: Kind) -> None:
    """Write the kernel with the arguments a, its stride, b, its stride, rates, biases, g, β, H.  A work item is a token."""
    a, a_stride, b, b_stride, rates, biases, decays, betas, num_heads = code.arguments(9)
    room = code.array("f32", LANES)
    rate, bias = code.pointer(rates, "f32"), code.pointer(biases, "f32")
    for token in code.work_items():
        for h in code.loop(0, num_heads, LANES):
            count = lanes_left(code, h, num_heads)
            x = load_few(code, code.pointer(a, kind) + (token * a_stride + h), count, room)
            shift = load_few(code, bias + h, count, room)
            speed = load_few(code, rate + h, count, room)
            out = token * num_heads + h
            decay = exp(code, speed * softplus(code, x + shift))
            store_few(code, code.pointer(decays, "f32") + out, decay, count, room)
            y = load_few(code, code.pointer(b, kind) + (token * b_stride + h), count, room)
            store_few(code, code.pointer(betas, "f32") + out, sigmoid(code, y), count, room)


def gated_delta(
    code: KernelBuilder, kind: Kind, tile: int, has_row_decay: bool, normalises: bool
) -> None:
    """Write the kernel with the arguments entries, q, k, v, their strides, g, β, state, its stride, key heads, value
    heads, dk, dv, dk^-½, o, scratch, its bytes.

    Args:
        has_row_decay: g is [T, H, dk], one for each row of S, instead of [T, H].
    """
    (
        *entries, qs, ks, vs, q_stride, k_stride, v_stride, decays, betas, states, state_stride, num_k, num_v, k_dim,
        v_dim, scale, outs, scratch, size,
    ) = code.arguments(NUM_ARGUMENTS + 18)  # fmt: skip
    scale, num_tiles = code.f32_argument(scale), v_dim // tile
    rows = code.pointer(scratch + code.thread() * size, "f32")
    copy = rows + k_dim * 3
    query, key, faded = (rows + k_dim * i for i in range(3))
    offsets = [v * LANES for v in range(tile // LANES)]
    for part in parts(code, entries, num_v * num_tiles):
        head, column = part.place // num_tiles, part.place % num_tiles * tile
        k_head = head // (num_v // num_k)
        place = head * k_dim * v_dim + column
        state = code.pointer(states, "f32") + (part.row * state_stride + place)
        is_copied = part.is_fresh | (part.last - part.first > 1)
        with code.when(part.is_fresh):
            for i in code.loop(0, k_dim * tile, LANES):
                copy.store(i, code.f32x16(0.0))
        with code.when(is_copied & part.is_fresh.equals(0)):
            _move(code, copy, tile, state, v_dim, k_dim, offsets)
        used = code.pointer(
            code.select(is_copied, address(code, copy), address(code, state)), "f32"
        )
        step, saves = code.select(is_copied, code.i64(tile), v_dim), Saves(code, part)
        for t in code.loop(part.first, part.last):
            gate = t * num_v + head
            whole = code.pointer(decays, "f32")[code.i64(0) if has_row_decay else gate]
            by_row = code.pointer(decays, "f32") + gate * k_dim if has_row_decay else None
            q = code.pointer(qs, kind) + (t * q_stride + k_head * k_dim)
            k = code.pointer(ks, kind) + (t * k_stride + k_head * k_dim)
            q_scale = _inverse_length(code, q, k_dim) * scale if normalises else scale
            k_scale = _inverse_length(code, k, k_dim) if normalises else code.f32(1.0)
            for d in code.loop(0, k_dim, LANES):
                query.store(d, q.load(d) * q_scale)
                key.store(d, k.load(d) * k_scale)
                faded.store(d, key.load(d) * (by_row.load(d) if by_row is not None else whole))
            token = _Token(query, key, faded, by_row or whole, k_dim)
            v = code.pointer(vs, kind) + (t * v_stride + head * v_dim + column)
            beta = code.pointer(betas, "f32")[gate]
            out = code.pointer(outs, kind) + ((t * num_v + head) * v_dim + column)
            read = _advance(code, used, step, token, [v.load(d) for d in offsets], beta)
            for sum_, d in zip(read, offsets, strict=True):
                out.store(d, sum_)
            with saves.behind(t) as row:
                saved = code.pointer(states, "f32") + (row * state_stride + place)
                _move(code, saved, v_dim, used, step, k_dim, offsets)
            with code.when(is_copied & (t + 1).equals(part.settled)):
                _move(code, state, v_dim, copy, tile, k_dim, offsets)


class _Token(NamedTuple):
    """The vectors of one token and head, float32, and the decay of the whole state or of each row."""

    query: Pointer
    key: Pointer
    # The key times the decay: what a faded state contains at the key.
    faded: Pointer
    decay: Pointer | Value
    width: Value


def _advance(
    code: KernelBuilder,
    state: Pointer,
    step: Value,
    token: _Token,
    values: list[Value],
    beta: Value,
) -> list[Var]:
    """Write the update of a tile, whose rows start `step` apart.  Returns what the query reads from it."""
    offsets = [i * LANES for i in range(len(values))]
    found, read = ([code.var(code.f32x16(0.0)) for _ in values] for _ in range(2))
    for i in code.loop(0, token.width):
        share, line = code.f32x16(token.faded[i]), state + i * step
        for sum_, d in zip(found, offsets, strict=True):
            sum_.set(code.fma(share, line.load(d), sum_))
    strength = code.f32x16(beta)
    changes = [strength * (value - sum_) for value, sum_ in zip(values, found, strict=True)]
    for i in code.loop(0, token.width):
        line = state + i * step
        left = code.f32x16(token.decay[i] if isinstance(token.decay, Pointer) else token.decay)
        written, asked = code.f32x16(token.key[i]), code.f32x16(token.query[i])
        for sum_, change, d in zip(read, changes, offsets, strict=True):
            new = code.fma(written, change, left * line.load(d))
            line.store(d, new)
            sum_.set(code.fma(asked, new, sum_))
    return read


def _move(
    code: KernelBuilder,
    target: Pointer,
    target_step: int | Value,
    source: Pointer,
    source_step: int | Value,
    num_rows: Value,
    offsets: list[int],
) -> None:
    for i in code.loop(0, num_rows):
        for d in offsets:
            (target + i * target_step).store(d, (source + i * source_step).load(d))


def _inverse_length(code: KernelBuilder, x: Pointer, width: Value) -> Value:
    squares = code.var(code.f32x16(0.0))
    for d in code.loop(0, width, LANES):
        squares.set(code.fma(x.load(d), x.load(d), squares))
    return 1.0 / code.sqrt(code.reduce_sum(squares) + L2_EPS)


def ssd_scratch_bytes(num_states: int) -> int:
    """Return the scratch memory of a thread: B and C of a token, its inputs and outputs, and sixteen rows of a state."""
    return 4 * (2 * num_states + 2 * LANES + LANES * num_states)


def ssd_gates(code: KernelBuilder, kind: Kind) -> None:
    """Write the kernel with the arguments dt, its stride, rates, biases, low, high, Δ, a, H.  A work item is a token."""
    dts, stride, rates, biases, low, high, deltas, decays, num_heads = code.arguments(9)
    low, high = code.f32_argument(low), code.f32_argument(high)
    room = code.array("f32", LANES)
    rate, bias = code.pointer(rates, "f32"), code.pointer(biases, "f32")
    for token in code.work_items():
        for h in code.loop(0, num_heads, LANES):
            count = lanes_left(code, h, num_heads)
            x = load_few(code, code.pointer(dts, kind) + (token * stride + h), count, room)
            delta = softplus(code, x + load_few(code, bias + h, count, room))
            # Selections keep NaN, which a minimum would hide.
            delta = code.select(delta < code.f32x16(low), code.f32x16(low), delta)
            delta = code.select(delta > code.f32x16(high), code.f32x16(high), delta)
            out = token * num_heads + h
            store_few(code, code.pointer(deltas, "f32") + out, delta, count, room)
            decay = exp(code, load_few(code, rate + h, count, room) * delta)
            store_few(code, code.pointer(decays, "f32") + out, decay, count, room)


def ssd(code: KernelBuilder, kind: Kind) -> None:
    """Write the kernel with the arguments entries, x, B, C, their strides, Δ, a, D or 0, state, its stride, heads, groups,
    P, N, y, scratch, its bytes.
    """
    (
        *entries, xs, bs, cs, x_stride, b_stride, c_stride, deltas, decays, skips, states, state_stride, num_heads,
        num_groups, width, num_states, ys, scratch, size,
    ) = code.arguments(NUM_ARGUMENTS + 18)  # fmt: skip
    rows = code.pointer(scratch + code.thread() * size, "f32")
    inputs, outputs = rows, rows + LANES
    written, asked = rows + 2 * LANES, rows + (num_states + 2 * LANES)
    copy = rows + (num_states * 2 + 2 * LANES)
    num_blocks, together = width // LANES, 4 if num_registers() > 8 else 1
    for part in parts(code, entries, num_heads * num_blocks):
        head, p = part.place // num_blocks, part.place % num_blocks * LANES
        group = head // (num_heads // num_groups)
        place, saves = (head * width + p) * num_states, Saves(code, part)
        state = code.pointer(states, "f32") + (part.row * state_stride + place)
        with code.when(part.is_fresh):
            for n in code.loop(0, num_states * LANES, LANES):
                state.store(n, code.f32x16(0.0))
        for t in code.loop(part.first, part.last):
            with code.when(t.equals(part.settled)):
                _copy(code, copy, state, num_states)
            used = code.pointer(
                code.select(t < part.settled, address(code, state), address(code, copy)), "f32"
            )
            gate = t * num_heads + head
            x = (code.pointer(xs, kind) + (t * x_stride + head * width + p)).load()
            inputs.store(0, x * code.pointer(deltas, "f32")[gate])
            left = code.f32x16(code.pointer(decays, "f32")[gate])
            b = code.pointer(bs, kind) + (t * b_stride + group * num_states)
            c = code.pointer(cs, kind) + (t * c_stride + group * num_states)
            for n in code.loop(0, num_states, LANES):
                written.store(n, b.load(n))
                asked.store(n, c.load(n))
            for i in code.loop(0, LANES, together):
                lines = [used + (i + j) * num_states for j in range(together)]
                shares = [code.f32x16(inputs[i + j]) for j in range(together)]
                read = [code.var(code.f32x16(0.0)) for _ in lines]
                for n in code.loop(0, num_states, LANES):
                    for line, share, sum_ in zip(lines, shares, read, strict=True):
                        new = code.fma(share, written.load(n), left * line.load(n))
                        line.store(n, new)
                        sum_.set(code.fma(new, asked.load(n), sum_))
                for j, sum_ in enumerate(read):
                    outputs[i + j] = code.reduce_sum(sum_)
            y = code.var(outputs.load(0))
            with code.when(skips > 0):
                y.set(code.fma(code.f32x16(code.pointer(skips, "f32")[head]), x, y))
            (code.pointer(ys, kind) + (gate * width + p)).store(0, y)
            with saves.behind(t) as row:
                saved = code.pointer(states, "f32") + (row * state_stride + place)
                _copy(code, saved, state, num_states)


def _copy(code: KernelBuilder, target: Pointer, source: Pointer, num_states: Value) -> None:
    for n in code.loop(0, num_states * LANES, LANES):
        target.store(n, source.load(n))
