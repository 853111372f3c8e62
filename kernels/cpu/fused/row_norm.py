"""The norm of one row, as the kernels of this folder write it.

rms      x / √(mean(x²) + ε) · w
layer    (x - mean(x)) / √(mean((x - mean(x))²) + ε) · w + b

w [D] float32, and behind it b [D] of a layer norm
"""

from collections.abc import Callable

from trouper.kernels.codegen.builder import KernelBuilder
from trouper.kernels.codegen.core import Pointer, Value
from trouper.kernels.codegen.units import LANES
from trouper.kernels.formats import Norm

Load = Callable[[Value], Value]


def row_norm(
    code: KernelBuilder, load: Load, width: Value, weight: Pointer, eps: Value, norm: Norm
) -> Load:
    """Write the sums over a row; return what gives sixteen numbers of its norm from a column on."""
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
