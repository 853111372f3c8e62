import pytest
import torch

from trouper.kernels.codegen import units
from trouper.kernels.cpu.fused.layer_norm import LayerNorm, layer_norm_reference


@pytest.mark.parametrize("native", [False, True], ids=["torch", "native"])
@pytest.mark.parametrize(("num_rows", "width"), [(1, 16), (3, 48), (40, 384)])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)], ids=str
)
def test_it_equals_the_reference(num_rows, width, has_bias, dtype, tolerance, native):
    if native and units.kind_of(dtype) is None:
        pytest.skip("this machine's kernels do not compute with it")
    torch.manual_seed(0)
    x = (torch.randn(num_rows, width) * 3 + 5).to(dtype)  # far from 0: mean before variance
    weight, bias = torch.randn(width).to(dtype), torch.randn(width).to(dtype)
    bias = bias if has_bias else None
    norm = LayerNorm(weight, bias, 1e-5, native=native)
    want = layer_norm_reference(x, weight, bias, 1e-5)
    torch.testing.assert_close(norm(x), want, atol=tolerance, rtol=tolerance)
    residual = torch.randn(num_rows, width).to(dtype)
    want = layer_norm_reference(x.double() + residual.double(), weight, bias, 1e-5).to(dtype)
    torch.testing.assert_close(norm(x, residual), want, atol=2 * tolerance, rtol=2 * tolerance)


def test_it_is_torchs_where_rows_are_no_whole_registers():
    x = torch.randn(5, 20)
    norm = LayerNorm(torch.ones(20), None, 1e-5)
    assert "torch" in repr(norm)
    torch.testing.assert_close(norm(x).mean(1), torch.zeros(5), atol=1e-6, rtol=0)
