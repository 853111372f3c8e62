"""y = act(x Wᵀ + b) for bfloat16 and float32, with W packed so that any number of rows reads it in order.

    x [T, I]                tokens × inputs, rows may be strided; I a multiple of 32 (float32: of 16)
    W [O / 16, I / 2, 16]   words: panels of sixteen outputs, pairs of inputs; O a multiple of 16 (float32: [O / 16, I, 16])
    b [O]                   optional
    y [T, O]                rows may be strided
    act                     none or gelu

`products.py` describes the units that multiply such words, and the law that a row's result does not depend on the number
of rows.  Rows with a stride of a multiple of 4 KiB would share one set of the first cache, so activations are padded
(`memory.padded`).  A machine has one unit for a dtype and a use; the roundings of units differ (for encoders in float32,
machines with tiles use `split_fp32.py`).

Roofline: e (O I + T I + T O) bytes, 2 T O I FLOPs; bound by memory below about 10 tokens.
Measured on two EPYC cores that read 41 GB/s, O = 32000, I = 1024: T = 1 41 GB/s (oneDNN's packed weights: 29), T = 4 40
(32); one core: T = 12 16 GB/s = 195 GFLOP/s (146), T = 1024 227 GFLOP/s (221).
Two Xeon cores with AMX, O = 6144: T = 16 0.68 TFLOP/s (0.69), T = 1024 2.1 (2.9).  In float32 there, GFLOP/s:
O = 1536, I = 384: T = 1 29 (15), T = 16 177 (119), T = 1024 228 (230); O = 1024, I = 3072: 19 (16), 182 (146), 250 (244).
"""

from typing import ClassVar, Self

import torch
from torch import Tensor

from trouper.kernels.codegen import launch, units
from trouper.kernels.codegen.builder import KernelBuilder
from trouper.kernels.codegen.core import Pointer, Value
from trouper.kernels.codegen.features import has_bf16_dot
from trouper.kernels.codegen.units import LANES, Unit
from trouper.kernels.cpu.linear.products import (
    BLOCKINGS,
    Act,
    Block,
    Product,
    items_of_many,
    product_of,
)
from trouper.kernels.cpu.memory import padded
from trouper.kernels.linear import LinearMethod


class DenseLinear(LinearMethod):
    """A weight in bfloat16 or float32, stored in panels of sixteen outputs.

    A product reads each panel from start to end, at the speed of the memory.
    """

    is_recordable: ClassVar[bool] = True

    def __init__(self, shape: tuple[int, int], weight: Tensor, bias_O: Tensor | None) -> None:
        self.shape, self.weight, self.bias = shape, weight, bias_O
        self._unit: Unit = "floats" if weight.dtype == torch.float32 else units.bf16_unit()
        launch.compiled(matmul, self._unit, "none")

    @classmethod
    def pack(cls, weight: Tensor, bias_O: Tensor | None = None) -> Self:
        num_out, num_in = weight.shape
        return cls((num_out, num_in), pack_panels(weight), bias_O)

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes

    def apply(self, x_TI: Tensor) -> Tensor:
        return self._product(x_TI, "none", x_TI.new_empty((len(x_TI), self.shape[0])))

    def apply_into(self, x_TI: Tensor, y_TO: Tensor) -> None:
        self._product(x_TI, "none", y_TO)

    def apply_act(self, x_TI: Tensor, act: str) -> Tensor:
        if act != "gelu":
            return super().apply_act(x_TI, act)
        # The next product reads padded rows faster.
        return self._product(x_TI, "gelu", padded(len(x_TI), self.shape[0], x_TI.dtype))

    def _product(self, x_TI: Tensor, act: Act, y_TO: Tensor) -> Tensor:
        num_rows, (num_out, num_in) = len(x_TI), self.shape
        per_word = 4 // x_TI.itemsize
        launch.compiled(matmul, self._unit, act)(
            BLOCKINGS[self._unit].num_items(num_rows, num_out, 2 * num_in // per_word),
            x_TI.data_ptr(),
            x_TI.stride(0) // per_word,
            self.weight.data_ptr(),
            0 if self.bias is None else self.bias.data_ptr(),
            y_TO.data_ptr(),
            y_TO.stride(0),
            num_rows,
            num_in // per_word,
            num_out // LANES,
            num_threads=torch.get_num_threads(),
        )
        return y_TO


def pack_panels(weight_OI: Tensor) -> Tensor:
    """Copy a plain matrix [O, I] into panels of sixteen outputs.

    O must be a multiple of sixteen.  The kernel that does so runs on all threads.
    """
    weight_OI = weight_OI.contiguous()
    num_out, num_in = weight_OI.shape
    per_word = 4 // weight_OI.itemsize
    packed = weight_OI.new_empty((num_out // LANES, num_in // per_word, LANES, per_word))
    launch.compiled(pack)(
        num_out // LANES,
        weight_OI.data_ptr(),
        packed.data_ptr(),
        num_in // per_word,
        num_threads=torch.get_num_threads(),
    )
    return packed


def pack(code: KernelBuilder) -> None:
    """Write the kernel with the arguments plain matrix [O, I], its packed form, words of a row.  A work item is a panel."""
    plain, packed, pairs = code.arguments(3)
    for panel in code.work_items():
        rows = code.pointer(plain, "i32") + panel * LANES * pairs
        words = code.pointer(packed, "i32") + panel * LANES * pairs
        for i in code.loop(0, pairs, LANES):
            for j, column in enumerate(
                code.transpose([rows.load(pairs * r + i) for r in range(LANES)])
            ):
                words.store((i + j) * LANES, column)


def matmul(code: KernelBuilder, unit: Unit, act: Act) -> None:
    """Write the kernel with the arguments x, its stride in words, W, b or 0, y, its stride, T, words of a row, O / 16.

    A work item is the panels of a block of rows.
    """
    x, stride, weight, *others = code.arguments(9)
    product, shape = product_of(unit, code, act, x, stride, *others), BLOCKINGS[unit]
    words, num_rows, before = code.pointer(weight, "i32"), product.num_rows, 0
    with product.begun():
        for block in shape.few:
            with code.when((num_rows > before) & (num_rows <= block.rows)):
                for item in code.work_items():
                    at_panel = product.panels_from(item * block.panels, block.panels)
                    weights = [words + p * product.pairs * LANES for p in at_panel]
                    steps = product.plain(weights, block.ahead)
                    product.block(at_panel, code.i64(0), block.rows, steps)
            before = block.rows
        with code.when(num_rows > shape.most_few):
            if unit == "dots" and not has_bf16_dot():
                widened_matmul(product, words, shape.many)
                return
            panels, rows, ahead = shape.many
            for panel, first, stop in items_of_many(code, shape.many, num_rows, product.num_panels):
                at_panel = product.panels_from(panel, panels)
                weights = [words + p * product.pairs * LANES for p in at_panel]
                for row in code.loop(first, stop, rows):
                    product.block(at_panel, row, rows, product.plain(weights, ahead))


# Words of a row to widen at once.  Together with those of a panel they take 26 KiB of the first cache.
WIDE = 256
# Up to this many rows blocks of four are 1.1 times as fast as blocks of five, because they leave no partial block.
SOME = 16


def widened_matmul(product: Product, words: Pointer, many: Block) -> None:
    """Multiply many rows where a dot product of bfloat16 is two FMAs.

    The numbers of x are unpacked once for all panels of a work item.  The order of every sum is that of `Dots`.
    """
    code, num_rows = product.code, product.num_rows
    fitting = 4 if SOME % many.rows else many.rows
    for rows, is_better in ((fitting, num_rows <= SOME), (many.rows, num_rows > SOME)):
        with code.when(is_better):
            block = many._replace(rows=rows)
            widened = _Widened(product, words, block)
            for panel, first, stop in items_of_many(code, block, num_rows, product.num_panels):
                for row in code.loop(first, stop, rows):
                    widened.block(panel, row)


class _Widened:
    def __init__(self, product: Product, words: Pointer, block: Block) -> None:
        code = product.code
        self._product, self._words, self._block = product, words, block
        self._x = code.array(
            "f32",
            block.rows * 2 * WIDE,
            # Each row has its low numbers first, then its high ones.
        )
        self._sums = code.array("f32", block.panels * block.rows * LANES)

    def block(self, first_panel: Value, first_row: Value) -> None:
        product, code = self._product, self._product.code
        panels, rows, _ = self._block
        at_row = [code.minimum(first_row + r, product.num_rows - 1) for r in range(rows)]
        for i in code.loop(0, panels * rows * LANES, LANES):
            self._sums.store(i, code.f32x16(0.0))
        for start in code.loop(0, product.pairs, WIDE):
            num = code.minimum(product.pairs - start, WIDE)
            for r, row in enumerate(at_row):
                for i in code.loop(0, num, LANES):
                    halves = code.unpack_bf16((product.x + row * product.stride).load(start + i))
                    for half, numbers in enumerate(halves):
                        self._x.store((2 * r + half) * WIDE + i, numbers)
            for p in code.loop(0, panels):
                panel = code.minimum(first_panel + p, product.num_panels - 1)
                self._add(self._words + (panel * product.pairs + start) * LANES, num, p)
        for p in code.loop(0, panels):
            panel = code.minimum(first_panel + p, product.num_panels - 1)
            own = product.bias_or_zeros(panel)
            for r, row in enumerate(at_row):
                product.store(row, panel, self._sums.load((p * rows + r) * LANES) + own)

    def _add(self, weights: Pointer, num: Value, p: Value) -> None:
        code, rows = self._product.code, self._block.rows
        places = [(p * rows + r) * LANES for r in range(rows)]
        sums = [code.var(self._sums.load(place)) for place in places]
        for i in code.loop(0, num):
            for half, numbers in enumerate(code.unpack_bf16((weights + i * LANES).load())):
                for r, total in enumerate(sums):
                    x = code.f32x16(self._x[(2 * r + half) * WIDE + i])
                    total.set(code.fma(numbers, x, total))
        for place, total in zip(places, sums, strict=True):
            self._sums.store(place, total)
