"""Products of bfloat16 rows with integer weights, which are decoded to pairs of bfloat16: the kernel for dots and tiles.

Dots read the decoded pairs from registers, tiles from memory in the first cache.  If there are more rows than a block
has, the first block keeps the pairs in memory of its thread, in the second cache, for the other blocks.

Law: a row's result does not depend on the number of rows.  Each sum starts at 0, follows the inputs and is added to the
total, times its scale, in every block.  A sum covers a group; for tiles with four bits it covers 32 inputs, one
product, whatever the group.

A minimum is multiplied by the sum of x over its group, by one more dot product for each row.  Minima, and int8 in
groups, always use dots.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from trouper.kernels.codegen.builder import KernelBuilder
from trouper.kernels.codegen.core import Pointer, Value, Var
from trouper.kernels.codegen.units import LANES, Kind, Unit
from trouper.kernels.cpu.linear.integer_panels import (
    GROUPS_AHEAD,
    LINE,
    BytePanel,
    ChunkPanel,
    IntegerPanel,
    KeepingPanel,
    KeptPanel,
    NibblePanel,
    PackedPanel,
    PanelStream,
)
from trouper.kernels.cpu.linear.products import (
    TILE,
    TILE_BYTES,
    AllRows,
    Block,
    Blocking,
    Rows,
    Steps,
    Tiles,
    items_of_many,
)
from trouper.kernels.cpu.linear.quantization import PANELS, STEP
from trouper.kernels.formats import BITS, Format

# With dots the sums of a group fill the registers, and the totals of larger blocks are spilled once a group: eight rows, the
# rows of a step that verifies drafts, take 0.7 times as long as in blocks of four.  Six rows also use pairs of panels:
# threes would split the four interleaved panels, and take 1.4 times as long with two threads.
_FEW_BY_DOTS = (Block(4, 1), Block(4, 2), Block(4, 4), Block(2, 6), Block(2, 8))
INTEGER_BLOCKINGS: dict[tuple[Unit, Format], Blocking] = {
    ("dots", "int4"): Blocking(few=_FEW_BY_DOTS, many=Block(3, 4)),
    ("dots", "fp4"): Blocking(few=_FEW_BY_DOTS, many=Block(3, 4)),
    ("dots", "int8"): Blocking(few=_FEW_BY_DOTS, many=Block(3, 4)),
    ("tiles", "int4"): Blocking(few=(Block(4, TILE),), many=Block(4, TILE), most_rows=512),
    ("tiles", "fp4"): Blocking(few=(Block(4, TILE),), many=Block(4, TILE), most_rows=512),
    ("tiles", "int8"): Blocking(few=(Block(4, TILE),), many=Block(2, 2 * TILE), most_rows=512),
}
ONES = 0x3F803F80  # a pair of bfloat16
# Tiles of a panel that are decoded, then multiplied, then added.  With 8 one row took 1.1 times as long.
CHUNK = 4


def scratch_bytes(num_rows: int, num_in: int, unit: Unit, fmt: Format, num_sums: int = 0) -> int:
    """Count the bytes of scratch memory that a thread needs: for kept panels, or for `num_sums` sums of each of few rows."""
    shape = INTEGER_BLOCKINGS[unit, fmt]
    if num_rows <= shape.most_few:
        return -(-4 * shape.most_few * num_sums // LINE) * LINE
    return shape.many.panels * num_in * LANES * 2


def quantized_matmul(
    code: KernelBuilder,
    unit: Unit,
    fmt: Format,
    scale_kind: Kind,
    has_zeros: bool,
    minima_kind: Kind | None = None,
) -> None:
    """Write the kernel with the arguments x, its stride in words, q, s, z or 0, m or 0, b or 0, y, T, I / 2, O / 16, the stride of
    y / 16, pairs of a group, threads, scratch, scratch bytes of a thread.

    A work item is the panels of a block of rows.
    """
    kind = IntegerDots if unit == "dots" else _Tiles
    work = kind(code, fmt, scale_kind, has_zeros, minima_kind, code.arguments(16))
    shape, num_rows, before = INTEGER_BLOCKINGS[unit, fmt], work.num_rows, 0
    with work.begun():
        for block in shape.few:
            with code.when((num_rows > before) & (num_rows <= block.rows)):
                work.begin_few(block.rows)
                for item in code.runs_of_items(work.num_threads):
                    at_panel = work.panels(item * block.panels, block.panels)
                    work.block(at_panel, code.i64(0), block.rows)
            before = block.rows
        with code.when(num_rows > before):
            work.num_between = work.num_threads - 1
            panels, rows, _ = shape.many
            mine = work.scratch_of(code.thread())
            kept = [KeptPanel(mine + p * work.pairs * LANES) for p in range(panels)]
            for panel, first, stop in items_of_many(code, shape.many, num_rows, work.num_panels):
                at_panel = work.panels(panel, panels)
                work.block(at_panel, first, rows, kept)
                for row in code.loop(first + rows, stop, rows):
                    work.block(at_panel, row, rows, kept, is_first=False)


class _Work(ABC):
    def __init__(
        self,
        code: KernelBuilder,
        fmt: Format,
        scale_kind: Kind,
        has_zeros: bool,
        minima_kind: Kind | None,
        arguments: Sequence[Value],
    ) -> None:
        x, stride, q, s, z, m, bias, y, *sizes, scratch, bytes_each = arguments
        self.addresses = x, stride, bias, y
        self.num_rows, self.pairs, self.num_panels, self.y_panels, *sizes = sizes
        self.length, self.num_threads = sizes
        # A call with few rows takes runs of work items; see `PanelStream`.
        self.num_between = code.i64(0)
        self.num_groups = self.pairs // self.length
        self.code = code
        self.fmt: Format = fmt
        self._kind: Kind = scale_kind
        self._has_zeros = has_zeros
        self._minima_kind: Kind | None = minima_kind
        self._scratch, self._bytes_each = scratch, bytes_each
        self.take_weight(q, s, z, m, bias)

    def take_weight(self, q: Value, s: Value, z: Value, m: Value, bias: Value) -> None:
        """Use the weight at these addresses from now on."""
        code = self.code
        self.q, self.scales, self.bias = code.pointer(q, "i8"), code.pointer(s, self._kind), bias
        self.zeros = code.pointer(z, "i32") if self._has_zeros else None
        self.minima = code.pointer(m, self._minima_kind) if self._minima_kind else None

    def scratch_of(self, thread: Value) -> Pointer:
        return self.code.pointer(self._scratch + thread * self._bytes_each, "i32")

    def panels(self, first: Value, num: int) -> list[Value]:
        """Return the indices of `num` panels.  Indices beyond the last panel repeat the last one."""
        return [self.code.minimum(first + p, self.num_panels - 1) for p in range(num)]

    def packed(self, panel: Value) -> "PackedPanel":
        steps = self.pairs // STEP
        length = LANES * BITS[self.fmt] // 4
        q = PanelStream(self.q.of("i32"), panel, length, steps, self.num_between)
        if self.fmt == "int8":
            return BytePanel(self.code, q)
        zeros = self.zeros and PanelStream(
            self.zeros, panel, LANES, self.num_groups, self.num_between
        )
        return NibblePanel(self.code, self.fmt, q, zeros)

    def scales_of(self, at_panel: list[Value]) -> "list[PanelStream]":
        return [
            PanelStream(self.scales, p, LANES, self.num_groups, self.num_between) for p in at_panel
        ]

    def minima_of(self, at_panel: list[Value]) -> "list[PanelStream]":
        if self.minima is None:
            return []
        return [
            PanelStream(self.minima, p, LANES, self.num_groups, self.num_between) for p in at_panel
        ]

    def begun(self) -> "contextlib.AbstractContextManager[None]":
        """Configure the state that all blocks of a call share."""
        return contextlib.nullcontext()

    def begin_few(self, rows: int, thread: Value | None = None) -> None:  # noqa: B027  # tiles need nothing
        """Compute what all work items of a call with few rows share.

        Args:
            thread: the number of this thread; by default a new one.
        """

    def reading(self, at_panel: list[Value], kept: "Sequence[KeptPanel]") -> "list[KeepingPanel]":
        return [KeepingPanel(self.packed(p), k) for p, k in zip(at_panel, kept, strict=True)]

    @abstractmethod
    def block(
        self,
        at_panel: list[Value],
        first_row: Value,
        rows: int,
        kept: "Sequence[KeptPanel]" = (),
        *,
        is_first: bool = True,
    ) -> None:
        """Compute a block of rows; indices beyond the last row repeat the last one.

        Args:
            kept: memory for decoded panels.
            is_first: whether this block decodes the panels into `kept`, or reads them from there.
        """


class IntegerDots(_Work):
    """Computes blocks of panels and rows with dots of bfloat16.

    The integers are decoded in registers.  `arguments` are those of `quantized_matmul`.  Scales are applied to the
    sums.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        x, self._stride, _, y = self.addresses
        self._x, self._y = self.code.pointer(x, "i32"), self.code.pointer(y, "bf16")
        # The sums of each group, for few rows only.
        self._sums_of_x: list[Pointer] = []
        self.rows: Rows = AllRows(self.code, self.num_rows)

    def _rows_from(self, first: Value, rows: int) -> list[Value]:
        return [self.rows.row(first + r) for r in range(rows)]

    def _x_of(self, at_row: list[Value]) -> list[Pointer]:
        return [self._x + self.rows.x_row(row) * self._stride for row in at_row]

    def begin_few(self, rows: int, thread: Value | None = None) -> None:
        """Compute the sums of x over each group once, instead of in every work item."""
        if self.minima is None:
            return
        code, most = self.code, self.num_groups
        mine = self.scratch_of(code.thread() if thread is None else thread).of("f32")
        self._sums_of_x = [mine + most * row for row in range(rows)]
        xs = self._x_of(self._rows_from(code.i64(0), rows))
        for g in code.loop(0, self.num_groups):
            sums = [code.var(code.f32x16(0.0)) for _ in xs]
            for i in code.loop(g * self.length, (g + 1) * self.length):
                for row, total in zip(xs, sums, strict=True):
                    self._add_x(total, row[i])
            for own, total in zip(self._sums_of_x, sums, strict=True):
                # All lanes are equal, so the maximum reads one of them.
                own[g] = code.reduce_max(total)

    def _add_x(self, total: Var, pair: Value) -> None:
        total.set(self.code.dot(self.code.i32x16(ONES), self.code.i32x16(pair), total))

    def block(
        self,
        at_panel: list[Value],
        first_row: Value,
        rows: int,
        kept: "Sequence[KeptPanel]" = (),
        *,
        is_first: bool = True,
    ) -> None:
        weights = self._read(at_panel, kept) if is_first else kept
        code, panels, num_groups = self.code, len(at_panel), self.num_groups
        at_row = self._rows_from(first_row, rows)
        xs = self._x_of(at_row)
        scales, minima = self.scales_of(at_panel), self.minima_of(at_panel)
        totals = [[code.var(code.f32x16(0.0)) for _ in range(rows)] for _ in range(panels)]
        steps = self.length // STEP
        for g in code.loop(0, num_groups):
            sums = [[code.var(code.f32x16(0.0)) for _ in range(rows)] for _ in range(panels)]
            # For few rows `begin_few` has computed these sums.
            of_x = [code.var(code.f32x16(0.0)) for _ in range(rows if minima and kept else 0)]
            for stream in (*scales, *minima, *weights):
                stream.enter(g)
            for i in code.loop(g * steps, g * steps + steps):
                self._add(sums, of_x, xs, [weight.pairs(i) for weight in weights], i)
            for factor, of_panel, own in zip(scales, sums, totals, strict=True):
                self._scale(own, of_panel, factor.at(g).load())
            sums_of_x = of_x or [code.f32x16(of_row[g]) for of_row in self._sums_of_x]
            for factor, own in zip(minima, totals, strict=bool(minima)):
                self._scale(own, sums_of_x, factor.at(g).load())
        for panel, own in zip(at_panel, totals, strict=True):
            self._finish(own, panel, at_row)

    def _scale(self, totals: list[Var], sums: Sequence[Value], factor: Value) -> None:
        """Add the sums of a group, times the factor of their panel."""
        for total, part in zip(totals, sums, strict=True):
            total.set(self.code.fma(part, factor, total))

    def _add(
        self,
        sums: list[list[Var]],
        of_x: list[Var],
        xs: list[Pointer],
        pairs: list[list[Value]],
        step: Value,
    ) -> None:
        """Add the products of one step to the sums, and x itself to `of_x` if minima need it."""
        code = self.code
        for j in range(STEP):
            for r, row in enumerate(xs):
                pair = row[step * STEP + j]
                both = code.i32x16(pair)
                if of_x:
                    self._add_x(of_x[r], pair)
                for of_panel, weights in zip(sums, pairs, strict=True):
                    of_panel[r].set(code.dot(weights[j], both, of_panel[r]))

    def _read(self, at_panel: list[Value], kept: "Sequence[KeptPanel]") -> "Sequence[IntegerPanel]":
        return self.reading(at_panel, kept) if kept else [self.packed(p) for p in at_panel]

    def _finish(self, totals: list[Var], panel: Value, at_row: list[Value]) -> None:
        with self.code.when(self.bias > 0):
            own = self.code.pointer(self.bias, "bf16").load(panel * LANES)
            for total in totals:
                total.set(total + own)
        for row, total in zip(at_row, totals, strict=True):
            self._y.store((row * self.y_panels + panel) * LANES, total)


class _Tiles(_Work):
    """Products by AMX.

    Several tiles are decoded to the first cache before the first is loaded, because a load of a tile waits for unfinished
    stores.  The same holds for the sums of products.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        code = self.code
        sizes = self.num_rows, self.pairs, self.num_panels
        self._product = Tiles(code, "none", *self.addresses, self.y_panels * LANES, *sizes)
        self._rooms = [ChunkPanel(code.array("i32", CHUNK * TILE * LANES)) for _ in range(PANELS)]
        self._parts = code.array("f32", CHUNK * TILE * LANES)
        self._totals = code.array("f32", PANELS * TILE * LANES)

    def begun(self) -> "contextlib.AbstractContextManager[None]":
        return self._product.begun()

    def block(
        self,
        at_panel: list[Value],
        first_row: Value,
        rows: int,
        kept: "Sequence[KeptPanel]" = (),
        *,
        is_first: bool = True,
    ) -> None:
        weights: Sequence[KeepingPanel | KeptPanel] = kept
        if is_first:
            weights = self.reading(at_panel, kept or self._rooms[: len(at_panel)])
        if self.fmt != "int8":
            self._groups(at_panel, weights, self._product.tile_at(first_row))
            return
        steps, zero = self._steps(weights), self.code.i64(0)
        scales = [scale.at(zero).load() for scale in self.scales_of(at_panel)]
        self._product.block(at_panel, first_row, rows, steps, scales)

    def _steps(self, weights: "Sequence[KeepingPanel | KeptPanel]") -> Steps:
        """Yield the tiles of one group."""
        for i in self.code.loop(0, self.pairs // STEP, TILE // STEP):
            for weight in weights:
                weight.decode(i)
            yield i * STEP, [weight.tile(i) for weight in weights]

    def _groups(
        self, at_panel: list[Value], weights: "Sequence[KeepingPanel | KeptPanel]", first_row: Value
    ) -> None:
        code, product, num_tiles = self.code, self._product, self.pairs // TILE
        scales, whole = self.scales_of(at_panel), num_tiles // CHUNK * CHUNK
        totals = [self._totals + p * (TILE * LANES) for p in range(len(at_panel))]
        for row in code.loop(0, product.tile_rows):
            for total in totals:
                total.store(row * LANES, code.f32x16(0.0))
        x = product.x + first_row * product.stride
        of_panel = list(zip(weights, scales, totals, strict=True))
        for first in code.loop(0, whole, CHUNK):
            for panel in of_panel:
                self._chunk(x, *panel, first, CHUNK)
        for first in code.loop(whole, num_tiles):
            for panel in of_panel:
                self._chunk(x, *panel, first, 1)
        for total, panel in zip(totals, at_panel, strict=True):
            product.write(total, panel, first_row)

    def _chunk(
        self,
        x: Pointer,
        weight: "KeepingPanel | KeptPanel",
        scales: "PanelStream",
        totals: Pointer,
        first: Value,
        length: int,
    ) -> None:
        """Add the product of each tile, times its scale, to the totals."""
        code, step, tile = self.code, first * (TILE // STEP), TILE * LANES
        per_group = self.length // TILE
        groups = [(first + t) // per_group for t in range(length)]
        for t, group in enumerate(groups):
            scales.ask(groups[0], GROUPS_AHEAD, t)
            weight.enter(group)
            weight.decode(step, t * (TILE // STEP))
        for t in range(length):
            code.tile_load(4, x + first * TILE + t * TILE, self._product.stride * 4)
            code.tile_load(6 + t % 2, weight.tile(step, t * (TILE // STEP)), TILE_BYTES)
            code.tile_zero(t % 4)
            code.tile_dot(t % 4, 4, 6 + t % 2)
            code.tile_store(t % 4, self._parts + t * tile, TILE_BYTES)
        factors = [scales.at(group).load() for group in groups]
        for row in code.loop(0, self._product.tile_rows):
            total = totals.load(row * LANES)
            for t, factor in enumerate(factors):
                part = (self._parts + t * tile).load(row * LANES)
                total = code.fma(part, factor, total)
            totals.store(row * LANES, total)
