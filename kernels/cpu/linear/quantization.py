"""Weights as integers of 4 or 8 bits with scales: w = s · (q - z) + m.

`quantize` rounds at load, with z = 0:

    int4  -8 … 7, a scale for every GROUP inputs of an output; the value of largest magnitude becomes -8 (llama.cpp's
          q4_0)
    int8  -127 … 127, a scale for each output

Only checkpoints contain:

    fp4   0, ±1, ±2, ±3, ±4, ±6, ±8, ±12: twice the values of e2m1

    int5  -16 … 15
    int6  -32 … 31

Scales are rounded to bfloat16 before the integers are computed.  Checkpoints may have int4 in groups of any multiple of
32, float32 scales and zeros (`actors/executor/weights/quantized.py`), and GGUF files integers in groups of 16 or 32, with
minima m (`actors/executor/weights/gguf.py`).  Scales and minima are kept in as few bits as represent them exactly: as half
precision, or as the small integers and the factors of a `ScaleBlocks`.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# torch leaves the types of split, view and some others open.

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from trouper.kernels.codegen.units import LANES, Kind
from trouper.kernels.formats import CENTRES, Format

GROUP = 32
PANELS = 4  # interleaved in memory
E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice the value of each code
# Pairs of inputs of a panel before the next panel: a word of int4.
STEP = 4
# Inputs that share the factors of their scales.
BLOCK = 256
# How many words of four bits precede a word with the other bits of int5 and int6: a word has 32 fifth bits, or 16 times the
# fifth and sixth.
WORDS_OF_CHUNK: dict[Format, int] = {"int5": 4, "int6": 2}
# The bit of each byte at which the fifth bit of a number begins.
FIFTH = 4


# The type of scales in memory.
ScaleKind = Kind | Literal["blocks"]
KINDS: dict[torch.dtype, Kind] = {
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float32: "f32",
}


class ScaleBlocks(NamedTuple):
    """Scales and minima as small integers, which a factor for each 256 inputs multiplies: the K types of GGUF files.

    Every product of them is exact in float32. The minima are those of weights without a sign.
    """

    scales_OG: Tensor  # int8
    scale_factors_OB: Tensor  # float16
    minima_OG: Tensor | None = None  # int8
    minimum_factors_OB: Tensor | None = None  # float16


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
    # Equal to the scales and minima, in fewer bits.
    blocks: ScaleBlocks | None = None


class StackedWeight(NamedTuple):
    """Matrices in several formats with concatenated outputs, such as the parts of a fused layer."""

    parts: tuple[IntegerWeight, ...]


class PackedWeight(NamedTuple):
    """The tensors of an integer weight in the layout of `integer.py`, which also describes the names of scales."""

    weight: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    minima: Tensor | None = None
    # Whether the scales are in blocks, and whether minima follow them there.
    has_blocks: bool = False
    has_block_minima: bool = False

    @property
    def scale_kind(self) -> "ScaleKind":
        return "blocks" if self.has_blocks else KINDS[self.scales.dtype]

    @property
    def minima_kind(self) -> Kind | None:
        """Return the type of the minima: in blocks, the type of their integers."""
        if self.has_block_minima:
            return "i8"
        return None if self.minima is None else KINDS[self.minima.dtype]


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


def dequantized(integers: IntegerWeight | StackedWeight) -> Tensor:
    """Return the weights in float32.

    They are exactly the numbers with which the kernels multiply, so tests can compare both. Nothing is rounded beyond
    float32.
    """
    if isinstance(integers, StackedWeight):
        return torch.cat([dequantized(part) for part in integers.parts])
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
    group = {"int8": 16, "int4": 16, "int6": 16}.get(integers.fmt, GROUP)
    return num_groups == 1 or num_in // num_groups % group == 0


def needs_bytes(integers: IntegerWeight) -> bool:
    """Test whether only products of bytes support the form of a weight, and not those of bfloat16."""
    num_in, num_groups = integers.q_OI.shape[1], integers.scales_OG.shape[1]
    has_small_groups = integers.fmt == "int4" and num_in // num_groups % GROUP > 0
    return integers.fmt in WORDS_OF_CHUNK or integers.blocks is not None or has_small_groups


def packed(integers: IntegerWeight, *, is_for_bytes: bool = False) -> PackedWeight:
    """Convert to q, s, z and m in the layout of `integer.py`.  Zeros of int8 become minima.

    Args:
        is_for_bytes: whether `integer_bytes.py` multiplies, which also reads minima in half precision.
    """
    zeros_OG, minima_OG, scales_OG = integers.zeros_OG, integers.minima_OG, integers.scales_OG
    weight = _packed_integers(integers.fmt, integers.q_OI)
    if integers.blocks is not None:
        has_minima, blocks = integers.blocks.minima_OG is not None, _packed_blocks(integers.blocks)
        return PackedWeight(weight, blocks, has_blocks=True, has_block_minima=has_minima)
    if zeros_OG is not None and integers.fmt == "int8":
        minima_OG, zeros_OG = -zeros_OG.float() * scales_OG.float(), None
    if zeros_OG is not None:
        zeros_OG = _panels((32 - (zeros_OG + 8)).int() * 0x10001)
    halves = _halves(scales_OG)
    if minima_OG is not None and halves is not None and is_for_bytes:
        minima_OG = _uncentred(minima_OG, CENTRES[integers.fmt] * scales_OG)
    return PackedWeight(
        weight,
        _panels(scales_OG if halves is None else halves),
        zeros_OG,
        None if minima_OG is None else _panels(minima_OG),
    )


def _halves(numbers: Tensor) -> Tensor | None:
    """Return float32 numbers in half precision if all of them are exact in it."""
    if numbers.dtype != torch.float32:
        return None
    halves = numbers.half()
    return halves if torch.equal(halves.float(), numbers) else None


def _uncentred(minima_OG: Tensor, added_OG: Tensor) -> Tensor:
    """Return the minima of weights without a sign in half precision, if adding `added_OG` gives exactly these minima."""
    halves = (minima_OG - added_OG).half()
    return halves if torch.equal(halves.float() + added_OG, minima_OG) else minima_OG


def _packed_blocks(blocks: ScaleBlocks) -> Tensor:
    """Return bytes [O / 64, B, N]: of each block the factors, then the integers of each group; minima follow scales."""
    factors = [blocks.scale_factors_OB]
    groups = [blocks.scales_OG]
    if blocks.minima_OG is not None and blocks.minimum_factors_OB is not None:
        # The sign of a minimum is that of its factor.
        factors.append(-blocks.minimum_factors_OB)
        groups.append(blocks.minima_OG)
    num_blocks = blocks.scale_factors_OB.shape[1]
    # [O / 64, B, 1 or 2, 4, 16]
    of_blocks = torch.stack([_panels(x) for x in factors], 2)
    of_groups = torch.stack([_panels(x) for x in groups], 2).unflatten(1, (num_blocks, -1))
    first = of_blocks.flatten(2).view(torch.int8)
    return torch.cat((first, of_groups.flatten(2)), 2).contiguous()


def _packed_integers(fmt: Format, q_OI: Tensor) -> Tensor:
    if fmt == "int8":
        # The eight inputs of a step in the order of the nibbles of other formats.
        steps = q_OI.unflatten(1, (-1, 2 * STEP))[..., (0, 4, 1, 5, 2, 6, 3, 7)].flatten(1)
        words = _panels(steps.view(torch.int64)).view(torch.int32)
        words = words.unflatten(-1, (LANES, 2)).transpose(3, 4).contiguous()
        return words.view(torch.int8).unflatten(-1, (LANES, 4))
    if fmt not in WORDS_OF_CHUNK:
        return _panels(_words(_nibbles(fmt, q_OI.contiguous())))
    unsigned = q_OI + CENTRES[fmt]
    words = _panels(_words(unsigned & 15))
    # The other bits of each byte of the eight inputs of a word, for its low and high nibbles.
    rest, num_words = _words(unsigned >> FIFTH & 15), WORDS_OF_CHUNK[fmt]
    width, chunks = FIFTH // num_words, rest.unflatten(1, (-1, num_words))
    high = torch.zeros_like(chunks[..., 0])
    for i in range(2 * num_words):
        bits = chunks[..., i // 2] >> FIFTH * (i % 2) & 0x0F0F0F0F
        high |= bits << width * i
    return torch.cat((words.unflatten(1, (-1, num_words)), _panels(high).unsqueeze(2)), 2)


def _words(nibbles: Tensor) -> Tensor:
    """Return words of eight numbers of four bits."""
    # The low half of a word contains the even inputs, the high half the odd ones.
    four = nibbles.view(torch.int32)
    # Inputs 0 and 2 go to the first byte, 1 and 3 to the second.
    four = four | four >> 12
    four = ((four & 0xFF) | (four & 0xFF00) << 8).unflatten(1, (-1, 2))
    return four[..., 0] | four[..., 1] << 8


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
