"""LLVM types of the kernels, and conversions of Python numbers to LLVM constants."""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownLambdaType=false
# llvmlite has no types.

import struct
from typing import Any

from llvmlite import ir

from trouper.kernels.codegen.units import LANES

I16_LANES = 2 * LANES


class BFloat16(ir.Type):
    """The LLVM type bfloat, which llvmlite does not define.

    It is needed for the signatures of the processor's bfloat16 instructions. Memory holds it as 16-bit integers.
    """

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat16)

    def __hash__(self) -> int:
        return hash(BFloat16)


I64, I32, I1, F32 = ir.IntType(64), ir.IntType(32), ir.IntType(1), ir.FloatType()
POINTER: Any = ir.PointerType()
F32X16, I32X16 = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)
BF16X32 = ir.VectorType(BFloat16(), 2 * LANES)
I16, I8 = ir.IntType(16), ir.IntType(8)
I16X32, I16X16 = ir.VectorType(I16, I16_LANES), ir.VectorType(I16, LANES)
ELEMENTS: dict[str, Any] = {
    "bf16": BFloat16(),
    "f32": F32,
    "i64": I64,
    "i32": I32,
    "i16": I16,
    "i8": I8,
}
SIZES = {"bf16": 2, "f32": 4, "i64": 8, "i32": 4, "i16": 2, "i8": 1}


def signed(x: int, width: int) -> int:
    """Return the signed number with the same bits as x: LLVM's form of a constant of this width.

    LLVM would refuse the unsigned form, for example of 0xFFFF.
    """
    return (x + 2 ** (width - 1)) % 2**width - 2 ** (width - 1)


def rounded_f32(x: float) -> float:
    """Return the nearest float32 of a Python float.

    LLVM accepts only constants that are exact in their type. Kernels compute with it from then on.
    """
    return struct.unpack("f", struct.pack("f", x))[0]
