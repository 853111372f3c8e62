"""Weights of 4 and 8 bits: how they are rounded, and that the kernels multiply with exactly that."""

import pytest
import torch

from trouper.kernels.codegen import units
from trouper.kernels.cpu.linear.integer import Fp4Linear, Int4Linear, Int8Linear
from trouper.kernels.cpu.linear.quantization import (
    E2M1,
    GROUP,
    IntegerWeight,
    ScaleBlocks,
    StackedWeight,
    can_quantize,
    dequantized,
    packed,
    quantize,
)
from trouper.kernels.linear import LinearConfig
from trouper.kernels.reference.linear import integer_linear_reference
from trouper.kernels.select import make_linear

FORMATS = ("int4", "int8")
needs_native = pytest.mark.skipif(not units.is_available(), reason="needs native kernels")
pytestmark = pytest.mark.usefixtures("integer_unit")


@pytest.fixture(scope="module", params=["dots", "tiles", "bytes"])
def integer_unit(request):
    """Each of the ways in which integers are multiplied; bfloat16 also where it is too slow to be chosen."""
    if request.param == "tiles" and units.bf16_unit() != "tiles":
        pytest.skip("needs AMX")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            units,
            "integer_unit",
            lambda *, has_tiles=True: _possible(request.param, has_tiles),
        )
        yield request.param


def _possible(unit, has_tiles):
    return "dots" if unit == "tiles" and not has_tiles else unit


def check_product(layer, integers, bias=None):
    """Against the weights that the integers are, and the same for any number of rows and threads."""
    num_in, before = layer.shape[1], torch.get_num_threads()
    x = torch.randn(520, num_in + 32).bfloat16()[:, :num_in]  # strided
    expected = x.double() @ dequantized(integers).double().T
    if bias is not None:
        expected += bias
    found = layer.apply(x)
    if layer.unit == "bytes":
        assert torch.equal(found, integer_linear_reference(x, integers, bias))
        assert (found - expected).norm() < 9e-3 * expected.norm()  # bfloat16 alone is 1.7e-3
    else:
        torch.testing.assert_close(found.double(), expected, atol=2e-2, rtol=8e-3)
    try:
        for num_threads in (1, 3):
            torch.set_num_threads(num_threads)
            for num_rows in (*range(1, 20), 32, 33, 192, 193, 513):
                assert torch.equal(layer.apply(x[-num_rows:]), found[-num_rows:]), num_rows
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("fmt", FORMATS)
def test_rounding_is_as_fine_as_the_bits_allow(fmt):
    torch.manual_seed(0)
    weight = torch.randn(48, 256)
    weight[5] = 0.0
    integers = quantize(weight, fmt)
    low, high = {"int4": (-8, 7), "int8": (-127, 127)}[fmt]
    assert low <= integers.q_OI.min() < 0 < integers.q_OI.max() <= high
    num_groups = {"int4": 256 // GROUP, "int8": 1}[fmt]
    assert integers.scales_OG.shape == (48, num_groups)
    error = (dequantized(integers) - weight).abs().unflatten(1, (num_groups, -1))
    # half a step; a whole one where int4 would need + 8
    step = integers.scales_OG.float().abs().unsqueeze(2)
    assert (error <= step * (1.05 if fmt == "int4" else 0.75)).all()
    assert error.mean() < 0.3 * step.mean()
    assert not dequantized(integers)[5].any()


def test_every_integer_has_its_place():
    q = torch.randint(-8, 8, (80, 64), dtype=torch.int8)
    scales, zeros = torch.rand(80, 2), torch.randint(-8, 9, (80, 2), dtype=torch.int8)
    words, _, packed_zeros, *_ = packed(IntegerWeight("int4", torch.bfloat16, q, scales, zeros))
    bytes_, packed_scales, *_ = packed(IntegerWeight("int8", torch.bfloat16, q, scales))
    assert words.shape == (2, 8, 4, 16)
    assert bytes_.shape == (2, 8, 4, 2, 16, 4)
    for o, i in ((0, 0), (17, 5), (31, 63), (3, 34), (79, 40)):
        panel, e = (o // 64, o % 64 // 16), i % 8
        word = int(words[panel[0], i // 8, panel[1], o % 16])
        assert (word >> (4 * (e // 2) + 16 * (e % 2)) & 15) - 8 == q[o, i]
        place = [0, 4, 1, 5, 2, 6, 3, 7].index(e)
        assert bytes_[panel[0], i // 8, panel[1], place // 4, o % 16, place % 4] == q[o, i]
        assert packed_scales[panel[0], i // 32, panel[1], o % 16] == scales[o, i // 32]
        low, high = divmod(int(packed_zeros[panel[0], i // 32, panel[1], o % 16]), 1 << 16)
        assert low == high == 24 - zeros[o, i // 32]


@needs_native
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("shape", [(16, 32), (80, 96), (208, 704)])
def test_the_kernel_rounds_as_the_formulas_do(fmt, shape):
    torch.manual_seed(0)
    weight = torch.randn(shape).bfloat16()
    weight[3] = 0.0
    weight[4] = -weight[4, 0].abs()
    weight[5] = weight[5].clamp(-0.5, 0.5)  # largest magnitude of both signs
    layer, expected = (
        make_linear(weight, config=LinearConfig(quantization=fmt)),
        packed(quantize(weight, fmt)),
    )
    assert torch.equal(layer.weight.view(-1), expected[0].view(torch.int8).view(-1))
    assert torch.equal(layer.scales, expected[1])


@needs_native
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("shape", [(16, 32), (80, 96), (208, 704)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_equal_the_rounded_weights(fmt, shape, has_bias):
    torch.manual_seed(0)
    weight = torch.randn(shape).bfloat16()
    bias = torch.randn(shape[0]).bfloat16() if has_bias else None
    layer = make_linear(weight, bias, LinearConfig(quantization=fmt))
    assert type(layer) is {"int4": Int4Linear, "int8": Int8Linear}[fmt]
    assert layer.num_bytes < 0.7 * weight[:1].nbytes * (-(-shape[0] // 64) * 64)
    check_product(layer, quantize(weight, fmt), bias)


@needs_native
@pytest.mark.parametrize("group", [32, 96, 384])
@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_groups_with_zeros_and_float32_scales(group, has_zeros, dtype):
    torch.manual_seed(0)
    shape, groups = (112, 384), (112, 384 // group)
    integers = IntegerWeight(
        "int4",
        torch.bfloat16,
        torch.randint(-8, 8, shape, dtype=torch.int8),
        (torch.randn(groups) / 8).to(dtype),
        torch.randint(-8, 9, groups, dtype=torch.int8) if has_zeros else None,
    )
    layer = make_linear(integers)
    assert type(layer) is Int4Linear
    check_product(layer, integers)


@needs_native
@pytest.mark.parametrize("group", [32, 96])
def test_e2m1_as_checkpoints_of_gpt_oss_have_it(group):
    torch.manual_seed(0)
    numbers = torch.tensor(E2M1, dtype=torch.int8)
    integers = IntegerWeight(
        "fp4",
        torch.bfloat16,
        numbers[torch.randint(0, 16, (112, 384))],
        (2.0 ** torch.randint(-6, 2, (112, 384 // group))).bfloat16(),
    )
    integers.q_OI[0], integers.q_OI[1] = 12, -12  # the largest sums
    integers.scales_OG[1] = integers.scales_OG[0]
    bias = torch.randn(112).bfloat16()
    bias[:2] = 0.0
    layer = make_linear(integers, bias)
    assert type(layer) is Fp4Linear
    assert layer.num_bytes < 0.6 * 384 * 128
    check_product(layer, integers, bias)
    large = layer.apply(torch.full((3, 384), 3e4).bfloat16())  # integers of 127 alone
    assert torch.equal(large[:, 0], -large[:, 1])


@needs_native
@pytest.mark.parametrize(
    ("fmt", "group", "has_minima"),
    [
        ("int4", 32, True),
        ("int8", 32, False),
        ("int8", 32, True),
        ("int8", 16, False),
        ("int8", 48, False),
    ],
)
def test_int8_minima_and_groups_of_gguf_files(fmt, group, has_minima):
    torch.manual_seed(0)
    shape, groups = (112, 384), (112, 384 // group)
    low, high = (-8, 8) if fmt == "int4" else (-128, 128)
    integers = IntegerWeight(
        fmt,
        torch.bfloat16,
        torch.randint(low, high, shape, dtype=torch.int8),
        torch.randn(groups) / high,
        minima_OG=torch.randn(groups) if has_minima else None,
    )
    layer = make_linear(integers)
    assert type(layer) is {"int4": Int4Linear, "int8": Int8Linear}[fmt]
    check_product(layer, integers)


@needs_native
@pytest.mark.parametrize("fmt", FORMATS)
def test_zeros_and_columns_in_another_order(fmt):
    torch.manual_seed(0)
    shape, groups = (112, 384), (112, 384 // 64)
    high = 8 if fmt == "int4" else 128
    integers = IntegerWeight(
        fmt,
        torch.bfloat16,
        torch.randint(-high, high, shape, dtype=torch.int8),
        torch.randn(groups) / high,
        torch.randint(-high, high, groups, dtype=torch.int8),
        order_I=torch.randperm(384),
    )
    layer = make_linear(integers)
    assert type(layer) is {"int4": Int4Linear, "int8": Int8Linear}[fmt]
    check_product(layer, integers)


LIMITS = {"int4": 8, "int5": 16, "int6": 32}


def weight_in_blocks(fmt, group, *, has_minima, shape=(112, 768)):
    """Integers whose scales are those of a GGUF file's K types."""
    high, groups = LIMITS[fmt], (shape[0], shape[1] // group)
    low = 0 if has_minima else -128
    factors = [(torch.randn(shape[0], shape[1] // 256) / high / 50).half() for _ in range(2)]
    integers = [torch.randint(low, 64, groups, dtype=torch.int8) for _ in range(2)]
    each = [
        f.float().repeat_interleave(256 // group, 1) * i
        for f, i in zip(factors, integers, strict=True)
    ]
    return IntegerWeight(
        fmt,
        torch.bfloat16,
        torch.randint(-high, high, shape, dtype=torch.int8),
        each[0],
        minima_OG=high * each[0] - each[1] if has_minima else None,
        blocks=ScaleBlocks(
            integers[0],
            factors[0],
            integers[1] if has_minima else None,
            factors[1] if has_minima else None,
        ),
    )


# Each form is a kernel to compile; the other forms of files are in the slow suite.
slow = pytest.mark.slow


@needs_native
@pytest.mark.parametrize(
    ("fmt", "group", "has_minima", "num_bytes"),
    [
        ("int4", 32, True, 0.579),
        ("int6", 16, False, 0.821),
        pytest.param("int4", 16, True, 0.641, marks=slow),
        pytest.param("int4", 16, False, 0.571, marks=slow),
        pytest.param("int5", 32, True, 0.704, marks=slow),
    ],
)
def test_scales_in_blocks_multiply_exactly(fmt, group, has_minima, num_bytes, integer_unit):
    if integer_unit != "bytes":
        pytest.skip("these forms always use bytes")
    torch.manual_seed(0)
    integers = weight_in_blocks(fmt, group, has_minima=has_minima)
    integers.q_OI[0], integers.q_OI[1] = LIMITS[fmt] - 1, -LIMITS[fmt]  # the largest sums
    layer = make_linear(integers)
    assert layer.num_bytes <= num_bytes * 128 * 768
    check_product(layer, integers)


@needs_native
@pytest.mark.parametrize(
    ("fmt", "has_minima"),
    [
        ("int4", True),
        ("int8", False),
        pytest.param("int5", False, marks=slow),
        pytest.param("int5", True, marks=slow),
    ],
)
def test_half_scales_stay_half(fmt, has_minima):
    torch.manual_seed(0)
    shape, high = (112, 384), LIMITS.get(fmt, 128)
    scales = (torch.randn(112, 12) / high).half().float()
    minima = torch.randn(112, 12).half().float() + high * scales if has_minima else None
    q_OI = torch.randint(-high, high, shape, dtype=torch.int8)
    integers = IntegerWeight(fmt, torch.bfloat16, q_OI, scales, None, minima)
    layer = make_linear(integers)
    assert layer.scales.dtype == torch.float16
    assert layer.unit != "bytes" or not has_minima or layer.minima.dtype == torch.float16
    check_product(layer, integers)


@needs_native
@pytest.mark.parametrize("has_bias", [False, True])
def test_parts_in_several_formats_are_columns_of_one_product(has_bias):
    torch.manual_seed(0)
    parts = (
        weight_in_blocks("int4", 32, has_minima=True),
        weight_in_blocks("int6", 16, has_minima=False, shape=(48, 768)),
        quantize(torch.randn(32, 768).bfloat16(), "int8"),
    )
    bias = torch.randn(192).bfloat16() if has_bias else None
    layer, x = make_linear(StackedWeight(parts), bias), torch.randn(19, 768).bfloat16()
    biases = [None] * 3 if bias is None else bias.split([112, 48, 32])
    alone = [make_linear(part, own) for part, own in zip(parts, biases, strict=True)]
    assert layer.shape == (192, 768)
    assert layer.num_bytes == sum(part.num_bytes for part in alone)
    assert torch.equal(layer.apply(x), torch.cat([part.apply(x) for part in alone], 1))


def test_unsupported_groups_become_plain_weights():
    integers = IntegerWeight(
        "int8", torch.bfloat16, torch.randint(-9, 9, (32, 64), dtype=torch.int8), torch.rand(32, 8)
    )
    layer, x = make_linear(integers), torch.randn(3, 64).bfloat16()
    expected = x.double() @ dequantized(integers).bfloat16().double().T
    torch.testing.assert_close(layer.apply(x).double(), expected, atol=0.5, rtol=2e-2)


@needs_native
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("worst", [float("nan"), float("inf"), 1e-38])
def test_overflow_stays_in_its_row(fmt, worst):
    torch.manual_seed(0)
    weight = torch.randn(48, 64).bfloat16()
    layer = make_linear(weight, config=LinearConfig(quantization=fmt))
    x = torch.randn(5, 64).bfloat16()
    expected = layer.apply(x)
    x[3, 32:] = worst
    found = layer.apply(x)
    assert torch.equal(found[[0, 1, 2, 4]], expected[[0, 1, 2, 4]])
    assert found[3].isfinite().all() == (worst < 1)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_multiply_with_the_rounded_weights(fmt, dtype):
    torch.manual_seed(0)
    weight, x = torch.randn(24, 64).to(dtype), torch.randn(3, 64).to(dtype)
    integers = quantize(weight, fmt)
    expected = x.double() @ dequantized(integers).to(dtype).double().T
    for layer in (
        make_linear(weight, config=LinearConfig(quantization=fmt)),
        make_linear(integers),
    ):
        torch.testing.assert_close(layer.apply(x).double(), expected, atol=3e-2, rtol=2e-3)


def test_groups_must_divide_the_inputs():
    assert can_quantize(64, "int4")
    assert not can_quantize(48, "int4")
    assert can_quantize(48, "int8")
