import pytest
import torch

from trouper.kernels.codegen import units
from trouper.kernels.cpu.linear.by_torch import PlainLinear
from trouper.kernels.cpu.linear.compressed import CompressedLinear
from trouper.kernels.cpu.linear.dense import DenseLinear
from trouper.kernels.cpu.linear.split_fp32 import SplitLinear
from trouper.kernels.linear import LinearConfig
from trouper.kernels.reference.linear import linear_reference
from trouper.kernels.select import make_linear

needs_native = pytest.mark.skipif(not units.can_multiply(), reason="needs native products")
pytestmark = pytest.mark.usefixtures("unit")
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
KINDS = [
    (DenseLinear, torch.bfloat16),
    (CompressedLinear, torch.bfloat16),
    (DenseLinear, torch.float32),
    (SplitLinear, torch.float32),
]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (3, 63, 17), (16, 64, 128), (7, 1000, 33), (5, 96, 48)]
)
def test_packed_weights_equal_plain_weights(dtype, has_bias, shape):
    num_tokens, num_in, num_out = shape
    torch.manual_seed(0)
    x = torch.randn(num_tokens, num_in).to(dtype)
    weight = (torch.randn(num_out, num_in) / num_in**0.5).to(dtype)
    bias = torch.randn(num_out).to(dtype) if has_bias else None
    expected = linear_reference(x, weight, bias)
    layers = [
        PlainLinear.pack(weight, bias),
        make_linear(weight, bias),
        make_linear(weight, bias, LinearConfig(is_compressed=False)),
        make_linear(weight, bias, LinearConfig(is_for_many_rows=True)),
    ]
    for layer in layers:
        found, tolerance = layer.apply(x), TOLERANCES[dtype]
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@needs_native
@pytest.mark.parametrize("num_out", [16, 80, 208])
@pytest.mark.parametrize(("kind", "dtype"), KINDS, ids=str)
def test_row_does_not_depend_on_rows_or_threads(num_out, kind, dtype, unit):
    if kind is SplitLinear and unit != "tiles":
        pytest.skip("is tiles")
    torch.manual_seed(0)
    weight, bias = torch.randn(num_out, 96).to(dtype), torch.randn(num_out).to(dtype)
    layer = kind.pack(weight, bias)
    assert type(layer) is kind
    before = torch.get_num_threads()
    x = torch.randn(400, 128).to(dtype)[:, :96]  # strided
    expected = layer.apply(x)
    tolerance = TOLERANCES[dtype]
    reference = linear_reference(x, weight, bias)
    torch.testing.assert_close(expected, reference, atol=tolerance, rtol=tolerance)
    try:
        for num_threads in (1, 3):
            torch.set_num_threads(num_threads)
            for num_rows in (*range(1, 26), 48, 191, 192, 193, 400):
                found = layer.apply(x[-num_rows:])
                assert torch.equal(found, expected[-num_rows:]), num_rows
    finally:
        torch.set_num_threads(before)


def test_a_batch_without_tokens_gives_no_rows():
    assert make_linear(torch.randn(4, 8)).apply(torch.empty(0, 8)).shape == (0, 4)


def test_a_layer_says_how_it_is_kept():
    assert repr(make_linear(torch.zeros(4, 8, dtype=torch.float16))) == "<PlainLinear 8 -> 4>"


def test_the_reference_equals_a_sum_of_products():
    x, weight, bias = torch.randn(3, 5), torch.randn(2, 5), torch.randn(2)
    expected = (x[:, None] * weight).sum(-1) + bias
    torch.testing.assert_close(linear_reference(x, weight, bias), expected)
