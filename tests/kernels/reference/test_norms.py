import pytest
import torch

from trouper.kernels.reference.norms import rms_norm, rms_norm_heads_, rms_norm_reference


@pytest.mark.parametrize(
    ("dtype", "atol"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-2)], ids=str
)
@pytest.mark.parametrize("shape", [(1, 1), (3, 63), (16, 1024), (5, 7, 1000), (0, 8)])
def test_it_equals_the_reference(dtype, atol, shape):
    torch.manual_seed(0)
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    found = rms_norm(x, weight, 1e-6)
    assert found.dtype == dtype
    torch.testing.assert_close(found, rms_norm_reference(x, weight, 1e-6), atol=atol, rtol=1e-2)


def test_strided_heads_are_normalised_each_by_itself():
    qkv = torch.randn(5, 6, 16)
    heads = qkv.narrow(1, 2, 3)
    weight = torch.randn(16)
    expected = torch.stack([rms_norm_reference(heads[:, i], weight, 1e-5) for i in range(3)], dim=1)
    torch.testing.assert_close(rms_norm(heads, weight, 1e-5), expected)


def test_a_float32_weight_is_not_rounded():
    x = torch.randn(4, 64).to(torch.bfloat16)
    weight = 1 + 2.0**-12 * torch.arange(64)
    found = rms_norm(x, weight, 1e-6)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, rms_norm_reference(x, weight, 1e-6), atol=0, rtol=2**-7)


def test_a_nan_row_does_not_touch_its_neighbours():
    x = torch.randn(3, 32)
    clean = rms_norm(x, torch.ones(32), 1e-6)
    x[1] = torch.nan
    found = rms_norm(x, torch.ones(32), 1e-6)
    assert torch.equal(found[::2], clean[::2])
    assert found[1].isnan().all()


def test_heads_are_normalised_with_their_own_weights():
    qkv = torch.randn(5, 6, 16)
    heads, rest = qkv.narrow(1, 0, 4), qkv.narrow(1, 4, 2).clone()
    weights = torch.randn(4, 16)
    expected = torch.stack(
        [rms_norm_reference(heads[:, i], weights[i], 1e-5) for i in range(4)], dim=1
    )
    rms_norm_heads_(heads, weights, 1e-5)
    torch.testing.assert_close(heads, expected)
    assert torch.equal(qkv[:, 4:], rest)
