"""Weights of 4 and 8 bits: how they are rounded, and that the kernels multiply with exactly that."""

import pytest
import torch

from trouper.kernels.linear import Linear, layout_of, linear
from trouper.kernels.quantization import (
    GROUP,
    PER_WORD,
    can_quantize,
    dequantized,
    pack_integers,
    quantize,
)

FORMATS = ("int4", "int8")
needs_native = pytest.mark.skipif(
    layout_of(torch.empty(16, 32, dtype=torch.bfloat16)) != "native", reason="needs AVX512-BF16"
)


@pytest.mark.parametrize("fmt", FORMATS)
def test_rounding_is_as_fine_as_the_bits_allow(fmt):
    torch.manual_seed(0)
    weight = torch.randn(48, 256)
    weight[5] = 0.0
    integers, scales = quantize(weight, fmt)
    low, high = {"int4": (-8, 7), "int8": (-127, 127)}[fmt]
    assert low <= integers.min() < 0 < integers.max() <= high
    error = (dequantized(integers, scales) - weight).abs().unflatten(1, (scales.shape[1], -1))
    # half a step; a whole one where int4 would need + 8
    step = scales.float().abs().unsqueeze(2)
    assert (error <= step * (1.05 if fmt == "int4" else 0.75)).all()
    assert error.mean() < 0.3 * step.mean()
    assert not dequantized(integers, scales)[5].any()
    assert scales.shape == (48, {"int4": 256 // GROUP, "int8": 1}[fmt])


@pytest.mark.parametrize("fmt", FORMATS)
def test_every_integer_has_its_place_in_a_word(fmt):
    per_word = PER_WORD[fmt]
    integers = torch.randint(-8, 8, (32, 64), dtype=torch.int8)
    words = pack_integers(integers, fmt)
    assert words.shape == (2, 64 // per_word, 16)
    for o, i in ((0, 0), (17, 5), (31, 63), (3, 34)):
        word, e = int(words[o // 16, i // per_word, o % 16]), i % per_word
        if fmt == "int4":
            found = (word >> (4 * (e // 2) + 16 * (e % 2)) & 15) - 8
        else:
            found = ((word >> 8 * e & 0xFF) ^ 0x80) - 0x80
        assert found == integers[o, i]


@needs_native
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("shape", [(16, 32), (80, 96), (208, 704)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_product_is_that_of_the_rounded_weights_for_any_number_of_rows(fmt, shape, has_bias):
    torch.manual_seed(0)
    weight = torch.randn(shape).bfloat16()
    bias = torch.randn(shape[0]).bfloat16() if has_bias else None
    layer = Linear(weight, bias, quantization=fmt)
    assert layer.layout == fmt
    assert layer.num_bytes < 0.7 * weight.nbytes
    x = torch.randn(250, shape[1] + 32).bfloat16()[:, : shape[1]]  # strided
    expected = x.double() @ dequantized(*quantize(weight, fmt)).double().T
    if bias is not None:
        expected += bias
    found = linear(x, layer)
    torch.testing.assert_close(found.double(), expected, atol=2e-2, rtol=8e-3)
    for num_rows in (1, 2, 3, 4, 5, 8, 9, 17, 192, 193):
        assert torch.equal(linear(x[-num_rows:], layer), found[-num_rows:]), num_rows


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_multiply_with_the_rounded_weights(fmt, dtype):
    torch.manual_seed(0)
    weight, x = torch.randn(24, 64).to(dtype), torch.randn(3, 64).to(dtype)
    layer = Linear(weight, quantization=fmt)
    expected = x.double() @ dequantized(*quantize(weight, fmt)).to(dtype).double().T
    torch.testing.assert_close(linear(x, layer).double(), expected, atol=3e-2, rtol=2e-3)


def test_groups_must_divide_the_inputs():
    assert can_quantize(64, "int4")
    assert not can_quantize(48, "int4")
    assert can_quantize(48, "int8")
