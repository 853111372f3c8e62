import pytest
import torch

from trouper.kernels.cuda.norms import act_and_mul
from trouper.kernels.reference.norms import gelu_tanh_and_mul_reference, silu_and_mul_reference

REFERENCES = {"silu": silu_and_mul_reference, "gelu_tanh": gelu_tanh_and_mul_reference}
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
SHAPES = [(0, 8), (1, 1), (3, 63), (2, 1000), (1, 2050)]
REAL = [(1, 3072), (256, 14_336), (2048, 12_288), (120_000, 9_000)]  # the last crosses int32


@pytest.mark.parametrize("activation", REFERENCES)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("shape", SHAPES + [pytest.param(s, marks=pytest.mark.gpu) for s in REAL])
def test_it_equals_the_reference(device, activation, dtype, shape):
    torch.manual_seed(0)
    num_tokens, width = shape
    gate_up = (3 * torch.randn(num_tokens, 2 * width, device=device)).to(dtype)
    out = torch.full(shape, torch.nan, dtype=dtype, device=device)
    assert act_and_mul(gate_up, activation, out=out) is out
    last = slice(-256, None)  # in float64, all of the largest case would not fit
    expected = REFERENCES[activation](gate_up[last])
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(out[last], expected, atol=tolerance, rtol=tolerance)
    assert (out[last] - expected).double().norm() <= 3e-3 * expected.double().norm()
    assert not out.isnan().any()


def test_gates_that_overflow_the_exponential_saturate(device):
    gate = torch.tensor([[-1e4, -90.0, 0.0, 90.0, 1e4]], device=device)
    found = act_and_mul(torch.cat((gate, torch.ones_like(gate)), 1), "silu")
    assert found.tolist() == [[0.0, 0.0, 0.0, 90.0, 1e4]]
