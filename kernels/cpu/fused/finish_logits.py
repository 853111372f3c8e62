"""y = cap(scale · x) in float32, cap(s) = c · tanh(s / c) if there is a c: what models do to their head's product.

    x [R, V]   as the product leaves it;  y [R, V] float32

Roofline: bytes = (e + 4) R V.
"""

from trouper.kernels.codegen.builder import KernelBuilder
from trouper.kernels.codegen.units import LANES, Kind
from trouper.kernels.cpu.attention.decode import capped


def finish_logits(code: KernelBuilder, kind: Kind) -> None:
    """Write the kernel of the arguments x, y, V, at least 16, scale, cap or 0.  A piece is a row."""
    xs, ys, length, scale, cap = code.arguments(5)
    scale, cap = code.f32_argument(scale), code.f32_argument(cap)
    for row in code.pieces():
        x, y = code.pointer(xs, kind) + row * length, code.pointer(ys, "f32") + row * length
        for start in code.loop(0, length, LANES):
            first = code.minimum(start, length - LANES)  # those before again
            y.store(first, capped(code, x.load(first) * scale, cap))
