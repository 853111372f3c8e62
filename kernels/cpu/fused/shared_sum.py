"""The sums over the ranks of a group, each with what follows it: one launch, the same bits on every rank.

    s = Σ_r y_r            in float32, in the order of the ranks
    s = norm(s) by p          where there is a post-norm
    x += α · s,   z = norm(x) by w       as `fused_add_norm` does;  without x: z = s

    y_r, x, z [T, D]   D a multiple of 16, rows may be strided;  w, p as `row_norm.py` reads them, or absent

Roofline: bytes = e T D (R + 4), FLOPs = (R + 6) T D.
"""

from collections.abc import Iterator, Sequence
from functools import partial

from trouper.kernels.codegen.builder import KernelBuilder
from trouper.kernels.codegen.core import Pointer, Value
from trouper.kernels.codegen.units import LANES, Kind
from trouper.kernels.cpu.attention.decode import capped
from trouper.kernels.cpu.fused.exchange import Exchange, exchange
from trouper.kernels.cpu.fused.row_norm import row_norm
from trouper.kernels.formats import Norm

ROWS = 4  # of a piece


def shared_sum(code: KernelBuilder, kind: Kind, num_ranks: int, norm: Norm) -> None:
    """Write the kernel of the arguments of the group, address and bytes of a part, y, its stride, x or 0, its stride, p or 0, w or 0, z, its stride, T, D, α, ε."""
    *group, parts, part_bytes, ys, y_stride, xs, x_stride, post, weights, zs, z_stride, length, width, alpha, eps = code.arguments(18)  # fmt: skip
    group = Exchange(*group)
    alpha, eps = code.f32_argument(alpha), code.f32_argument(eps)
    weight, post_weight = code.pointer(weights, "f32"), code.pointer(post, "f32")

    def write(piece: Value, place: Value) -> None:
        part = code.pointer(parts + (place * num_ranks + group.rank) * part_bytes, kind)
        for row in _rows(code, piece, length):
            y, target = code.pointer(ys, kind) + row * y_stride, part + row * width
            for d in code.loop(0, width, LANES):
                target.store(d, y.load(d))

    def read(piece: Value, place: Value) -> None:
        first = parts + place * num_ranks * part_bytes
        for row in _rows(code, piece, length):
            y = [code.pointer(first + r * part_bytes, kind) + row * width for r in range(num_ranks)]
            z = code.pointer(zs, kind) + row * z_stride
            total = partial(_total, y)

            with code.when(xs < 1):
                for d in code.loop(0, width, LANES):
                    z.store(d, total(d))
            with code.when(xs > 0):
                x = code.pointer(xs, kind) + row * x_stride
                with code.when(post < 1):
                    for d in code.loop(0, width, LANES):
                        x.store(d, code.fma(alpha, total(d), x.load(d)))
                with code.when(post > 0):
                    normed = row_norm(code, total, width, post_weight, eps, norm)
                    for d in code.loop(0, width, LANES):
                        x.store(d, code.fma(alpha, normed(d), x.load(d)))
                with code.when(weights > 0):
                    normed = row_norm(code, x.load, width, weight, eps, norm)
                    for d in code.loop(0, width, LANES):
                        z.store(d, normed(d))

    exchange(code, group, num_ranks, length, write, read)


def shared_heads_norm(code: KernelBuilder, kind: Kind, num_ranks: int, num_copies: int) -> None:
    """Write the kernel that normalises q and k in place, each over the heads of all ranks.

    Its arguments: those of the group, address and bytes of a part, qkv, its stride, the widths of q and k here, those of all
    ranks together, weights of q and k [width here], T, ε.  `num_copies` ranks one after the other have the same keys.
    """
    *group, parts, part_bytes, xs, x_stride, q_width, k_width, q_size, k_size, q_weights, k_weights, length, eps = code.arguments(16)  # fmt: skip
    group = Exchange(*group)
    eps = code.f32_argument(eps)
    sides = (  # start in a row, width here, width of all, weights, column of the sums, ranks that count
        (code.i64(0), q_width, q_size, q_weights, 0, range(num_ranks)),
        (q_width, k_width, k_size, k_weights, 1, range(0, num_ranks, num_copies)),
    )

    def write(piece: Value, place: Value) -> None:
        part = code.pointer(parts + (place * num_ranks + group.rank) * part_bytes, "f32")
        for row in _rows(code, piece, length):
            for start, width, _, _, column, _ in sides:
                x = code.pointer(xs, kind) + row * x_stride + start
                squares = code.var(code.f32x16(0.0))
                for d in code.loop(0, width, LANES):
                    value = x.load(d)
                    squares.set(code.fma(value, value, squares))
                part[row * 2 + column] = code.reduce_sum(squares)

    def read(piece: Value, place: Value) -> None:
        first = parts + place * num_ranks * part_bytes
        for row in _rows(code, piece, length):
            for start, width, size, weights, column, ranks in sides:
                squares = code.f32(0.0)
                for r in ranks:
                    part = code.pointer(first + r * part_bytes, "f32")
                    squares = squares + part[row * 2 + column]
                inverse = 1.0 / code.sqrt(squares / code.f32(size) + eps)
                x, weight = code.pointer(xs, kind) + row * x_stride + start, code.pointer(weights, "f32")  # fmt: skip
                for d in code.loop(0, width, LANES):
                    x.store(d, x.load(d) * inverse * weight.load(d))

    exchange(code, group, num_ranks, length, write, read)


def shared_columns(code: KernelBuilder, kind: Kind, num_ranks: int) -> None:
    """Write the kernel that puts each rank's columns of the logits into a sheet [R, V] of float32, as `finish_logits` does.

    Its arguments: those of the group, product [R, W], its stride, the address of its first column, V, R, W, at least 16 or 0,
    scale, cap or 0.
    """
    *group, xs, x_stride, ys, y_stride, length, width, scale, cap = code.arguments(12)
    group = Exchange(*group)
    scale, cap = code.f32_argument(scale), code.f32_argument(cap)

    def write(piece: Value, place: Value) -> None:  # there is one sheet
        for row in _rows(code, piece, length):
            x, y = code.pointer(xs, kind) + row * x_stride, code.pointer(ys, "f32") + row * y_stride
            for start in code.loop(0, width, LANES):
                d = code.minimum(start, width - LANES)  # those before again
                y.store(d, capped(code, x.load(d) * scale, cap))

    exchange(code, group, num_ranks, length, write, lambda piece, place: None)


def num_pieces(num_rows: int) -> int:
    """Return the pieces of a launch: all rows are written and read."""
    return 2 * -(-num_rows // ROWS)


def _total(parts: Sequence[Pointer], d: Value) -> Value:
    """Return sixteen sums from d on, in the order of the parts."""
    found = parts[0].load(d)
    for part in parts[1:]:
        found = found + part.load(d)
    return found


def _rows(code: KernelBuilder, piece: Value, length: Value) -> Iterator[Value]:
    first = piece * ROWS
    return code.loop(first, code.minimum(first + ROWS, length))
