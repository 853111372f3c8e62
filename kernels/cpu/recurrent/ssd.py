"""The kernels of Mamba-2: the gates of all tokens, and the recurrence token by token.

    Δ = clamp(softplus(dt + bias)),   a = exp(rate · Δ)                         Δ, a [T, H] float32
    h ← a h + (Δ x) ⊗ B;   y = h C + D x                                        x, y [T, H, P];  h [H, P, N] float32

B and C are [T, groups, N].  P and N are multiples of 16.  A work item is sixteen rows of one head's state, which lie
together in memory and in the first cache.  Sums over N have a fixed order, so the bits do not depend on the division of tokens
into steps.  Drafts work on a copy of these rows in scratch memory.

Roofline: a decoding token reads and writes the state once, 8 H P N bytes; a token of a prompt takes 5 H P N FLOPs.
"""

from trouper.kernels.codegen.builder import KernelBuilder
from trouper.kernels.codegen.core import Pointer, Value
from trouper.kernels.codegen.features import num_registers
from trouper.kernels.codegen.units import LANES, Kind
from trouper.kernels.cpu.recurrent.entries import (
    NUM_ARGUMENTS,
    Saves,
    address,
    exp,
    lanes_left,
    load_few,
    parts,
    softplus,
    store_few,
)


def scratch_bytes(num_states: int) -> int:
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
