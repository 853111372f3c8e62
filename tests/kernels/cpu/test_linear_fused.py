import pytest
import torch
import torch.nn.functional as F

from trouper.kernels.cpu.linear.fused import (
    FUSED,
    activate,
    linear_act,
    linear_act_reference,
    linear_add,
    linear_add_reference,
)
from trouper.kernels.cpu.linear.layer import NATIVE, Linear, layout_of

pytestmark = pytest.mark.usefixtures("unit")
KINDS = [
    (torch.float32, "onednn", 1e-5),
    (torch.float32, "floats", 1e-5),
    (torch.float32, "split", 1e-5),
    (torch.float32, "plain", 1e-5),
    (torch.bfloat16, "onednn", 5e-2),
    (torch.bfloat16, "native", 5e-2),
]
SHAPES = [(1, 32, 16), (7, 64, 48), (130, 64, 96)]


def tensors(shape, dtype):
    torch.manual_seed(0)
    num_tokens, num_inputs, num_outputs = shape
    weight = (torch.randn(num_outputs, num_inputs) / num_inputs**0.5).to(dtype)
    bias, residual = (
        torch.randn(*s).to(dtype) for s in ((num_outputs,), (num_tokens, num_outputs))
    )
    return torch.randn(num_tokens, num_inputs).to(dtype), weight, bias, residual


def skip_without(layout, weight):
    is_bf16 = weight.dtype == torch.bfloat16
    if layout == "onednn" and is_bf16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN does not multiply bfloat16 here")
    own = (layout_of(weight, is_for_many=is_for_many) for is_for_many in (False, True))
    if layout in NATIVE and layout not in own:
        pytest.skip("this machine does not multiply so")


@pytest.mark.parametrize(("dtype", "layout", "tolerance"), KINDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("act", FUSED)
def test_the_activation_equals_the_reference(act, shape, dtype, layout, tolerance):
    x, weight, bias, _ = tensors(shape, dtype)
    skip_without(layout, weight)
    layer = Linear(weight.clone(), bias, layout=layout)
    want = linear_act_reference(x, weight, bias, act)
    torch.testing.assert_close(linear_act(x, layer, act), want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("dtype", "layout", "tolerance"), KINDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_sum_equals_the_reference(shape, dtype, layout, tolerance):
    x, weight, bias, residual = tensors(shape, dtype)
    skip_without(layout, weight)
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


def test_gelu_of_bfloat16_is_exact_to_half_a_unit():
    weight = torch.eye(64).bfloat16()
    if layout_of(weight) != "native":
        pytest.skip("this machine does not multiply bfloat16")
    x = torch.linspace(-12, 12, 64 * 64).view(64, 64).bfloat16()
    got = linear_act(x, Linear(weight, layout="native"), "gelu").double()
    want = F.gelu(x.double())
    assert ((got - want).abs() - want.abs() / 256).max() < 1e-4
