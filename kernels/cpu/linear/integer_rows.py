"""Rows of bfloat16 rounded to integers with a scale for each group of inputs: the input of `integer_bytes.py`.

    x [T, I]         bfloat16, rows may be strided
    q [T, I / g, g / 4 + 4]  words of four bytes, -127 … 127, in the order in which the nibbles of a weight are extracted:
                     of eight inputs 0 4 1 5, then 2 6 3 7; then a record of the group: the scale; the sum of its integers in
                     the low half; the sum times minus the offset of the weights' bytes (`formats.OFFSETS`); the scale
                     times the sum (float32)

    a = max |x| of the group      scale = a · (1 / 127)      q = round(x · (127 / a)), ties to even

A group has 32 inputs, or 16.  With weights of up to six bits the error of the rows' eight bits is the smaller one, and with
weights of eight bits in groups it has the size of theirs.  A group with an infinity or NaN gets that scale and integers 0,
so that its products are NaN.  A group without numbers above 1e-30 gets integers 0 as well.

`gathered` reorders the inputs first, for a matrix with sorted columns: y[t, i] = x[t, order[i]].  It is one launch that a
recording can contain.

Roofline: quantize_rows 3 T I bytes; gather_columns 4 T I + 8 I bytes.
"""

import torch
from torch import Tensor

from trouper.kernels.codegen import launch
from trouper.kernels.codegen.builder import KernelBuilder
from trouper.kernels.codegen.core import Pointer, Value
from trouper.kernels.codegen.units import LANES
from trouper.kernels.formats import LIMIT, OFFSETS, Format

# Pairs of inputs to round at once: one register.
PAIRS = 16
RECORD = 4  # words
SCALE, LOW_SUM, MINUS_OFFSETS, SCALED_SUM = range(RECORD)
INFINITY = 0x7F800000  # bits
# The largest number of a group with nonzero integers, so that limit / a stays finite.
SMALLEST = 1e-30
# Indices of the first and second word of each step of four, in a register of pairs.
FIRST = [4 * (k // 2) + k % 2 for k in range(LANES // 2)]
SECOND = [4 * (k // 2) + 2 + k % 2 for k in range(LANES // 2)]


def words_of_group(group: int) -> int:
    return group // 4 + RECORD


def quantize_rows(code: KernelBuilder, fmt: Format, group: int) -> None:
    """Write the kernel with the arguments x, its stride in words, q, I / 2.  A work item is a row.

    Args:
        group: number of inputs that share a scale.
    """
    x, stride, q, pairs = code.arguments(4)
    per_row = pairs // (group // 2) * words_of_group(group)
    for row in code.work_items():
        quantize_row(
            code,
            fmt,
            group,
            code.pointer(x, "i32") + row * stride,
            code.pointer(q, "i32") + row * per_row,
            pairs,
        )


def quantize_row(
    code: KernelBuilder,
    fmt: Format,
    group: int,
    source: Pointer,
    target: Pointer,
    pairs: Value,
) -> None:
    """Write the code that rounds one row and writes its records.

    Args:
        source: pairs of bfloat16.
        target: words of the groups.
        pairs: number of pairs in the row.
    """
    for i in code.loop(0, pairs, PAIRS):
        low, high = code.unpack_bf16(source.load(i))
        bits = [code.as_i32x16(number) & 0x7FFFFFFF for number in (low, high)]
        tops = _each_group(code, group, code.maximum(*bits), largest=True)
        largest = code.as_f32x16(_by_lane(code, tops))
        is_finite = _by_lane(code, tops) < INFINITY
        usable = code.select(is_finite, largest, 0.0)
        inverse = code.select(usable > SMALLEST, LIMIT / usable, 0.0)
        scale = largest * (1.0 / LIMIT)
        numbers = [code.round_i32x16(code.select(is_finite, x, 0.0) * inverse) for x in (low, high)]
        groups = [
            target + (i // (group // 2) + g) * words_of_group(group) for g in range(32 // group)
        ]
        _store(code, groups, *numbers)
        sums = _each_group(code, group, numbers[0] + numbers[1], largest=False)
        for g, total in enumerate(sums):
            lane = code.lane(scale, g * (group // 2))
            own = groups[g] + group // 4
            own.of("f32")[SCALE] = lane
            own[LOW_SUM] = total & 0xFFFF
            own[MINUS_OFFSETS] = total * -OFFSETS[fmt]
            own.of("f32")[SCALED_SUM] = lane * code.f32(total)


def _each_group(code: KernelBuilder, group: int, x: Value, *, largest: bool) -> list[Value]:
    """Return the largest lane, or the sum of the lanes, of each group."""
    fold = code.reduce_max if largest else code.reduce_sum
    if group == 2 * LANES:
        return [fold(x)]
    is_first = code.lane_ids() < LANES // 2
    return [fold(code.select(is_first, x, 0)), fold(code.select(is_first, 0, x))]


def _by_lane(code: KernelBuilder, values: list[Value]) -> Value:
    """Return the value of its group in each lane."""
    if len(values) == 1:
        return code.i32x16(values[0])
    first, second = (code.i32x16(value) for value in values)
    return code.select(code.lane_ids() < LANES // 2, first, second)


def _store(code: KernelBuilder, groups: list[Pointer], low: Value, high: Value) -> None:
    both = (low & 0xFF) | (high & 0xFF) << 16  # bytes 0 and 2
    first, second = (code.shuffle(both, both, lanes) for lanes in (FIRST, SECOND))
    words, each = first | second << 8, LANES // 2 // len(groups)
    for g, group in enumerate(groups):
        group.store_lanes(0, code.shuffle(words, words, range(g * each, (g + 1) * each)))


def gathered(x_TI: Tensor, order_I: Tensor) -> Tensor:
    """Return the columns of x in another order, as a new tensor.

    Weights with reordered groups of inputs need it. GPTQ with `desc_act` is an example.
    """
    y_TI = x_TI.new_empty(x_TI.shape)
    launch.compiled(gather_columns)(
        len(x_TI),
        x_TI.data_ptr(),
        x_TI.stride(0),
        order_I.data_ptr(),
        len(order_I),
        y_TI.data_ptr(),
        num_threads=torch.get_num_threads(),
    )
    return y_TI


def gather_columns(code: KernelBuilder) -> None:
    """Write the kernel with the arguments x, its stride, order, I, y.  A work item is a row."""
    xs, stride, order, width, ys = code.arguments(5)
    place = code.pointer(order, "i64")
    for row in code.work_items():
        x = code.pointer(xs, "i16") + row * stride
        y = code.pointer(ys, "i16") + row * width
        for i in code.loop(0, width):
            y[i] = x[place[i]]
