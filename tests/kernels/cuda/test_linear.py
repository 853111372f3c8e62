"""Products with rows that do not depend on the number of rows."""

import pytest
import torch

from trouper.kernels.cuda.linear import InvariantLinear, matmul
from trouper.kernels.reference.linear import linear_reference

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def tensors(num_tokens, num_in, num_out, dtype, device):
    torch.manual_seed(0)
    x = torch.randn(num_tokens, num_in + 8).to(dtype)[:, :num_in]  # strided
    weight = (torch.randn(num_out, num_in) / num_in**0.5).to(dtype)
    return x.to(device), weight.to(device), torch.randn(num_out).to(dtype).to(device)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(
    ("num_tokens", "num_in", "num_out"),
    [
        (1, 16, 1),
        (3, 65, 70),
        (130, 96, 64),
        *(
            pytest.param(*sizes, marks=pytest.mark.gpu)
            for sizes in [(1, 4096, 6144), (700, 14_336, 4096), (8192, 1024, 6144)]
        ),
    ],
)
def test_it_is_the_product(num_tokens, num_in, num_out, dtype, device):
    x, weight, bias = tensors(num_tokens, num_in, num_out, dtype, device)
    tolerance = TOLERANCES[dtype] * max(1, num_in / 4096)  # float32 adds up so many
    for b in (bias, None):
        out = torch.full((num_tokens, num_out), torch.nan, dtype=dtype, device=device)
        expected = linear_reference(x, weight, b)
        torch.testing.assert_close(
            matmul(x, weight, b, out=out), expected, atol=tolerance, rtol=tolerance
        )


@pytest.mark.usefixtures("ordered_dots")
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("num_in", [96, pytest.param(4096, marks=pytest.mark.gpu)])
def test_a_row_does_not_depend_on_other_rows(num_in, dtype, device):
    x, weight, bias = tensors(150, num_in, 70, dtype, device)
    layer = InvariantLinear.pack(weight, bias)
    crowd = layer.apply(x)
    for first, last in ((0, 1), (7, 8), (64, 67), (3, 131), (149, 150)):
        assert torch.equal(layer.apply(x[first:last]), crowd[first:last])


def test_more_row_tiles_than_a_group_shares(device):
    x, weight, bias = tensors(64 * 9 + 1, 16, 130, torch.float32, device)
    expected = linear_reference(x, weight, bias)
    torch.testing.assert_close(matmul(x, weight, bias), expected, atol=1e-5, rtol=1e-5)
