"""Values, memory, loops and branches of the kernel builder, and the LLVM types behind them.

int     64 bits
float   32 bits
f32x16  sixteen float32: one zmm register, two ymm, or four NEON registers
i32x16  sixteen 32-bit integers, or sixteen pairs of bfloat16 (the even element in the low half)
i16x32  thirty-two 16-bit integers in the same register
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownLambdaType=false
# llvmlite has no types.

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownLambdaType=false
# llvmlite has no types.
import contextlib
import struct
from collections.abc import Generator, Iterator, Sequence
from typing import Any, Literal

from llvmlite import ir

from trouper.kernels.codegen.features import has_bf16_dot, has_half_conversion
from trouper.kernels.codegen.units import LANES, Kind

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
    "f16": ir.HalfType(),
    "f32": F32,
    "i64": I64,
    "i32": I32,
    "i16": I16,
    "i8": I8,
}
SIZES = {"bf16": 2, "f16": 2, "f32": 4, "i64": 8, "i32": 4, "i16": 2, "i8": 1}


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


class Value:
    """A number, a vector or a condition at run time.

    Python's operators write the instruction for its type.  Constants of Python can be an operand of them.
    """

    def __init__(self, code: "CoreBuilder", value: Any) -> None:
        self.code, self._value = code, value

    @property
    def ir(self) -> Any:
        return self._value

    @property
    def type(self) -> Any:
        """The LLVM type of the value.

        Operators use it to choose between instructions for integers, floats and vectors. It is known while the kernel
        is written.
        """
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
    """A variable at run time: `set` writes it, and every use reads its current value.

    Loops use variables for everything that changes between repetitions.
    """

    @property
    def ir(self) -> Any:
        return self.code.builder.load(self._value, typ=self.type)

    @property
    def type(self) -> Any:
        return self._value.allocated_type

    def set(self, value: Operand) -> None:
        self.code.builder.store(self.code.like(self, value).ir, self._value)


class Pointer:
    """The address of elements of one kind.

    Indices and sums count elements, not bytes.  Adding a number gives a pointer; an index loads or stores one
    element.
    """

    def __init__(self, code: "CoreBuilder", value: Any, kind: Kind) -> None:
        self.code, self.ir = code, value
        self.kind: Kind = kind

    def __add__(self, count: Operand) -> "Pointer":
        index = self.code.i64(count).ir
        element = ELEMENTS[self.kind]
        moved = self.code.builder.gep(self.ir, [index], source_etype=element)
        return Pointer(self.code, moved, self.kind)

    def of(self, kind: Kind) -> "Pointer":
        """Return the same address as a pointer to elements of another kind.

        Indices then count elements of that kind. It costs no instruction, and allows other reads of the same memory.
        """
        return Pointer(self.code, self.ir, kind)

    def __getitem__(self, index: Operand) -> Value:
        return Value(self.code, self._load(index, ELEMENTS[self.kind]))

    def __setitem__(self, index: Operand, value: Operand) -> None:
        element = Value(self.code, ir.Constant(ELEMENTS[self.kind], 0))
        self._store(index, self.code.like(element, value).ir)

    def load(self, index: Operand = 0) -> Value:
        """Load sixteen elements from `index` on.

        Floats become f32x16, and integers of any width i32x16.  The address need not be aligned.  Reading must stay
        inside the array.
        """
        if self.kind == "bf16":
            halves = Value(
                self.code, self.code.builder.zext(self.of("i16")._load(index, I16X16), I32X16)
            )
            return self.code.as_f32x16(halves << 16)
        if self.kind == "f16":
            return self.code.from_half(self.of("i16")._load(index, I16X16))
        raw = self._load(index, ir.VectorType(ELEMENTS[self.kind], LANES))
        if self.kind in ("i16", "i8"):
            raw = self.code.builder.sext(raw, I32X16)
        return Value(self.code, raw)

    def store(self, index: Operand, x: Value) -> None:
        """Store sixteen elements, converted to the pointer's kind.

        Floats are rounded to bfloat16, and integers keep their lowest bits. The address need not be aligned to a
        vector.
        """
        if self.kind == "bf16":
            self._store(index, self.code.round_bf16(x))
            return
        raw = x.ir
        if self.kind in ("i16", "i8"):
            raw = self.code.builder.trunc(raw, ir.VectorType(ELEMENTS[self.kind], LANES))
        self._store(index, raw)

    def load_bytes(self, index: Operand = 0) -> Value:
        """Load thirty-two bytes, sign-extended to i16x32.

        It prepares byte weights for products with 16-bit integers. The address need not be aligned, but all bytes
        must exist.
        """
        raw = self._load(index, ir.VectorType(ELEMENTS["i8"], 2 * LANES))
        return Value(self.code, self.code.builder.sext(raw, I16X32))

    def load_i16x32(self, index: Operand = 0) -> Value:
        return Value(self.code, self._load(index, I16X32))

    def store_i16x32(self, index: Operand, x: Value) -> None:
        self._store(index, x.ir)

    def store_lanes(self, index: Operand, x: Value) -> None:
        """Store a vector of any length without conversion.

        The number of bytes is the vector's own, whatever the pointer's kind. It stores results of `pack_bf16`, for
        example.
        """
        self._store(index, x.ir)

    def prefetch(self, index: Operand = 0, *, level: Literal[1, 2] = 2) -> None:
        """Prefetch a cache line into the first or second cache.

        Any address is allowed, even behind the end of an array, because prefetching cannot fail.
        """
        locality = 4 - level
        kind = ir.FunctionType(ir.VoidType(), [POINTER, I32, I32, I32])
        arguments = [(self + index).ir, I32(0), I32(locality), I32(1)]  # for reading; data
        self.code.call("llvm.prefetch.p0", kind, arguments)

    def _load(self, index: Operand, kind: Any) -> Any:
        return self.code.builder.load((self + index).ir, typ=kind, align=SIZES[self.kind])

    def _store(self, index: Operand, value: Any) -> None:
        self.code.builder.store(value, (self + index).ir, align=SIZES[self.kind])


class CoreBuilder:
    """A C function with one argument, a pointer to int64, during its construction.

    `launch.py` describes the arguments.  Its methods append instructions; nothing is executed.
    """

    def __init__(self, name: str) -> None:
        self.module: Any = ir.Module()
        kind = ir.FunctionType(ir.VoidType(), [POINTER])
        self._function: Any = ir.Function(self.module, kind, name)
        self._entry: Any = self._function.append_basic_block()
        body = self._function.append_basic_block()
        self.builder: Any = ir.IRBuilder(body)
        self._variables: Any = ir.IRBuilder(self._entry)
        self._body = body
        self._arguments = Pointer(self, self._function.args[0], "i64")

    def finish(self) -> str:
        """Return the text of the LLVM module.

        It ends the function, so nothing can be added afterwards. The compiler translates it to machine code.
        """
        self.builder.ret_void()
        self._variables.branch(self._body)
        return str(self.module)

    def arguments(self, count: int) -> list[Value]:
        """Return the kernel's own arguments, in the order of the call.

        All of them are 64-bit integers; `pointer` and `f32_argument` convert addresses and floats.
        """
        return [self._arguments[3 + i] for i in range(count)]

    def fetch_add(self, where: Pointer, count: Operand, ordering: str = "seq_cst") -> Value:
        """Add to memory atomically.

        Returns the number before the addition. Threads use it to take work items and to signal each other; `ordering`
        is LLVM's name of the memory order.
        """
        return Value(self, self.builder.atomic_rmw("add", where.ir, self.i64(count).ir, ordering))

    def fetch(self, where: Pointer) -> Value:
        return Value(self, self.builder.load_atomic(where.ir, "seq_cst", align=8, typ=I64))

    def loop(self, start: Operand, stop: Operand, step: int = 1) -> Iterator[Value]:
        stop = self.i64(stop)
        i = self.var(self.i64(start))
        with self._repeated() as leave_unless:
            here = Value(self, i.ir)
            leave_unless(here < stop)
            yield here
            i.set(here + step)

    def while_(self, variable: Var, limit: Operand) -> Iterator[None]:
        """Repeat the block while variable < limit.

        The block must change the variable.  The condition is tested before each repetition.  It is a loop of the
        kernel, not of Python.
        """
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

    def fence(self) -> None:
        """Keep LLVM from moving loads and stores across this place. It is no instruction.

        LLVM otherwise loads a number once for two uses far apart, and stores other registers to the stack to keep it.
        """
        self.builder.fence("seq_cst", "singlethread")

    def var(self, value: Operand) -> Var:
        """Create a variable.

        A Python float becomes a float32, and an int an integer of 64 bits.  LLVM turns variables into registers.
        `set` changes it later.
        """
        first = self._value(value)
        variable = Var(self, self._variables.alloca(first.ir.type))
        variable.set(first)
        return variable

    def array(self, kind: Kind, count: int) -> Pointer:
        """Allocate memory on the stack, aligned to cache lines and not initialised.

        It belongs to the current thread, and its size is fixed when the kernel is written.
        """
        memory = self._variables.alloca(ir.ArrayType(ELEMENTS[kind], count))
        memory.align = 64
        memory.type = POINTER
        return Pointer(self, memory, kind)

    def _value(self, x: Operand) -> Value:
        if isinstance(x, Value):
            return x
        return Value(self, I64(x) if isinstance(x, int) else ir.Constant(F32, rounded_f32(x)))

    def i64(self, x: Operand) -> Value:
        return x if isinstance(x, Value) else Value(self, I64(x))

    def f32(self, x: Operand) -> Value:
        """Convert a constant or an integer value to the nearest float32."""
        if not isinstance(x, Value):
            return Value(self, ir.Constant(F32, rounded_f32(x)))
        return Value(self, self.builder.sitofp(x.ir, F32))

    def f32_argument(self, bits: Value) -> Value:
        """Convert an argument with the bits of a float64 to float32.

        Python passes floats with `launch.float_bits`, because all arguments of a kernel are integers.
        """
        wide = self.builder.bitcast(bits.ir, ir.DoubleType())
        return Value(self, self.builder.fptrunc(wide, F32))

    def f32x16(self, x: Operand) -> Value:
        """Broadcast one float to all sixteen lanes.

        A Python number becomes a constant of the machine code. The lanes are equal until an operation changes them.
        """
        return self.like(Value(self, ir.Constant(F32X16, ir.Undefined)), x)

    def i32x16(self, x: Operand) -> Value:
        """Broadcast one 32-bit integer to all sixteen lanes.

        A Python number becomes a constant of the machine code. It is usually the other operand of an operator.
        """
        return self.like(Value(self, ir.Constant(I32X16, ir.Undefined)), x)

    def i16x32(self, x: Operand) -> Value:
        """Broadcast one 16-bit integer to all thirty-two lanes.

        A Python number becomes a constant of the machine code. It is usually the other operand of an operator.
        """
        return self.like(Value(self, ir.Constant(I16X32, ir.Undefined)), x)

    def pointer(self, address: Value, kind: Kind) -> Pointer:
        return Pointer(self, self.builder.inttoptr(address.ir, POINTER), kind)

    def like(self, model: Value, x: Operand) -> Value:
        """Convert `x` to the type of `model`.

        A number or an element is broadcast to all lanes.  Operators call it, so their operands can be plain numbers.
        """
        kind = model.type
        element = kind.element if isinstance(kind, ir.VectorType) else kind
        if not isinstance(x, Value):
            number = rounded_f32(x) if element == F32 else signed(int(x), element.width)
            if element != kind:
                return Value(self, ir.Constant(kind, [number] * kind.count))
            return Value(self, ir.Constant(kind, number))
        value = x.ir
        if isinstance(kind, ir.VectorType) and value.type == element:
            empty = ir.Constant(kind, ir.Undefined)
            one = self.builder.insert_element(empty, value, I32(0))
            zeros = ir.Constant(ir.VectorType(I32, kind.count), [0] * kind.count)
            value = self.builder.shuffle_vector(one, empty, zeros)
        return Value(self, value)

    def _pair(self, a: Value, b: Operand) -> tuple[Any, Any, bool]:
        if isinstance(b, Value) and isinstance(b.ir.type, ir.VectorType):
            a = self.like(b, a)
        b = self.like(a, b)
        x = a.ir
        element = x.type.element if isinstance(x.type, ir.VectorType) else x.type
        return x, b.ir, element == F32

    def binary(self, name: str, a: Value, b: Operand) -> Value:
        x, y, is_float = self._pair(a, b)
        return Value(self, getattr(self.builder, "f" + name if is_float else name)(x, y))

    def compare(self, operator: str, a: Value, b: Operand) -> Value:
        """Compare numbers or vectors, lane by lane.

        A comparison with NaN is false.  `operator` is Python's spelling, such as "<".  The result is one condition,
        or one for each lane.
        """
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
        """Return the larger operand, or b if a is NaN.

        The order of operands therefore decides whether NaN is propagated. It is two instructions at most.
        """
        a = self._value(a)
        return self.select(a > b, a, b)

    def call(self, name: str, kind: Any, arguments: Sequence[Any]) -> Any:
        function = self.module.globals.get(name) or ir.Function(self.module, kind, name)
        return self.builder.call(function, arguments)

    def _intrinsic(self, name: str, result: Any, *arguments: Any) -> Value:
        kind = ir.FunctionType(result, [a.type for a in arguments])
        return Value(self, self.call(name, kind, arguments))

    def as_f32x16(self, words: Value) -> Value:
        """Reinterpret the bits as floats, without converting numbers. It costs no instruction."""
        return Value(self, self.builder.bitcast(words.ir, F32X16))

    def as_i32x16(self, x: Value) -> Value:
        """Reinterpret the bits of floats or of 16-bit integers as 32-bit integers."""
        return Value(self, self.builder.bitcast(x.ir, I32X16))

    def as_i16x32(self, x: Value) -> Value:
        return Value(self, self.builder.bitcast(x.ir, I16X32))

    def round_bf16(self, x: Value) -> Any:
        """Round sixteen floats to bfloat16, half a register.

        Ties are rounded to even, with or without the processor's own instruction. The result is a raw value of LLVM.
        """
        if has_bf16_dot():
            return self.builder.fptrunc(x.ir, ir.VectorType(BFloat16(), LANES))
        return self.builder.trunc((self._rounded_bits(x) >> 16).ir, I16X16)

    def from_half(self, bits: Any) -> Value:
        """Convert sixteen half-precision numbers, given as 16-bit integers of LLVM, to float32. It is exact.

        Without an instruction for it, the bits of a half become those of a float32 with 2^-112 of its value.
        """
        if has_half_conversion():
            halves = self.builder.bitcast(bits, ir.VectorType(ir.HalfType(), LANES))
            return Value(self, self.builder.fpext(halves, F32X16))
        wide = Value(self, self.builder.zext(bits, I32X16))
        size = (wide & 0x7FFF) << 13
        finite = self.as_i32x16(self.as_f32x16(size) * 2.0**112)
        number = self.select(size >= 0x7C00 << 13, size | 0x7F800000, finite)
        return self.as_f32x16(number | (wide & 0x8000) << 16)

    def rounded(self, x: Value, kind: Kind) -> Value:
        """Return the sixteen floats that a store to memory of this kind and a load would give.

        Kernels that keep numbers in registers thus get the same bits.
        """
        if kind != "bf16":
            return x
        if has_bf16_dot():
            return Value(self, self.builder.fpext(self.round_bf16(x), F32X16))
        return self.as_f32x16(self._rounded_bits(x) & -0x10000)

    def _rounded_bits(self, x: Value) -> Value:
        """Return i32x16 whose upper halves hold the nearest bfloat16, ties to even.  NaN stays NaN."""
        bits = self.as_i32x16(x)
        rounded = bits + 0x7FFF + (bits >> 16 & 1)
        return self.select(x.equals(x), rounded, bits | 0x400000)
