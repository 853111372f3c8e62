"""y = scale · table[id]: the embeddings of a step's tokens.

    table [V, D]   D a multiple of 16;  ids [T] int64, below V, as admission has checked;  y [T, D]

Roofline: bytes = 2 e T D.  One launch, which a recording holds, where torch's two calls let go of the interpreter.
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
