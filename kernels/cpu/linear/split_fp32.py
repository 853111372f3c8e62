"""y = act(x Wᵀ + b) in float32, by tiles that multiply bfloat16: as exact as float32's own products, and faster.

    x [T, I]            tokens × inputs, rows may be strided; I a multiple of 32
    W [O / 16, I, 16]   panels of sixteen outputs in the float32 layout of `dense.py`; O a multiple of 16
    b [O]               optional
    y [T, O]            rows may be strided
    parts [T / 16, I / 32, 3, 16, 16]   words: x in tiles, T rounded up; with at most sixteen rows each thread makes its own

A float32 has 24 bits of significand, so it is exactly the sum of three bfloat16: the number rounded, the remainder
truncated, and the rest.  Of the nine products of the parts of x and w three are below 2^-23 of x w; the other six are
added to one accumulator.  A word pairs inputs i and i + 16 of 32, in x and in W, so that no lane moves.

W is stored as float32.  The parts of a step's panels are computed while the step before it is multiplied, instruction by
instruction, because tiles and lanes are different units.  With more than sixteen rows the first block of a work item
keeps the parts in its thread's memory, which stays in the second cache.

Numbers below 2^-102 lose their last parts, and products below 2^-126 are zero, because tiles flush subnormal numbers.  An
infinity, or a number that rounds to one, makes its outputs NaN.

Law: a row's result does not depend on the number of rows.  So the use decides, not the number of rows: encoders have
many rows, while single rows of a decoder would take 1.1 to 1.4 times as long, because the parts of a panel are computed
for each of them.

Roofline: 4 (O I + T O) + 10 T I bytes, 12 T O I FLOPs of tiles: 940 GFLOP/s of float32 on two Xeon cores.
Measured there, and FMAs in brackets, GFLOP/s: O = 1536, I = 384: T = 1 10 (13), T = 16 172 (164), T = 512 435 (268);
O = 384, I = 1536: 10 (13), 186 (180), 327 (305); O = 1024, I = 3072: 12 (13), 208 (184), 305 (279).  The error is smaller
than that of FMAs: half of it for normal and for positive numbers, nine tenths if magnitudes differ a lot.
"""

import contextlib
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from typing import ClassVar, Self

import torch
from torch import Tensor

from trouper.kernels.codegen import launch, units
from trouper.kernels.codegen.builder import KernelBuilder
from trouper.kernels.codegen.core import Pointer, Value
from trouper.kernels.codegen.units import LANES
from trouper.kernels.cpu.linear.dense import pack_panels
from trouper.kernels.cpu.linear.products import (
    TILE,
    TILE_BYTES,
    Act,
    Block,
    Blocking,
    Tiles,
    items_of_many,
)
from trouper.kernels.linear import LinearMethod

PARTS = 3
# The number of inputs that one step multiplies.
STEP = 2 * TILE
TILE_WORDS = TILE * LANES
# Words of a step of a panel, or of a tile of rows.
SIZE = PARTS * TILE_WORDS
FEW, MANY = Block(4, TILE, 512), Block(2, 2 * TILE, 1024)
BLOCKING = Blocking(few=(FEW,), many=MANY, most_rows=512, most_bytes=5 * 2**18)
# Parts of x and of W, the largest product last.  Neighbours share a part, and the products of one part of W are adjacent.
PRODUCTS = ((0, 2), (0, 1), (1, 1), (1, 0), (2, 0), (0, 0))

Work = Sequence[Callable[[], None]]


class SplitLinear(LinearMethod):
    """A float32 weight that tiles multiply as sums of bfloat16 parts. Requires that `units.bf16_unit()` is tiles."""

    is_recordable: ClassVar[bool] = True

    def __init__(self, shape: tuple[int, int], weight: Tensor, bias_O: Tensor | None) -> None:
        self.shape, self.weight, self.bias = shape, weight, bias_O
        # `bf16_unit` has requested the permission to use tiles.
        assert units.bf16_unit() == "tiles"
        launch.compiled(split_rows)
        launch.compiled(split_matmul, "none")

    @classmethod
    def pack(cls, weight: Tensor, bias_O: Tensor | None = None) -> Self:
        num_out, num_in = weight.shape
        return cls((num_out, num_in), pack_panels(weight), bias_O)

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes

    def apply(self, x_TI: Tensor) -> Tensor:
        return self._product(x_TI, "none")

    def apply_act(self, x_TI: Tensor, act: str) -> Tensor:
        return self._product(x_TI, "gelu") if act == "gelu" else super().apply_act(x_TI, act)

    def _product(self, x_TI: Tensor, act: Act) -> Tensor:
        num_rows, (num_out, num_in) = len(x_TI), self.shape
        num_threads = torch.get_num_threads()
        y_TO = x_TI.new_empty((num_rows, num_out))
        most = rows_at_once(num_rows, num_in, num_threads)
        own_bytes = num_threads * scratch_bytes(most, num_in)
        scratch = launch.scratch(own_bytes + parts_bytes(most, num_in))
        parts = scratch + own_bytes
        split, product = launch.compiled(split_rows), launch.compiled(split_matmul, act)
        for first in range(0, num_rows, most):
            rows = min(most, num_rows - first)
            x = x_TI.data_ptr() + first * x_TI.stride(0) * 4, x_TI.stride(0)
            if rows > FEW.rows:
                split(-(-rows // TILE), *x, parts, rows, num_in, num_threads=num_threads)
            product(
                BLOCKING.num_items(rows, num_out, 3 * num_in),
                *x,
                parts,
                self.weight.data_ptr(),
                0 if self.bias is None else self.bias.data_ptr(),
                y_TO.data_ptr() + first * num_out * 4,
                num_out,
                rows,
                num_in,
                num_out // LANES,
                scratch,
                num_threads=num_threads,
            )
        return y_TO


def rows_at_once(num_rows: int, num_in: int, num_threads: int) -> int:
    """Return the number of rows of equal ranges, so that their parts are read while they are in the second caches."""
    step = MANY.rows
    most = max(num_threads * BLOCKING.most_bytes // (2 * PARTS * num_in) // step * step, step)
    num_stretches = max(1, -(-num_rows // most))
    return max(1, -(-num_rows // (num_stretches * step)) * step)


def parts_bytes(num_rows: int, num_in: int) -> int:
    return 0 if num_rows <= FEW.rows else -(-num_rows // TILE) * TILE * num_in * 2 * PARTS


def scratch_bytes(num_rows: int, num_in: int) -> int:
    """Count the scratch bytes of a thread.

    They hold the parts of its rows, or of its panels if there are many rows.
    """
    rows = TILE if num_rows <= TILE else MANY.panels * LANES
    return rows * num_in * 2 * PARTS


def split_rows(code: KernelBuilder) -> None:
    """Write the kernel with the arguments x, its stride, parts, T, I.  A work item is a tile."""
    x, stride, parts, num_rows, num_in = code.arguments(5)
    x, parts = code.pointer(x, "f32"), code.pointer(parts, "i32")
    for tile in code.work_items():
        first = code.minimum(tile * TILE, code.maximum(num_rows - TILE, 0))
        own = parts + tile * num_in * (PARTS * LANES // 2)
        _split_tile(code, x + first * stride, stride, own, code.minimum(num_rows, TILE), num_in)


def _split_tile(
    code: KernelBuilder, x: Pointer, stride: Value, parts: Pointer, num_rows: Value, num_in: Value
) -> None:
    for step in code.loop(0, num_in // STEP):
        numbers, target = x + step * STEP, parts + step * SIZE
        for row in code.loop(0, num_rows):
            here = numbers + row * stride
            for part, word in enumerate(_parts_of(code, here.load(), here.load(LANES))):
                target.store(part * TILE_WORDS + row * LANES, word)


def _parts_of(code: KernelBuilder, low: Value, high: Value) -> Iterator[Value]:
    """Yield words of pairs of bfloat16 that add up to the lanes, the largest part first."""
    for part in range(PARTS):
        bits = [code.as_i32x16(x) + (0x8000 if part == 0 else 0) for x in (low, high)]
        yield ((bits[0] >> 16) & 0xFFFF) | (bits[1] & -0x10000)
        low, high = (
            x - code.as_f32x16(b & -0x10000) for x, b in zip((low, high), bits, strict=True)
        )


def split_matmul(code: KernelBuilder, act: Act) -> None:
    """Write the kernel with the arguments x, its stride, parts, W, b or 0, y, its stride, T, I, O / 16, scratch.

    A work item is the panels of a block of rows.  A call with few rows does not read `parts`.
    """
    *arguments, scratch = code.arguments(11)
    product = _Product(code, act, *arguments)
    num_rows, of_tile = product.num_rows, product.words_of_tile
    mine = code.pointer(scratch, "i32")
    with product.begun():
        with code.when((num_rows > 0) & (num_rows <= FEW.rows)):
            parts = mine + code.thread() * of_tile
            product.split_rows(parts)
            rooms = [code.array("i32", 2 * SIZE) for _ in range(FEW.panels)]
            for item in code.work_items():
                at_panel = product.panels_from(item * FEW.panels, FEW.panels)
                product.few(at_panel, parts, rooms)
        with code.when(num_rows > FEW.rows):
            first_kept = mine + code.thread() * (MANY.panels * of_tile)
            kept = [first_kept + p * of_tile for p in range(MANY.panels)]
            for panel, first, stop in items_of_many(code, MANY, num_rows, product.num_panels):
                at_panel = product.panels_from(panel, MANY.panels)
                product.many(at_panel, first, kept, is_first=True)
                for row in code.loop(first + MANY.rows, stop, MANY.rows):
                    product.many(at_panel, row, kept, is_first=False)


class _Product(Tiles):
    kind = "f32"

    def __init__(
        self,
        code: KernelBuilder,
        act: Act,
        x: Value,
        stride: Value,
        parts: Value,
        weight: Value,
        *others: Value,
    ) -> None:
        super().__init__(code, act, x, stride, *others)
        self._parts, self._weight = code.pointer(parts, "i32"), code.pointer(weight, "f32")
        self._tiles = code.array("f32", 4 * TILE_WORDS)
        # A word is one input.
        self._num_in = self.pairs
        self._last = self._num_in // STEP - 1
        self.words_of_tile = self._num_in * (PARTS * LANES // 2)

    @contextlib.contextmanager
    def begun(self) -> Generator[None]:
        """Configure the state that all blocks share.  With few rows only the last register holds weights."""
        with self.code.tiles(self.tile_rows, narrow=range(7)):
            yield

    def split_rows(self, parts: Pointer) -> None:
        _split_tile(self.code, self.x.of("f32"), self.stride, parts, self.num_rows, self._num_in)

    def few(self, at_panel: list[Value], parts: Pointer, rooms: list[Pointer]) -> None:
        """Compute one tile of rows.  The registers hold the sums, the parts of the rows and one part of a panel."""
        code, start = self.code, self.code.i64(0)

        def room(step: Value) -> list[Pointer]:
            return [each + step % 2 * SIZE for each in rooms]

        def dots(step: Value) -> Work:
            return self._dots_of_few(parts + step * SIZE, room(step))

        def split(step: Value) -> Work:
            return self._split(at_panel, step, room(step), FEW.ahead)

        for tile in range(len(at_panel)):
            code.tile_zero(tile)
        _woven(split(start))
        for step in code.loop(0, self._last):
            _woven(split(step + 1), dots(step))
        _woven(dots(self._last))
        self._finish(at_panel, [start])

    def _dots_of_few(self, rows: Pointer, panels: list[Pointer]) -> Work:
        """Return the products of few rows.

        A part of a panel is loaded once: with a load for each product sixteen rows took 1.13 times as long.
        """
        code, num = self.code, len(panels)
        work: list[Callable[[], None]] = [
            partial(code.tile_load, num + x, rows + x * TILE_WORDS, TILE_BYTES)
            for x in range(PARTS)
        ]
        for w in dict.fromkeys(w for _, w in PRODUCTS):
            for p, panel in enumerate(panels):
                work.append(partial(code.tile_load, 7, panel + w * TILE_WORDS, TILE_BYTES))
                work += [partial(code.tile_dot, p, num + x, 7) for x, own in PRODUCTS if own == w]
        return work

    def many(
        self, at_panel: list[Value], first_row: Value, kept: list[Pointer], *, is_first: bool
    ) -> None:
        """Compute two tiles of rows by two panels.  The first block computes and keeps the parts of the panels.

        The registers hold the sums, a part of each tile of rows and a part of each panel.
        """
        code, last_tile = self.code, (self.num_rows - 1) // TILE
        at_tile = [code.minimum(first_row // TILE + r, last_tile) for r in range(2)]
        rows = [self._parts + tile * self.words_of_tile for tile in at_tile]

        def at(step: Value, places: list[Pointer]) -> list[Pointer]:
            return [place + step * SIZE for place in places]

        def dots(step: Value) -> Work:
            return self._dots_of_many(at(step, rows), at(step, kept))

        def split(step: Value) -> Work:
            return self._split(at_panel, step, at(step, kept), MANY.ahead)

        for tile in range(4):
            code.tile_zero(tile)
        if is_first:
            _woven(split(code.i64(0)))
            for step in code.loop(0, self._last):
                _woven(split(step + 1), dots(step))
            _woven(dots(self._last))
        else:
            for step in code.loop(0, self._last + 1):
                _woven(dots(step))
        self._finish(at_panel, [self.tile_at(first_row + r * TILE) for r in range(2)])

    def _dots_of_many(self, rows: list[Pointer], panels: list[Pointer]) -> Work:
        """Return 14 loads and 24 products."""
        code = self.code
        work: list[Callable[[], None]] = []

        def load(first_tile: int, places: list[Pointer], part: int) -> None:
            for i, place in enumerate(places):
                work.append(
                    partial(code.tile_load, first_tile + i, place + part * TILE_WORDS, TILE_BYTES)
                )

        before: tuple[int, int] | None = None
        for x, w in PRODUCTS:
            if before is None or before[0] != x:
                load(4, rows, x)
            if before is None or before[1] != w:
                load(6, panels, w)
            work += [partial(code.tile_dot, i, 4 + i % 2, 6 + i // 2) for i in range(4)]
            before = x, w
        return work

    def _split(self, at_panel: list[Value], step: Value, rooms: list[Pointer], ahead: int) -> Work:
        """Return the work that splits a step of the panels into the buffers, sixteen pairs at a time."""

        def split(numbers: Pointer, room: Pointer) -> None:
            for half in (0, TILE_WORDS):
                numbers.prefetch(half + ahead)
            words = _parts_of(self.code, numbers.load(), numbers.load(TILE_WORDS))
            for part, word in enumerate(words):
                room.store(part * TILE_WORDS, word)

        starts = [self._weight + (p * self._num_in + step * STEP) * LANES for p in at_panel]
        return [
            partial(split, start + i * LANES, room + i * LANES)
            for start, room in zip(starts, rooms, strict=True)
            for i in range(TILE)
        ]

    def _finish(self, at_panel: list[Value], at_row: list[Value]) -> None:
        """Store all sums to memory, then write all rows: with one tile after the other 192 rows took 1.28 times as long."""
        code, num = self.code, len(at_row)
        tiles = [self._tiles + i * TILE_WORDS for i in range(len(at_panel) * num)]
        for i, tile in enumerate(tiles):
            code.tile_store(i, tile, TILE_BYTES)
        biases = [self.bias_or_zeros(panel) for panel in at_panel]
        for row in code.loop(0, self.tile_rows):
            for r, start in enumerate(at_row):
                for p, panel in enumerate(at_panel):
                    total = tiles[p * num + r].load(row * LANES)
                    self.store(start + row, panel, total + biases[p])


def _woven(*works: Work) -> None:
    """Run all works interleaved evenly, each in its own order."""
    marked = [((i + 0.5) / len(work), one) for work in works for i, one in enumerate(work)]
    for _, one in sorted(marked, key=lambda pair: pair[0]):
        one()
