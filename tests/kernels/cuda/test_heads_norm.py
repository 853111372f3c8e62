import pytest
import torch

from trouper.kernels.cuda.heads_norm import heads_norm_reference, norm_by_sum_, sum_of_squares_

TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
SHAPES = [(0, 64), (1, 32), (3, 96), (2, 2048)]  # tokens, and numbers of a rank
REAL = [(256, 1024), (2048, 2560)]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("shape", SHAPES + [pytest.param(s, marks=pytest.mark.gpu) for s in REAL])
def test_parts_become_what_the_whole_would_be(device, dtype, shape):
    """Two ranks, whose rows begin with q and go on with something else."""
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


def test_a_row_does_not_depend_on_its_batch(device):
    torch.manual_seed(0)
    x, sums = torch.randn(7, 200, device=device), torch.empty(7, device=device)
    alone = torch.empty(1, device=device)
    sum_of_squares_(x[3:4], alone)
    x[5] = torch.nan
    sum_of_squares_(x, sums)
    assert torch.equal(sums[3:4], alone)
