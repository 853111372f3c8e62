import pytest
import torch

from trouper.kernels.linear import Linear, can_pack, linear, linear_reference

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 63, 17), (16, 64, 128), (7, 1000, 33)])
def test_packed_weights_give_the_product_of_the_plain_ones(dtype, has_bias, shape):
    num_tokens, num_in, num_out = shape
    torch.manual_seed(0)
    x = torch.randn(num_tokens, num_in).to(dtype)
    weight = (torch.randn(num_out, num_in) / num_in**0.5).to(dtype)
    bias = torch.randn(num_out).to(dtype) if has_bias else None
    expected = linear_reference(x, weight, bias)
    for pack in (True, False):
        found = linear(x, Linear(weight, bias, pack=pack))
        torch.testing.assert_close(found, expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


def test_a_batch_without_tokens_gives_no_rows():
    assert linear(torch.empty(0, 8), Linear(torch.randn(4, 8))).shape == (0, 4)


def test_half_precision_is_not_packed_and_says_so():
    layer = Linear(torch.zeros(4, 8, dtype=torch.float16))
    assert not layer.is_packed
    assert not can_pack(layer.weight)
    assert repr(layer) == "Linear(8 -> 4, torch.float16, plain)"


def test_the_reference_equals_a_sum_of_products():
    x, weight, bias = torch.randn(3, 5), torch.randn(2, 5), torch.randn(2)
    expected = (x[:, None] * weight).sum(-1) + bias
    torch.testing.assert_close(linear_reference(x, weight, bias), expected)
