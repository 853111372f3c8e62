"""The kernel of `layer_norm.py`: three looks at each row, two of them in the first cache."""

from trouper.kernels.codegen.builder import KernelBuilder
from trouper.kernels.codegen.core import Pointer, Value
from trouper.kernels.codegen.units import LANES, Kind


def center_norm(code: KernelBuilder, kind: Kind) -> None:
    """Write the kernel of the arguments x, r or 0, w, b or 0, y, D, ε.  A piece is a row."""
    xs, others, weights, biases, ys, width, eps = code.arguments(7)
    weight, bias = code.pointer(weights, "f32"), code.pointer(biases, "f32")
    eps, size = code.f32_argument(eps), code.f32(width)
    for row in code.pieces():
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
