import pytest
import torch

from trouper.kernels.cuda.fused_add_rms_norm import fused_add_rms_norm, fused_add_rms_norm_reference

TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
SHAPES = [(0, 64), (1, 1), (3, 63), (5, 1000), (2, 2048)]
REAL = [(1, 1024), (256, 4096), (2048, 8192), (3, 16384)]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("shape", SHAPES + [pytest.param(s, marks=pytest.mark.gpu) for s in REAL])
@pytest.mark.parametrize("form", ["plain", "sum", "post norm"])
def test_it_equals_the_reference(device, dtype, shape, form):
    torch.manual_seed(0)
    x, y = torch.randn(2, *shape).to(dtype)
    weight, post = torch.randn(2, shape[1])  # float32, as Gemma's
    options = {"alpha": 0.5, "post_weight_E": post if form == "post norm" else None}
    y = None if form == "plain" else y
    sums, expected = fused_add_rms_norm_reference(x, y, weight, 1e-6, **options)
    options["post_weight_E"] = _to(device, options["post_weight_E"])
    x = x.to(device)
    out = torch.full(shape, torch.nan, dtype=dtype, device=device)
    found = fused_add_rms_norm(x, _to(device, y), weight.to(device), 1e-6, out=out, **options)
    assert found is out
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(x.cpu(), sums, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(out.cpu(), expected, atol=tolerance, rtol=tolerance)
    assert (out.cpu() - expected).double().norm() <= 3e-3 * expected.double().norm()


def test_strided_rows_may_be_normalised_in_place(device):
    torch.manual_seed(0)
    both = torch.randn(5, 96, device=device)
    rest, rows = both[:, :33].clone(), both[:, 33:]
    weight = torch.randn(63, device=device)
    _, expected = fused_add_rms_norm_reference(rows.cpu(), None, weight.cpu(), 1e-5)
    fused_add_rms_norm(rows, None, weight, 1e-5, out=rows)
    torch.testing.assert_close(rows.cpu(), expected)
    assert torch.equal(both[:, :33], rest)


def test_a_row_does_not_depend_on_its_batch(device):
    torch.manual_seed(0)
    x = torch.randn(7, 200, device=device)
    weight = torch.randn(200, device=device)
    alone = fused_add_rms_norm(x[3:4], None, weight, 1e-6)
    x[5] = torch.nan
    assert torch.equal(fused_add_rms_norm(x, None, weight, 1e-6)[3:4], alone)


def test_the_reference_is_the_separate_operations():
    x, y, weight = torch.randn(4, 16), torch.randn(4, 16), torch.randn(16)
    total, out = fused_add_rms_norm_reference(x, y, weight, 1e-6, alpha=2.0)
    torch.testing.assert_close(total, x + 2 * y)
    torch.testing.assert_close(out, torch.rms_norm(total, (16,), weight, 1e-6))


def _to(device, x):
    return None if x is None else x.to(device)
