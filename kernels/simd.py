"""Sixteen float32 lanes as a type of Numba, so that a kernel says which registers it wants.

    lanes           one <16 x float> of LLVM: a zmm register, two ymm, four NEON registers
    tuples of them  rows of accumulators; after inlining they live in registers
    words           two bfloat16 in 32 bits, even element low; carried in `lanes` as bits

Loops that LLVM vectorises by itself need a horizontal sum for each dot product and keep no block of
accumulators; both cost more than the arithmetic here.  Pointers are typed by what they point to:
uint16 is bfloat16, uint32 a pair of them.

Laws:
  * Nothing here depends on the number of threads or on what other rows hold.
  * The order of every sum is fixed by the code: no fast-math flags.
"""

import math
from typing import Any

from llvmlite import binding, ir
from numba import extending, njit, types
from numba.core import cgutils
from numba.extending import models, register_model

LANES = 16
HAS_BF16_DOT = bool(binding.get_host_cpu_features().get("avx512bf16"))

intrinsic: Any = extending.intrinsic  # what it makes is called without the typing context
_njit: Any = njit
# A function that kernels call: no way in from Python, which would be compiled as well.
inner = _njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)

_f32, _i32, _i16 = ir.FloatType(), ir.IntType(32), ir.IntType(16)
_v16f, _v16i = ir.VectorType(_f32, LANES), ir.VectorType(_i32, LANES)

# 2^f on [-½, ½], degree 7: relative error 5e-9 before rounding
_EXP2 = [math.log(2) ** i / math.factorial(i) for i in range(8)]
LOWEST, HIGHEST = -126.0, 127.0  # below it exp2 is 0, above it stays


class Lanes(types.Type):
    def __init__(self) -> None:
        super().__init__(name="lanes")


lanes = Lanes()


@register_model(Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, fe_type: Any) -> None:
        super().__init__(manager, fe_type, _v16f)


class _BFloat16(ir.Type):
    """llvmlite has no name for it."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat16)

    def __hash__(self) -> int:
        return hash(_BFloat16)


_v32bf = ir.VectorType(_BFloat16(), 2 * LANES)


def _const(value: float) -> ir.Constant:
    return ir.Constant(_v16f, [value] * LANES)


def _int_const(value: int) -> ir.Constant:
    return ir.Constant(_v16i, [value] * LANES)


def _splat(builder: Any, value: Any) -> Any:
    vector = ir.VectorType(value.type, LANES)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), value, _i32(0))
    return builder.shuffle_vector(
        one, ir.Constant(vector, ir.Undefined), ir.Constant(_v16i, [0] * LANES)
    )


def _shuffle(builder: Any, a: Any, b: Any, indices: list[int]) -> Any:
    mask = ir.Constant(ir.VectorType(_i32, len(indices)), indices)
    return builder.shuffle_vector(a, b, mask)


def _call(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    signature = ir.FunctionType(result, [a.type for a in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, signature, name), arguments)


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return _call(builder, "llvm.fma.v16f32", _v16f, a, b, c)


def _widened(builder: Any, pointer: Any, element: Any) -> Any:
    """Sixteen elements behind `pointer` as float32."""
    size = element.bitwidth // 8
    kinds = {
        types.uint16: _i16,
        types.float16: ir.HalfType(),
        types.uint32: _f32,
        types.float32: _f32,
    }
    vector = ir.VectorType(kinds[element], LANES)
    raw = builder.load(builder.bitcast(pointer, vector.as_pointer()), align=size)
    if element is types.uint16:
        words = builder.shl(builder.zext(raw, _v16i), _int_const(16))
        return builder.bitcast(words, _v16f)
    if element is types.float16:
        return builder.fpext(raw, _v16f)
    return raw


def _to_bf16_bits(builder: Any, x: Any) -> Any:
    """Rounded to nearest even, in the low half of each word; not-a-number stays one."""
    bits = builder.bitcast(x, _v16i)
    odd = builder.and_(builder.lshr(bits, _int_const(16)), _int_const(1))
    rounded = builder.lshr(builder.add(builder.add(bits, odd), _int_const(0x7FFF)), _int_const(16))
    is_nan = builder.fcmp_unordered("uno", x, x)
    return builder.select(is_nan, _int_const(0x7FC0), rounded)


def _narrowed(builder: Any, x: Any, element: Any) -> Any:
    if element is types.uint16:
        return builder.trunc(_to_bf16_bits(builder, x), ir.VectorType(_i16, LANES))
    if element is types.float16:
        return builder.fptrunc(x, ir.VectorType(ir.HalfType(), LANES))
    return x


@intrinsic
def pointer(typingctx, address, dtype):
    """int64 -> pointer to `dtype`."""
    target = types.CPointer(dtype.dtype)

    def build(context, builder, _, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(target))

    return target(types.int64, dtype), build


@intrinsic
def at(typingctx, base, index):
    """base + index elements."""

    def build(context, builder, _, arguments):
        return builder.gep(arguments[0], [arguments[1]])

    return base(base, types.int64), build


@intrinsic
def pointer_to(typingctx, base, dtype):
    """The same address, as one of `dtype`."""
    target = types.CPointer(dtype.dtype)

    def build(context, builder, _, arguments):
        return builder.bitcast(arguments[0], context.get_value_type(target))

    return target(base, dtype), build


@intrinsic
def fetch_add(typingctx, base):
    """Add one to the int64 behind `base`, from any thread; what it was."""

    def build(context, builder, _, arguments):
        return builder.atomic_rmw("add", arguments[0], ir.IntType(64)(1), "monotonic")

    return types.int64(types.CPointer(types.int64)), build


@intrinsic
def float_of(typingctx, bits):
    """The float64 whose bits an int64 argument carries, as float32."""

    def build(context, builder, _, arguments):
        return builder.fptrunc(builder.bitcast(arguments[0], ir.DoubleType()), _f32)

    return types.float32(types.int64), build


@intrinsic
def prefetch(typingctx, base, index):
    """Ask for the cache line of base[index]; any address will do."""

    def build(context, builder, _, arguments):
        byte = ir.IntType(8).as_pointer()
        where = builder.bitcast(builder.gep(arguments[0], [arguments[1]]), byte)
        kind = ir.FunctionType(ir.VoidType(), [byte, _i32, _i32, _i32])
        fn = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(fn, [where, _i32(0), _i32(2), _i32(1)])  # read, into L2, data
        return context.get_dummy_value()

    return types.void(base, types.int64), build


@intrinsic
def load(typingctx, base, index):
    """Sixteen elements from base[index], as float32 (words: as they are)."""

    def build(context, builder, _, arguments):
        return _widened(builder, builder.gep(arguments[0], [arguments[1]]), base.dtype)

    return lanes(base, types.int64), build


@intrinsic
def store(typingctx, base, index, x):
    """Sixteen elements to base[index], rounded to its type."""

    def build(context, builder, _, arguments):
        narrow = _narrowed(builder, arguments[2], base.dtype)
        where = builder.gep(arguments[0], [arguments[1]])
        where = builder.bitcast(where, narrow.type.as_pointer())
        builder.store(narrow, where, align=base.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(base, types.int64, lanes), build


@intrinsic
def fill(typingctx, x):
    """One number in all lanes."""

    def build(context, builder, _, arguments):
        return _splat(builder, arguments[0])

    return lanes(types.float32), build


def _binary(name):
    @intrinsic
    def operation(typingctx, a, b):
        def build(context, builder, _, arguments):
            return getattr(builder, name)(*arguments)

        return lanes(lanes, lanes), build

    return operation


add, sub, mul, div = (_binary(name) for name in ("fadd", "fsub", "fmul", "fdiv"))


@intrinsic
def fma(typingctx, a, b, c):
    """a · b + c."""

    def build(context, builder, _, arguments):
        return _fma(builder, *arguments)

    return lanes(lanes, lanes, lanes), build


@intrinsic
def maximum(typingctx, a, b):
    """The larger, lane by lane; b where a is not a number."""

    def build(context, builder, _, arguments):
        a, b = arguments
        return builder.select(builder.fcmp_ordered(">", a, b), a, b)

    return lanes(lanes, lanes), build


@intrinsic
def where_less(typingctx, a, b, yes, no):
    """yes where a < b, no elsewhere."""

    def build(context, builder, _, arguments):
        a, b, yes, no = arguments
        return builder.select(builder.fcmp_ordered("<", a, b), yes, no)

    return lanes(lanes, lanes, lanes, lanes), build


@intrinsic
def exp2(typingctx, x):
    """2^x to 2e-7; 0 below 2^-126, 2^127 above; not a number where x is not."""

    def build(context, builder, _, arguments):
        (x,) = arguments
        bounded = builder.select(builder.fcmp_ordered("<", x, _const(LOWEST)), _const(LOWEST), x)
        is_high = builder.fcmp_ordered(">", bounded, _const(HIGHEST))
        bounded = builder.select(is_high, _const(HIGHEST), bounded)
        whole = _call(builder, "llvm.rint.v16f32", _v16f, bounded)
        f = builder.fsub(bounded, whole)
        power = _const(_EXP2[7])
        for c in reversed(_EXP2[:7]):
            power = _fma(builder, power, f, _const(c))
        exponent = builder.fptosi(whole, _v16i)
        scale = builder.bitcast(
            builder.shl(builder.add(exponent, _int_const(127)), _int_const(23)), _v16f
        )
        is_zero = builder.fcmp_ordered("<", x, _const(LOWEST))
        return builder.select(is_zero, _const(0.0), builder.fmul(power, scale))

    return lanes(lanes), build


def _horizontal(name):
    @intrinsic
    def operation(typingctx, x):
        def build(context, builder, _, arguments):
            (x,) = arguments
            width = LANES
            while width > 1:  # halves upon halves: the same order on every machine
                width //= 2
                low = _shuffle(builder, x, x, list(range(width)))
                high = _shuffle(builder, x, x, list(range(width, 2 * width)))
                if name == "sum":
                    x = builder.fadd(low, high)
                else:
                    x = builder.select(builder.fcmp_ordered(">", low, high), low, high)
            return builder.extract_element(x, _i32(0))

        return types.float32(lanes), build

    return operation


sum_of, max_of = _horizontal("sum"), _horizontal("max")


@intrinsic(prefer_literal=True)
def zeros(typingctx, count):
    """`count` (a literal) rows of zeros."""
    kind = types.UniTuple(lanes, count.literal_value)

    def build(context, builder, _, arguments):
        return context.make_tuple(builder, kind, [_const(0.0)] * count.literal_value)

    return kind(count), build


@intrinsic(prefer_literal=True)
def load_rows(typingctx, base, index, stride, last, count):
    """Rows i of `count`: sixteen elements from base[index + min(i, last) · stride]."""
    num = count.literal_value
    kind = types.UniTuple(lanes, num)

    def build(context, builder, _, arguments):
        start, index, stride, last, _ = arguments
        start = builder.gep(start, [index])
        rows = []
        for i in range(num):
            row = ir.IntType(64)(i)
            row = builder.select(builder.icmp_signed("<", row, last), row, last)
            where = builder.gep(start, [builder.mul(row, stride)])
            rows.append(_widened(builder, where, base.dtype))
        return context.make_tuple(builder, kind, rows)

    return kind(base, types.int64, types.int64, types.int64, count), build


@intrinsic(prefer_literal=True)
def load_line(typingctx, base, index, count):
    """count · 16 consecutive elements."""
    num = count.literal_value
    kind = types.UniTuple(lanes, num)

    def build(context, builder, _, arguments):
        start = builder.gep(arguments[0], [arguments[1]])
        rows = [
            _widened(builder, builder.gep(start, [ir.IntType(64)(LANES * i)]), base.dtype)
            for i in range(num)
        ]
        return context.make_tuple(builder, kind, rows)

    return kind(base, types.int64, count), build


@intrinsic
def store_line(typingctx, base, index, rows):
    """The rows one after the other from base[index]; of float32."""

    def build(context, builder, _, arguments):
        start = builder.gep(arguments[0], [arguments[1]])
        for i, row in enumerate(cgutils.unpack_tuple(builder, arguments[2], rows.count)):
            where = builder.gep(start, [ir.IntType(64)(LANES * i)])
            narrow = _narrowed(builder, row, base.dtype)
            where = builder.bitcast(where, narrow.type.as_pointer())
            builder.store(narrow, where, align=base.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(base, types.int64, rows), build


@intrinsic
def store_rows(typingctx, base, index, stride, rows):
    """Row i to base[index + i · stride] …, of float32."""

    def build(context, builder, _, arguments):
        start, index, stride, rows_ = arguments
        start = builder.gep(start, [index])
        for i, row in enumerate(cgutils.unpack_tuple(builder, rows_, rows.count)):
            where = builder.gep(start, [builder.mul(ir.IntType(64)(i), stride)])
            builder.store(row, builder.bitcast(where, row.type.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(base, types.int64, types.int64, rows), build


@intrinsic
def fma_rows(typingctx, x, rows, sums):
    """sums[i] + x · rows[i]."""

    def build(context, builder, _, arguments):
        x, rows_, sums_ = arguments
        pairs = zip(
            cgutils.unpack_tuple(builder, rows_, rows.count),
            cgutils.unpack_tuple(builder, sums_, rows.count),
            strict=True,
        )
        done = [_fma(builder, x, row, total) for row, total in pairs]
        return context.make_tuple(builder, rows, done)

    return rows(lanes, rows, rows), build


@intrinsic(prefer_literal=True)
def dot_broadcast(typingctx, base, index, stride, x, sums):
    """sums[i] + base[index + i · stride] · x, the element in all lanes.

    Of float32 a product; of words the sum of two products, by the machine's bfloat16 instruction.
    """
    num = sums.count

    def build(context, builder, _, arguments):
        start, index, stride_, x, sums_ = arguments
        start = builder.gep(start, [index])
        step = getattr(stride, "literal_value", None)  # a constant costs no register
        if step is not None:
            stride_ = ir.IntType(64)(step)
        done = []
        for i, total in enumerate(cgutils.unpack_tuple(builder, sums_, num)):
            offset = builder.mul(ir.IntType(64)(i), stride_)
            one = builder.load(builder.gep(start, [offset]))
            both = _splat(builder, one)
            if base.dtype is types.float32:
                done.append(_fma(builder, both, x, total))
                continue
            a, b = builder.bitcast(both, _v32bf), builder.bitcast(x, _v32bf)
            done.append(_call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", _v16f, total, a, b))
        return context.make_tuple(builder, sums, done)

    return sums(base, types.int64, stride, lanes, sums), build


@intrinsic
def store_sums8(typingctx, base, index, rows):
    """The sums of eight rows to base[index] …: halves folded pairwise, 3 instructions a row."""

    def build(context, builder, _, arguments):
        vectors = cgutils.unpack_tuple(builder, arguments[2], 8)
        part = LANES
        while len(vectors) > 1:  # each vector holds LANES / part rows of `part` partial sums
            half = part // 2
            firsts = [j for j in range(LANES) if j % part < half]
            low = firsts + [LANES + j for j in firsts]
            high = [j + half for j in low]
            vectors = [
                builder.fadd(_shuffle(builder, a, b, low), _shuffle(builder, a, b, high))
                for a, b in zip(vectors[::2], vectors[1::2], strict=True)
            ]
            part = half
        (pairs,) = vectors
        done = builder.fadd(
            _shuffle(builder, pairs, pairs, list(range(0, LANES, 2))),
            _shuffle(builder, pairs, pairs, list(range(1, LANES, 2))),
        )
        where = builder.gep(arguments[0], [arguments[1]])
        builder.store(done, builder.bitcast(where, done.type.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(base, types.int64, rows), build


@intrinsic
def pair(typingctx, low, high):
    """Words of the two numbers of each lane, rounded to bfloat16."""

    def build(context, builder, _, arguments):
        low, high = (_to_bf16_bits(builder, x) for x in arguments)
        return builder.bitcast(builder.or_(low, builder.shl(high, _int_const(16))), _v16f)

    return lanes(lanes, lanes), build


@intrinsic
def pair_exact(typingctx, low, high):
    """The same of numbers that are bfloat16 already."""

    def build(context, builder, _, arguments):
        low, high = (builder.bitcast(x, _v16i) for x in arguments)
        low = builder.lshr(low, _int_const(16))
        return builder.bitcast(builder.or_(low, high), _v16f)

    return lanes(lanes, lanes), build


@intrinsic
def transpose_store(typingctx, target, index, stride, rows):
    """Lane j of row i (of 16) to target[index + j · stride + i]."""

    def build(context, builder, _, arguments):
        start, index, stride, rows_ = arguments
        vectors = cgutils.unpack_tuple(builder, rows_, LANES)
        for distance in (8, 4, 2, 1):
            low = [j if not j & distance else LANES + j - distance for j in range(LANES)]
            high = [j + distance if not j & distance else LANES + j for j in range(LANES)]
            swapped = list(vectors)
            for i in range(LANES):
                if not i & distance:
                    a, b = vectors[i], vectors[i + distance]
                    swapped[i] = _shuffle(builder, a, b, low)
                    swapped[i + distance] = _shuffle(builder, a, b, high)
            vectors = swapped
        start = builder.gep(start, [index])
        for j, row in enumerate(vectors):
            where = builder.gep(start, [builder.mul(ir.IntType(64)(j), stride)])
            narrow = _narrowed(builder, row, target.dtype)
            where = builder.bitcast(where, narrow.type.as_pointer())
            builder.store(narrow, where, align=target.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(target, types.int64, types.int64, rows), build
