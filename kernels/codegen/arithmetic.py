"""Arithmetic of the kernel builder: exact dot products of small integers, and exp2, log and sqrt.

Processors multiply small integers with VNNI, with the instructions of AVX2, or with plain multiplications.  Kernels
call one method, and the builder emits what the processor has.

    i32x16  sixteen 32-bit integers; also sixteen words of four bytes, or of two 16-bit integers
    i16x32  sums of the products of neighbouring bytes

Law: all variants compute the same bits if the sum of two products of bytes fits 16 bits.
"""


# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownLambdaType=false
# llvmlite has no types.

import math
from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from trouper.kernels.codegen.core import F32, F32X16, I8, I16, I32, I32X16, Value
from trouper.kernels.codegen.features import (
    has_byte_dots,
    has_byte_pairs,
    has_permutations,
    has_scaling,
    has_wide_byte_dots,
    has_wide_byte_pairs,
)
from trouper.kernels.codegen.units import LANES
from trouper.kernels.codegen.vectors import VectorBuilder

HALF = LANES // 2


class IntegerBuilder(VectorBuilder):
    """`VectorBuilder` with dot products of integers.

    Each method uses the best instruction of the target processor, or several simpler ones with the same exact result.
    """

    def byte_dot(self, total: Value, unsigned: Value, signed: Value) -> Value:
        """Return total + the four products of unsigned and signed bytes in each 32-bit lane.

        Requires VNNI.  The sum is exact, since four products cannot overflow.
        """
        operands = [(total, I32), (unsigned, I8), (signed, I8)]
        wide = "llvm.x86.avx512.vpdpbusd.512" if has_wide_byte_dots() else None
        return self._by_halves(wide, "llvm.x86.avx512.vpdpbusd.256", I32, operands)

    def byte_pairs(self, unsigned: Value, signed: Value) -> Value:
        """Return i16x32 sums of two products of unsigned and signed bytes.

        Each sum must fit 16 bits.  Without AVX2 they are computed in 16-bit lanes, with the same result.
        """
        if has_byte_pairs():
            wide = "llvm.x86.avx512.pmaddubs.w.512" if has_wide_byte_pairs() else None
            operands = [(unsigned, I8), (signed, I8)]
            return self._by_halves(wide, "llvm.x86.avx2.pmadd.ub.sw", I16, operands)
        u, s = self.as_i16x32(unsigned), self.as_i16x32(signed)
        low = (u & 0xFF) * (s << 8 >> 8)
        return low + (u >> 8 & 0xFF) * (s >> 8)

    def without_sign(self, a: Value, b: Value) -> tuple[Value, Value]:
        """Return the bytes |a|, and the bytes b with the sign of a, so that the products stay the same.

        It prepares signed bytes for `byte_pairs`. A byte of b must not be -128.
        """
        ir_builder, kind = self.builder, _vector(I8, LANES)
        x, y = (ir_builder.bitcast(value.ir, kind) for value in (a, b))
        zeros = ir.Constant(kind, [0] * 4 * LANES)
        is_negative = ir_builder.icmp_signed("<", x, zeros)
        found = [ir_builder.select(is_negative, ir_builder.sub(zeros, z), z) for z in (x, y)]
        return self.as_i32x16(Value(self, found[0])), self.as_i32x16(Value(self, found[1]))

    def lookup_bytes(self, table: Sequence[int], index: Value) -> Value:
        """Look up the bytes 0 … 15 of `index` in a table of sixteen bytes.

        Returns sixteen words of four entries.  Without a shuffle instruction the result is the same, but slower.
        """
        wide = _vector(I8, LANES)
        constant = Value(self, ir.Constant(wide, list(table) * 4))
        if has_byte_pairs():
            whole = "llvm.x86.avx512.pshuf.b.512" if has_wide_byte_pairs() else None
            operands = [(constant, I8), (index, I8)]
            return self.as_i32x16(self._by_halves(whole, "llvm.x86.avx2.pshuf.b", I8, operands))
        b, found = self.builder, ir.Constant(wide, [0] * 4 * LANES)
        here = b.bitcast(index.ir, wide)
        for i, number in enumerate(table):
            is_here = b.icmp_unsigned("==", here, ir.Constant(wide, [i] * 4 * LANES))
            found = b.select(is_here, ir.Constant(wide, [number] * 4 * LANES), found)
        return self.as_i32x16(Value(self, found))

    def lookup_words(self, table: Value, index: Value) -> Value:
        """Return table[index mod 16] for each of thirty-two 16-bit indices.

        The table is a vector with sixteen entries, given twice.  Processors without an instruction for 16-bit entries
        look up both bytes of an entry.
        """
        if has_permutations() or not has_byte_pairs():
            return self.permute(table, index)
        b = self.builder
        entries = Value(self, b.bitcast(table.ir, _vector(I8, LANES)))
        low, high = (
            self.shuffle(entries, entries, [2 * (i % 16) + j for i in range(64)]) for j in (0, 1)
        )
        # The highest bit of an index makes its byte 0.
        at = index & 15
        found = [(low, at | 0x8000), (high, at << 8 | 0x80)]
        a, c = (
            self._by_halves(None, "llvm.x86.avx2.pshuf.b", I8, [(t, I8), (i, I8)]) for t, i in found
        )
        return self.as_i16x32(a) | self.as_i16x32(c)

    def word_dot(self, total: Value, a: Value, b: Value) -> Value:
        """Return total + the two products of signed 16-bit integers in each 32-bit lane.

        Uses VNNI if the processor has it, or else one multiplication and one addition.
        """
        if has_byte_dots():
            wide = "llvm.x86.avx512.vpdpwssd.512" if has_wide_byte_dots() else None
            operands = [(total, I32), (a, I16), (b, I16)]
            return self._by_halves(wide, "llvm.x86.avx512.vpdpwssd.256", I32, operands)
        return total + self.word_pairs(a, b)

    def word_pairs(self, a: Value, b: Value) -> Value:
        """Return the sum of the two products of signed 16-bit integers in each 32-bit lane.

        Without AVX2 both products are computed in 32 bits, with the same result.
        """
        if has_byte_pairs():
            wide = "llvm.x86.avx512.pmaddw.d.512" if has_wide_byte_pairs() else None
            return self._by_halves(wide, "llvm.x86.avx2.pmadd.wd", I32, [(a, I16), (b, I16)])
        x, y = self.as_i32x16(a), self.as_i32x16(b)
        return (x << 16 >> 16) * (y << 16 >> 16) + (x >> 16) * (y >> 16)

    def _by_halves(
        self, wide: str | None, narrow: str, result: Any, operands: list[tuple[Value, Any]]
    ) -> Value:
        """Call an instruction once on 64 bytes, or twice on halves if the processor has only the narrow one.

        Args:
            wide: name of the instruction on 64 bytes, or None if the processor lacks it.
            narrow: name of the instruction on 32 bytes.
            result: element type of the result.
            operands: each with the element type that the instruction expects.
        """
        b = self.builder
        if wide is not None:
            whole = [b.bitcast(x.ir, _vector(kind, LANES)) for x, kind in operands]
            return self._intrinsic(wide, _vector(result, LANES), *whole)
        halves: list[Value] = []
        for lanes in (range(HALF), range(HALF, LANES)):
            parts = [(Value(self, b.bitcast(x.ir, _vector(I32, LANES))), k) for x, k in operands]
            cut = [b.bitcast(self.shuffle(x, x, lanes).ir, _vector(k, HALF)) for x, k in parts]
            halves.append(self._intrinsic(narrow, _vector(result, HALF), *cut))
        low, high = halves
        return self.shuffle(low, high, range(2 * low.type.count))


def _vector(kind: Any, words: int) -> Any:
    """Return the vector type that fills this number of 32-bit words with these elements."""
    return ir.VectorType(kind, words * 32 // kind.width)


# Coefficients of 2^f on [-½, ½], of degree 7.  The relative error is 5e-9 before rounding.
_EXP2 = [math.log(2) ** i / math.factorial(i) for i in range(8)]
# Coefficients of 2^f on [0, 1), a minimax polynomial of degree 5.  The relative error is 8e-8.
_EXP2_UP = (1.0, 0.693151295, 0.240164444, 0.0557999127, 0.00901702885, 0.00186713075)
# Coefficients of P in log(1 + f) = f - f²/2 + f³ P(f) on [√½ - 1, √2 - 1], from Cephes' logf.
_LOG = (
    3.3333331174e-1, -2.4999993993e-1, 2.0000714765e-1, -1.6668057665e-1, 1.4249322787e-1,
    -1.2420140846e-1, 1.1676998740e-1, -1.1514610310e-1, 7.0376836292e-2,
)  # fmt: skip
_LN2 = 0.693359375, -2.12194440e-4  # high and low part
_SQRT_HALF = 0.707106781186547524
# Below the lowest exponent exp2 returns 0; above the highest it stays constant.
_LOWEST, _HIGHEST = -126.0, 127.0


class MathBuilder(IntegerBuilder):
    """`IntegerBuilder` with elementary functions of vectors: roots, powers and logarithms.

    They are polynomials with coefficients chosen for the precision of float32. Kernels use them for softmax,
    activations and sampling.
    """

    def sqrt(self, x: Value) -> Value:
        return self._intrinsic("llvm.sqrt.f32", F32, x.ir)

    def exp2(self, x: Value) -> Value:
        """Return 2^x with a relative error of 2e-7.

        Returns 0 below 2^-126 and 2^127 above 2^127; NaN stays NaN. It is the basis of all exponential functions of
        kernels.
        """
        bounded = self.select(x > _HIGHEST, _HIGHEST, x)
        if has_scaling():
            bounded = self.select(x < _LOWEST, -math.inf, bounded)
            power = self._polynomial(_EXP2_UP, self._above_floor(bounded))
            return self._masked("scalef", power, bounded)
        bounded = self.select(x < _LOWEST, _LOWEST, bounded)
        whole = self._intrinsic("llvm.rint.v16f32", F32X16, bounded.ir)
        power = self._polynomial(_EXP2, bounded - whole)
        exponent = Value(self, self.builder.fptosi(whole.ir, I32X16))
        scale = self.as_f32x16((exponent + 127) << 23)
        return self.select(x < _LOWEST, 0.0, power * scale)

    def log(self, x: Value) -> Value:
        """Return the natural logarithm of positive normal floats.

        Other inputs give arbitrary results.  The argument is reduced to about [0.7, 1.4] before the polynomial.
        Sampling computes its noise with it.
        """
        exponent, half_to_one = self.split_exponent(x)
        is_low = half_to_one < _SQRT_HALF
        f = self.select(is_low, half_to_one + half_to_one, half_to_one) - 1.0
        e = self.to_f32x16(self.select(is_low, exponent - 1, exponent))
        power = self._polynomial(_LOG, f)
        square = f * f
        tail = self.fma(e, self.f32x16(_LN2[1]), power * f * square) - 0.5 * square
        return self.fma(e, self.f32x16(_LN2[0]), f + tail)

    def _polynomial(self, coefficients: Sequence[float], x: Value) -> Value:
        total = self.f32x16(coefficients[-1])
        for c in reversed(coefficients[:-1]):
            total = self.fma(total, x, self.f32x16(c))
        return total

    def _above_floor(self, x: Value) -> Value:
        """Return x - floor(x), or 0 for infinities."""
        round_down = ir.Constant(I32, 1)
        return self._masked("reduce", x, Value(self, round_down))

    def _masked(self, name: str, a: Value, b: Value) -> Value:
        """Call an AVX-512 instruction on all lanes, with the current rounding mode."""
        everywhere, as_ever = ir.Constant(I16, -1), ir.Constant(I32, 4)
        none = ir.Constant(F32X16, ir.Undefined)
        full = f"llvm.x86.avx512.mask.{name}.ps.512"
        return self._intrinsic(full, F32X16, a.ir, b.ir, none, everywhere, as_ever)
