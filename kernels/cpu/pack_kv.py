"""Keys and values in bfloat16, packed to twelve bits without loss, for the tier on disk.

The format of `linear/compressed.py`, for parts of contiguous values: a part is the keys or the values of one head and layer
in one block.

    raw      [parts, N] bfloat16; N a multiple of 128 from 256 to 65,536
    sizes    [parts] uint32: bytes of each packed part
    payload  the packed parts, one after another

A packed part:

    table       [32] halfwords: its sixteen most frequent exponents, twice
    groups      [N / 128] of four vectors of 32 values, 192 bytes each
    exceptions  uint32: place << 16 | bits of each value with another exponent, up to the end of the part

A part that would not shrink is copied, and has 2 N bytes.  Exponents are counted in every third quadruple of values: that
takes a third of the time, finds all channels of a head, and only the number of exceptions depends on it.

Law: unpacking writes only the given values, whatever the payload contains.  A damaged one gives other values.

Roofline: 3.5 N bytes for each part.
"""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from trouper.kernels.codegen import launch, units
from trouper.kernels.codegen.builder import KernelBuilder
from trouper.kernels.codegen.core import I16_LANES, Pointer, Value
from trouper.kernels.cpu.linear.compressed import (
    CODES,
    PLACES,
    VECTORS,
    count_exponents,
    decode_group,
    encode_group,
    exceptional,
    most_frequent,
)

Bytes = NDArray[np.uint8]
N = TypeVar("N", int, Value, NDArray[np.int64])
TABLE_BYTES, GROUP_BYTES = 4 * CODES, 3 * PLACES // 2
LEAST, MOST = 2 * PLACES, 2**16
# Exponents are counted in one of this many quadruples.  The widths of heads are even, so all channels are counted.
SAMPLED = 3


def can_pack(length: int) -> bool:
    """Test whether parts of this many bfloat16 can be packed, with AVX2 or more."""
    if length % PLACES or not LEAST <= length <= MOST or not units.is_available():
        return False
    from trouper.kernels.codegen.features import has_byte_pairs

    return has_byte_pairs()


class KvCodec:
    """Packs and unpacks blocks of one layout.  One thread uses it.

    Args:
        groups: of each group of layers, the number of parts of a block, and the values of a part.
    """

    def __init__(self, groups: Sequence[tuple[int, int]]) -> None:
        self._groups = tuple(groups)
        num_bytes = sum(2 * parts * length for parts, length in groups)
        self._room: Bytes = np.empty(num_bytes, np.uint8)
        self._sizes = np.empty(sum(parts for parts, _ in groups), np.uint32)
        self._pack = launch.compiled(pack_kv)
        self._unpack = launch.compiled(unpack_kv)

    def __repr__(self) -> str:
        return f"<KvCodec of {self._groups}>"

    def pack(self, raw: Bytes) -> tuple[Bytes, NDArray[np.uint32]]:
        """Return the payload and the sizes of a block.  They are valid until the next call."""
        start = place = first = 0
        for parts, length in self._groups:
            sizes = self._sizes[first : first + parts]
            addresses = raw[start:].ctypes.data, self._room[place:].ctypes.data, sizes.ctypes.data
            self._pack(1, *addresses, parts, length)
            start, first = start + 2 * parts * length, first + parts
            place += int(sizes.sum(dtype=np.int64))
        return self._room[:place], self._sizes

    def unpack(self, payload: Bytes, sizes: NDArray[np.uint32], raw: Bytes) -> bool:
        """Write the values of a payload to `raw`.  Returns False if it cannot be a payload of this layout."""
        lengths = np.repeat(
            [length for _, length in self._groups], [parts for parts, _ in self._groups]
        )
        if len(sizes) != len(lengths) or int(sizes.sum(dtype=np.int64)) != len(payload):
            return False
        beyond = sizes.astype(np.int64) - _bytes_without_exceptions(lengths)
        is_packed = (beyond >= 0) & (beyond % 4 == 0) & (sizes < 2 * lengths)
        if not (is_packed | (sizes == 2 * lengths)).all():
            return False
        start = place = first = 0
        for parts, length in self._groups:
            here = sizes[first : first + parts]
            addresses = payload[place:].ctypes.data, raw[start:].ctypes.data, here.ctypes.data
            self._unpack(1, *addresses, parts, length)
            start, first = start + 2 * parts * length, first + parts
            place += int(here.sum(dtype=np.int64))
        return True


def _bytes_without_exceptions(length: N) -> N:
    return TABLE_BYTES + length // PLACES * GROUP_BYTES


def pack_kv(code: KernelBuilder) -> None:
    """Write the kernel with the arguments raw, payload, sizes, parts, N.  One work item does it all."""
    raw, payload, sizes, parts, length = code.arguments(5)
    counts = code.array("i32", 4 * 256)
    rooms = tuple(code.array("i16", I16_LANES) for _ in range(2))
    fixed = _bytes_without_exceptions(length)
    # One exception more would be as large as the plain values.
    most = (2 * length - fixed) // 4 - 1
    target = code.var(payload)
    for _ in code.work_items():
        for part in code.loop(0, parts):
            source, table = code.pointer(raw, "i16") + part * length, code.pointer(target, "i16")
            count_exponents(code, source.of("i64"), length // 4, counts, SAMPLED)
            most_frequent(code, counts, table)
            exponents = [code.i16x32(table[c]) for c in range(CODES)]
            exceptions = code.pointer(target + fixed, "i32")
            num_found = code.var(0)
            for first in code.loop(0, length, PLACES):
                vectors = [source.load_i16x32(first + v * I16_LANES) for v in range(VECTORS)]
                found = encode_group(code, vectors, exponents, _group(table, first))
                is_short = num_found <= most
                for place, bits in exceptional(code, vectors, found, rooms, is_short):
                    entry = (first + place << 16) | bits
                    exceptions[code.minimum(num_found, most)] = code.truncate(entry, "i32")
                    num_found.set(num_found + 1)
            size = code.var(fixed + num_found * 4)
            with code.when(num_found > most):
                size.set(2 * length)
                _copy(code, source, table, length)
            code.pointer(sizes, "i32")[part] = code.truncate(size, "i32")
            target.set(target + size)


def unpack_kv(code: KernelBuilder) -> None:
    """Write the kernel with the arguments payload, raw, sizes, parts, N.  One work item does it all."""
    payload, raw, sizes, parts, length = code.arguments(5)
    fixed = _bytes_without_exceptions(length)
    at = code.var(payload)
    for _ in code.work_items():
        for part in code.loop(0, parts):
            source, target = code.pointer(at, "i16"), code.pointer(raw, "i16") + part * length
            size = code.sign_extend(code.pointer(sizes, "i32")[part])
            with code.when(size.equals(2 * length)):
                _copy(code, source, target, length)
            with code.when(size < 2 * length):
                table = source.load_i16x32()
                for first in code.loop(0, length, PLACES):
                    vectors = decode_group(code, table, _group(source, first))
                    for v, vector in enumerate(vectors):
                        target.store_i16x32(first + v * I16_LANES, vector)
                exceptions = code.pointer(at + fixed, "i32")
                for i in code.loop(0, (size - fixed) // 4):
                    entry = code.sign_extend(exceptions[i])
                    place = code.minimum((entry >> 16) & 0xFFFF, length - 1)
                    target[place] = code.truncate(entry, "i16")
            at.set(at + size)


def _group(part: Pointer, first: Value) -> Pointer:
    """Return the group of a packed part with this value and the 127 behind it."""
    return part + TABLE_BYTES // 2 + first // PLACES * (GROUP_BYTES // 2)


def _copy(code: KernelBuilder, source: Pointer, target: Pointer, length: Value) -> None:
    for i in code.loop(0, length, I16_LANES):
        target.store_i16x32(i, source.load_i16x32(i))


def unpack_reference(payload: Bytes, sizes: NDArray[np.uint32], length: int) -> NDArray[np.uint16]:
    """Return the values [parts, N] of a payload, as the definition of the format."""
    parts: list[NDArray[np.uint16]] = []
    for part in np.split(payload, np.cumsum(sizes[:-1], dtype=np.int64)):
        if len(part) == 2 * length:
            parts.append(part.view(np.uint16))
            continue
        fixed = _bytes_without_exceptions(length)
        table = part[:TABLE_BYTES].view(np.uint16)
        groups = part[TABLE_BYTES:fixed].view(np.uint16).reshape(-1, 3, I16_LANES)
        rest = groups[:, [1, 1, 2, 2]]
        rest[:, 1::2] = rest[:, 1::2].byteswap()
        codes = groups[:, :1] >> np.arange(0, 16, 4, dtype=np.uint16)[:, None] & 15
        values = (rest & 0x807F | table[codes]).reshape(length).astype(np.uint16)
        entries = part[fixed:].view(np.uint32)
        values[entries >> 16] = entries & 0xFFFF
        parts.append(values)
    return np.stack(parts)
