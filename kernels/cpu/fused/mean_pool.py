"""The kernel of `row_pooling.py`.  Of one row the mean is that row, but for the sign of a zero."""

from trouper.kernels.codegen.builder import KernelBuilder
from trouper.kernels.codegen.units import LANES, Kind


def mean_of_spans(code: KernelBuilder, kind: Kind) -> None:
    """Write the kernel of the arguments x, its stride, spans [C, 2] int64 (first row, how many, never none), D, y.  A piece is a span."""
    xs, stride, spans, width, ys = code.arguments(5)
    for i in code.pieces():
        span = code.pointer(spans, "i64") + i * 2
        x = code.pointer(xs, kind) + span[0] * stride
        y = code.pointer(ys, "f32") + i * width
        for d in code.loop(0, width, LANES):
            total = code.var(code.f32x16(0.0))
            for row in code.loop(0, span[1]):
                total.set(total + (x + row * stride).load(d))
            y.store(d, total / code.f32(span[1]))
