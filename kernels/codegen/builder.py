"""A small language for kernels: Python that writes LLVM IR.  No Numba, no compiler, only llvmlite.

A kernel is a function of a `KernelBuilder`.  It runs once, when the kernel is compiled; what it does with
values is what the machine will do in every call:

    for i in code.loop(0, n, LANES):   a loop of the machine   (over a Python range: unrolled)
    with code.when(a < b):             a branch of the machine (Python's if: chooses what is compiled)
    x = code.var(0.0); x.set(x + y)    what changes in a loop lives in a variable

The types of values are in `core.py`.

Laws:
  * Nothing here depends on the number of threads or on what other rows hold.
  * The order of every sum is fixed by the code: no fast-math flags.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownLambdaType=false
# llvmlite has no types.

import contextlib
from collections.abc import Generator, Sequence
from typing import Any

from llvmlite import ir

from trouper.kernels.codegen.arithmetic import MathBuilder
from trouper.kernels.codegen.core import Operand, Pointer
from trouper.kernels.codegen.ir_types import I8, POINTER
from trouper.kernels.codegen.units import LANES


class KernelBuilder(MathBuilder):
    """All that kernels are written with; this file adds the tiles of AMX.

    There are eight registers of up to 16 rows of 64 bytes, and a product of them.
    """

    @contextlib.contextmanager
    def tiles(self, num_rows: Operand, narrow: Sequence[int]) -> Generator[None]:
        """Configure the tiles for a block: `narrow` ones have `num_rows` rows, the others 16; all hold zeros."""
        config = self.array("i8", 64)
        for i in range(0, 64, LANES):
            config.store(i, self.i32x16(0))
        config[0] = 1
        for tile in range(8):
            config.of("i16")[8 + tile] = 64  # bytes of a row
            rows = self.truncate(self.i64(num_rows), "i8") if tile in narrow else 16
            config[48 + tile] = rows
        nothing = ir.VoidType()
        self.call("llvm.x86.ldtilecfg", ir.FunctionType(nothing, [POINTER]), [config.ir])
        yield
        self.call("llvm.x86.tilerelease", ir.FunctionType(nothing, []), [])

    def tile_zero(self, tile: int) -> None:
        self._tile("tilezero", tile)

    def tile_load(self, tile: int, source: Pointer, stride: Operand) -> None:
        """Load a tile; `stride` is the bytes from one row to the next."""
        self._tile("tileloadd64", tile, source.ir, self.i64(stride).ir)

    def tile_store(self, tile: int, target: Pointer, stride: Operand) -> None:
        self._tile("tilestored64", tile, target.ir, self.i64(stride).ir)

    def tile_dot(self, c: int, a: int, b: int) -> None:
        """Compute c [R, 16] float32 += a [R, 32] · b [16 pairs, 16] of bfloat16: the sum of one call, then c."""
        self._tile("tdpbf16ps", c, ir.Constant(I8, a), ir.Constant(I8, b))

    def _tile(self, name: str, tile: int, *others: Any) -> None:
        arguments = [ir.Constant(I8, tile), *others]
        kind = ir.FunctionType(ir.VoidType(), [a.type for a in arguments])
        self.call(f"llvm.x86.{name}", kind, arguments)
