"""Kernels at both ends of a model: embeddings of tokens, and means of the rows of a text.

    embed           y = scale · table[id]                  table [V, D], ids [T] int64, y [T, D]
    embed_tokens    the sum of a row of each of three tables, added in float32 (encoders)
    mean_of_spans   the mean of consecutive rows; the mean of one row is that row, except for the sign of a zero

D is a multiple of 16.  Admission has checked that ids are below V.

Roofline: embed 2 e T D bytes.  One launch that a recording can contain, while torch's two calls hold the interpreter.
"""

from trouper.kernels.codegen.builder import KernelBuilder
from trouper.kernels.codegen.units import LANES, Kind


def embed(code: KernelBuilder, kind: Kind) -> None:
    """Write the kernel with the arguments table, D, ids, scale, y.  A work item is a row."""
    table, width, ids, scale, ys = code.arguments(5)
    scale = code.f32_argument(scale)
    for row in code.work_items():
        x = code.pointer(table, kind) + code.pointer(ids, "i64")[row] * width
        y = code.pointer(ys, kind) + row * width
        for d in code.loop(0, width, LANES):
            y.store(d, x.load(d) * scale)


def embed_tokens(code: KernelBuilder, kind: Kind) -> None:
    """Write the kernel with the arguments of three tables, each followed by its row ids, then D and y.

    The address of the second and the third table may be 0.  A work item is a token.
    """
    words, ids, types, type_ids, positions, position_ids, width, ys = code.arguments(8)
    for token in code.work_items():
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
    """Write the kernel with the arguments x, its stride, spans [C, 2] int64, D, y.  A work item is a span.

    A span is its first row and its number of rows, at least one.
    """
    xs, stride, spans, width, ys = code.arguments(5)
    for i in code.work_items():
        span = code.pointer(spans, "i64") + i * 2
        x = code.pointer(xs, kind) + span[0] * stride
        y = code.pointer(ys, "f32") + i * width
        for d in code.loop(0, width, LANES):
            total = code.var(code.f32x16(0.0))
            for row in code.loop(0, span[1]):
                total.set(total + (x + row * stride).load(d))
            y.store(d, total / code.f32(span[1]))
