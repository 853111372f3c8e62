"""The kernel of causal convolutions of a few taps, for any mixture of prompts and single tokens.

    y_t = act(w_0 x_{t-K+1} + … + w_{K-1} x_t + b)         x, y [T, C];  w [K, C], b [C] float32;  state [S, K - 1, C]

With gates, x_t is b_t ⊙ x_t and y_t is c_t ⊙ y_t for the thirds b, c and x of an input row (LFM2).  C is a multiple
of 16.  A work item is a tile of channels of one entry, whose last inputs stay in registers.

Roofline: 2 e T C bytes and 2 K T C FLOPs.  With SiLU exp2 takes most of the time, about 20 FLOPs a number.
"""

from typing import Literal

from trouper.kernels.codegen.builder import KernelBuilder
from trouper.kernels.codegen.core import Pointer, Value, Var
from trouper.kernels.codegen.units import LANES, Kind
from trouper.kernels.cpu.norms import activated
from trouper.kernels.cpu.recurrent.entries import NUM_ARGUMENTS, Saves, parts

# Channels of a work item.  Two threads share the 6,144 channels of a small model's single row evenly.
TILE = 256
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
    for part in parts(code, entries, (width + TILE - 1) // TILE):
        begin = part.place * TILE
        state = code.pointer(states, kind) + part.row * state_stride
        for c in code.loop(begin, code.minimum(begin + TILE, width), num_vectors * LANES):
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
