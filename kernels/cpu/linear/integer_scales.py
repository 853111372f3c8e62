"""How kernels of bytes read the scales and minima of a panel: one for each group, or in blocks of 256 inputs.

Blocks keep the small integers of a GGUF file's K types, a byte for each, and multiply them with the factors of their block
in registers.  A byte instead of the file's six bits makes four-bit weights 0.578 bytes instead of 0.563, and saves shifts.

Minima in half precision, and those of blocks, belong to weights without a sign.  The weights of panels are smaller by a
constant, their centre, so centre times scale is added to the minimum.

Law: both ways compute the same bits, because factor times integer is exact in float32.
"""

from abc import ABC, abstractmethod

from trouper.kernels.codegen.builder import KernelBuilder
from trouper.kernels.codegen.core import Pointer, Value
from trouper.kernels.codegen.units import LANES, Kind
from trouper.kernels.cpu.linear.integer_panels import LINE, PanelStream
from trouper.kernels.cpu.linear.quantization import BLOCK, PANELS

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
