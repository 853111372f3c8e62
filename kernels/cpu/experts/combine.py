"""y = Σ weight · expert's output, over a token's experts and the one that all tokens use.

    each [T k, E]         outputs of the experts, those of a token together; E a multiple of 16
    weights [T, k + 1]    float32; the last is the shared expert's
    shared [T, E]         or absent
    y [T, E]

The sum is float32, in the order of the token's experts: a token's bits do not depend on the others.

Roofline: bytes = e T (k + 2) E.
"""

from trouper.kernels.codegen.builder import KernelBuilder
from trouper.kernels.codegen.units import LANES, Kind


def combine(code: KernelBuilder, kind: Kind) -> None:
    """Write the kernel of the arguments each, weights, k, shared or 0, y, E.  A piece is a token."""
    each, weights, k, shared, ys, width = code.arguments(6)
    for t in code.pieces():
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
