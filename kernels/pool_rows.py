"""y = the mean of each span's rows, in float32: how the states of a text become one.

    x [T, D]   D a multiple of 16, rows may be apart       y [C, D] float32
    spans [C, 2] int64, the first row and how many, never none

Rows are added one by one: a text's bits do not depend on who is beside it.  One row is copied.

Roofline: bytes = e T D.  Measured on one Zen 3 core, with the call: 21 µs for 8 rows of 384 bfloat16 and 60 for 510 of
six texts, where torch's `embedding_bag` takes 116 and 157; from memory 159 and 245 where it takes 310 and 401.
"""

from trouper.kernels.simd import LANES, Code, Kind


def pool_rows(code: Code, kind: Kind) -> None:
    """x, its stride, spans, D, y.  A piece is a span."""
    xs, stride, spans, width, ys = code.arguments(5)
    for i in code.pieces():
        span = code.pointer(spans, "i64") + i * 2
        x = code.pointer(xs, kind) + span[0] * stride
        y = code.pointer(ys, "f32") + i * width
        for d in code.loop(0, width, LANES):
            total = code.var(code.lanes(0.0))
            for row in code.loop(0, span[1]):
                total.set(total + (x + row * stride).load(d))
            y.store(d, total / code.f32(span[1]))
