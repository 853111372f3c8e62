import pytest
import torch

from trouper.kernels.cpu.linear.layer import Linear, layout_of, linear, linear_reference

needs_native = pytest.mark.skipif(
    layout_of(torch.empty(16, 32, dtype=torch.bfloat16)) != "native", reason="needs native products"
)
pytestmark = pytest.mark.usefixtures("unit")
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (3, 63, 17), (16, 64, 128), (7, 1000, 33), (5, 96, 48)]
)
def test_packed_weights_give_the_product_of_the_plain_ones(dtype, has_bias, shape):
    num_tokens, num_in, num_out = shape
    torch.manual_seed(0)
    x = torch.randn(num_tokens, num_in).to(dtype)
    weight = (torch.randn(num_out, num_in) / num_in**0.5).to(dtype)
    bias = torch.randn(num_out).to(dtype) if has_bias else None
    expected = linear_reference(x, weight, bias)
    for layout in {"plain", layout_of(weight), layout_of(weight, is_for_many=True)}:
        found = linear(x, Linear(weight, bias, layout=layout))
        torch.testing.assert_close(found, expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@needs_native
@pytest.mark.parametrize("num_out", [16, 80, 208])
@pytest.mark.parametrize("layout", ["native", "compressed", "floats", "split"])
def test_a_row_does_not_depend_on_the_number_of_rows_or_threads(num_out, layout, unit):
    if layout == "split" and unit != "tiles":
        pytest.skip("is tiles")
    torch.manual_seed(0)
    dtype = torch.float32 if layout in ("floats", "split") else torch.bfloat16
    weight, bias = torch.randn(num_out, 96).to(dtype), torch.randn(num_out).to(dtype)
    layer = Linear(weight, bias, layout=None if layout == "compressed" else layout)
    assert layer.layout == layout
    before = torch.get_num_threads()
    x = torch.randn(400, 128).to(dtype)[:, :96]  # strided
    expected = linear(x, layer)
    tolerance = TOLERANCES[dtype]
    reference = linear_reference(x, weight, bias)
    torch.testing.assert_close(expected, reference, atol=tolerance, rtol=tolerance)
    try:
        for num_threads in (1, 3):
            torch.set_num_threads(num_threads)
            for num_rows in (*range(1, 26), 48, 191, 192, 193, 400):
                found = linear(x[-num_rows:], layer)
                assert torch.equal(found, expected[-num_rows:]), num_rows
    finally:
        torch.set_num_threads(before)


def test_a_batch_without_tokens_gives_no_rows():
    assert linear(torch.empty(0, 8), Linear(torch.randn(4, 8))).shape == (0, 4)


def test_half_precision_is_not_packed_and_says_so():
    layer = Linear(torch.zeros(4, 8, dtype=torch.float16))
    assert repr(layer) == "Linear(8 -> 4, torch.float16, plain)"


def test_the_reference_equals_a_sum_of_products():
    x, weight, bias = torch.randn(3, 5), torch.randn(2, 5), torch.randn(2)
    expected = (x[:, None] * weight).sum(-1) + bias
    torch.testing.assert_close(linear_reference(x, weight, bias), expected)
