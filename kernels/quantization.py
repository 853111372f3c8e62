"""Weights as integers of 4 or 8 bits with scales: w ≈ s · q, rounded when a model is loaded.

    int4  -8 … 7, a scale for each GROUP inputs of an output; the value of largest magnitude becomes -8
          (llama.cpp's q4_0)
    int8  -127 … 127, a scale for each output

Scales are bfloat16 and are rounded before the integers are.
"""

from typing import Literal

import torch
from torch import Tensor

Format = Literal["int4", "int8"]
PER_WORD = {"int4": 8, "int8": 4}  # inputs in 32 bits
GROUP = 32
LANES = 16


def can_quantize(num_in: int, fmt: Format) -> bool:
    return num_in % group_of(num_in, fmt) == 0


def group_of(num_in: int, fmt: Format) -> int:
    return GROUP if fmt == "int4" else num_in


def quantize(weight_OI: Tensor, fmt: Format) -> tuple[Tensor, Tensor]:
    """Integers [O, I] int8 and scales [O, I / G] bfloat16; I divides by G."""
    groups = weight_OI.float().unflatten(1, (-1, group_of(weight_OI.shape[1], fmt)))
    if fmt == "int4":
        largest = groups.gather(2, groups.abs().argmax(2, keepdim=True))
        scales, low, high = largest / -8, -8, 7
    else:
        scales, low, high = groups.abs().amax(2, keepdim=True) / 127, -127, 127
    scales = scales.bfloat16()
    inverse = torch.where(scales == 0, 0.0, 1 / scales.float())
    integers = (groups * inverse).round_().clamp_(low, high).to(torch.int8)
    return integers.flatten(1), scales.squeeze(2)


def dequantized(integers_OI: Tensor, scales: Tensor) -> Tensor:
    """float32; exactly what the kernels multiply with."""
    groups = integers_OI.unflatten(1, (scales.shape[1], -1)).float()
    return (groups * scales.float().unsqueeze(2)).flatten(1)


def pack_integers(integers_OI: Tensor, fmt: Format) -> Tensor:
    """[O / 16, I / P, 16] int32."""
    per_word = PER_WORD[fmt]
    numbers = integers_OI.to(torch.int32).unflatten(1, (-1, per_word))
    if fmt == "int4":
        shifts = [4 * (e // 2) + 16 * (e % 2) for e in range(per_word)]
        numbers = numbers + 8
    else:
        shifts = [8 * e for e in range(per_word)]
        numbers = numbers & 0xFF
    words = torch.zeros(numbers.shape[:2], dtype=torch.int32)
    for e, shift in enumerate(shifts):
        words |= numbers[..., e] << shift
    return pack_panels(words)


def pack_panels(rows: Tensor) -> Tensor:
    """[O, N] to [O / 16, N, 16]."""
    return rows.unflatten(0, (-1, LANES)).transpose(1, 2).contiguous()
