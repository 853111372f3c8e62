"""Work items over the entries of a step, and the kernels of recurrent mixers around the recurrence: convolutions and gates.

    firsts, counts, rows, starts, settled, keeps [C], saves [S + 1, 2]    int64, see `reference/recurrent.py`

A work item is a part of one entry: a tile of channels, or a head or a tile of it.  Entries with a negative row have
work items without work, so that a recorded step can have fewer entries than its launches.

Law: a kernel stores the state behind the last settled token, and copies of it in between where the step saves them.  Behind the drafts
that follow, nothing is stored.

    convolution   y_t = act(w_0 x_{t-K+1} + … + w_{K-1} x_t + b)     x, y [T, C];  w [K, C], b [C] float32;  state [S, K - 1, C]
    gated_norm    y = rms(x) w ⊙ silu(z), or rms(x ⊙ silu(z)) w      x, y [T, groups · D], z strided, w float32
    mul_sigmoid   y = x ⊙ σ(z)                                       x, y [T, D], x and z strided

With gates, the convolution's x_t is b_t ⊙ x_t and its y_t is c_t ⊙ y_t for the thirds b, c and x of an input row (LFM2).  C and D are
multiples of 16.  A work item of a convolution is a tile of channels of one entry, whose last inputs stay in registers.

Roofline of convolutions: 2 e T C bytes and 2 K T C FLOPs.  With SiLU exp2 takes most of the time, about 20 FLOPs a number.
Roofline of gates: 3 e T D bytes and about 25 FLOPs a number.
"""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Literal, NamedTuple

from trouper.kernels.codegen.builder import KernelBuilder
from trouper.kernels.codegen.core import Pointer, Value, Var
from trouper.kernels.codegen.units import LANES, Kind
from trouper.kernels.cpu.norms import LOG2_E, activated, row_norm

NUM_ARGUMENTS = 7
# Above this softplus(x) is x in float32.
LINEAR = 20.0


class EntryPart(NamedTuple):
    """One part of an entry: its number, the tokens first … last - 1, the row, whether the state begins with zeros.

    The tokens from `settled` on are drafts, the first of which belongs to row `keep` of kept inputs.
    """

    place: Value
    first: Value
    last: Value
    row: Value
    is_fresh: Value
    settled: Value
    keep: Value
    saves: Pointer


class Saves:
    """The tokens of an entry behind which its state is copied to another row."""

    def __init__(self, code: KernelBuilder, part: EntryPart) -> None:
        self._code, self._saves = code, part.saves
        self._place: Var = code.var(code.i64(0))
        self._end: Var = code.var(part.saves[0])
        # Those of earlier entries precede them.
        for _ in code.while_(self._end, part.first + 1):
            self._advance()

    @contextmanager
    def behind(self, token: Value) -> Generator[Value]:
        """Write code that runs only if the state behind `token` is saved, and yield the row for it."""
        with self._code.when((token + 1).equals(self._end)):
            yield self._saves[self._place + 1]
            self._advance()

    def _advance(self) -> None:
        self._place.set(self._place + 2)
        self._end.set(self._saves[self._place])


def parts(code: KernelBuilder, addresses: list[Value], num_parts: Value) -> Iterator[EntryPart]:
    """Take work items, `num_parts` of each entry, and skip those of padding.

    Args:
        addresses: of the seven arrays of entries.
    """
    firsts, counts, rows, starts, settled, keeps, saves = (
        code.pointer(address, "i64") for address in addresses
    )
    for item in code.work_items():
        entry = item // num_parts
        row = rows[entry]
        with code.when(row >= 0):
            first = firsts[entry]
            is_fresh = starts[entry].equals(0)
            yield EntryPart(
                item % num_parts,
                first,
                first + counts[entry],
                row,
                is_fresh,
                first + settled[entry],
                keeps[entry],
                saves,
            )


def keep_drafts(code: KernelBuilder, kind: Kind) -> None:
    """Write the kernel with the arguments entries, x, its stride, kept rows, columns.  A work item is an entry."""
    *entries, xs, x_stride, kepts, width = code.arguments(NUM_ARGUMENTS + 4)
    whole = width // LANES * LANES
    for part in parts(code, entries, code.i64(1)):
        for t in code.loop(part.settled, part.last):
            x = code.pointer(xs, kind) + t * x_stride
            kept = code.pointer(kepts, kind) + (part.keep + (t - part.settled)) * width
            for d in code.loop(0, whole, LANES):
                kept.store(d, x.load(d))
            words, target = (p.of("i16" if kind == "bf16" else "i32") for p in (x, kept))
            for d in code.loop(whole, width):
                target[d] = words[d]


def load_few(code: KernelBuilder, x: Pointer, count: Value, room: Pointer) -> Value:
    """Load fewer than seventeen elements without reading beyond them; the other lanes are zeros."""
    words = x.of("i16" if x.kind == "bf16" else "i32")
    room.of("i32").store(0, code.i32x16(0))
    target = room.of(words.kind)
    for i in code.loop(0, count):
        target[i] = words[i]
    return room.of(x.kind).load(0)


def store_few(code: KernelBuilder, y: Pointer, x: Value, count: Value, room: Pointer) -> None:
    """Store the first lanes of a vector of float32."""
    room.store(0, x)
    for i in code.loop(0, count):
        y[i] = room[i]


def exp(code: KernelBuilder, x: Value) -> Value:
    return code.exp2(x * LOG2_E)


def sigmoid(code: KernelBuilder, x: Value) -> Value:
    return 1.0 / (1.0 + code.exp2(x * -LOG2_E))


def softplus(code: KernelBuilder, x: Value) -> Value:
    """Return log(1 + e^x), which is accurate for small results too."""
    power = exp(code, x)
    total = power + 1.0
    # What the sum lost by rounding is put back by this factor (Kahan's log1p).
    is_lost = total.equals(1.0)
    kept = code.select(is_lost, code.f32x16(1.0), total - 1.0)
    near = code.select(is_lost, power, code.log(total) * (power / kept))
    return code.select(x > LINEAR, x, near)


def lanes_left(code: KernelBuilder, first: Value, width: Value) -> Value:
    return code.minimum(width - first, LANES)


def address(code: KernelBuilder, x: Pointer) -> Value:
    return Value(code, code.builder.ptrtoint(x.ir, code.i64(0).type))


# Channels of a work item.  Two threads share the 6,144 channels of a small model's single row evenly.
CONV_TILE = 256
Gates = Literal["gates", "plain"]


def causal_conv(
    code: KernelBuilder, kind: Kind, taps: int, has_silu: bool, gates: Gates, num_vectors: int
) -> None:
    """Write the kernel with the arguments entries, x, its stride, w, b or 0, state, its stride, y, its stride, C.

    Args:
        num_vectors: vectors of channels that are computed together, which divide the C / 16 of them.
    """
    *entries, xs, x_stride, ws, biases, states, state_stride, ys, y_stride, width = code.arguments(
        NUM_ARGUMENTS + 9
    )
    weight, is_gated = code.pointer(ws, "f32"), gates == "gates"
    for part in parts(code, entries, (width + CONV_TILE - 1) // CONV_TILE):
        begin = part.place * CONV_TILE
        state = code.pointer(states, kind) + part.row * state_stride
        for c in code.loop(begin, code.minimum(begin + CONV_TILE, width), num_vectors * LANES):
            columns = [c + v * LANES for v in range(num_vectors)]
            held = _last_inputs(code, state, part.is_fresh, taps, columns, width)
            bias, saves = [_bias(code, biases, d) for d in columns], Saves(code, part)
            for t in code.loop(part.first, part.last):
                x = code.pointer(xs, kind) + t * x_stride
                y = code.pointer(ys, kind) + t * y_stride
                for v, d in enumerate(columns):
                    new = _input(code, x, d, width, kind, is_gated=is_gated)
                    window = [*(Value(code, vectors[v].ir) for vectors in held), new]
                    total = bias[v]
                    for k, old in enumerate(window):
                        total = code.fma(old, (weight + width * k).load(d), total)
                    total = activated(code, total, "silu") if has_silu else total
                    y.store(d, (x + width).load(d) * total if is_gated else total)
                    for vectors, newer in zip(held, window[1:], strict=True):
                        vectors[v].set(newer)
                with saves.behind(t) as row:
                    saved = code.pointer(states, kind) + row * state_stride
                    _store_inputs(saved, held, columns, width)
                with code.when((t + 1).equals(part.settled)):
                    _store_inputs(state, held, columns, width)


def _last_inputs(
    code: KernelBuilder,
    state: Pointer,
    is_fresh: Value,
    taps: int,
    columns: list[Value],
    width: Value,
) -> list[list[Var]]:
    """Load the state of some channels, by its age and then by the channels; zeros at the beginning of a sequence."""
    held = [[code.var(code.f32x16(0.0)) for _ in columns] for _ in range(taps - 1)]
    with code.when(is_fresh.equals(0)):
        for k, vectors in enumerate(held):
            for vector, d in zip(vectors, columns, strict=True):
                vector.set((state + width * k).load(d))
    return held


def _store_inputs(
    state: Pointer, held: list[list[Var]], columns: list[Value], width: Value
) -> None:
    for k, vectors in enumerate(held):
        for vector, d in zip(vectors, columns, strict=True):
            (state + width * k).store(d, vector)


def _bias(code: KernelBuilder, biases: Value, d: Value) -> Value:
    bias = code.var(code.f32x16(0.0))
    with code.when(biases > 0):
        bias.set(code.pointer(biases, "f32").load(d))
    return Value(code, bias.ir)


def _input(
    code: KernelBuilder, x: Pointer, d: Value, width: Value, kind: Kind, *, is_gated: bool
) -> Value:
    if not is_gated:
        return x.load(d)
    # The product is rounded before it is used, because the state keeps it rounded.
    return code.rounded(x.load(d) * (x + width * 2).load(d), kind)


def gated_norm(code: KernelBuilder, kind: Kind, is_gate_first: bool) -> None:
    """Write the kernel with the arguments x, its stride, z, its stride, w, weights from a group to the next, y, its
    stride, groups, D, ε.  A work item is a group of a row.
    """
    xs, x_stride, zs, z_stride, ws, w_step, ys, y_stride, num_groups, width, eps = code.arguments(
        11
    )
    eps = code.f32_argument(eps)
    for item in code.work_items():
        row, group = item // num_groups, item % num_groups
        x = code.pointer(xs, kind) + (row * x_stride + group * width)
        z = code.pointer(zs, kind) + (row * z_stride + group * width)
        y = code.pointer(ys, kind) + (row * y_stride + group * width)
        weight = code.pointer(ws, "f32") + group * w_step

        gate = partial(_silu, code, z)
        load = partial(_gated, code, x, z) if is_gate_first else x.load
        normed = row_norm(code, load, width, weight, eps, "rms")
        for d in code.loop(0, width, LANES):
            y.store(d, normed(d) if is_gate_first else normed(d) * gate(d))


def _silu(code: KernelBuilder, z: Pointer, d: Value) -> Value:
    return activated(code, z.load(d), "silu")


def _gated(code: KernelBuilder, x: Pointer, z: Pointer, d: Value) -> Value:
    return x.load(d) * _silu(code, z, d)


def mul_sigmoid(code: KernelBuilder, kind: Kind) -> None:
    """Write the kernel with the arguments x, its stride, z, its stride, y, its stride, D.  A work item is a row."""
    xs, x_stride, zs, z_stride, ys, y_stride, width = code.arguments(7)
    for row in code.work_items():
        x, z = code.pointer(xs, kind) + row * x_stride, code.pointer(zs, kind) + row * z_stride
        y = code.pointer(ys, kind) + row * y_stride
        for d in code.loop(0, width, LANES):
            y.store(d, x.load(d) * sigmoid(code, z.load(d)))
