"""y = x Wᵀ + b with bfloat16 weights stored in twelve bits, without loss: bit for bit the result of `dense.py`.

A product of one row is bound by memory, so fewer bytes are faster.  A bfloat16 has a sign, eight bits of exponent and
seven of mantissa, and sixteen exponents cover more than 99.99 % of the weights of a panel (the idea of DFloat11,
arXiv 2504.11651, with a fixed width).

    x [T, I]        tokens × inputs, rows may be strided; I a multiple of 32
    W [O / 16, B]   panels of sixteen outputs as blocks of B words, and one more group; O a multiple of 16
    b [O]           optional
    y [T, O]

A block:

    table       [32] halfwords: the most frequent exponents in the bit positions of a bfloat16, twice
    exceptions  [8 (I / 256 + 1)] int64: index << 16 | bits of each weight with another exponent, by index, then END;
                the index counts the bfloat16 of a panel in the layout of `dense.py`
    groups      [I / 8] of four vectors of 32 weights (16 outputs × a pair of inputs): 32 halfwords of four codes, one
                for each vector; then twice 32 halfwords with the other bits of two vectors, one in the bit positions of
                a bfloat16 and one with swapped bytes

Decoding a vector takes a shift, a permutation of the table, a three-way logic instruction, and for every other vector a
swap of bytes.  A group is decoded to the first cache while the group before it is multiplied, exceptions are written over
it, and the tile of `dense.py` reads it there.  With more than twelve rows the first tile of a work item keeps its panels in
the second cache for the other tiles.

Roofline: 1.5 O I + e (T I + T O) bytes, 2 T O I FLOPs.
"""

from collections.abc import Iterator
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from trouper.kernels.codegen import launch, units
from trouper.kernels.codegen.builder import KernelBuilder
from trouper.kernels.codegen.core import I16_LANES, Pointer, Value
from trouper.kernels.codegen.units import LANES, Unit
from trouper.kernels.cpu.linear.dense import DenseLinear
from trouper.kernels.cpu.linear.products import (
    BLOCKINGS,
    TILE,
    Block,
    Steps,
    items_of_many,
    product_of,
)
from trouper.kernels.linear import LinearMethod

# The vectors of a group: a halfword holds this many codes.
VECTORS = 4
PLACES = VECTORS * I16_LANES  # weights of a group
GROUP_WORDS = LANES + PLACES // 4
CODES = 16
EXPONENT = 0x7F80
END = 2**62
# Prefetching this many groups into the second cache is 1.13 times as fast as not prefetching.
AHEAD = 16
# Groups to decode behind the last one.
BEYOND = TILE // VECTORS
# For one row eight panels are 1.1 to 1.2 times as fast as four, because a work item starts slowly.
_DOTS = BLOCKINGS["dots"]
COMPRESSED_BLOCKINGS = {
    "dots": _DOTS._replace(few=(Block(8, 1), Block(8, 2), *_DOTS.few[2:])),
    "tiles": BLOCKINGS["tiles"],
}

N = TypeVar("N", int, Value)


class CompressedLinear(LinearMethod):
    """A bfloat16 weight in twelve bits.

    It reads one row 1.2 times as fast as `DenseLinear`, and eight or more rows 0.85 to 0.95 times as fast.
    """

    is_recordable: ClassVar[bool] = True

    def __init__(self, shape: tuple[int, int], weight: Tensor, bias_O: Tensor | None) -> None:
        self.shape, self.weight, self.bias = shape, weight, bias_O
        self._unit: Unit = units.bf16_unit()
        self._matmul = launch.compiled(compressed_matmul, self._unit)

    @classmethod
    def pack(cls, weight: Tensor, bias_O: Tensor | None = None) -> LinearMethod:
        """Compress a weight to twelve bits a number, without loss.

        A weight with too many different exponents becomes a `DenseLinear` instead. Both multiply with exactly the
        given numbers.
        """
        num_out, num_in = weight.shape
        packed = _compressed(weight)
        if packed is None:
            return DenseLinear.pack(weight, bias_O)
        return cls((num_out, num_in), packed, bias_O)

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes

    def apply(self, x_TI: Tensor) -> Tensor:
        num_rows, (num_out, num_in) = len(x_TI), self.shape
        num_threads = torch.get_num_threads()
        y_TO = x_TI.new_empty((num_rows, num_out))
        self._matmul(
            COMPRESSED_BLOCKINGS[self._unit].num_items(num_rows, num_out, num_in),
            x_TI.data_ptr(),
            x_TI.stride(0) // 2,
            self.weight.data_ptr(),
            0 if self.bias is None else self.bias.data_ptr(),
            y_TO.data_ptr(),
            num_out,
            num_rows,
            num_in // 2,
            num_out // LANES,
            num_threads,
            launch.scratch(num_threads * scratch_bytes(num_rows, num_in, self._unit)),
            num_threads=num_threads,
        )
        return y_TO


def _compressed(weight_OI: Tensor) -> Tensor | None:
    """Compress a plain matrix.  Returns None if a panel has more exceptions than its block has room for."""
    weight_OI = weight_OI.contiguous()
    num_out, num_in = weight_OI.shape
    packed = torch.empty(weight_words(num_out, num_in), dtype=torch.int32)
    failures = torch.zeros(1, dtype=torch.int64)
    launch.compiled(compress)(
        num_out // LANES,
        weight_OI.data_ptr(),
        packed.data_ptr(),
        num_in // 2,
        failures.data_ptr(),
        num_threads=torch.get_num_threads(),
    )
    return None if failures.item() else packed


def weight_words(num_out: int, num_in: int) -> int:
    """Count the words of W, including the groups behind the last one, which are decoded but not used."""
    block = LANES + 2 * _room(num_in // 2) + num_in // 8 * GROUP_WORDS
    return num_out // LANES * block + BEYOND * GROUP_WORDS


def scratch_bytes(num_rows: int, num_in: int, unit: Unit) -> int:
    """Count the bytes of scratch memory that a thread needs.

    Products with few rows decode in registers and need none. With many rows a thread decodes panels to it once.
    """
    shape = COMPRESSED_BLOCKINGS[unit]
    if num_rows <= shape.most_few:
        return 0
    return shape.many.panels * (num_in // 2 + BEYOND * VECTORS) * LANES * 4


def _room(pairs: N) -> N:
    """Return how many exceptions a panel has room for, including the end marker."""
    return 8 * (pairs // 128 + 1)


def compress(code: KernelBuilder) -> None:
    """Write the kernel with the arguments plain matrix [O, I], W, I / 2, failures.  A work item is a panel.

    A panel with too many exceptions adds one to failures [1] int64.
    """
    plain, weight, pairs, failures = code.arguments(4)
    blocks = _Blocks(code, weight, pairs)
    counts = code.array("i32", 4 * 256)
    rooms = tuple(code.array("i16", I16_LANES) for _ in range(2))
    last = _room(pairs) - 1
    for panel in code.work_items():
        rows = code.pointer(plain, "i32") + panel * LANES * pairs
        count_exponents(code, rows.of("i64"), pairs * LANES // 2, counts)
        table, exceptions, groups = blocks.parts(panel)
        most_frequent(code, counts, table)
        exponents = [code.i16x32(table[c]) for c in range(CODES)]
        num_found = code.var(0)
        for first in code.loop(0, pairs, LANES):
            columns = code.transpose([rows.load(pairs * r + first) for r in range(LANES)])
            vectors = [code.as_i16x32(column) for column in columns]
            for j in range(0, LANES, VECTORS):
                group = (groups + (first + j) // VECTORS * GROUP_WORDS).of("i16")
                found = encode_group(code, vectors[j : j + VECTORS], exponents, group)
                for lane, bits in exceptional(code, vectors[j : j + VECTORS], found, rooms):
                    entry = ((first + j) * I16_LANES + lane << 16) | bits
                    exceptions[code.minimum(num_found, last)] = entry
                    num_found.set(num_found + 1)
        exceptions[code.minimum(num_found, last)] = END
        with code.when(num_found > last):
            code.fetch_add(code.pointer(failures, "i64"), 1)


def encode_group(
    code: KernelBuilder, vectors: list[Value], exponents: list[Value], group: Pointer
) -> list[Value]:
    """Write a group of four vectors.  Returns the code of each number, or `CODES` if its exponent has none."""
    found: list[Value] = []
    four = code.i16x32(0)
    for v, vector in enumerate(vectors):
        codes = code.i16x32(CODES)
        for c, exponent in enumerate(exponents):
            codes = code.select((vector & EXPONENT).equals(exponent), c, codes)
        found.append(codes)
        four = four | (codes & (CODES - 1)) << 4 * v
    group.store_i16x32(0, four)
    rest = [vector & ~EXPONENT for vector in vectors]
    for v in range(0, VECTORS, 2):
        both = rest[v] | code.swap_bytes(rest[v + 1])
        group.store_i16x32((1 + v // 2) * I16_LANES, both)
    return found


def exceptional(
    code: KernelBuilder,
    vectors: list[Value],
    found: list[Value],
    rooms: tuple[Pointer, ...],
    limit: Value | None = None,
) -> Iterator[tuple[Value, Value]]:
    """Yield the place in its group and the bits of each number without a code for its exponent.

    Args:
        rooms: two arrays of 32 halfwords.
        limit: a condition for the search.
    """
    bits, codes = rooms
    for v, (vector, here) in enumerate(zip(vectors, found, strict=True)):
        is_any = code.any(here.equals(CODES))
        with code.when(is_any if limit is None else is_any & limit):
            bits.store_i16x32(0, vector)
            codes.store_i16x32(0, here)
            for lane in code.loop(0, I16_LANES):
                with code.when(codes[lane].equals(CODES)):
                    yield v * I16_LANES + lane, code.sign_extend(bits[lane]) & 0xFFFF


def decode_group(code: KernelBuilder, table: Value, group: Pointer) -> Iterator[Value]:
    """Yield the four vectors of a group, without its exceptions."""
    codes = group.load_i16x32()
    for v in range(VECTORS):
        both = group.load_i16x32((1 + v // 2) * I16_LANES)
        rest = code.swap_bytes(both) if v % 2 else both
        yield (rest & ~EXPONENT) | code.lookup_words(table, codes >> 4 * v)


def count_exponents(
    code: KernelBuilder, quadruples: Pointer, length: Value, counts: Pointer, step: int = 1
) -> None:
    """Write counts[exponent] = 256 · frequency + exponent, from every `step`-th quadruple.

    Four counters for each exponent are faster, because consecutive updates of one counter wait for each other.
    """
    for i in range(0, 4 * 256, LANES):
        counts.store(i, code.i32x16(0))
    for i in code.loop(0, length, step):
        four = quadruples[i]
        for j in range(4):
            at = ((four >> (16 * j + 7)) & 0xFF) + 256 * j
            counts[at] = counts[at] + 256
    for exponent in code.loop(0, 256):
        total = code.truncate(exponent, "i32")
        for j in range(4):
            total = total + counts[exponent + 256 * j]
        counts[exponent] = total


def most_frequent(code: KernelBuilder, counts: Pointer, table: Pointer) -> None:
    """Write the sixteen most frequent exponents to the table, twice, in the bit positions of a bfloat16."""
    for c in code.loop(0, CODES):
        best = counts.load()
        for i in range(LANES, 256, LANES):
            best = code.maximum(best, counts.load(i))
        exponent = code.reduce_max(best) & 0xFF
        table[c] = table[c + CODES] = code.truncate(exponent << 7, "i16")
        counts[code.sign_extend(exponent)] = -1


def compressed_matmul(code: KernelBuilder, unit: Unit) -> None:
    """Write the kernel with the arguments x, its stride in words, W, b or 0, y, its stride, T, I / 2, O / 16, threads, scratch.

    A work item is the panels of a block of rows.
    """
    x, stride, weight, *others, threads, scratch = code.arguments(11)
    product = product_of(unit, code, "none", x, stride, *others)
    num_rows, pairs = product.num_rows, product.pairs
    shape, before = COMPRESSED_BLOCKINGS[unit], 0
    blocks = _Blocks(code, weight, pairs, threads, groups=max(1, product.step // VECTORS))
    rooms = [blocks.room() for _ in range(shape.few[0].panels)]
    with product.begun():
        for block in shape.few:
            with code.when((num_rows > before) & (num_rows <= block.rows)):
                for item in code.work_items():
                    at_panel = product.panels_from(item * block.panels, block.panels)
                    own = rooms[: block.panels]
                    steps = blocks.decoded(at_panel, own, product.step, is_kept=False)
                    product.block(at_panel, code.i64(0), block.rows, steps)
            before = block.rows
        with code.when(num_rows > shape.most_few):
            panels, rows, ahead = shape.many
            length = (pairs + BEYOND * VECTORS) * LANES
            own = code.pointer(scratch, "i32") + code.thread() * panels * length
            kept = [own + p * length for p in range(panels)]
            for panel, first, stop in items_of_many(code, shape.many, num_rows, product.num_panels):
                at_panel = product.panels_from(panel, panels)
                steps = blocks.decoded(at_panel, kept, product.step, is_kept=True)
                product.block(at_panel, first, rows, steps)
                for row in code.loop(first + rows, stop, rows):
                    product.block(at_panel, row, rows, product.plain(kept, ahead))


class _Blocks:
    def __init__(
        self,
        code: KernelBuilder,
        weight: Value,
        pairs: Value,
        threads: Value | int = 1,
        *,
        groups: int = 1,
    ) -> None:
        """Describe W.  `groups` of them are decoded at once."""
        self.code, self.num_groups, self._at_once = code, pairs // VECTORS, groups
        self._weight, self._threads = code.pointer(weight, "i32"), threads
        self._before_groups = LANES + 2 * _room(pairs)
        self._length = self._before_groups + self.num_groups * GROUP_WORDS

    def parts(self, panel: Value) -> tuple[Pointer, Pointer, Pointer]:
        """Return the table, exceptions and groups of a panel."""
        block = self._weight + panel * self._length
        return block.of("i16"), (block + LANES).of("i64"), block + self._before_groups

    def room(self) -> Pointer:
        """Allocate memory for decoded groups that are not kept."""
        return self.code.array("i32", 2 * self._at_once * VECTORS * LANES)

    def decoded(
        self, at_panel: list[Value], rooms: list[Pointer], step: int, *, is_kept: bool
    ) -> Steps:
        """Yield the words of the panels, decoded into one buffer for each.

        A buffer holds two groups, or the whole panel if it is kept.
        """
        beyond = len(at_panel) * self._length * self._threads
        panels = [
            _Panel(self.code, *self.parts(at), room, beyond, self.num_groups, is_kept=is_kept)
            for at, room in zip(at_panel, rooms, strict=True)
        ]
        for panel in panels:
            panel.decode(self.code.i64(0), self._at_once)
        for g in self.code.loop(0, self.num_groups, self._at_once):
            for panel in panels:
                panel.decode(g + self._at_once, self._at_once)
            here = [panel.room(g, self._at_once) for panel in panels]
            for v in range(0, self._at_once * VECTORS, step):
                yield g * VECTORS + v, [words + v * LANES for words in here]


class _Panel:
    def __init__(
        self,
        code: KernelBuilder,
        table: Pointer,
        exceptions: Pointer,
        groups: Pointer,
        rooms: Pointer,
        step: Value,
        num_groups: Value,
        *,
        is_kept: bool,
    ) -> None:
        """Describe a panel.  `step` is the distance in words to the panel that this thread will probably process next."""
        self.code, self._is_kept = code, is_kept
        self._num_groups = num_groups
        self._beyond = step - num_groups * GROUP_WORDS
        for line in range(4):
            table.of("i32").prefetch(step + line * LANES)
        self._table, self._exceptions = table.load_i16x32(), exceptions
        self._groups, self._rooms = groups, rooms
        self._num_seen, self._next = code.var(0), code.var(exceptions[0])

    def room(self, g: Value, at_once: int) -> Pointer:
        place = g if self._is_kept else g % (2 * at_once)
        return self._rooms + place * VECTORS * LANES

    def decode(self, first: Value, at_once: int) -> None:
        for i in range(at_once):
            self._decode(first + i, self.room(first, at_once).of("i16") + i * PLACES)

    def _decode(self, g: Value, room: Pointer) -> None:
        code, group = self.code, self._groups + g * GROUP_WORDS
        later = group + code.select(g + AHEAD < self._num_groups, 0, self._beyond)
        for line in range(0, GROUP_WORDS, LANES):
            later.prefetch(AHEAD * GROUP_WORDS + line)
        for v, vector in enumerate(decode_group(code, self._table, group.of("i16"))):
            room.store_i16x32(v * I16_LANES, vector)
        for _ in code.while_(self._next, (g + 1) * (PLACES << 16)):
            room[(self._next >> 16) & (PLACES - 1)] = code.truncate(self._next, "i16")
            self._num_seen.set(self._num_seen + 1)
            self._next.set(self._exceptions[self._num_seen])
