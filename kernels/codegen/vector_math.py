"""Exponential, logarithm and root of the kernel builder."""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownLambdaType=false
# llvmlite has no types.

import math
from collections.abc import Sequence

from llvmlite import ir

from trouper.kernels.codegen.core import Value
from trouper.kernels.codegen.features import has_scaling
from trouper.kernels.codegen.integers import IntegerBuilder
from trouper.kernels.codegen.ir_types import F32, F32X16, I16, I32, I32X16

# 2^f on [-½, ½], degree 7: relative error 5e-9 before rounding
_EXP2 = [math.log(2) ** i / math.factorial(i) for i in range(8)]
# on [0, 1), minimax of degree 5: 8e-8
_EXP2_UP = (1.0, 0.693151295, 0.240164444, 0.0557999127, 0.00901702885, 0.00186713075)
# log(1 + f) = f - f²/2 + f³ P(f) on [√½ - 1, √2 - 1], of Cephes' logf
_LOG = (
    3.3333331174e-1, -2.4999993993e-1, 2.0000714765e-1, -1.6668057665e-1, 1.4249322787e-1,
    -1.2420140846e-1, 1.1676998740e-1, -1.1514610310e-1, 7.0376836292e-2,
)  # fmt: skip
_LN2 = 0.693359375, -2.12194440e-4  # high and low part
_SQRT_HALF = 0.707106781186547524
_LOWEST, _HIGHEST = -126.0, 127.0  # below it exp2 is 0, above it stays


class MathBuilder(IntegerBuilder):
    """`IntegerBuilder` with functions of vectors."""

    def sqrt(self, x: Value) -> Value:
        return self._intrinsic("llvm.sqrt.f32", F32, x.ir)

    def exp2(self, x: Value) -> Value:
        """Return 2^x to 2e-7; 0 below 2^-126, 2^127 above; not a number where x is not."""
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
        """Return the natural logarithm of positive normal floats."""
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
        """Return x - floor(x); of infinities 0."""
        round_down = ir.Constant(I32, 1)
        return self._masked("reduce", x, Value(self, round_down))

    def _masked(self, name: str, a: Value, b: Value) -> Value:
        """Call an instruction of AVX-512 on all lanes, with the current rounding."""
        everywhere, as_ever = ir.Constant(I16, -1), ir.Constant(I32, 4)
        none = ir.Constant(F32X16, ir.Undefined)
        full = f"llvm.x86.avx512.mask.{name}.ps.512"
        return self._intrinsic(full, F32X16, a.ir, b.ir, none, everywhere, as_ever)
