from functools import partial

import pytest
import torch
import torch.nn.functional as F

from trouper.kernels.reference.norms import (
    clamped_swiglu,
    clamped_swiglu_reference,
    gelu_and_mul,
    gelu_and_mul_reference,
    gelu_tanh_and_mul,
    gelu_tanh_and_mul_reference,
    silu_and_mul,
    silu_and_mul_reference,
)

PAIRS = [
    (silu_and_mul, silu_and_mul_reference),
    (gelu_and_mul, gelu_and_mul_reference),
    (gelu_tanh_and_mul, gelu_tanh_and_mul_reference),
    tuple(
        partial(each, alpha=1.7, limit=2.0) for each in (clamped_swiglu, clamped_swiglu_reference)
    ),
]


@pytest.mark.parametrize(("op", "reference"), PAIRS)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 3e-2)], ids=str
)
@pytest.mark.parametrize("shape", [(0, 4), (1, 2), (3, 126), (16, 2000)])
def test_it_equals_the_reference(op, reference, dtype, tolerance, shape):
    torch.manual_seed(0)
    gate_up = (3 * torch.randn(shape)).to(dtype)
    before = gate_up.clone()
    torch.testing.assert_close(op(gate_up), reference(gate_up), atol=tolerance, rtol=tolerance)
    assert torch.equal(gate_up, before)


def test_the_references_equal_torchs_own_formulas():
    gate, up = torch.randn(2, 5, 7).double()
    both = torch.cat((gate, up), -1)
    torch.testing.assert_close(silu_and_mul_reference(both), F.silu(gate) * up)
    torch.testing.assert_close(gelu_and_mul_reference(both), F.gelu(gate) * up)
    torch.testing.assert_close(
        gelu_tanh_and_mul_reference(both), F.gelu(gate, approximate="tanh") * up
    )
