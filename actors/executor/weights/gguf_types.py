"""Unpack the blocks of each type of GGUF files into integers with scales.

    w = d q + m     q [O, I] int8, d [O, I / g], m [O, I / g] or absent, g = 16 or 32

The numbers equal those of llama.cpp's reference bit by bit.  Types whose values are not evenly spaced are looked up:
sixteen values (IQ4_NL, IQ4_XS, MXFP4), or a grid of four or eight values with their signs (IQ1, IQ2, IQ3).  The
grids are constants of the format, of 29 KB in all; they come from the package `gguf`.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# torch leaves the types of view, split and some others open.

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trouper.kernels.cpu.linear.quantization import E2M1, ScaleBlocks

IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


class Affine(NamedTuple):
    """A matrix of integers q with a scale d and a minimum m for each group of inputs: w = d q + m."""

    q_OI: Tensor  # int8
    scales_OG: Tensor  # float32
    minima_OG: Tensor | None = None
    # The scales and minima as the K types store them, in fewer bits.
    blocks: ScaleBlocks | None = None


def dequantized_affine(affine: Affine) -> Tensor:
    """Return the numbers of a matrix in float32, [O, I].

    Used for tensors that no kernel can multiply in their stored form.
    """
    q_OI, scales_OG, minima_OG, _ = affine
    groups = q_OI.unflatten(1, (scales_OG.shape[1], -1)).float() * scales_OG.unsqueeze(2)
    if minima_OG is not None:
        groups += minima_OG.unsqueeze(2)
    return groups.flatten(1)


def _factors(blocks: Tensor, at: int) -> Tensor:
    return blocks[..., at : at + 2].contiguous().view(torch.float16).squeeze(-1)


def _half(blocks: Tensor, at: int) -> Tensor:
    return _factors(blocks, at).float()


def _nibbles(bytes_: Tensor, width: int = 16) -> Tensor:
    """Unpack half bytes, […, N] to […, 2 N]: for each run of `width` bytes, first the low halves, then the high ones."""
    parts = bytes_.unflatten(-1, (-1, 1, width))
    return torch.cat((parts & 15, parts >> 4), -2).flatten(-3)


def _bits(bytes_: Tensor) -> Tensor:
    """Unpack the bits of little-endian words, lowest first."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return ((bytes_.unsqueeze(-1) >> shifts) & 1).flatten(-2)


def _rows(q: Tensor) -> Tensor:
    return q.to(torch.int8).flatten(1)


def _q4_0(blocks: Tensor) -> Affine:
    return Affine(_rows(_nibbles(blocks[..., 2:])) - 8, _half(blocks, 0))


def _q4_1(blocks: Tensor) -> Affine:
    return Affine(_rows(_nibbles(blocks[..., 4:])), _half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks: Tensor) -> Affine:
    q = _nibbles(blocks[..., 6:]) | _bits(blocks[..., 2:6]) << 4
    return Affine(_rows(q) - 16, _half(blocks, 0))


def _q5_1(blocks: Tensor) -> Affine:
    q = _nibbles(blocks[..., 8:]) | _bits(blocks[..., 4:8]) << 4
    return Affine(_rows(q), _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: Tensor) -> Affine:
    return Affine(blocks[..., 2:].contiguous().view(torch.int8).flatten(1), _half(blocks, 0))


def _in_blocks(
    q_OI: Tensor,
    scales: tuple[Tensor, Tensor],
    minima: tuple[Tensor, Tensor] | None = None,
) -> Affine:
    """Return a matrix whose scales and minima are products: of a factor of each block, and an integer of each group.

    Args:
        scales: the factors [O, B] and the integers [O, B, groups of a block].
        minima: likewise, to be subtracted.
    """
    of_groups = _rows(scales[1])
    found = Affine(q_OI, _scaled(scales[0].float(), scales[1].float()))
    if minima is None:
        return found._replace(blocks=ScaleBlocks(of_groups, scales[0]))
    return found._replace(
        minima_OG=-_scaled(minima[0].float(), minima[1].float()),
        blocks=ScaleBlocks(of_groups, scales[0], _rows(minima[1]), minima[0]),
    )


def _k_scales(blocks: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Unpack the scales and minima of eight groups: six bits each in twelve bytes."""
    low, middle, high = blocks[..., 4:16].split(4, -1)
    scales = torch.cat((low & 63, (high & 15) | (low >> 2 & 48)), -1)
    minima = torch.cat((middle & 63, (high >> 4) | (middle >> 2 & 48)), -1)
    return (_factors(blocks, 0), scales), (_factors(blocks, 2), minima)


def _q4_k(blocks: Tensor) -> Affine:
    return _in_blocks(_rows(_nibbles(blocks[..., 16:], 32)), *_k_scales(blocks))


def _q5_k(blocks: Tensor) -> Affine:
    shifts = torch.arange(8, dtype=torch.uint8).unsqueeze(-1)
    fifth = (blocks[..., 16:48].unsqueeze(-2) >> shifts & 1).flatten(-2)
    q = _rows(_nibbles(blocks[..., 48:], 32) | fifth << 4)
    return _in_blocks(q, *_k_scales(blocks))


def _q6_k(blocks: Tensor) -> Affine:
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).unsqueeze(-1)
    high = (blocks[..., 128:192].unflatten(-1, (2, 1, 32)) >> shifts & 3).flatten(-3)
    q = _rows(_nibbles(blocks[..., :128], 64) | high << 4) - 32
    scales = blocks[..., 192:208].contiguous().view(torch.int8)
    return _in_blocks(q, (_factors(blocks, 208), scales))


def _spread(words: Tensor, shifts: tuple[int, ...], mask: int) -> Tensor:
    """Unpack small numbers from each word, one for each shift, next to each other: [..., N] to [..., N * shifts]."""
    return (words.unsqueeze(-1) >> torch.tensor(shifts, dtype=words.dtype) & mask).flatten(-2)


def _planes(bytes_: Tensor, width: int, shifts: tuple[int, ...], mask: int) -> Tensor:
    """Unpack small numbers from runs of `width` bytes: for each run, first all of one shift, then all of the next."""
    column = torch.tensor(shifts, dtype=torch.uint8).unsqueeze(-1)
    return (bytes_.unflatten(-1, (-1, 1, width)) >> column & mask).flatten(-3)


def _words16(blocks: Tensor, at: int, count: int) -> Tensor:
    return blocks[..., at : at + 2 * count].contiguous().view(torch.int16).int() & 0xFFFF


def _words32(blocks: Tensor, at: int, count: int) -> Tensor:
    """Return signed words of 32 bits. The highest bit may be a sign, so shifted words must be masked."""
    return blocks[..., at : at + 4 * count].contiguous().view(torch.int32)


def _scaled(d: Tensor, factors: Tensor) -> Tensor:
    """Multiply the scale of each block with the factors of its groups. Returns [O, groups of a row]."""
    return (d.unsqueeze(-1) * factors).flatten(1)


def _q2_k(blocks: Tensor) -> Affine:
    q, groups = _planes(blocks[..., 16:80], 32, (0, 2, 4, 6), 3), blocks[..., :16]
    scales, minima = (_factors(blocks, 80), groups & 15), (_factors(blocks, 82), groups >> 4)
    return _in_blocks(_rows(q), scales, minima)


def _q3_k(blocks: Tensor) -> Affine:
    """Unpack Q3_K: three bits for each number, where the third is set if nothing is subtracted."""
    low = _planes(blocks[..., 32:96], 32, (0, 2, 4, 6), 3)
    third = _planes(blocks[..., :32], 32, tuple(range(8)), 1)
    factors = _planes(blocks[..., 96:104], 8, (0, 4), 15)
    factors = factors | _planes(blocks[..., 104:108], 4, (0, 2, 4, 6), 3) << 4
    q = _rows(low | third << 2) - 4
    return _in_blocks(q, (_factors(blocks, 108), factors.to(torch.int8) - 32))


def _tq1_0(blocks: Tensor) -> Affine:
    """Unpack TQ1_0: each byte contains five numbers -1, 0 and 1 as digits of a ternary fraction."""
    parts: list[Tensor] = []
    for begin, end, digits in ((0, 32, 5), (32, 48, 5), (48, 52, 4)):
        powers = torch.tensor([3**i for i in range(digits)], dtype=torch.uint8).unsqueeze(-1)
        parts.append((blocks[..., begin:end].unsqueeze(-2) * powers).flatten(-2))
    digits = torch.cat(parts, -1).short() * 3 >> 8
    return Affine(_rows(digits - 1), _half(blocks, 52).repeat_interleave(8, 1))


def _tq2_0(blocks: Tensor) -> Affine:
    q = _planes(blocks[..., :64], 32, (0, 2, 4, 6), 3)
    return Affine(_rows(q) - 1, _half(blocks, 64).repeat_interleave(8, 1))


def _looked_up(nibbles: Tensor, values: tuple[int, ...]) -> Tensor:
    return torch.tensor(values, dtype=torch.int8)[nibbles.flatten(1).int()]


def _iq4_nl(blocks: Tensor) -> Affine:
    return Affine(_looked_up(_nibbles(blocks[..., 2:]), IQ4_NL), _half(blocks, 0))


def _mxfp4(blocks: Tensor) -> Affine:
    """Unpack MXFP4. Scales are halved powers of two, because the table is doubled; the smallest are subnormal."""
    e = blocks[..., 0].int()
    bits = torch.where(e < 2, 0x00200000 << e.clamp(max=1), (e - 1) << 23)
    return Affine(_looked_up(_nibbles(blocks[..., 1:]), E2M1), bits.int().view(torch.float32))


def _iq4_xs(blocks: Tensor) -> Affine:
    factors = _spread(blocks[..., 4:8], (0, 4), 15).int()
    factors |= _spread(_words16(blocks, 2, 1), tuple(range(0, 16, 2)), 3) << 4
    scales = _scaled(_half(blocks, 0), factors.float() - 32)
    return Affine(_looked_up(_nibbles(blocks[..., 8:]), IQ4_NL), scales)


@cache
def _grid(name: str, unit: float = 1) -> Tensor:
    """Load the table of values for the codes of a type, in multiples of `unit`: [codes, 4 or 8] int8."""
    # The package comes with the extra `gguf`, and the config has checked that it is installed.
    from gguf import quants

    quant: Any = getattr(quants, name)
    quant.init_grid()
    return torch.from_numpy(np.array(quant.grid[0, 0] / unit, np.int8))


def _even_signs(codes: Tensor) -> Tensor:
    """Return eight signs for each code of seven bits. The eighth makes the number of minus signs even."""
    bits = _spread(codes, tuple(range(7)), 1).unflatten(-1, (-1, 7))
    return torch.cat((bits, bits.sum(-1, keepdim=True) & 1), -1).flatten(-2)


def _on_grid(name: str, codes: Tensor, is_minus: Tensor) -> Tensor:
    q = _grid(name)[codes.int()].flatten(-2)
    return _rows(q * (1 - 2 * is_minus.to(torch.int8)))


def _iq2_xxs(blocks: Tensor) -> Affine:
    codes, words = _words32(blocks, 2, 16).unflatten(-1, (8, 2)).unbind(-1)
    signs = _even_signs(_spread(words, (0, 7, 14, 21), 127))
    scales = _scaled(_half(blocks, 0), ((words >> 28 & 15).float() + 0.5) * 0.25)
    return Affine(_on_grid("IQ2_XXS", codes.contiguous().view(torch.uint8), signs), scales)


def _iq2_xs(blocks: Tensor) -> Affine:
    words = _words16(blocks, 2, 32)
    factors = _spread(blocks[..., 66:74], (0, 4), 15).float() + 0.5
    scales = _scaled(_half(blocks, 0), factors * 0.25)
    return Affine(_on_grid("IQ2_XS", words & 511, _even_signs(words >> 9)), scales)


def _iq2_s(blocks: Tensor) -> Affine:
    codes = blocks[..., 2:34].int() | _spread(blocks[..., 66:74], (0, 2, 4, 6), 3).int() << 8
    factors = _spread(blocks[..., 74:82], (0, 4), 15).float() + 0.5
    scales = _scaled(_half(blocks, 0), factors * 0.25)
    return Affine(_on_grid("IQ2_S", codes, _bits(blocks[..., 34:66])), scales)


def _iq3_xxs(blocks: Tensor) -> Affine:
    words = _words32(blocks, 66, 8)
    signs = _even_signs(_spread(words, (0, 7, 14, 21), 127))
    scales = _scaled(_half(blocks, 0), ((words >> 28 & 15).float() + 0.5) * 0.5)
    return Affine(_on_grid("IQ3_XXS", blocks[..., 2:66], signs), scales)


def _iq3_s(blocks: Tensor) -> Affine:
    codes = blocks[..., 2:66].int() | _bits(blocks[..., 66:74]).int() << 8
    factors = 2 * _spread(blocks[..., 106:110], (0, 4), 15).float() + 1
    return Affine(
        _on_grid("IQ3_S", codes, _bits(blocks[..., 74:106])), _scaled(_half(blocks, 0), factors)
    )


def _shifted_grid(name: str, codes: Tensor, is_minus: Tensor) -> Tensor:
    """Return the values -1, 0 and 1 with an eighth added or subtracted, in multiples of an eighth."""
    return _rows(
        (8 * _grid(name)[codes] + 1 - 2 * is_minus.to(torch.int8).unsqueeze(-1)).flatten(-2)
    )


def _iq1_s(blocks: Tensor) -> Affine:
    words = _words16(blocks, 34, 8)
    codes = blocks[..., 2:34].int() | _spread(words, (0, 3, 6, 9), 7) << 8
    factors = (2 * (words >> 12 & 7) + 1).float() / 8
    signs = (words >> 15).repeat_interleave(4, -1)
    return Affine(_shifted_grid("IQ1_S", codes, signs), _scaled(_half(blocks, 0), factors))


def _iq1_m(blocks: Tensor) -> Affine:
    """Unpack IQ1_M, which stores the scale of a block in the highest bits of the four words with the scales of its groups."""
    words, codes = _words16(blocks, 48, 4), _spread(blocks[..., 32:48], (0, 4), 15).int()
    d = (words >> 12 << torch.tensor([0, 4, 8, 12], dtype=torch.int32)).sum(-1).short()
    factors = (2 * _spread(words, (0, 3, 6, 9), 7) + 1).float() / 8
    q = _shifted_grid("IQ1_M", blocks[..., :32].int() | (codes & 7) << 8, codes >> 3)
    return Affine(q, _scaled(d.view(torch.float16).float(), factors))


READERS: dict[str, Callable[[Tensor], Affine]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "TQ1_0": _tq1_0,
    "TQ2_0": _tq2_0,
    "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m,
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ2_S": _iq2_s,
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
