"""Panels of integer weights: how kernels decode their integers and read their scales, and the kernel that rounds and packs a matrix.

    int4  a lookup of the lowest five bits of each half word; without z the fifth bit belongs to the next integer, and the
          table contains everything twice
    fp4   likewise, with sixteen other numbers
    int8  converted to float32, then to bfloat16

A panel is decoded to pairs of bfloat16 step by step.  A reader either takes the pairs of a step (`pairs`), or lets the panel write a
tile to memory (`decode`) and loads it from there (`tile`).

Kernels of bytes read scales and minima apart: one for each group, or in blocks of 256 inputs.  Blocks keep the small integers of a GGUF
file's K types, a byte for each, and multiply them with the factors of their block in registers.  A byte instead of the file's six bits
makes four-bit weights 0.578 bytes instead of 0.563, and saves shifts.  Law: both ways compute the same bits, because factor times
integer is exact in float32.

Minima in half precision, and those of blocks, belong to weights without a sign.  The weights of panels are smaller by a
constant, their centre, so centre times scale is added to the minimum.

`quantize_panels` uses the formulas of `quantization.py` and the layouts of `integer.py`.  Sixteen outputs are the lanes,
so no sum or maximum crosses lanes.  It reads each group twice, the second time from the cache.
Roofline of quantize_panels: O I (2 + bits / 8) bytes.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator

from trouper.kernels.codegen.builder import KernelBuilder
from trouper.kernels.codegen.core import Pointer, Value
from trouper.kernels.codegen.units import LANES, Kind
from trouper.kernels.cpu.linear.products import TILE
from trouper.kernels.cpu.linear.quantization import BLOCK, E2M1, PANELS, STEP
from trouper.kernels.formats import Format

AHEAD = 48  # steps to prefetch into the second cache
GROUPS_AHEAD = 8  # groups of scales to prefetch
LINE = 64  # bytes
NUMBERS: dict[Format, list[float]] = {
    "int4": [float(i % 16 - 8) for i in range(32)],
    "fp4": [float(x) for x in E2M1 * 2],
}
DIFFERENCES = [float((i + 16) % 32 - 16) for i in range(32)]


class PanelStream:
    """The data of one panel for each step or group, interleaved with the data of other panels."""

    def __init__(
        self, start: Pointer, panel: Value, length: int, count: Value, num_between: Value
    ) -> None:
        """Describe the stream.

        Args:
            num_between: number of panels between this one and the one that its thread will probably process next.
        """
        self._own = start + (panel // PANELS * (count * PANELS) + panel % PANELS) * length
        self._stride, self._count, self._num_between = length * PANELS, count, num_between

    def at(self, i: Value, more: int = 0) -> Pointer:
        """Return the address of entry i + more.

        `more` is known when the kernel is written, so it costs no instruction. The step between entries is constant.
        """
        return self._own + i * self._stride + more * self._stride

    def enter(self, group: Value) -> None:
        """Prefetch the scales of a later group."""
        self.ask(group, GROUPS_AHEAD)

    def ask(self, i: Value, ahead: int, more: int = 0) -> None:
        """Prefetch a later entry, or one of the panel that this thread will probably process next."""
        later = i + ahead
        beyond = later + self._num_between * self._count
        there = self.at(later.code.select(later < self._count, later, beyond), more)
        for line in range(0, self._stride // PANELS, LINE // 4):
            there.prefetch(line)

    def ask_next(self, i: Value, more: int = 0) -> None:
        """Prefetch the entry of the panel with the same place among the next interleaved ones."""
        self.ask_entry(i + self._count + more)

    def ask_entry(self, i: Value, panels: int = 1) -> None:
        """Prefetch an entry of some panels, from this one on."""
        there = self.at(i)
        for line in range(0, self._stride // PANELS * panels, LINE // 4):
            there.prefetch(line)


class NibblePanel:
    """A panel of int4 or fp4 weights, decoded to pairs of bfloat16.

    Decoding is a lookup in a small table that fits a register.
    """

    def __init__(
        self, code: KernelBuilder, fmt: Format, words: PanelStream, zeros: PanelStream | None
    ) -> None:
        self._code, self._numbers, self._words, self._zeros = code, NUMBERS[fmt], words, zeros
        self._zero: Value | None = None

    def enter(self, group: Value) -> None:
        self._zero = self._zeros and self._zeros.at(group).load()

    def pairs(self, i: Value, more: int = 0) -> list[Value]:
        """Return the pairs of step i + more."""
        word = self._words.at(i, more).load()
        self._words.ask(i, AHEAD, more)
        shifted = [word >> 4 * j for j in range(STEP)]
        if self._zero is None:
            return [self._code.lookup_bf16(self._numbers, index) for index in shifted]
        zero = self._zero
        return [self._code.lookup_bf16(DIFFERENCES, (x & 0x000F000F) + zero) for x in shifted]


class BytePanel:
    """A panel of int8 weights, decoded to pairs of bfloat16.

    Integers of this size are exact in bfloat16, so decoding does not round.
    """

    def __init__(self, code: KernelBuilder, words: PanelStream) -> None:
        self._code, self._words = code, words

    def enter(self, group: Value) -> None:
        """Do nothing: int8 has no zeros."""

    def pairs(self, i: Value, more: int = 0) -> list[Value]:
        code = self._code
        self._words.ask(i, AHEAD, more)
        here = self._words.at(i, more)
        words = [here.load(), here.load(LANES)]
        # Input 2j is byte j // 2 of word j % 2, and the next input is two bytes further.
        places = [(j % 2, 8 * (j // 2)) for j in range(STEP)]
        pairs: list[Value] = []
        for w, first in places:
            low, high = (
                code.as_i32x16(code.to_f32x16(words[w] << 24 - b >> 24))
                for b in (first, first + 16)
            )
            # Integers of eight bits are exact in bfloat16, so the lower halves are zero.
            pairs.append((low >> 16 & 0xFFFF) | high)
        return pairs


PackedPanel = NibblePanel | BytePanel


class KeptPanel:
    """A panel of already decoded pairs of bfloat16.

    With many rows, a panel is decoded once and then read by each block of rows.
    """

    def __init__(self, words: Pointer) -> None:
        self._words = words

    def enter(self, group: Value) -> None:
        """Do nothing: the zeros are already subtracted."""

    def pairs(self, i: Value, more: int = 0) -> list[Value]:
        place = self.tile(i, more)
        return [place.load(j * LANES) for j in range(STEP)]

    def decode(self, i: Value, more: int = 0) -> None:
        """Do nothing: the panel is already decoded."""

    def tile(self, i: Value, more: int = 0) -> Pointer:
        """Return the address of step i + more and the following steps."""
        return self._words + i * (STEP * LANES) + more * (STEP * LANES)


class ChunkPanel(KeptPanel):
    """Memory for one chunk of a panel, decoded shortly before its use. It holds step `more` for any i."""

    def tile(self, i: Value, more: int = 0) -> Pointer:
        return self._words + more * (STEP * LANES)


class KeepingPanel:
    """A packed panel that keeps what it decodes, for later blocks of rows.

    It is read like any other panel. Its methods are those of `KeptPanel`, so products need no distinction.
    """

    def __init__(self, packed: PackedPanel, kept: KeptPanel) -> None:
        self._packed, self._kept = packed, kept

    def enter(self, group: Value) -> None:
        self._packed.enter(group)

    def pairs(self, i: Value, more: int = 0) -> list[Value]:
        pairs, place = self._packed.pairs(i, more), self.tile(i, more)
        for j, pair in enumerate(pairs):
            place.store(j * LANES, pair)
        return pairs

    def decode(self, i: Value, more: int = 0) -> None:
        """Decode a tile of the panel to memory.

        The tile unit can only multiply from memory, not from vector registers. Each tile is decoded once for each
        block.
        """
        for step in range(TILE // STEP):
            self.pairs(i, more + step)

    def tile(self, i: Value, more: int = 0) -> Pointer:
        return self._kept.tile(i, more)


IntegerPanel = PackedPanel | KeepingPanel | KeptPanel


def quantize_panels(code: KernelBuilder, fmt: Format) -> None:
    """Write the kernel with the arguments plain matrix, q, s, I / 2, pairs of a group.  A work item is a panel."""
    plain, q, s, pairs, length = code.arguments(5)
    num_groups, num_words = pairs // length, 1 if fmt == "int4" else 2  # of a step
    of_step = LANES * num_words
    for panel in code.work_items():
        block, place = panel // PANELS, panel % PANELS
        rows = code.pointer(plain, "i32") + panel * LANES * pairs
        words = code.pointer(q, "i32")
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
                for j in range(0, LANES, STEP):
                    step = (i + j) // STEP * (PANELS * of_step)
                    for w, word in enumerate(_step(code, fmt, columns[j : j + STEP], inverse)):
                        words.store(step + w * LANES, word)


def _columns(
    code: KernelBuilder, rows: Pointer, pairs: Value, first: Value, length: Value
) -> Iterator[tuple[Value, list[Value]]]:
    """Yield sixteen pairs of inputs at a time, each for sixteen outputs."""
    for i in code.loop(first, first + length, LANES):
        yield i, code.transpose([rows.load(pairs * r + i) for r in range(LANES)])


def _magnitude(x: Value) -> Value:
    return x.code.maximum(x, 0.0 - x)


def _step(code: KernelBuilder, fmt: Format, columns: list[Value], inverse: Value) -> list[Value]:
    """Return the words of a step: for int4 a nibble in each half for each column, for int8 a byte, in two words."""
    lowest, highest = (-8.0, 7.0) if fmt == "int4" else (-127.0, 127.0)
    words = [code.i32x16(0) for _ in range(1 if fmt == "int4" else 2)]
    for k, column in enumerate(columns):
        low, high = (
            code.round_i32x16(code.minimum(code.maximum(x * inverse, lowest), highest))
            for x in code.unpack_bf16(column)
        )
        if fmt == "int4":
            words[0] = words[0] | ((low + 8) << 4 * k) | ((high + 8) << 16 + 4 * k)
        else:
            both = (low & 0xFF) | (high & 0xFF) << 16
            words[k % 2] = words[k % 2] | both << 8 * (k // 2)
    return words


HALF_BYTES = 2
# Blocks to prefetch: one block of weights takes long enough for memory to answer.
BLOCKS_AHEAD = 1


class Scales(ABC):
    """The scales and minima of one panel, read span by span and group by group.

    A span is what `enter` prepares for: a group of weights, or a block of 256 inputs.
    """

    @abstractmethod
    def enter(self, span: Value) -> None:
        """Prefetch a later span, and load what all groups of this one share."""

    @abstractmethod
    def at(self, span: Value, group: Value) -> tuple[Value, Value | None]:
        """Return the scale of a group of x, and its minimum if the weight has minima."""


class PlainScales(Scales):
    """Scales in one array and minima in another. A span is a group of weights, with one or several groups of x."""

    def __init__(
        self,
        code: KernelBuilder,
        scales: PanelStream,
        minima: PanelStream | None,
        minima_kind: Kind | None,
        centre: int,
    ) -> None:
        self._code, self._scales, self._minima = code, scales, minima
        self._centre = float(centre if minima_kind == "f16" else 0)

    def enter(self, span: Value) -> None:
        self._scales.enter(span)
        if self._minima is not None:
            self._minima.enter(span)

    def at(self, span: Value, group: Value) -> tuple[Value, Value | None]:
        scale = self._scales.at(span).load()
        if self._minima is None:
            return scale, None
        least = self._minima.at(span).load()
        return scale, self._code.fma(self._centre, scale, least) if self._centre else least


class BlockScales(Scales):
    """Scales and minima in blocks of bytes, see `integer.py`.

    Args:
        start: the first byte of the whole array.
        panel: index of the panel.
        num_blocks: blocks of 256 inputs in a row.
        group: inputs that share a scale.
        has_minima: whether minima follow the scales.
        asks: whether this panel prefetches, for all four.
        centre: the constant by which the weights of panels are smaller.
    """

    def __init__(
        self,
        code: KernelBuilder,
        start: Pointer,
        panel: Value,
        num_blocks: Value,
        group: int,
        centre: int,
        *,
        has_minima: bool,
        asks: bool,
    ) -> None:
        self._code, self._has_minima, self._centre = code, has_minima, float(centre)
        self._asks = asks
        # Bytes of the scales and minima of a group of four panels.
        self._width = PANELS * LANES * (2 if has_minima else 1)
        self._num_groups = BLOCK // group
        self._size = self._width * (HALF_BYTES + self._num_groups)
        self._own = start + panel // PANELS * num_blocks * self._size
        self._place = panel % PANELS * LANES

    def enter(self, span: Value) -> None:
        here = self._own + span * self._size
        for line in range(0, self._size if self._asks else 0, LINE):
            here.prefetch(self._size * BLOCKS_AHEAD + line)
        factors = here.of("f16") + self._place
        self._factor = factors.load()
        if self._has_minima:
            self._minimum_factor = factors.load(PANELS * LANES)
        self._groups = here + self._width * HALF_BYTES + self._place

    def at(self, span: Value, group: Value) -> tuple[Value, Value | None]:
        code = self._code
        own = self._groups + (group - span * self._num_groups) * self._width
        scale = code.to_f32x16(own.load()) * self._factor
        if not self._has_minima:
            return scale, None
        minimum = code.to_f32x16(own.load(PANELS * LANES)) * self._minimum_factor
        return scale, code.fma(self._centre, scale, minimum)
