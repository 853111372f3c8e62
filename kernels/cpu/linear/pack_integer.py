"""A plain bfloat16 matrix [O, I] rounded and packed: the formulas of `quantization.py`, the layouts of
`integer.py`.

Sixteen outputs are the lanes, so that no sum or maximum crosses them; a group is read twice, the second
time from the cache.

Roofline: bytes = O I (2 + bits / 8).
"""

from collections.abc import Iterator

from trouper.kernels.codegen.builder import KernelBuilder
from trouper.kernels.codegen.core import Pointer, Value
from trouper.kernels.codegen.units import LANES
from trouper.kernels.cpu.linear.quantization import PANELS, STEP
from trouper.kernels.formats import Format


def quantize_panels(code: KernelBuilder, fmt: Format) -> None:
    """Write the kernel of the arguments plain matrix, q, s, I / 2, pairs of a group.  A piece is a panel."""
    plain, q, s, pairs, length = code.arguments(5)
    num_groups, at_once = pairs // length, STEP if fmt == "int4" else 1  # columns to a word
    of_step = LANES * STEP // at_once
    for panel in code.pieces():
        block, place = panel // PANELS, panel % PANELS
        rows = code.pointer(plain, "i32") + panel * LANES * pairs
        words = code.pointer(q, "i32" if fmt == "int4" else "i16")
        words += (block * (pairs // STEP * PANELS) + place) * of_step
        scales = code.pointer(s, "bf16") + (block * (num_groups * PANELS) + place) * LANES
        for g in code.loop(0, num_groups):
            first = g * length
            largest = code.var(code.f32x16(0.0))
            for _, columns in _columns(code, rows, pairs, first, length):
                for x in (x for column in columns for x in code.unpack_bf16(column)):
                    largest.set(code.select(_magnitude(x) > _magnitude(largest), x, largest))
            scale = largest * (-1 / 8) if fmt == "int4" else _magnitude(largest) / 127.0
            scales.store(g * (PANELS * LANES), scale)
            scale = scales.load(g * (PANELS * LANES))
            inverse = code.select(scale.equals(0.0), 0.0, code.f32x16(1.0) / scale)
            for i, columns in _columns(code, rows, pairs, first, length):
                for j in range(0, LANES, at_once):
                    word = _word(code, fmt, columns[j : j + at_once], inverse)
                    step = (i + j) // STEP * (PANELS * of_step)
                    words.store(step + j % STEP // at_once * LANES, word)


def _columns(
    code: KernelBuilder, rows: Pointer, pairs: Value, first: Value, length: Value
) -> Iterator[tuple[Value, list[Value]]]:
    """Yield sixteen pairs of inputs at a time, each of sixteen outputs."""
    for i in code.loop(first, first + length, LANES):
        yield i, code.transpose([rows.load(pairs * r + i) for r in range(LANES)])


def _magnitude(x: Value) -> Value:
    return x.code.maximum(x, 0.0 - x)


def _word(code: KernelBuilder, fmt: Format, columns: list[Value], inverse: Value) -> Value:
    """Return the words of some columns: int4, a nibble of each half for each column; int8, two bytes."""
    lowest, highest = (-8.0, 7.0) if fmt == "int4" else (-127.0, 127.0)
    word = code.i32x16(0)
    for k, column in enumerate(columns):
        low, high = (
            code.round_i32x16(code.minimum(code.maximum(x * inverse, lowest), highest))
            for x in code.unpack_bf16(column)
        )
        if fmt == "int8":
            return (low & 0xFF) | (high << 8)
        word = word | ((low + 8) << 4 * k) | ((high + 8) << 16 + 4 * k)
    return word
