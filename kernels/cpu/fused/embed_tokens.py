"""The kernel of `token_embedding.py`: a row of each table, added up in float32."""

from trouper.kernels.codegen.builder import KernelBuilder
from trouper.kernels.codegen.units import LANES, Kind


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
