import pytest
import torch
import torch.nn.functional as F

from trouper.kernels.linear import Linear
from trouper.kernels.linear_fused import (
    FUSED,
    activate,
    linear_act,
    linear_act_reference,
    linear_add,
    linear_add_reference,
)

KINDS = [
    (torch.float32, "onednn", 1e-5),
    (torch.float32, "plain", 1e-5),
    (torch.bfloat16, "onednn", 5e-2),
]
SHAPES = [(1, 8, 16), (7, 40, 24), (130, 64, 96)]


def tensors(shape, dtype):
    torch.manual_seed(0)
    num_tokens, num_inputs, num_outputs = shape
    weight = (torch.randn(num_outputs, num_inputs) / num_inputs**0.5).to(dtype)
    bias, residual = (
        torch.randn(*s).to(dtype) for s in ((num_outputs,), (num_tokens, num_outputs))
    )
    return torch.randn(num_tokens, num_inputs).to(dtype), weight, bias, residual


@pytest.mark.parametrize(("dtype", "layout", "tolerance"), KINDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("act", FUSED)
def test_the_activation_equals_the_reference(act, shape, dtype, layout, tolerance):
    x, weight, bias, _ = tensors(shape, dtype)
    layer = Linear(weight.clone(), bias, layout=layout)
    want = linear_act_reference(x, weight, bias, act)
    torch.testing.assert_close(linear_act(x, layer, act), want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("dtype", "layout", "tolerance"), KINDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_sum_equals_the_reference(shape, dtype, layout, tolerance):
    x, weight, bias, residual = tensors(shape, dtype)
    before = residual.clone()
    layer = Linear(weight.clone(), bias, layout=layout)
    want = linear_add_reference(x, weight, bias, residual)
    torch.testing.assert_close(linear_add(x, layer, residual), want, atol=tolerance, rtol=tolerance)
    assert torch.equal(residual, before)


def test_every_activation_has_torchs_formula():
    x = torch.randn(9)
    for act, want in (
        ("gelu", F.gelu(x)), ("gelu_tanh", F.gelu(x, approximate="tanh")), ("relu", x.relu()),
        ("silu", F.silu(x)), ("tanh", x.tanh()), ("sigmoid", x.sigmoid()), ("identity", x),
    ):  # fmt: skip
        assert torch.equal(activate(x, act), want)
    with pytest.raises(ValueError, match="swoosh"):
        activate(x, "swoosh")
