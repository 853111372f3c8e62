"""Weights as integers of 4 or 8 bits with scales: w = s · (q - z) + m.

`quantize` rounds at load, with z = 0:

    int4  -8 … 7, a scale for every GROUP inputs of an output; the value of largest magnitude becomes -8 (llama.cpp's
          q4_0)
    int8  -127 … 127, a scale for each output

Only checkpoints contain:

    fp4   0, ±1, ±2, ±3, ±4, ±6, ±8, ±12: twice the values of e2m1

Scales are rounded to bfloat16 before the integers are computed.  Checkpoints may have int4 in groups of any multiple of
32, float32 scales and zeros (`actors/executor/weights/quantized.py`), and GGUF files both formats in groups of 16 or 32,
with float32 scales and minima m (`actors/executor/weights/gguf.py`).
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# torch leaves the types of split, view and some others open.

from typing import NamedTuple

import torch
from torch import Tensor

from trouper.kernels.codegen.units import LANES
from trouper.kernels.formats import Format

GROUP = 32
PANELS = 4  # interleaved in memory
E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice the value of each code
# Pairs of inputs of a panel before the next panel: a word of int4.
STEP = 4


class IntegerWeight(NamedTuple):
    """A matrix of integers with scales, which represent its weights exactly.

    Args:
        dtype: the dtype of the weights before they were rounded.
        minima_OG: added to the weights, only without zeros.
        order_I: the input that each column multiplies; by default the columns are in order.
    """

    fmt: Format
    dtype: torch.dtype
    q_OI: Tensor  # int8, or float8_e4m3fn
    scales_OG: Tensor  # bfloat16 or float32
    zeros_OG: Tensor | None = None  # int8; for int4 -8 … 8
    minima_OG: Tensor | None = None  # float32
    order_I: Tensor | None = None


def can_quantize(num_in: int, fmt: Format) -> bool:
    return num_in % group_of(num_in, fmt) == 0


def group_of(num_in: int, fmt: Format) -> int:
    return GROUP if fmt == "int4" else num_in


def quantize(weight_OI: Tensor, fmt: Format, whole_OI: Tensor | None = None) -> IntegerWeight:
    """Round a matrix whose number of inputs is a multiple of the group.  `integer_panels.py` does the same faster.

    Args:
        whole_OI: the complete matrix, if this is a part of its inputs: its scales are used for int8.
    """
    groups = weight_OI.float().unflatten(1, (-1, group_of(weight_OI.shape[1], fmt)))
    if fmt == "int4":
        largest = groups.gather(2, groups.abs().argmax(2, keepdim=True))
        scales, low, high = largest / -8, -8, 7
    else:
        each = groups if whole_OI is None else whole_OI.unsqueeze(1)
        scales, low, high = each.abs().amax(2, keepdim=True).float() / 127, -127, 127
    scales = scales.bfloat16()
    inverse = torch.where(scales == 0, 0.0, 1 / scales.float())
    integers = (groups * inverse).round_().clamp_(low, high).to(torch.int8)
    return IntegerWeight(fmt, weight_OI.dtype, integers.flatten(1), scales.squeeze(2))


def dequantized(integers: IntegerWeight) -> Tensor:
    """Return the weights in float32.

    They are exactly the numbers with which the kernels multiply, so tests can compare both. Nothing is rounded beyond
    float32.
    """
    scales_OG = integers.scales_OG
    groups = integers.q_OI.unflatten(1, (scales_OG.shape[1], -1)).float()
    if integers.zeros_OG is not None:
        groups -= integers.zeros_OG.unsqueeze(2)
    weights = groups * scales_OG.float().unsqueeze(2)
    if integers.minima_OG is not None:
        weights += integers.minima_OG.unsqueeze(2)
    weights = weights.flatten(1)
    if integers.order_I is not None:
        weights = torch.empty_like(weights).index_copy_(1, integers.order_I, weights)
    return weights


def can_pack(integers: IntegerWeight) -> bool:
    """Test whether `integer.py` supports groups of this size.

    Other matrices are dequantized and packed as plain ones.
    """
    num_in, num_groups = integers.q_OI.shape[1], integers.scales_OG.shape[1]
    return num_groups == 1 or num_in // num_groups % (16 if integers.fmt == "int8" else GROUP) == 0


def packed(integers: IntegerWeight) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Convert to q, s, z and m in the layout of `integer.py`.  Zeros of int8 become minima."""
    q_OI, zeros_OG, minima_OG = integers.q_OI, integers.zeros_OG, integers.minima_OG
    if zeros_OG is not None and integers.fmt == "int8":
        minima_OG, zeros_OG = -zeros_OG.float() * integers.scales_OG.float(), None
    minima = None if minima_OG is None else _panels(minima_OG)
    if zeros_OG is not None:
        zeros_OG = _panels((32 - (zeros_OG + 8)).int() * 0x10001)
    scales = _panels(integers.scales_OG)
    if integers.fmt == "int8":
        # One copy moves everything that stays together.
        steps = _panels(q_OI.contiguous().view(torch.int64))
        pairs = steps.view(torch.int16).unflatten(-1, (LANES, STEP)).transpose(3, 4).contiguous()
        return pairs.view(torch.int8).unflatten(-1, (LANES, 2)), scales, None, minima
    # The low half of a word contains the even inputs, the high half the odd ones.
    four = _nibbles(integers.fmt, q_OI.contiguous()).view(torch.int32)
    # Inputs 0 and 2 go to the first byte, 1 and 3 to the second.
    four |= four >> 12
    four = ((four & 0xFF) | (four & 0xFF00) << 8).unflatten(1, (-1, 2))
    return _panels(four[..., 0] | four[..., 1] << 8), scales, zeros_OG, minima


def _nibbles(fmt: Format, q_OI: Tensor) -> Tensor:
    if fmt == "int4":
        return q_OI + 8
    size = q_OI.abs()
    steps = (
        (size > 4).char() + (size > 6).char() + 3 * (size > 8).char()
        # The numbers of e2m1 are not consecutive, so this skips the codes between them.
    )
    return size - steps + 8 * (q_OI < 0).char()


def num_blocks(num_out: int) -> int:
    """Count the blocks of interleaved panels. The last block is padded, so memory is allocated for whole blocks."""
    return -(-num_out // (PANELS * LANES))


def _panels(rows: Tensor) -> Tensor:
    """Reorder to [O / 64, N, 4, 16, …], with zeros behind the last output."""
    missing = num_blocks(len(rows)) * PANELS * LANES - len(rows)
    if missing:
        rows = torch.cat((rows, rows.new_zeros((missing, *rows.shape[1:]))))
    return rows.unflatten(0, (-1, PANELS, LANES)).movedim(3, 1).contiguous()
