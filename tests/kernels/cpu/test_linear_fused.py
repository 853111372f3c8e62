import pytest
import torch
import torch.nn.functional as F

from trouper.kernels.codegen import units
from trouper.kernels.cpu.linear.by_torch import FUSED, OneDNNLinear, PlainLinear, packed_dtypes
from trouper.kernels.cpu.linear.dense import DenseLinear
from trouper.kernels.cpu.linear.split_fp32 import SplitLinear
from trouper.kernels.reference.linear import linear_act_reference, linear_add_reference
from trouper.kernels.reference.norms import activate

pytestmark = pytest.mark.usefixtures("unit")
KINDS = [
    (torch.float32, OneDNNLinear, 1e-5),
    (torch.float32, DenseLinear, 1e-5),
    (torch.float32, SplitLinear, 1e-5),
    (torch.float32, PlainLinear, 1e-5),
    (torch.bfloat16, OneDNNLinear, 5e-2),
    (torch.bfloat16, DenseLinear, 5e-2),
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


def skip_without(kind, dtype):
    if kind is OneDNNLinear and dtype not in packed_dtypes():
        pytest.skip("oneDNN does not pack this dtype here")
    if kind in (DenseLinear, SplitLinear) and not units.can_multiply():
        pytest.skip("needs native products")
    if kind is SplitLinear and units.bf16_unit() != "tiles":
        pytest.skip("is tiles")


@pytest.mark.parametrize(("dtype", "kind", "tolerance"), KINDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("act", FUSED)
def test_the_activation_equals_the_reference(act, shape, dtype, kind, tolerance):
    x, weight, bias, _ = tensors(shape, dtype)
    skip_without(kind, dtype)
    layer = kind.pack(weight.clone(), bias)
    want = linear_act_reference(x, weight, bias, act)
    torch.testing.assert_close(layer.apply_act(x, act), want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("dtype", "kind", "tolerance"), KINDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_sum_equals_the_reference(shape, dtype, kind, tolerance):
    x, weight, bias, residual = tensors(shape, dtype)
    skip_without(kind, dtype)
    before = residual.clone()
    layer = kind.pack(weight.clone(), bias)
    want = linear_add_reference(x, weight, bias, residual)
    torch.testing.assert_close(layer.apply_add(x, residual), want, atol=tolerance, rtol=tolerance)
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


def test_bfloat16_gelu_is_exact_to_half_a_unit():
    weight = torch.eye(64).bfloat16()
    if not units.can_multiply():
        pytest.skip("this machine does not multiply bfloat16")
    x = torch.linspace(-12, 12, 64 * 64).view(64, 64).bfloat16()
    got = DenseLinear.pack(weight).apply_act(x, "gelu").double()
    want = F.gelu(x.double())
    assert ((got - want).abs() - want.abs() / 256).max() < 1e-4
