"""Attention of many query tokens at once: prompts over a paged KV cache, and whole sequences of encoders.

`prefill_attention` is causal, over a cache that already contains the keys of the queries:

    out[t, n] = softmax(cap(scale · q[t, n] Kᵀ) + mask) V
                with sinks, over one more key with the score sinks[n] and the value 0

    q      [T, N, D]     rows may be strided;  N = H · G, the G heads of a group adjacent
    cache  [2, H, S, D]  slot = block id · block size + offset
    tables [C, B]        int64 block ids
    tiles  [P, 6]        int64: first token, number of tokens (≤ PARTS · SIDE / G), row of the table, position, end of its span
                         or 0, window
    sinks  [N]           float32, or absent
    out    [T, N · D]

A work item is one KV head of one tile.  Its tokens and group heads are R ≤ SIDE query rows, which are the *lanes*
throughout.  For every SIDE keys, of the past and of the tile itself:

    scores [SIDE, R]  = K q      each key's cells in all lanes, times the transposed queries
    weights           = an online softmax down the columns, so that no sum crosses lanes
    out    [D, R]    += Vᵀ weights

So K is not rearranged, and V only pairs neighbours for bfloat16 (`tile.py`).  Keys that no query of a tile sees are not
read.  The queries of a span see all keys before the span's end, as far back as the window reaches.

`whole_attention` lets every token of a sequence see the others in both directions, without a cache:

    out[t, n] = softmax(scale · q[t, n] Kᵀ + bias[n, P + t - j] + mask) V,   j the positions of the keys

    q, k, v  [T, N, D]   the sequences one after the other; rows may be strided
    tiles  [P, 4]        int64: first token and number of keys of the sequence, first query, number of queries ≤ WHOLE_SIDE
    bias   [N, 2 P + WHOLE_SIDE]  float32, or absent; a tile reads up to WHOLE_SIDE beyond its last query
    out    [T, N D]

Law: a token's result does not depend on the chunk in which it is computed.  Keys are processed SIDE at a time from
multiples of SIDE on, and an invisible key adds exactly nothing.

Roofline of prefill_attention: 4 N D · (visible pairs of query and key) FLOPs; as many bytes as a decode for every SIDE / G
tokens.  Measured on one EPYC core, N = 16, H = 8, D = 128, bfloat16, where a packed GEMM reached 223 GFLOP/s:
    0 + 1024 tokens  161 GFLOP/s    1024 + 1024  164    0 + 4096  159
torch's flash attention: 56, 61, 74.  The two products without the rest run at 225-230.
Roofline of whole_attention: 4 Σ L² N D FLOPs, 4 e T N D bytes.
"""

from collections.abc import Iterator

from trouper.kernels.codegen.builder import KernelBuilder
from trouper.kernels.codegen.core import Pointer, Value
from trouper.kernels.codegen.units import LANES, Kind, Unit
from trouper.kernels.cpu.attention.decode import LOG2_E, capped
from trouper.kernels.cpu.attention.tile import WIDEST, Tile, tile_of

# The largest number of query tiles in a work item, for which keys and values are prepared once.
PARTS = 4
# Keys, and rows of queries, of a tile.  With AMX 64 and 64 take 1.15 times as long; with AVX-512 they are equal.
SIDE = 128


def prefill_attention(code: KernelBuilder, kind: Kind, unit: Unit) -> None:
    """Write the kernel with the arguments q, its stride, cache, S, tables, their stride, tiles, H, G, D, block size, scale, cap,
    sinks or 0, out, its stride, scratch, scratch bytes of a thread.
    """
    (
        q, q_stride, cache, num_slots, tables, table_stride, tiles, num_kv, group, width, block_size,
        scale, cap, sinks, out, out_stride, scratch, scratch_bytes,
    ) = code.arguments(18)  # fmt: skip
    q, cache, out = (code.pointer(x, kind) for x in (q, cache, out))
    tables, tiles = code.pointer(tables, "i64"), code.pointer(tiles, "i64")
    size = group * width
    base = scratch + code.thread() * scratch_bytes
    tile = tile_of(unit, code, kind, base, group, width, SIDE)
    scale, cap = code.f32_argument(scale), code.f32_argument(cap)
    with tile.begun():
        for item in code.work_items():
            row = tiles + item // num_kv * 6
            head = item % num_kv
            token, count, position = row[0], row[1], row[3]
            span_end, window = row[4], row[5]
            # Farther than any position.
            ahead = code.minimum(span_end, 1) * 2**30
            table = tables + row[2] * table_stride
            k = cache + head * num_slots * width
            v = cache + (num_kv + head) * num_slots * width

            oldest = code.maximum(position + 1 - window, 0)

            def slot(place: Value, table: Pointer = table, oldest: Value = oldest) -> Value:
                # A hidden key before the window is not read, because its block may have another owner.
                place = code.maximum(place, oldest)
                return table[place // block_size] * block_size + place % block_size

            end = code.maximum(position + count, span_end)
            step = code.i64(SIDE) // group

            def parts(
                count: Value = count, step: Value = step
            ) -> Iterator[tuple[Tile, Value, Value]]:
                """Yield the parts of a work item: the tile, its first token, its number of tokens."""
                for part in code.loop(0, (count + (step - 1)) // step):
                    at = part * step
                    yield tile.part(part), at, code.minimum(step, count - at)

            for part, at, own in parts():
                part.read_queries(q + ((token + at) * q_stride + head * size), q_stride, own)
                part.begin(position + at, own)
                with code.when(sinks > 0):
                    part.add_sinks(code.pointer(sinks, "f32") + head * group, own)
            for first in code.loop(oldest // SIDE * SIDE, end, SIDE):
                num = code.minimum(end - first, SIDE)
                tile.stage_keys(lambda i, k=k, first=first: k + slot(first + i) * width, num)
                tile.stage_values(lambda i, v=v, first=first: v + slot(first + i) * width, num)
                for part, at, own in parts():
                    begin, stop = position + at, position + at + own
                    last = code.maximum(stop, span_end)
                    num, num_rows = code.minimum(last - first, SIDE), part.padded_rows(own)
                    with code.when((num > 0) & (first + num > begin + 1 - window)):
                        part.write_scores(num_rows, num)
                        is_masked = (first + num - 1 > begin + ahead) | (stop - 1 - window >= first)
                        for r in code.loop(0, num_rows, LANES):
                            with code.when(cap > 0.0):
                                _cap(part, r, num, scale, cap)
                            with code.when(is_masked):
                                part.hide(r, first, num, window, ahead)
                            part.softmax(r, num, code.select(cap > 0.0, 1.0, scale) * LOG2_E)
                        part.add_values(num_rows, num)
            for part, at, own in parts():
                part.write_out(out + ((token + at) * out_stride + head * size), out_stride, own)


def _cap(tile: Tile, r: Value, num_keys: Value, scale: Value, cap: Value) -> None:
    """Cap the scores of sixteen queries."""
    code = tile.code
    for i in code.loop(0, num_keys):
        x = capped(code, tile.scores.load(i * SIDE + r) * scale, cap)
        tile.scores.store(i * SIDE + r, x)


def can_prefill(group: int, width: int) -> bool:
    return group <= SIDE and width <= WIDEST


# Keys, and queries, of a tile.
WHOLE_SIDE = 64


def whole_attention(code: KernelBuilder, kind: Kind, unit: Unit) -> None:
    """Write the kernel with the arguments q, k, v, their strides, tiles, N, D, scale, window, bias or 0, its stride, out, scratch,
    its bytes.
    """
    (
        q_all, k_all, v_all, q_stride, k_stride, v_stride, tiles, num_heads, width, scale, window, bias, bias_stride,
        out, scratch, num_bytes,
    ) = code.arguments(16)  # fmt: skip
    q_all, k_all, v_all, out = (code.pointer(x, kind) for x in (q_all, k_all, v_all, out))
    tiles, has_bias, bias = code.pointer(tiles, "i64"), bias > 0, code.pointer(bias, "f32")
    tile = tile_of(unit, code, kind, scratch + code.thread() * num_bytes, 1, width, WHOLE_SIDE)
    scale = code.f32_argument(scale)
    middle = (bias_stride - WHOLE_SIDE) // 2
    size = num_heads * width
    with tile.begun():
        for item in code.work_items():
            row, head = tiles + item // num_heads * 4, item % num_heads
            start, num_keys, query, count = row[0], row[1], row[2], row[3]
            q = q_all + ((start + query) * q_stride + head * width)
            k = k_all + (start * k_stride + head * width)
            v = v_all + (start * v_stride + head * width)
            num_rows = tile.padded_rows(count)
            tile.read_queries(q, q_stride, count)
            tile.begin(query, count)
            low, high = (
                code.maximum(query - window, 0),
                code.minimum(query + count + window, num_keys),
            )
            is_masked = (query + count - 1 - window > low) | (query + window < high - 1)
            for first in code.loop(low, high, WHOLE_SIDE):
                num = code.minimum(high - first, WHOLE_SIDE)
                tile.stage_keys(lambda i, k=k, first=first: k + (first + i) * k_stride, num)
                tile.write_scores(num_rows, num)
                for r in code.loop(0, num_rows, LANES):
                    with code.when(has_bias):
                        nearest = bias + (head * bias_stride + middle + query + r - first)
                        for i in code.loop(0, num):
                            x = tile.scores.load(i * WHOLE_SIDE + r) * scale
                            tile.scores.store(i * WHOLE_SIDE + r, x + nearest.load(i * -1))
                    with code.when(is_masked):
                        tile.hide(r, first, num, window + 1, window)
                    tile.softmax(r, num, code.select(has_bias, 1.0, scale) * LOG2_E)
                tile.stage_values(lambda i, v=v, first=first: v + (first + i) * v_stride, num)
                tile.add_values(num_rows, num)
            tile.write_out(out + ((start + query) * size + head * width), size, count)
