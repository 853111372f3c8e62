"""y += B A x for bfloat16 and float32, where each row has the A and B of its own adapter.

    x [T, I]                    rows may be strided; I a multiple of 32 (float32: of 16)
    A [S, P, R / 16, I / 2, 16] words: for each slot and part, panels of sixteen ranks in the layout of `dense.py`
    h [T, P · R]                A x in float32
    B [S, O / 16, R, 16]        panels of sixteen outputs; zeros for a part that the adapter does not change
    y [T, O]                    rows may be strided; parts are whole panels

    lora_shrink   h = A x: a work item is a panel of ranks with every n-th block of rows
    lora_expand   y += B h: a work item is some panels of outputs with every n-th block of rows

A block is up to four rows of one adapter (`RowTable`), which share the reads of its A and B.

Law: an output is one accumulator over the inputs in their order, in every block.

Roofline: e r (I + O) bytes for each block of an adapter, 2 T r (I + O) FLOPs.
Measured on one EPYC core with AVX512-BF16 and busy neighbours, r = 16, 8 adapters: shrink + expand and the base's
product, µs:
    I = 1024, O = 2 · 3072    16 rows  27 + 67 and 1,023    512 rows  231 + 1,038 and 28,971
    I = 3072, O = 1024        16 rows  35 + 20 and   457    512 rows  341 +   183 and 14,945
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from trouper.kernels.codegen import launch, units
from trouper.kernels.codegen.builder import KernelBuilder
from trouper.kernels.codegen.core import Pointer, Value
from trouper.kernels.codegen.units import LANES, Kind
from trouper.kernels.cpu.linear.dense import pack_panels
from trouper.kernels.linear import BLOCK_ROWS, LoRAWeights, LowRank, RowTable, rounded_rank

# Panels of outputs in a work item of `lora_expand`.  Many rows need long work items: 512 rows of 4096 outputs took 2.5 ms with
# 4 panels, because each panel is another line of the third cache.
FEW_PANELS, MANY_PANELS, MANY_ROWS = 4, 32, 64
MAX_SPLITS = 16  # parts of the blocks of rows, as work items
COLUMNS = 3  # in a row of `RowTable.blocks`


class NativeLoRA(LoRAWeights):
    """The adapters of one linear layer by compiled kernels.

    Args:
        part_sizes: number of outputs of each part, multiples of 16.
        num_in: number of inputs.
        num_slots: number of adapters.  The system allocates the pages of a slot when it is first loaded.
        max_rank: the largest rank of an adapter.
    """

    def __init__(
        self,
        part_sizes: Sequence[int],
        num_in: int,
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
    ) -> None:
        kind = units.kind_of(dtype)
        assert kind is not None
        rank, self._num_in = rounded_rank(max_rank), num_in
        self._part_sizes, self._dtype, self._per_word = (
            tuple(part_sizes),
            dtype,
            4 // dtype.itemsize,
        )
        self._a = torch.empty(
            (num_slots, len(part_sizes), rank // LANES, num_in * LANES), dtype=dtype
        )
        self._b = torch.empty((num_slots, sum(part_sizes) // LANES, rank, LANES), dtype=dtype)
        self._ranks = np.zeros(num_slots + 1, dtype=np.int64)  # by slot, rounded up
        panels = np.array(part_sizes) // LANES
        self._offsets = np.repeat(np.arange(len(part_sizes)) * rank, panels)  # in h, by panel
        self._shrink = launch.compiled(lora_shrink, kind)
        self._expand = launch.compiled(lora_expand, kind)

    def load(self, slot: int, parts: Sequence[LowRank | None]) -> None:
        rank = rounded_rank(max((len(part.a_RI) for part in parts if part is not None), default=0))
        a, b, panel = self._a[slot - 1], self._b[slot - 1], 0
        for number, (part, size) in enumerate(zip(parts, self._part_sizes, strict=True)):
            a_RI, b_OR = (
                torch.zeros(shape, dtype=self._dtype)
                for shape in ((rank, self._num_in), (size, rank))
            )
            if part is not None:
                a_RI[: len(part.a_RI)], b_OR[:, : len(part.a_RI)] = part.a_RI, part.b_OR
            panels = pack_panels(a_RI)
            a[number, : rank // LANES] = panels.view(rank // LANES, self._num_in * LANES)
            end = panel + size // LANES
            b[panel:end, :rank] = b_OR.view(-1, LANES, rank).transpose(1, 2)
            panel = end
        self._ranks[slot] = rank

    def clear(self, slot: int) -> None:
        self._ranks[slot] = 0

    def add_to(self, y_TO: Tensor, x_TI: Tensor, rows: RowTable) -> None:
        num_rows, num_threads = len(x_TI), torch.get_num_threads()
        (_, num_parts, per_part, _), (_, num_panels, rank, _) = self._a.shape, self._b.shape
        h_TX = torch.empty((num_rows, num_parts * rank), dtype=torch.float32)
        table = rows.blocks.ctypes.data, rows.order.ctypes.data, self._ranks.ctypes.data
        self._shrink(
            num_parts * per_part * min(num_rows, MAX_SPLITS),
            x_TI.data_ptr(),
            x_TI.stride(0) // self._per_word,
            self._a.data_ptr(),
            self._num_in // self._per_word,
            num_parts * per_part,
            per_part,
            *table,
            h_TX.data_ptr(),
            num_threads=num_threads,
        )
        is_long = num_rows >= MANY_ROWS
        chunk = MANY_PANELS if is_long else FEW_PANELS
        self._expand(
            -(-num_panels // chunk) * (MAX_SPLITS if is_long else 1),
            chunk,
            h_TX.data_ptr(),
            num_parts * rank,
            self._b.data_ptr(),
            rank,
            num_panels,
            self._offsets.ctypes.data,
            *table,
            y_TO.data_ptr(),
            y_TO.stride(0),
            num_threads=num_threads,
        )


def can_adapt(part_sizes: Sequence[int], num_in: int, dtype: torch.dtype) -> bool:
    """Test whether the kernels support the dtype, and inputs and parts that fill whole registers.

    Otherwise `PlainLoRA` computes the adapters. The answer is the same for all slots.
    """
    if units.kind_of(dtype) is None or any(size % LANES for size in part_sizes):
        return False
    return num_in % (LANES * (4 // dtype.itemsize)) == 0


class _RowBlock(NamedTuple):
    """Up to four rows of one adapter."""

    slot: Value
    rank: Value
    num_rows: Value
    rows: Pointer  # indices in the order


class _RowBlocks:
    """The blocks of rows of a step; see `RowTable`."""

    def __init__(self, code: KernelBuilder, blocks: Value, order: Value, ranks: Value) -> None:
        self._code = code
        self._blocks, self._order, self._ranks = (
            code.pointer(x, "i64") for x in (blocks, order, ranks)
        )
        self.count = self._blocks[0]

    def block(self, number: Value) -> _RowBlock:
        entry = self._blocks + (number + 1) * COLUMNS
        return _RowBlock(entry[0], self._ranks[entry[0]], entry[2], self._order + entry[1])

    def rows(self, block: _RowBlock, compute: Callable[[list[Value]], None]) -> None:
        """Run `compute` with the rows of a block.  Writes separate code for each number of rows."""
        for num_rows in range(1, BLOCK_ROWS + 1):
            with self._code.when(block.num_rows.equals(num_rows)):
                compute([block.rows[r] for r in range(num_rows)])


def lora_shrink(code: KernelBuilder, kind: Kind) -> None:
    """Write the kernel with the arguments x, its stride in words, A, words of a row, panels of a slot and of a part, blocks,
    order, ranks, h.
    """
    x, stride, a, words, num_panels, per_part, blocks, order, ranks, h = code.arguments(10)
    table = _RowBlocks(code, blocks, order, ranks)
    xs, panels, sums = code.pointer(x, "i32"), code.pointer(a, "i32"), code.pointer(h, "f32")
    num_splits = code.num_items // num_panels
    for item in code.work_items():
        panel, number = item % num_panels, code.var(item // num_panels)
        for _ in code.while_(number, table.count):
            block = table.block(number)
            weights = panels + ((block.slot - 1) * num_panels + panel) * words * LANES

            def compute(rows: list[Value]) -> None:
                totals = _products(code, kind, [xs + r * stride for r in rows], weights, words)  # noqa: B023  # called at once
                for row, total in zip(rows, totals, strict=True):
                    sums.store((row * num_panels + panel) * LANES, total)  # noqa: B023

            with code.when(panel % per_part * LANES < block.rank):
                table.rows(block, compute)
            number.set(number + num_splits)


def _products(
    code: KernelBuilder, kind: Kind, rows: list[Pointer], weights: Pointer, words: Value
) -> list[Value]:
    """Return a panel's sixteen sums for each row."""
    totals = [code.var(code.f32x16(0.0)) for _ in rows]
    for i in code.loop(0, words):
        word = (weights + i * LANES).of("i32" if kind == "bf16" else "f32").load()
        for row, total in zip(rows, totals, strict=True):
            if kind == "bf16":
                total.set(code.dot(word, code.i32x16(row[i]), total))
            else:
                total.set(code.fma(word, code.f32x16(row.of("f32")[i]), total))
    return list(totals)


def lora_expand(code: KernelBuilder, kind: Kind) -> None:
    """Write the kernel with the arguments panels of a work item, h, its width, B, ranks of a panel, number of panels, column of h
    where each panel's part begins, blocks, order, ranks, y, its stride.
    """
    chunk, h, width, b, rank, num_panels, offsets, blocks, order, ranks, y, stride = code.arguments(
        12
    )
    table = _RowBlocks(code, blocks, order, ranks)
    sums, begins = code.pointer(h, "f32"), code.pointer(offsets, "i64")
    across = (num_panels + chunk - 1) // chunk
    num_splits = code.num_items // across
    for item in code.work_items():
        first, number = item % across * chunk, code.var(item // across)
        stop = code.minimum(first + chunk, num_panels)
        for _ in code.while_(number, table.count):
            block = table.block(number)
            slot = code.pointer(b, kind) + (block.slot - 1) * num_panels * rank * LANES

            def compute(rows: list[Value]) -> None:
                for panel in code.loop(first, stop):  # noqa: B023  # called at once
                    columns = [sums + (r * width + begins[panel]) for r in rows]
                    outputs = [code.pointer(y, kind) + (r * stride + panel * LANES) for r in rows]
                    totals = [code.var(place.load()) for place in outputs]
                    weights = slot + panel * rank * LANES  # noqa: B023
                    for j in code.loop(0, block.rank):  # noqa: B023
                        word = (weights + j * LANES).load()
                        for column, total in zip(columns, totals, strict=True):
                            total.set(code.fma(word, code.f32x16(column[j]), total))
                    for place, total in zip(outputs, totals, strict=True):
                        place.store(0, total)

            with code.when(block.rank > 0):
                table.rows(block, compute)
            number.set(number + num_splits)
