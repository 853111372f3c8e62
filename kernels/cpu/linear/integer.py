"""y = x (s · (q - z) + m)ᵀ + b: bfloat16 times integers of 4 or 8 bits, or fp4, with a scale for each group of inputs.

    x [T, I]                        tokens × inputs, rows may be strided
    q [O / 64, I / 8, 4, 16]        int4, fp4: words of eight inputs
      [O / 64, I / 8, 4, 4, 16, 2]  int8: bytes of four pairs of inputs
    s [O / 64, I / G, 4, 16]        bfloat16 or float32; G inputs of an output share a scale: a multiple of 32, or 16
    z [O / 64, I / G, 4, 16]        int4 only, optional: words of 32 - (z + 8), twice
    m [O / 64, I / G, 4, 16]        float32, only without z, optional
    b [O]                           optional
    y [T, O]

Sixteen outputs are a panel, and four panels are interleaved, with O rounded up, so that a product of one row reads one
stream.  With separate panels a third of each would be processed before prefetching could start.

Units (`units.integer_unit`):

    dots, tiles  integers become pairs of bfloat16, exactly, for the units of `products.py` (`integer_matmul.py`)
    bytes        rows become integers, 8 bits for int4 and fp4 and 16 for int8, and products are exact
                 (`integer_bytes.py`)

On machines with tiles, weights with minima and int8 in groups use bytes or dots.

Law: a row's result does not depend on the number of rows.

Roofline: O I (bits / 8 + 2 / G) bytes, 2 T O I FLOPs.
Measured on two Xeon cores with AMX, O = 6144, I = 1024, weights in memory, by tiles (dots): int4 T = 1 19.2 GB/s (21.2),
T = 16 0.78 TFLOP/s (0.21), T = 512 1.3 (0.24); int8 T = 1 24.1 GB/s (22.7), T = 16 0.65 TFLOP/s (0.19), T = 512 2.3 (0.24).
"""

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
from trouper.kernels.cpu.linear.integer_rows import RECORD, gathered, quantize_rows
from trouper.kernels.cpu.linear.quantization import (
    PANELS,
    IntegerWeight,
    group_of,
    num_blocks,
    packed,
)
from trouper.kernels.formats import Format, integers_per_word
from trouper.kernels.linear import LinearMethod
from trouper.kernels.reference.linear import row_group


class IntegerLinear(LinearMethod):
    """A weight of integers with a scale for each group of inputs, rounded at load or in the checkpoint."""

    fmt: ClassVar[Format]
    # Whether most products have at most some dozen rows.
    has_few_rows: ClassVar[bool] = False
    is_recordable: ClassVar[bool] = True
    takes_integers: ClassVar[bool] = True

    def __init__(
        self,
        shape: tuple[int, int],
        weight: Tensor,
        scales: Tensor,
        zeros: Tensor | None,
        minima: Tensor | None,
        bias_O: Tensor | None,
        order_I: Tensor | None = None,
    ) -> None:
        self.shape, self.bias, self.order = shape, bias_O, order_I
        self.weight, self.scales, self.zeros, self.minima = weight, scales, zeros, minima
        has_tiles = minima is None and not (self.fmt == "int8" and scales.shape[1] > 1)
        self.unit: Unit = units.integer_unit(
            self.fmt, has_tiles=has_tiles, has_few_rows=self.has_few_rows
        )
        kind = "bf16" if scales.dtype == torch.bfloat16 else "f32"
        self.options = (
            self.fmt,
            kind,
            zeros is not None,
            minima is not None,
        )  # options of the kernels
        if self.unit == "bytes":
            self.row_group = row_group(shape[1] // scales.shape[1])
            self._matmul = launch.compiled(byte_matmul, *self.options, self.row_group)
            self._quantize = launch.compiled(quantize_rows, self.fmt, self.row_group)
        else:
            self._matmul = launch.compiled(quantized_matmul, self.unit, *self.options)

    @classmethod
    def pack(cls, weight: Tensor | IntegerWeight, bias_O: Tensor | None = None) -> Self:
        """Round a plain bfloat16 matrix, or pack the integers of a checkpoint without rounding.

        Both then have the same layout and kernels. The format is the class's.
        """
        if isinstance(weight, IntegerWeight):
            num_out, num_in = weight.q_OI.shape
            return cls((num_out, num_in), *packed(weight), bias_O, weight.order_I)
        num_out, num_in = weight.shape
        return cls((num_out, num_in), *_rounded(weight, cls.fmt), None, None, bias_O)

    @property
    def num_bytes(self) -> int:
        parts = (self.weight, self.scales, self.zeros, self.minima)
        return sum(part.nbytes for part in parts if part is not None)

    def apply(self, x_TI: Tensor) -> Tensor:
        if self.order is not None:
            x_TI = gathered(x_TI, self.order)
        y_TO = x_TI.new_empty((len(x_TI), self.shape[0]))
        (self._by_bytes if self.unit == "bytes" else self._by_bf16)(x_TI, y_TO)
        return y_TO

    def _by_bf16(self, x_TI: Tensor, y_TO: Tensor) -> None:
        num_rows, (num_out, num_in) = len(x_TI), self.shape
        num_threads = torch.get_num_threads()
        num_groups = self.scales.shape[1]
        num_sums = 0 if self.minima is None else num_groups
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
        num_threads, rounded = torch.get_num_threads(), (0, 0)
        bytes_each = integer_bytes.scratch_bytes(num_rows, num_in, self.fmt, self.row_group)
        if not bytes_each:
            q_TI, records = self.quantized_rows(x_TI)
            rounded = q_TI.data_ptr(), records.data_ptr()
        self._matmul(
            BYTE_BLOCKING.num_items(num_rows, num_out, num_in),
            x_TI.data_ptr(),
            x_TI.stride(0) // 2,
            *rounded,
            *self._arguments(y_TO),
            num_threads,
            launch.scratch(num_threads * bytes_each),
            bytes_each,
            num_threads=num_threads,
        )

    def quantized_rows(self, x_TI: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows as integers with their scales: the input of `byte_matmul`.

        Used on processors without bfloat16 instructions.
        """
        num_rows, num_in = len(x_TI), self.shape[1]
        per_word = integers_per_word(self.fmt)
        q_TI = x_TI.new_empty((num_rows, num_in // per_word), dtype=torch.int32)
        records = x_TI.new_empty((num_rows, num_in // self.row_group * RECORD), dtype=torch.int32)
        self._quantize(
            num_rows,
            x_TI.data_ptr(),
            x_TI.stride(0) // 2,
            q_TI.data_ptr(),
            records.data_ptr(),
            num_in // 2,
            num_threads=torch.get_num_threads(),
        )
        return q_TI, records

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
            num_in // self.scales.shape[1] // 2,
        )


class Int4Linear(IntegerLinear):
    fmt: ClassVar[Format] = "int4"


class Int8Linear(IntegerLinear):
    fmt: ClassVar[Format] = "int8"


class Int8Head(Int8Linear):
    """A linear layer with weights of eight bits for few rows, such as the head, which only sampled tokens need."""

    has_few_rows: ClassVar[bool] = True


class Fp4Linear(IntegerLinear):
    """A linear layer with e2m1 weights of four bits. Only checkpoints contain them; no option rounds to fp4."""

    fmt: ClassVar[Format] = "fp4"


INTEGER_LINEARS = {kind.fmt: kind for kind in (Int4Linear, Int8Linear, Fp4Linear)}


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
