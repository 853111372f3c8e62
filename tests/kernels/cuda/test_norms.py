import pytest
import torch

from trouper.kernels.cuda.norms import (
    fused_add_rms_norm,
    fused_add_rms_norm_reference,
    heads_norm_reference,
    norm_by_sum_,
    sum_of_squares_,
)

TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
HEADS_SHAPES = [(0, 64), (1, 32), (3, 96), (2, 2048)]  # tokens, and numbers of a rank
HEADS_REAL = [(256, 1024), (2048, 2560)]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(
    "shape", HEADS_SHAPES + [pytest.param(s, marks=pytest.mark.gpu) for s in HEADS_REAL]
)
def test_parts_become_what_the_whole_would_be(device, dtype, shape):
    """The rows of both ranks continue behind q with other data."""
    torch.manual_seed(0)
    num_tokens, width = shape
    whole = torch.randn(num_tokens, 2 * width).to(dtype)
    weight = torch.randn(2 * width).to(dtype)
    expected = heads_norm_reference(whole, weight, 1e-5)
    rows = [torch.randn(num_tokens, width + 5).to(dtype).to(device) for _ in range(2)]
    rest = [row[:, width:].clone() for row in rows]
    parts = [row[:, :width].copy_(part) for row, part in zip(rows, whole.chunk(2, 1), strict=True)]
    sums = torch.full((2, num_tokens), torch.nan, device=device)
    for part, mine in zip(parts, sums, strict=True):
        sum_of_squares_(part, mine)
    for part, mine in zip(parts, weight.to(device).chunk(2), strict=True):
        norm_by_sum_(part, sums.sum(0), mine, num=2 * width, eps=1e-5)
    found = torch.cat(parts, 1).cpu()
    torch.testing.assert_close(found, expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])
    assert all(torch.equal(row[:, width:], other) for row, other in zip(rows, rest, strict=True))


def test_sum_of_squares_does_not_depend_on_batch(device):
    torch.manual_seed(0)
    x, sums = torch.randn(7, 200, device=device), torch.empty(7, device=device)
    alone = torch.empty(1, device=device)
    sum_of_squares_(x[3:4], alone)
    x[5] = torch.nan
    sum_of_squares_(x, sums)
    assert torch.equal(sums[3:4], alone)


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
