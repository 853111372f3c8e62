"""y = x (s · (q - z) + m)ᵀ + b: bfloat16 times integers of 4 to 8 bits, or fp4, with a scale for each group of inputs.

    x [T, I]                        tokens × inputs, rows may be strided
    q [O / 64, I / 8, 4, 16]        int4, fp4: words of eight inputs
      [O / 64, I / 16, 3, 4, 16]    int6: two words of lowest four bits, then one of the other two bits of 16 inputs
      [O / 64, I / 32, 5, 4, 16]    int5: four words of lowest four bits, then one of the fifth bit of 32 inputs
      [O / 64, I / 8, 4, 2, 16, 4]  int8: bytes of eight inputs in the order 0 4 1 5, 2 6 3 7
    s [O / 64, I / G, 4, 16]        bfloat16, half or float32; G inputs of an output share a scale: a multiple of 32, or 16
      [O / 64, I / 256, N]          bytes of blocks of 256 inputs, without m: half-precision factors of scales, and of
                                    minima; then of each group integers of scales, and of minima
    z [O / 64, I / G, 4, 16]        int4 only, optional: words of 32 - (z + 8), twice
    m [O / 64, I / G, 4, 16]        float32, or half for weights without a sign; only without z, optional
    b [O]                           optional
    y [T, O]

Sixteen outputs are a panel, and four panels are interleaved, with O rounded up, so that a product of one row reads one
stream.  With separate panels a third of each would be processed before prefetching could start.

Units (`units.integer_unit`):

    dots, tiles  integers become pairs of bfloat16, exactly, for the units of `products.py` (`integer_matmul.py`)
    bytes        rows become integers of eight bits, and products are exact (`integer_bytes.py`)

On machines with tiles, weights with minima and int8 in groups use bytes or dots.  Only bytes support int5, int6, int4 in groups
of 16, and scales in blocks.

Law: a row's result does not depend on the number of rows.

Roofline: O I (bits / 8 + 2 / G) bytes, 2 T O I FLOPs.
Measured on two Xeon cores with AMX, O = 6144, I = 1024, weights in memory, by tiles (dots): int4 T = 1 19.2 GB/s (21.2),
T = 16 0.78 TFLOP/s (0.21), T = 512 1.3 (0.24); int8 T = 1 24.1 GB/s (22.7), T = 16 0.65 TFLOP/s (0.19), T = 512 2.3 (0.24).
"""

from collections.abc import Sequence
from typing import ClassVar, Self

import torch
from torch import Tensor

from trouper.kernels.codegen import launch, units
from trouper.kernels.codegen.units import LANES, Unit
from trouper.kernels.cpu.linear import integer_bytes
from trouper.kernels.cpu.linear.integer_bytes import BYTE_BLOCKING, byte_matmul
from trouper.kernels.cpu.linear.integer_matmul import (
    INTEGER_BLOCKINGS,
    quantized_matmul,
    scratch_bytes,
)
from trouper.kernels.cpu.linear.integer_panels import quantize_panels
from trouper.kernels.cpu.linear.integer_rows import gathered, quantize_rows, words_of_group
from trouper.kernels.cpu.linear.quantization import (
    PANELS,
    IntegerWeight,
    PackedWeight,
    StackedWeight,
    group_of,
    needs_bytes,
    num_blocks,
    packed,
)
from trouper.kernels.formats import Format
from trouper.kernels.linear import LinearMethod
from trouper.kernels.reference.linear import row_group


class IntegerLinear(LinearMethod):
    """A weight of integers with a scale for each group of inputs, rounded at load or in the checkpoint."""

    fmt: ClassVar[Format]
    is_recordable: ClassVar[bool] = True
    takes_integers: ClassVar[bool] = True

    def __init__(
        self,
        shape: tuple[int, int],
        num_groups: int,
        unit: Unit,
        packed: PackedWeight,
        bias_O: Tensor | None,
        order_I: Tensor | None = None,
    ) -> None:
        self.shape, self.num_groups = shape, num_groups
        self.unit: Unit = unit
        self.bias, self.order = bias_O, order_I
        self.weight, self.scales, self.zeros, self.minima, *_ = packed
        # Options of the kernels.
        self.options = self.fmt, packed.scale_kind, self.zeros is not None, packed.minima_kind
        if unit == "bytes":
            self.row_group = row_group(shape[1] // num_groups)
            self._matmul = launch.compiled(byte_matmul, *self.options, self.row_group)
            self._quantize = launch.compiled(quantize_rows, self.fmt, self.row_group)
        else:
            self._matmul = launch.compiled(quantized_matmul, unit, *self.options)

    @classmethod
    def pack(cls, weight: Tensor | IntegerWeight, bias_O: Tensor | None = None) -> Self:
        """Round a plain bfloat16 matrix, or pack the integers of a checkpoint without rounding.

        Both then have the same layout and kernels. The format is the class's.
        """
        if not isinstance(weight, IntegerWeight):
            num_out, num_in = weight.shape
            num_groups = num_in // group_of(num_in, cls.fmt)
            rounded = PackedWeight(*_rounded(weight, cls.fmt))
            return cls((num_out, num_in), num_groups, cls._unit(num_groups), rounded, bias_O)
        num_out, num_in = weight.q_OI.shape
        num_groups = weight.scales_OG.shape[1]
        has_minima = weight.minima_OG is not None or (
            weight.zeros_OG is not None and cls.fmt == "int8"
        )
        is_bytes = needs_bytes(weight)
        unit = "bytes" if is_bytes else cls._unit(num_groups, has_minima=has_minima)
        parts = packed(weight, is_for_bytes=unit == "bytes")
        return cls((num_out, num_in), num_groups, unit, parts, bias_O, weight.order_I)

    @classmethod
    def _unit(cls, num_groups: int, *, has_minima: bool = False) -> Unit:
        has_tiles = not has_minima and not (cls.fmt == "int8" and num_groups > 1)
        return units.integer_unit(has_tiles=has_tiles)

    @property
    def num_bytes(self) -> int:
        parts = (self.weight, self.scales, self.zeros, self.minima)
        return sum(part.nbytes for part in parts if part is not None)

    def apply(self, x_TI: Tensor) -> Tensor:
        if self.order is not None:
            x_TI = gathered(x_TI, self.order)
        y_TO = x_TI.new_empty((len(x_TI), self.shape[0]))
        self.apply_to(x_TI, y_TO)
        return y_TO

    def apply_to(self, x_TI: Tensor, y_TO: Tensor) -> None:
        """Write the product to y, which may be some columns of a larger matrix. It ignores the order of the inputs."""
        (self._by_bytes if self.unit == "bytes" else self._by_bf16)(x_TI, y_TO)

    def _by_bf16(self, x_TI: Tensor, y_TO: Tensor) -> None:
        num_rows, (num_out, num_in) = len(x_TI), self.shape
        num_threads = torch.get_num_threads()
        num_sums = 0 if self.minima is None else self.num_groups
        bytes_each = scratch_bytes(num_rows, num_in, self.unit, self.fmt, num_sums)
        self._matmul(
            INTEGER_BLOCKINGS[self.unit, self.fmt].num_items(num_rows, num_out, num_in),
            x_TI.data_ptr(),
            x_TI.stride(0) // 2,
            *self._arguments(y_TO),
            num_threads,
            launch.scratch(num_threads * bytes_each),
            bytes_each,
            num_threads=num_threads,
        )

    def _by_bytes(self, x_TI: Tensor, y_TO: Tensor) -> None:
        num_rows, (num_out, num_in) = len(x_TI), self.shape
        num_threads = torch.get_num_threads()
        bytes_each = integer_bytes.scratch_bytes(num_rows, num_in, self.row_group)
        # Few rows are rounded by the threads that multiply them.
        rounded = None if bytes_each else self.quantized_rows(x_TI)
        self._matmul(
            BYTE_BLOCKING.num_items(num_rows, num_out, num_in),
            x_TI.data_ptr(),
            x_TI.stride(0) // 2,
            0 if rounded is None else rounded.data_ptr(),
            *self._arguments(y_TO),
            num_threads,
            launch.scratch(num_threads * bytes_each),
            bytes_each,
            num_threads=num_threads,
        )

    def quantized_rows(self, x_TI: Tensor) -> Tensor:
        """Return the rows as integers with their scales: the input of `byte_matmul` with many rows."""
        num_rows, num_in = len(x_TI), self.shape[1]
        words = num_in // self.row_group * words_of_group(self.row_group)
        q_TI = x_TI.new_empty((num_rows, words), dtype=torch.int32)
        self._quantize(
            num_rows,
            x_TI.data_ptr(),
            x_TI.stride(0) // 2,
            q_TI.data_ptr(),
            num_in // 2,
            num_threads=torch.get_num_threads(),
        )
        return q_TI

    def _arguments(self, y_TO: Tensor) -> tuple[int, ...]:
        """Return the arguments of the weight and the sizes, which both kernels share."""
        num_out, num_in = self.shape
        return (
            self.weight.data_ptr(),
            self.scales.data_ptr(),
            0 if self.zeros is None else self.zeros.data_ptr(),
            0 if self.minima is None else self.minima.data_ptr(),
            0 if self.bias is None else self.bias.data_ptr(),
            y_TO.data_ptr(),
            len(y_TO),
            num_in // 2,
            num_out // LANES,
            y_TO.stride(0) // LANES,
            num_in // self.num_groups // 2,
        )


class Int4Linear(IntegerLinear):
    fmt: ClassVar[Format] = "int4"


class Int5Linear(IntegerLinear):
    """A linear layer with weights of five bits. Only GGUF files contain them."""

    fmt: ClassVar[Format] = "int5"


class Int6Linear(IntegerLinear):
    """A linear layer with weights of six bits. Only GGUF files contain them."""

    fmt: ClassVar[Format] = "int6"


class Int8Linear(IntegerLinear):
    fmt: ClassVar[Format] = "int8"


class Fp4Linear(IntegerLinear):
    """A linear layer with e2m1 weights of four bits. Only checkpoints contain them; no option rounds to fp4."""

    fmt: ClassVar[Format] = "fp4"


INTEGER_LINEARS = {
    kind.fmt: kind for kind in (Int4Linear, Int5Linear, Int6Linear, Int8Linear, Fp4Linear)
}


class StackedLinear(LinearMethod):
    """Layers of several formats with the same inputs. Their outputs are concatenated.

    GGUF files often have more bits for some parts of a fused layer, such as the values of an attention. Each part is one launch, which
    writes its columns of the result.
    """

    is_recordable: ClassVar[bool] = True
    takes_integers: ClassVar[bool] = True

    def __init__(self, parts: Sequence[IntegerLinear], bias_O: Tensor | None) -> None:
        self._parts, self.bias = parts, bias_O
        self.shape = sum(part.shape[0] for part in parts), parts[0].shape[1]

    @classmethod
    def pack(cls, weight: StackedWeight, bias_O: Tensor | None = None) -> Self:
        """Pack each part for its own format, without rounding.

        The parts have whole registers of outputs, and their inputs are in order.
        """
        parts: list[IntegerLinear] = []
        first = 0
        for part in weight.parts:
            own = None if bias_O is None else bias_O[first : first + len(part.q_OI)].contiguous()
            parts.append(INTEGER_LINEARS[part.fmt].pack(part, own))
            first += len(part.q_OI)
        return cls(parts, bias_O)

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self._parts)

    def apply(self, x_TI: Tensor) -> Tensor:
        y_TO = x_TI.new_empty((len(x_TI), self.shape[0]))
        first = 0
        for part in self._parts:
            part.apply_to(x_TI, y_TO[:, first : first + part.shape[0]])
            first += part.shape[0]
        return y_TO


def _rounded(weight_OI: Tensor, fmt: Format) -> tuple[Tensor, Tensor]:
    """Return packed integers and scales, equal to `packed(quantize(...))` but faster."""
    weight_OI = weight_OI.contiguous()
    num_out, num_in = weight_OI.shape
    group = group_of(num_in, fmt)
    blocks, half_bytes = num_blocks(num_out), 1 if fmt == "int4" else 2
    numbers = torch.zeros((blocks, num_in, 32 * half_bytes), dtype=torch.int8)
    scales = weight_OI.new_zeros((blocks, num_in // group, PANELS, LANES))
    launch.compiled(quantize_panels, fmt)(
        num_out // LANES,
        weight_OI.data_ptr(),
        numbers.data_ptr(),
        scales.data_ptr(),
        num_in // 2,
        group // 2,
        num_threads=torch.get_num_threads(),
    )
    return numbers, scales
