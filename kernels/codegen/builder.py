"""A small language for kernels: Python functions that write LLVM IR through llvmlite.

A kernel must use the instructions of the user's processor, and users have no C compiler.  A kernel is a function of a
`KernelBuilder`.  Python runs it once, when the kernel is compiled; its operations on values become the instructions
of every call:

    for i in code.loop(0, n, LANES):   a loop at run time   (a loop over a Python range is unrolled)
    with code.when(a < b):             a branch at run time (a Python `if` decides what is compiled)
    x = code.var(0.0); x.set(x + y)    a variable that changes in a loop

`core.py` documents the types of values.

Laws:
  * No instruction depends on the number of threads or on other rows.
  * The code fixes the order of every sum: there are no fast-math flags.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownLambdaType=false
# llvmlite has no types.

import contextlib
import platform
from collections.abc import Generator, Iterator, Sequence
from typing import Any

from llvmlite import ir

from trouper.kernels.codegen.arithmetic import MathBuilder
from trouper.kernels.codegen.core import I8, I32, I64, POINTER, Operand, Pointer, Value
from trouper.kernels.codegen.units import LANES


class KernelBuilder(MathBuilder):
    """The complete kernel language.  This class adds work items, calls of C functions and the tiles of AMX.

    AMX has eight tile registers of up to 16 rows of 64 bytes, and an instruction that multiplies them.
    """

    def thread(self) -> Value:
        """Return a different number in each thread of a call: 0, 1, … Call it once in a kernel, because each call
        counts a new thread.

        It selects a thread's scratch memory.
        """
        return self.fetch_add(self._arguments + 1, 1, "monotonic")

    @property
    def num_items(self) -> Value:
        """The number of work items of the call.

        Threads take items one after the other, so their costs may differ. `work_items` iterates over their numbers.
        """
        return self._arguments[2]

    def work_items(self, count: Value | None = None) -> Iterator[Value]:
        """Take work items until none is left.

        Args:
            count: the number of work items, if the call does not give it.  It is written into the call's arguments,
                where threads that join later read it.
        """
        if count is not None:
            self._arguments[2] = count
        with self._repeated() as leave_unless:
            item = self.fetch_add(self._arguments, 1, "monotonic" if count is None else "acq_rel")
            leave_unless(item < (self.num_items if count is None else count))
            yield item

    def runs_of_items(self, num_threads: Value) -> Iterator[Value]:
        """Take work items like `work_items`, in runs of consecutive ones: long runs first, then shorter ones.

        This suits memory that is read once, because the processor prefetches for a thread that continues in order.
        """
        count = self.num_items
        with self._repeated() as leave_unless:
            left = count - self.fetch(self._arguments)
            least = self.maximum(count // (num_threads * 8), 1)
            length = self.maximum(left * 3 // (num_threads * 4), least)
            first = self.fetch_add(self._arguments, length, "monotonic")
            leave_unless(first < count)
            yield from self.loop(first, self.minimum(first + length, count))

    def pause(self) -> None:
        """Pause the core for about ten nanoseconds, if the processor has an instruction for it.

        Used in loops that wait for another thread, to leave resources to the second thread of the core.
        """
        nothing = ir.VoidType()
        if platform.machine() in ("x86_64", "AMD64"):
            self.call("llvm.x86.sse2.pause", ir.FunctionType(nothing, []), [])
        elif platform.machine() in ("aarch64", "arm64"):
            self.call("llvm.aarch64.hint", ir.FunctionType(nothing, [I32]), [I32(1)])  # yield

    def cycles(self) -> Value:
        """Return the processor's cycle counter.

        On x86-64 it counts at a constant rate on all cores. Its unit must be measured.
        """
        kind = ir.FunctionType(I64, [])
        return Value(self, self.call("llvm.readcyclecounter", kind, []))

    def call_at(self, address: Value, *arguments: Operand) -> Value:
        """Call a C function at this address.

        It takes integers and addresses and returns an integer.  Kernels use it for system calls.  The address is an
        argument of the kernel.
        """
        values = [self.i64(x).ir for x in arguments]
        kind = ir.FunctionType(I64, [I64] * len(values))
        function = self.builder.inttoptr(address.ir, kind.as_pointer())
        return Value(self, self.builder.call(function, values))

    @contextlib.contextmanager
    def tiles(self, num_rows: Operand, narrow: Sequence[int]) -> Generator[None]:
        """Configure the tile registers for a block, with zeros in all of them.

        Args:
            num_rows: number of rows of the tiles in `narrow`; the other tiles have 16.
        """
        config = self.array("i8", 64)
        for i in range(0, 64, LANES):
            config.store(i, self.i32x16(0))
        config[0] = 1
        for tile in range(8):
            config.of("i16")[8 + tile] = 64  # bytes in a row
            rows = self.truncate(self.i64(num_rows), "i8") if tile in narrow else 16
            config[48 + tile] = rows
        nothing = ir.VoidType()
        self.call("llvm.x86.ldtilecfg", ir.FunctionType(nothing, [POINTER]), [config.ir])
        yield
        self.call("llvm.x86.tilerelease", ir.FunctionType(nothing, []), [])

    def tile_zero(self, tile: int) -> None:
        self._tile("tilezero", tile)

    def tile_load(self, tile: int, source: Pointer, stride: Operand) -> None:
        """Load a tile from rows that start `stride` bytes apart.

        The tile's size is that of the configuration in force.  Requires AMX.  Rows beyond the tile are not read.
        """
        self._tile("tileloadd64", tile, source.ir, self.i64(stride).ir)

    def tile_store(self, tile: int, target: Pointer, stride: Operand) -> None:
        self._tile("tilestored64", tile, target.ir, self.i64(stride).ir)

    def tile_dot(self, c: int, a: int, b: int) -> None:
        """Add a product of tiles: c [R, 16] float32 += a [R, 32] · b [16 pairs, 16] bfloat16.

        The products of one call are summed first and then added to c.
        """
        self._tile("tdpbf16ps", c, ir.Constant(I8, a), ir.Constant(I8, b))

    def _tile(self, name: str, tile: int, *others: Any) -> None:
        arguments = [ir.Constant(I8, tile), *others]
        kind = ir.FunctionType(ir.VoidType(), [a.type for a in arguments])
        self.call(f"llvm.x86.{name}", kind, arguments)
