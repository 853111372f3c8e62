"""Attention of whole sequences in both directions, without padding and without a cache.

    out[t, n] = softmax(scale · q[t, n] Kᵀ + bias[n, P + t - j] + mask) V,   j the keys' positions

    qkv    [T, 3, N, D]  the sequences one after the other
    tiles  [P, 4]        int64: first token and number of keys of the sequence, first query, number of queries ≤ SIDE
    bias   [N, 2 P + SIDE]  float32, or absent; a tile reads up to SIDE beyond its last query
    out    [T, N D]

A piece of work is one head of one tile.  Tiles and what is done with one are those of
`prefill.py`: an online softmax over SIDE keys at a time.

Roofline: FLOPs = 4 Σ L² N D, bytes = 4 e T N D.
"""

from trouper.kernels.codegen.builder import KernelBuilder
from trouper.kernels.codegen.units import LANES, Kind, Unit
from trouper.kernels.cpu.attention.decode import LOG2_E
from trouper.kernels.cpu.attention.tile import tile_of

SIDE = 64  # keys, and queries of a tile


def whole_attention(code: KernelBuilder, kind: Kind, unit: Unit) -> None:
    """Write the kernel of the arguments qkv, tiles, N, D, scale, window, bias or 0, its stride, out, scratch, its bytes."""
    (
        qkv, tiles, num_heads, width, scale, window, bias, bias_stride, out, scratch, num_bytes,
    ) = code.arguments(11)  # fmt: skip
    qkv, out = code.pointer(qkv, kind), code.pointer(out, kind)
    tiles, has_bias, bias = code.pointer(tiles, "i64"), bias > 0, code.pointer(bias, "f32")
    tile = tile_of(unit, code, kind, scratch + code.thread() * num_bytes, 1, width, SIDE)
    scale = code.f32_argument(scale)
    middle = (bias_stride - SIDE) // 2
    size = num_heads * width
    stride = size * 3
    with tile.begun():
        for piece in code.pieces():
            row, head = tiles + piece // num_heads * 4, piece % num_heads
            start, num_keys, query, count = row[0], row[1], row[2], row[3]
            q = qkv + (start * stride + head * width)
            k, v = q + size, q + size * 2
            num_rows = tile.padded_rows(count)
            tile.read_queries(q + query * stride, stride, count)
            tile.begin(query, count)
            low, high = (
                code.maximum(query - window, 0),
                code.minimum(query + count + window, num_keys),
            )
            is_masked = (query + count - 1 - window > low) | (query + window < high - 1)
            for first in code.loop(low, high, SIDE):
                num = code.minimum(high - first, SIDE)
                tile.stage_keys(lambda i, k=k, first=first: k + (first + i) * stride, num)
                tile.write_scores(num_rows, num)
                for r in code.loop(0, num_rows, LANES):
                    with code.when(has_bias):
                        nearest = bias + (head * bias_stride + middle + query + r - first)
                        for i in code.loop(0, num):
                            x = tile.scores.load(i * SIDE + r) * scale
                            tile.scores.store(i * SIDE + r, x + nearest.load(i * -1))
                    with code.when(is_masked):
                        tile.hide(r, first, num, window + 1, window)
                    tile.softmax(r, num, code.select(has_bias, 1.0, scale) * LOG2_E)
                tile.stage_values(lambda i, v=v, first=first: v + (first + i) * stride, num)
                tile.add_values(num_rows, num)
            tile.write_out(out + ((start + query) * size + head * width), size, count)
