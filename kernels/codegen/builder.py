"""A small language for kernels: Python that writes LLVM IR.  No Numba, no compiler, only llvmlite.

A kernel is a function of a `KernelBuilder`.  It runs once, when the kernel is compiled; what it does with
values is what the machine will do in every call:

    for i in code.loop(0, n, LANES):   a loop of the machine   (over a Python range: unrolled)
    with code.when(a < b):             a branch of the machine (Python's if: chooses what is compiled)
    x = code.var(0.0); x.set(x + y)    what changes in a loop lives in a variable

    int 64 bits, float 32 bits, lanes <16 x float>: a zmm register, two ymm, four NEON registers
    words  <16 x i32>: sixteen pairs of bfloat16 (even element low), or integers
    halfwords  <32 x i16>: the same register

Laws:
  * Nothing here depends on the number of threads or on what other rows hold.
  * The order of every sum is fixed by the code: no fast-math flags.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownLambdaType=false
# llvmlite has no types.

import contextlib
import math
import platform
import struct
from collections.abc import Generator, Iterator, Sequence
from typing import Any, Literal

from llvmlite import ir

from trouper.kernels.codegen.features import has_bf16_dot, has_permutations, has_scaling
from trouper.kernels.codegen.units import LANES, Kind

I16_LANES = 2 * LANES


class _BFloat16(ir.Type):
    """llvmlite has no name for it."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat16)

    def __hash__(self) -> int:
        return hash(_BFloat16)


_I64, _I32, _I1, _F32 = ir.IntType(64), ir.IntType(32), ir.IntType(1), ir.FloatType()
_POINTER: Any = ir.PointerType()
_LANES, _WORDS = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)
_PAIRS = ir.VectorType(_BFloat16(), 2 * LANES)
_I16, _I8 = ir.IntType(16), ir.IntType(8)
_HALFWORDS, _HALF = ir.VectorType(_I16, I16_LANES), ir.VectorType(_I16, LANES)
_ELEMENTS: dict[str, Any] = {
    "bf16": _BFloat16(),
    "f32": _F32,
    "i64": _I64,
    "i32": _I32,
    "i16": _I16,
    "i8": _I8,
}
_SIZES = {"bf16": 2, "f32": 4, "i64": 8, "i32": 4, "i16": 2, "i8": 1}

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


class Value:
    """An int, a float, lanes, words or a condition; operators are those of its type."""

    def __init__(self, code: "KernelBuilder", value: Any) -> None:
        self.code, self._value = code, value

    @property
    def ir(self) -> Any:
        return self._value

    @property
    def type(self) -> Any:
        """LLVM's type of the value."""
        return self._value.type

    def __add__(self, other: "Operand") -> "Value":
        return self.code.binary("add", self, other)

    __radd__ = __add__

    def __sub__(self, other: "Operand") -> "Value":
        return self.code.binary("sub", self, other)

    def __rsub__(self, other: "Operand") -> "Value":
        return self.code.binary("sub", self.code.like(self, other), self)

    def __mul__(self, other: "Operand") -> "Value":
        return self.code.binary("mul", self, other)

    __rmul__ = __mul__

    def __truediv__(self, other: "Operand") -> "Value":
        return self.code.binary("div", self, other)

    def __rtruediv__(self, other: "Operand") -> "Value":
        return self.code.binary("div", self.code.like(self, other), self)

    def __floordiv__(self, other: "Operand") -> "Value":
        return self.code.binary("sdiv", self, other)

    def __mod__(self, other: "Operand") -> "Value":
        return self.code.binary("srem", self, other)

    def __and__(self, other: "Operand") -> "Value":
        return self.code.binary("and_", self, other)

    def __or__(self, other: "Operand") -> "Value":
        return self.code.binary("or_", self, other)

    def __xor__(self, other: "Operand") -> "Value":
        return self.code.binary("xor", self, other)

    def __lshift__(self, other: "Operand") -> "Value":
        return self.code.binary("shl", self, other)

    def __rshift__(self, other: "Operand") -> "Value":
        return self.code.binary("ashr", self, other)

    def __lt__(self, other: "Operand") -> "Value":
        return self.code.compare("<", self, other)

    def __le__(self, other: "Operand") -> "Value":
        return self.code.compare("<=", self, other)

    def __gt__(self, other: "Operand") -> "Value":
        return self.code.compare(">", self, other)

    def __ge__(self, other: "Operand") -> "Value":
        return self.code.compare(">=", self, other)

    def equals(self, other: "Operand") -> "Value":
        return self.code.compare("==", self, other)


Operand = Value | int | float


class Var(Value):
    """A value that `set` replaces; reading it anywhere reads what is set there."""

    @property
    def ir(self) -> Any:
        return self.code.builder.load(self._value, typ=self.type)

    @property
    def type(self) -> Any:
        return self._value.allocated_type

    def set(self, value: Operand) -> None:
        self.code.builder.store(self.code.like(self, value).ir, self._value)


class Pointer:
    """The address of elements of one kind; indices and sums count elements."""

    def __init__(self, code: "KernelBuilder", value: Any, kind: Kind) -> None:
        self.code, self.ir = code, value
        self.kind: Kind = kind

    def __add__(self, count: Operand) -> "Pointer":
        index = self.code.i64(count).ir
        element = _ELEMENTS[self.kind]
        moved = self.code.builder.gep(self.ir, [index], source_etype=element)
        return Pointer(self.code, moved, self.kind)

    def of(self, kind: Kind) -> "Pointer":
        """The same address, of elements of another kind."""
        return Pointer(self.code, self.ir, kind)

    def __getitem__(self, index: Operand) -> Value:
        return Value(self.code, self._load(index, _ELEMENTS[self.kind]))

    def __setitem__(self, index: Operand, value: Operand) -> None:
        element = Value(self.code, ir.Constant(_ELEMENTS[self.kind], 0))
        self._store(index, self.code.like(element, value).ir)

    def load(self, index: Operand = 0) -> Value:
        """Sixteen elements from `index` on: numbers as lanes, integers as words."""
        if self.kind == "bf16":
            halves = Value(
                self.code, self.code.builder.zext(self.of("i16")._load(index, _HALF), _WORDS)
            )
            return self.code.as_f32x16(halves << 16)
        raw = self._load(index, ir.VectorType(_ELEMENTS[self.kind], LANES))
        if self.kind in ("i16", "i8"):
            raw = self.code.builder.sext(raw, _WORDS)
        return Value(self.code, raw)

    def store(self, index: Operand, x: Value) -> None:
        """Sixteen elements, rounded or cut to the kind."""
        if self.kind == "bf16":
            self._store(index, self.code.round_bf16(x))
            return
        raw = x.ir
        if self.kind in ("i16", "i8"):
            raw = self.code.builder.trunc(raw, ir.VectorType(_ELEMENTS[self.kind], LANES))
        self._store(index, raw)

    def load_i16x32(self, index: Operand = 0) -> Value:
        return Value(self.code, self._load(index, _HALFWORDS))

    def store_i16x32(self, index: Operand, x: Value) -> None:
        self._store(index, x.ir)

    def prefetch(self, index: Operand = 0, *, level: Literal[1, 2] = 2) -> None:
        """Ask for the cache line; any address will do."""
        locality = 4 - level
        kind = ir.FunctionType(ir.VoidType(), [_POINTER, _I32, _I32, _I32])
        arguments = [(self + index).ir, _I32(0), _I32(locality), _I32(1)]  # read, data
        self.code.call("llvm.prefetch.p0", kind, arguments)

    def _load(self, index: Operand, kind: Any) -> Any:
        return self.code.builder.load((self + index).ir, typ=kind, align=_SIZES[self.kind])

    def _store(self, index: Operand, value: Any) -> None:
        self.code.builder.store(value, (self + index).ir, align=_SIZES[self.kind])


class KernelBuilder:
    """A C function of one pointer to int64 arguments, while it is written; see `launch.py`."""

    def __init__(self, name: str) -> None:
        self.module: Any = ir.Module()
        kind = ir.FunctionType(ir.VoidType(), [_POINTER])
        self._function: Any = ir.Function(self.module, kind, name)
        self._entry: Any = self._function.append_basic_block()
        body = self._function.append_basic_block()
        self.builder: Any = ir.IRBuilder(body)
        self._variables: Any = ir.IRBuilder(self._entry)
        self._body = body
        self._arguments = Pointer(self, self._function.args[0], "i64")

    def finish(self) -> str:
        """The text of the module."""
        self.builder.ret_void()
        self._variables.branch(self._body)
        return str(self.module)

    # Arguments and work

    def arguments(self, count: int) -> list[Value]:
        """The kernel's own arguments, in the order of the call."""
        return [self._arguments[3 + i] for i in range(count)]

    def thread(self) -> Value:
        """A number of its own for each thread of this call: 0, 1, …"""
        return self.fetch_add(self._arguments + 1, 1, "monotonic")

    @property
    def num_pieces(self) -> Value:
        """Of the call."""
        return self._arguments[2]

    def pieces(self, count: Value | None = None) -> Iterator[Value]:
        """Take pieces of work until there are none left; as many as the call says, or `count`.

        Then that is what the call says from now on: who comes later asks it whether there is work left.
        """
        if count is not None:
            self._arguments[2] = count
        with self._repeated() as leave_unless:
            piece = self.fetch_add(self._arguments, 1, "monotonic" if count is None else "acq_rel")
            leave_unless(piece < (self.num_pieces if count is None else count))
            yield piece

    # Between threads

    def fetch_add(self, where: Pointer, count: int, ordering: str = "seq_cst") -> Value:
        """What was there before."""
        return Value(self, self.builder.atomic_rmw("add", where.ir, _I64(count), ordering))

    def fetch(self, where: Pointer) -> Value:
        return Value(self, self.builder.load_atomic(where.ir, "seq_cst", align=8, typ=_I64))

    def pause(self) -> None:
        """The core does less for some ten nanoseconds, where it knows how."""
        nothing = ir.VoidType()
        if platform.machine() in ("x86_64", "AMD64"):
            self.call("llvm.x86.sse2.pause", ir.FunctionType(nothing, []), [])
        elif platform.machine() in ("aarch64", "arm64"):
            self.call("llvm.aarch64.hint", ir.FunctionType(nothing, [_I32]), [_I32(1)])  # yield

    def call_at(self, address: Value, *arguments: Operand) -> Value:
        """Call a C function of integers and addresses that returns an integer."""
        values = [self.i64(x).ir for x in arguments]
        kind = ir.FunctionType(_I64, [_I64] * len(values))
        function = self.builder.inttoptr(address.ir, kind.as_pointer())
        return Value(self, self.builder.call(function, values))

    # Loops, branches, variables

    def loop(self, start: Operand, stop: Operand, step: int = 1) -> Iterator[Value]:
        stop = self.i64(stop)
        i = self.var(self.i64(start))
        with self._repeated() as leave_unless:
            here = Value(self, i.ir)
            leave_unless(here < stop)
            yield here
            i.set(here + step)

    def while_(self, variable: Var, limit: Operand) -> Iterator[None]:
        """As long as variable < limit."""
        with self._repeated() as leave_unless:
            leave_unless(variable < limit)
            yield

    @contextlib.contextmanager
    def _repeated(self) -> Generator[Any]:
        head, after = (self._function.append_basic_block() for _ in range(2))
        self.builder.branch(head)
        self.builder.position_at_end(head)

        def leave_unless(condition: Value) -> None:
            inside = self._function.append_basic_block()
            self.builder.cbranch(condition.ir, inside, after)
            self.builder.position_at_end(inside)

        yield leave_unless
        self.builder.branch(head)
        self.builder.position_at_end(after)

    @contextlib.contextmanager
    def when(self, condition: Value) -> Generator[None]:
        with self.builder.if_then(condition.ir):
            yield

    def var(self, value: Operand) -> Var:
        """A variable of an int, float or lanes; a Python float is a float, an int an int."""
        first = self._value(value)
        variable = Var(self, self._variables.alloca(first.ir.type))
        variable.set(first)
        return variable

    def array(self, kind: Kind, count: int) -> Pointer:
        """Memory of this call, aligned to cache lines; it holds anything."""
        memory = self._variables.alloca(ir.ArrayType(_ELEMENTS[kind], count))
        memory.align = 64
        memory.type = _POINTER  # not of that element alone
        return Pointer(self, memory, kind)

    # Values

    def _value(self, x: Operand) -> Value:
        if isinstance(x, Value):
            return x
        return Value(self, _I64(x) if isinstance(x, int) else ir.Constant(_F32, _f32(x)))

    def i64(self, x: Operand) -> Value:
        return x if isinstance(x, Value) else Value(self, _I64(x))

    def f32(self, x: Operand) -> Value:
        """A float; of an int value the nearest."""
        if not isinstance(x, Value):
            return Value(self, ir.Constant(_F32, _f32(x)))
        return Value(self, self.builder.sitofp(x.ir, _F32))

    def f32_argument(self, bits: Value) -> Value:
        """The float64 that an argument carries (`launch.float_bits`), as a float."""
        wide = self.builder.bitcast(bits.ir, ir.DoubleType())
        return Value(self, self.builder.fptrunc(wide, _F32))

    def f32x16(self, x: Operand) -> Value:
        """One float in all lanes."""
        return self.like(Value(self, ir.Constant(_LANES, ir.Undefined)), x)

    def i32x16(self, x: Operand) -> Value:
        """One 32-bit integer in all words."""
        return self.like(Value(self, ir.Constant(_WORDS, ir.Undefined)), x)

    def i16x32(self, x: Operand) -> Value:
        """One 16-bit integer in all halfwords."""
        return self.like(Value(self, ir.Constant(_HALFWORDS, ir.Undefined)), x)

    def pointer(self, address: Value, kind: Kind) -> Pointer:
        return Pointer(self, self.builder.inttoptr(address.ir, _POINTER), kind)

    def like(self, model: Value, x: Operand) -> Value:
        """`x` in the type of `model`: a number, or the element of its lanes."""
        kind = model.type
        element = kind.element if isinstance(kind, ir.VectorType) else kind
        if not isinstance(x, Value):
            number = _f32(x) if element == _F32 else _signed(int(x), element.width)
            if element != kind:
                return Value(self, ir.Constant(kind, [number] * kind.count))
            return Value(self, ir.Constant(kind, number))
        value = x.ir
        if isinstance(kind, ir.VectorType) and value.type == element:
            empty = ir.Constant(kind, ir.Undefined)
            one = self.builder.insert_element(empty, value, _I32(0))
            zeros = ir.Constant(ir.VectorType(_I32, kind.count), [0] * kind.count)
            value = self.builder.shuffle_vector(one, empty, zeros)
        return Value(self, value)

    def _pair(self, a: Value, b: Operand) -> tuple[Any, Any, bool]:
        if isinstance(b, Value) and isinstance(b.ir.type, ir.VectorType):
            a = self.like(b, a)
        b = self.like(a, b)
        x = a.ir
        element = x.type.element if isinstance(x.type, ir.VectorType) else x.type
        return x, b.ir, element == _F32

    def binary(self, name: str, a: Value, b: Operand) -> Value:
        x, y, is_float = self._pair(a, b)
        return Value(self, getattr(self.builder, "f" + name if is_float else name)(x, y))

    def compare(self, operator: str, a: Value, b: Operand) -> Value:
        """Of floats: false where one is not a number."""
        x, y, is_float = self._pair(a, b)
        compare = self.builder.fcmp_ordered if is_float else self.builder.icmp_signed
        return Value(self, compare(operator, x, y))

    def select(self, condition: Value, yes: Operand, no: Operand) -> Value:
        model = yes if isinstance(yes, Value) else self._value(no)
        chosen = self.like(model, yes).ir, self.like(model, no).ir
        return Value(self, self.builder.select(condition.ir, *chosen))

    def minimum(self, a: Operand, b: Operand) -> Value:
        a = self._value(a)
        return self.select(a < b, a, b)

    def maximum(self, a: Operand, b: Operand) -> Value:
        """b where a is not a number."""
        a = self._value(a)
        return self.select(a > b, a, b)

    def call(self, name: str, kind: Any, arguments: Sequence[Any]) -> Any:
        function = self.module.globals.get(name) or ir.Function(self.module, kind, name)
        return self.builder.call(function, arguments)

    def _intrinsic(self, name: str, result: Any, *arguments: Any) -> Value:
        kind = ir.FunctionType(result, [a.type for a in arguments])
        return Value(self, self.call(name, kind, arguments))

    # Arithmetic on lanes

    def fma(self, a: Operand, b: Value, c: Value) -> Value:
        """a · b + c of lanes, rounded once."""
        return self._intrinsic("llvm.fma.v16f32", _LANES, self.like(c, a).ir, b.ir, c.ir)

    def dot(self, a: Value, b: Value, c: Value) -> Value:
        """c + the two products of each pair of words: the machine's bfloat16 instruction, or two FMAs."""
        if not has_bf16_dot():
            (a_low, a_high), (b_low, b_high) = self.unpack_bf16(a), self.unpack_bf16(b)
            return self.fma(a_high, b_high, self.fma(a_low, b_low, c))
        x, y = (self.builder.bitcast(v.ir, _PAIRS) for v in (a, b))
        return self._intrinsic("llvm.x86.avx512bf16.dpbf16ps.512", _LANES, c.ir, x, y)

    # Tiles of AMX: eight registers of up to 16 rows of 64 bytes, and a product of them

    @contextlib.contextmanager
    def tiles(self, num_rows: Operand, narrow: Sequence[int]) -> Generator[None]:
        """Within the block all tiles are whole, but the `narrow` ones have so many rows; all hold zeros."""
        config = self.array("i8", 64)
        for i in range(0, 64, LANES):
            config.store(i, self.i32x16(0))
        config[0] = 1
        for tile in range(8):
            config.of("i16")[8 + tile] = 64  # bytes of a row
            rows = self.truncate(self.i64(num_rows), "i8") if tile in narrow else 16
            config[48 + tile] = rows
        nothing = ir.VoidType()
        self.call("llvm.x86.ldtilecfg", ir.FunctionType(nothing, [_POINTER]), [config.ir])
        yield
        self.call("llvm.x86.tilerelease", ir.FunctionType(nothing, []), [])

    def tile_zero(self, tile: int) -> None:
        self._tile("tilezero", tile)

    def tile_load(self, tile: int, source: Pointer, stride: Operand) -> None:
        """`stride`: bytes from one row to the next."""
        self._tile("tileloadd64", tile, source.ir, self.i64(stride).ir)

    def tile_store(self, tile: int, target: Pointer, stride: Operand) -> None:
        self._tile("tilestored64", tile, target.ir, self.i64(stride).ir)

    def tile_dot(self, c: int, a: int, b: int) -> None:
        """c [R, 16] float32 += a [R, 32] · b [16 pairs, 16] of bfloat16: the sum of one call, then c."""
        self._tile("tdpbf16ps", c, ir.Constant(_I8, a), ir.Constant(_I8, b))

    def _tile(self, name: str, tile: int, *others: Any) -> None:
        arguments = [ir.Constant(_I8, tile), *others]
        kind = ir.FunctionType(ir.VoidType(), [a.type for a in arguments])
        self.call(f"llvm.x86.{name}", kind, arguments)

    def interleave_bf16(self, low: Value, high: Value) -> Value:
        """Words of the two numbers of each lane, rounded to bfloat16."""
        if not has_bf16_dot():
            return self._rounded_bits(low) >> 16 & 0xFFFF | self._rounded_bits(high) & -0x10000
        both = self.as_i16x32(self.pack_bf16(low, high))
        alternate = [i // 2 + i % 2 * LANES for i in range(I16_LANES)]
        return Value(self, self.builder.bitcast(self.shuffle(both, both, alternate).ir, _WORDS))

    def unpack_bf16(self, words: Value) -> tuple[Value, Value]:
        """The low and the high numbers of pairs of bfloat16, as lanes."""
        return self.as_f32x16(words << 16), self.as_f32x16(words & -0x10000)

    def as_f32x16(self, words: Value) -> Value:
        """The lanes that words hold."""
        return Value(self, self.builder.bitcast(words.ir, _LANES))

    def pack_bf16(self, first: Value, second: Value) -> Value:
        """Words of sixteen numbers and sixteen more, in their order, rounded to bfloat16."""
        if not has_bf16_dot():
            low, high = (Value(self, self.round_bf16(x)) for x in (first, second))
            whole = self.shuffle(low, high, range(I16_LANES))
            return Value(self, self.builder.bitcast(whole.ir, _WORDS))
        name = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
        pairs = self._intrinsic(name, _PAIRS, second.ir, first.ir)
        return Value(self, self.builder.bitcast(pairs.ir, _WORDS))

    def round_bf16(self, x: Value) -> Any:
        """Sixteen numbers rounded to bfloat16: half a register."""
        if has_bf16_dot():
            return self.builder.fptrunc(x.ir, ir.VectorType(_BFloat16(), LANES))
        return self.builder.trunc((self._rounded_bits(x) >> 16).ir, _HALF)

    def _rounded_bits(self, x: Value) -> Value:
        """Words whose upper halves are the nearest bfloat16, halves to even; what is not a number stays none."""
        bits = self.as_i32x16(x)
        rounded = bits + 0x7FFF + (bits >> 16 & 1)
        return self.select(x.equals(x), rounded, bits | 0x400000)

    def to_f32x16(self, integers: Value) -> Value:
        """Words as lanes."""
        return Value(self, self.builder.sitofp(integers.ir, _LANES))

    def split_exponent(self, x: Value) -> tuple[Value, Value]:
        """Positive normal lanes as f · 2^e: words e, and lanes f in [½, 1)."""
        bits = self.as_i32x16(x)
        f = self.as_f32x16((bits & 0x7FFFFF) | 0x3F000000)
        return (bits >> 23) - 126, f

    def lane_ids(self) -> Value:
        """The words 0, 1, … 15."""
        return Value(self, ir.Constant(_WORDS, list(range(LANES))))

    def round_i32x16(self, x: Value) -> Value:
        """Lanes as the nearest integers, halves to even."""
        whole = self._intrinsic("llvm.rint.v16f32", _LANES, x.ir)
        return Value(self, self.builder.fptosi(whole.ir, _WORDS))

    def lookup_bf16(self, table: Sequence[float], index: Value) -> Value:
        """Words of pairs of bfloat16: entry i of 32, where i is the lowest five bits of each half."""
        entries = [struct.unpack("i", struct.pack("f", x))[0] >> 16 for x in table]
        constant = Value(self, ir.Constant(_HALFWORDS, entries))
        found = self.permute(constant, self.as_i16x32(index))
        return Value(self, self.builder.bitcast(found.ir, _WORDS))

    def as_i32x16(self, x: Value) -> Value:
        """The bits of lanes."""
        return Value(self, self.builder.bitcast(x.ir, _WORDS))

    def as_i16x32(self, x: Value) -> Value:
        return Value(self, self.builder.bitcast(x.ir, _HALFWORDS))

    def truncate(self, x: Value, kind: Literal["i32", "i16", "i8"]) -> Value:
        """The lowest bits of an integer."""
        return Value(self, self.builder.trunc(x.ir, _ELEMENTS[kind]))

    def sign_extend(self, x: Value) -> Value:
        """An integer of fewer bits as an int, with its sign."""
        return Value(self, self.builder.sext(x.ir, _I64))

    def swap_bytes(self, x: Value) -> Value:
        """The bytes of each halfword."""
        return self._intrinsic("llvm.bswap.v32i16", _HALFWORDS, x.ir)

    def permute(self, table: Value, indices: Value) -> Value:
        """table[index mod 32] of halfwords."""
        if not has_permutations():  # for tests: no layout that needs it is chosen there
            room = self.array("i16", 3 * I16_LANES)
            room.store_i16x32(0, table)
            room.store_i16x32(I16_LANES, indices & I16_LANES - 1)
            for i in self.loop(0, I16_LANES):
                room[i + 2 * I16_LANES] = room[self.sign_extend(room[i + I16_LANES])]
            return room.load_i16x32(2 * I16_LANES)
        name = "llvm.x86.avx512.permvar.hi.512"
        return self._intrinsic(name, _HALFWORDS, table.ir, indices.ir)

    def any(self, conditions: Value) -> Value:
        """Whether one of sixteen or thirty-two conditions holds."""
        return self.compare("!=", self._bits(conditions), 0)

    def count(self, conditions: Value) -> Value:
        """How many of sixteen hold."""
        bits = self._bits(conditions)
        number = self._intrinsic("llvm.ctpop.i16", _I16, bits.ir)
        return Value(self, self.builder.zext(number.ir, _I64))

    def compress(self, x: Value, conditions: Value) -> Value:
        """The lanes whose condition holds, in their order; then anything."""
        rest = ir.Constant(_LANES, ir.Undefined)
        name = "llvm.experimental.vector.compress.v16f32"
        return self._intrinsic(name, _LANES, x.ir, conditions.ir, rest)

    def _bits(self, conditions: Value) -> Value:
        raw = conditions.ir
        return Value(self, self.builder.bitcast(raw, ir.IntType(raw.type.count)))

    def sqrt(self, x: Value) -> Value:
        return self._intrinsic("llvm.sqrt.f32", _F32, x.ir)

    def exp2(self, x: Value) -> Value:
        """2^x to 2e-7; 0 below 2^-126, 2^127 above; not a number where x is not."""
        bounded = self.select(x > _HIGHEST, _HIGHEST, x)
        if has_scaling():
            bounded = self.select(x < _LOWEST, -math.inf, bounded)
            power = self._polynomial(_EXP2_UP, self._above_floor(bounded))
            return self._masked("scalef", power, bounded)
        bounded = self.select(x < _LOWEST, _LOWEST, bounded)
        whole = self._intrinsic("llvm.rint.v16f32", _LANES, bounded.ir)
        power = self._polynomial(_EXP2, bounded - whole)
        exponent = Value(self, self.builder.fptosi(whole.ir, _WORDS))
        scale = self.as_f32x16((exponent + 127) << 23)
        return self.select(x < _LOWEST, 0.0, power * scale)

    def log(self, x: Value) -> Value:
        """The natural logarithm of positive normal lanes."""
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
        """x - floor(x); of infinities 0."""
        round_down = ir.Constant(_I32, 1)
        return self._masked("reduce", x, Value(self, round_down))

    def _masked(self, name: str, a: Value, b: Value) -> Value:
        """An instruction of AVX-512 on all lanes, rounding as ever."""
        everywhere, as_ever = ir.Constant(_I16, -1), ir.Constant(_I32, 4)
        none = ir.Constant(_LANES, ir.Undefined)
        full = f"llvm.x86.avx512.mask.{name}.ps.512"
        return self._intrinsic(full, _LANES, a.ir, b.ir, none, everywhere, as_ever)

    def reduce_sum(self, x: Value) -> Value:
        """Halves upon halves: the same order on every machine."""
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
        return Value(self, self.builder.extract_element(x.ir, _I32(0)))

    def shuffle(self, a: Value, b: Value, indices: Sequence[int]) -> Value:
        """Lanes `indices` of a followed by b."""
        mask = ir.Constant(ir.VectorType(_I32, len(indices)), list(indices))
        return Value(self, self.builder.shuffle_vector(a.ir, b.ir, mask))

    def sums8(self, rows: Sequence[Value]) -> Value:
        """The sums of eight rows as eight lanes: halves folded pairwise, 3 instructions a row."""
        part = LANES
        rows = [Value(self, row.ir) for row in rows]
        while len(rows) > 1:  # each holds LANES / part rows of `part` partial sums
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
        """Sixteen rows to sixteen columns."""
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


def _signed(x: int, width: int) -> int:
    """The same bits, as LLVM wants its constants."""
    return (x + 2 ** (width - 1)) % 2**width - 2 ** (width - 1)


def _f32(x: float) -> float:
    """Rounded, as LLVM wants its constants."""
    return struct.unpack("f", struct.pack("f", x))[0]
