"""y = scale · table[id]: the embeddings of a step's tokens.

    table [V, D]   D a multiple of 16;  ids [T] int64, below V, as admission has checked;  y [T, D]

Roofline: bytes = 2 e T D.  One launch, which a recording holds, where torch's two calls let go of the interpreter.

The kernel of `token_embedding.py`: a row of each table, added up in float32.

The kernel of `row_pooling.py`.  Of one row the mean is that row, but for the sign of a zero.
"""

from trouper.kernels.codegen.builder import KernelBuilder
from trouper.kernels.codegen.units import LANES, Kind


def embed(code: KernelBuilder, kind: Kind) -> None:
    """Write the kernel of the arguments table, D, ids, scale, y.  A piece is a row."""
    table, width, ids, scale, ys = code.arguments(5)
    scale = code.f32_argument(scale)
    for row in code.pieces():
        x = code.pointer(table, kind) + code.pointer(ids, "i64")[row] * width
        y = code.pointer(ys, kind) + row * width
        for d in code.loop(0, width, LANES):
            y.store(d, x.load(d) * scale)


def embed_tokens(code: KernelBuilder, kind: Kind) -> None:
    """Write the kernel of three tables and their rows for each token, then D, y; the last two tables may be 0.

    A piece is a token.
    """
    words, ids, types, type_ids, positions, position_ids, width, ys = code.arguments(8)
    for token in code.pieces():
        word, kind_of_text, place = (
            code.pointer(table, kind) + code.pointer(rows, "i64")[token] * width
            for table, rows in ((words, ids), (types, type_ids), (positions, position_ids))
        )
        y = code.pointer(ys, kind) + token * width
        for d in code.loop(0, width, LANES):
            x = code.var(word.load(d))
            with code.when(types > 0):
                x.set(x + kind_of_text.load(d))
            with code.when(positions > 0):
                x.set(x + place.load(d))
            y.store(d, x)


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
