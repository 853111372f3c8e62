"""Vector instructions of the kernel builder: conversions, permutations, masks and reductions."""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownLambdaType=false
# llvmlite has no types.

import struct
from collections.abc import Sequence
from typing import Any, Literal

from llvmlite import ir

from trouper.kernels.codegen.core import (
    BF16X32,
    ELEMENTS,
    F32X16,
    I16,
    I16_LANES,
    I16X32,
    I32,
    I32X16,
    I64,
    CoreBuilder,
    Operand,
    Value,
)
from trouper.kernels.codegen.features import has_bf16_dot, has_permutations
from trouper.kernels.codegen.units import LANES


class VectorBuilder(CoreBuilder):
    """`CoreBuilder` with instructions on whole vectors: conversions, permutations, masks and reductions.

    A vector has sixteen lanes of 32 bits or thirty-two of 16. Each method is one instruction if the processor has it.
    """

    def fma(self, a: Operand, b: Value, c: Value) -> Value:
        """Return a · b + c, rounded once.

        The order of roundings is therefore the same on all processors with FMA. `a` may be a plain number.
        """
        return self._intrinsic("llvm.fma.v16f32", F32X16, self.like(c, a).ir, b.ir, c.ir)

    def dot(self, a: Value, b: Value, c: Value) -> Value:
        """Return c + the two products of each pair of bfloat16.

        Uses the processor's bfloat16 instruction, or else two FMAs of float32, with slightly different rounding.
        """
        if not has_bf16_dot():
            (a_low, a_high), (b_low, b_high) = self.unpack_bf16(a), self.unpack_bf16(b)
            return self.fma(a_high, b_high, self.fma(a_low, b_low, c))
        x, y = (self.builder.bitcast(v.ir, BF16X32) for v in (a, b))
        return self._intrinsic("llvm.x86.avx512bf16.dpbf16ps.512", F32X16, c.ir, x, y)

    def interleave_bf16(self, low: Value, high: Value) -> Value:
        """Round two vectors to bfloat16.

        Returns pairs: lane i holds the numbers of lane i of both.  It is the operand form of `dot`, with two inputs
        in one word.
        """
        if not has_bf16_dot():
            return self._rounded_bits(low) >> 16 & 0xFFFF | self._rounded_bits(high) & -0x10000
        both = self.as_i16x32(self.pack_bf16(low, high))
        alternate = [i // 2 + i % 2 * LANES for i in range(I16_LANES)]
        return Value(self, self.builder.bitcast(self.shuffle(both, both, alternate).ir, I32X16))

    def unpack_bf16(self, words: Value) -> tuple[Value, Value]:
        """Split pairs of bfloat16 into their low and high numbers, each as f32x16.

        It is exact, because bfloat16 is the upper half of a float32.
        """
        return self.as_f32x16(words << 16), self.as_f32x16(words & -0x10000)

    def pack_bf16(self, first: Value, second: Value) -> Value:
        """Round two vectors to bfloat16.

        Returns thirty-two numbers: the first sixteen, then the second.  It is the order of numbers in memory, so the
        result can be stored at once.
        """
        if not has_bf16_dot():
            low, high = (Value(self, self.round_bf16(x)) for x in (first, second))
            whole = self.shuffle(low, high, range(I16_LANES))
            return Value(self, self.builder.bitcast(whole.ir, I32X16))
        name = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
        pairs = self._intrinsic(name, BF16X32, second.ir, first.ir)
        return Value(self, self.builder.bitcast(pairs.ir, I32X16))

    def to_f32x16(self, integers: Value) -> Value:
        """Convert i32x16 to floats. Integers above 2^24 are rounded to the nearest float."""
        return Value(self, self.builder.sitofp(integers.ir, F32X16))

    def split_exponent(self, x: Value) -> tuple[Value, Value]:
        """Split positive normal floats into f · 2^e.

        Returns e as i32x16 and f in [½, 1) as f32x16.  Logarithms begin with this step.
        """
        bits = self.as_i32x16(x)
        f = self.as_f32x16((bits & 0x7FFFFF) | 0x3F000000)
        return (bits >> 23) - 126, f

    def lane(self, x: Value, i: int) -> Value:
        """Return one lane of a vector as a number.

        The index is known when the kernel is written. Vectors of any type are allowed.
        """
        return Value(self, self.builder.extract_element(x.ir, I32(i)))

    def lane_ids(self) -> Value:
        """Return the lane numbers 0, 1, … 15 as i32x16."""
        return Value(self, ir.Constant(I32X16, list(range(LANES))))

    def round_i32x16(self, x: Value) -> Value:
        """Round floats to the nearest integers, ties to even.

        Numbers beyond 32 bits give arbitrary results. Quantization of rows to integers uses it.
        """
        whole = self._intrinsic("llvm.rint.v16f32", F32X16, x.ir)
        return Value(self, self.builder.fptosi(whole.ir, I32X16))

    def lookup_bf16(self, table: Sequence[float], index: Value) -> Value:
        """Look up pairs of bfloat16: the lowest five bits of each half are the index in a table of 32.

        The other bits of an index are ignored.
        """
        entries = [struct.unpack("i", struct.pack("f", x))[0] >> 16 for x in table]
        constant = Value(self, ir.Constant(I16X32, entries))
        found = self.permute(constant, self.as_i16x32(index))
        return Value(self, self.builder.bitcast(found.ir, I32X16))

    def truncate(self, x: Value, kind: Literal["i32", "i16", "i8"]) -> Value:
        """Keep the lowest bits of an integer.

        The result has the given width, and is stored with a pointer of this kind. Vectors are truncated lane by lane.
        """
        return Value(self, self.builder.trunc(x.ir, ELEMENTS[kind]))

    def sign_extend(self, x: Value) -> Value:
        """Widen an integer to 64 bits, keeping its sign."""
        return Value(self, self.builder.sext(x.ir, I64))

    def swap_bytes(self, x: Value) -> Value:
        """Swap the bytes of each 16-bit integer."""
        return self._intrinsic("llvm.bswap.v32i16", I16X32, x.ir)

    def permute(self, table: Value, indices: Value) -> Value:
        """Return table[index mod 32] for each of thirty-two 16-bit indices.

        It is one instruction on processors with AVX512-BW. Other processors go through memory.
        """
        # Only tests get here: without the instruction no layout with tables is chosen.
        if not has_permutations():
            room = self.array("i16", 3 * I16_LANES)
            room.store_i16x32(0, table)
            room.store_i16x32(I16_LANES, indices & I16_LANES - 1)
            for i in self.loop(0, I16_LANES):
                room[i + 2 * I16_LANES] = room[self.sign_extend(room[i + I16_LANES])]
            return room.load_i16x32(2 * I16_LANES)
        name = "llvm.x86.avx512.permvar.hi.512"
        return self._intrinsic(name, I16X32, table.ir, indices.ir)

    def any(self, conditions: Value) -> Value:
        """Test whether any of sixteen or thirty-two conditions holds.

        The result is one condition, for `when` or `select`. A kernel can skip rare work with it.
        """
        return self.compare("!=", self._bits(conditions), 0)

    def count(self, conditions: Value) -> Value:
        """Count the conditions that hold, among sixteen.

        Together with `compress` it appends selected lanes to an array. The number is an integer of 64 bits.
        """
        bits = self._bits(conditions)
        number = self._intrinsic("llvm.ctpop.i16", I16, bits.ir)
        return Value(self, self.builder.zext(number.ir, I64))

    def compress(self, x: Value, conditions: Value) -> Value:
        """Move the lanes that satisfy their condition to the front, in order.

        The other lanes are arbitrary.  `count` gives the number of lanes that are valid afterwards.
        """
        rest = ir.Constant(F32X16, ir.Undefined)
        name = "llvm.experimental.vector.compress.v16f32"
        return self._intrinsic(name, F32X16, x.ir, conditions.ir, rest)

    def _bits(self, conditions: Value) -> Value:
        raw = conditions.ir
        return Value(self, self.builder.bitcast(raw, ir.IntType(raw.type.count)))

    def reduce_sum(self, x: Value) -> Value:
        """Add all lanes by folding halves.

        The order is the same on every machine, so sums are reproducible bit for bit. The result is one float.
        """
        return self._horizontal(x, lambda a, b: a + b)

    def reduce_max(self, x: Value) -> Value:
        return self._horizontal(x, self.maximum)

    def reduce_min(self, x: Value) -> Value:
        return self._horizontal(x, self.minimum)

    def _horizontal(self, x: Value, fold: Any) -> Value:
        width = LANES
        while width > 1:
            width //= 2
            x = fold(self.shuffle(x, x, range(width)), self.shuffle(x, x, range(width, 2 * width)))
        return Value(self, self.builder.extract_element(x.ir, I32(0)))

    def shuffle(self, a: Value, b: Value, indices: Sequence[int]) -> Value:
        """Return the lanes `indices` of the concatenation of a and b.

        The indices are known when the kernel is written. `a` and `b` have the same type.
        """
        mask = ir.Constant(ir.VectorType(I32, len(indices)), list(indices))
        return Value(self, self.builder.shuffle_vector(a.ir, b.ir, mask))

    def sums8(self, rows: Sequence[Value]) -> Value:
        """Return the sums of eight vectors in eight lanes.

        Halves are folded pairwise, which takes three instructions for each vector.
        """
        part = LANES
        rows = [Value(self, row.ir) for row in rows]
        # Each row holds LANES / part rows of `part` partial sums.
        while len(rows) > 1:
            half = part // 2
            firsts = [j for j in range(LANES) if j % part < half]
            low = firsts + [LANES + j for j in firsts]
            high = [j + half for j in low]
            rows = [
                self.shuffle(a, b, low) + self.shuffle(a, b, high)
                for a, b in zip(rows[::2], rows[1::2], strict=True)
            ]
            part = half
        (pairs,) = rows
        evens, odds = range(0, LANES, 2), range(1, LANES, 2)
        return self.shuffle(pairs, pairs, evens) + self.shuffle(pairs, pairs, odds)

    def transpose(self, rows: Sequence[Value]) -> list[Value]:
        """Return the sixteen columns of sixteen rows.

        Four rounds of exchanges take 64 instructions, instead of 256 single loads. Packing of weights into panels
        uses it.
        """
        vectors = [Value(self, row.ir) for row in rows]
        for distance in (8, 4, 2, 1):
            low = [j if not j & distance else LANES + j - distance for j in range(LANES)]
            high = [j + distance if not j & distance else LANES + j for j in range(LANES)]
            swapped = list(vectors)
            for i in range(LANES):
                if not i & distance:
                    a, b = vectors[i], vectors[i + distance]
                    swapped[i] = self.shuffle(a, b, low)
                    swapped[i + distance] = self.shuffle(a, b, high)
            vectors = swapped
        return vectors
