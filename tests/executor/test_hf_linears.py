"""Linear layers of transformers models: which are exchanged, and that none is computed wrongly in silence."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from trouper.actors.executor.models.hf_decoder import AbsentWeight, HfLinear
from trouper.actors.executor.weights.hf_check import linear_layers, observed
from trouper.errors import UnsupportedFeatureError
from trouper.kernels.linear import LinearConfig
from trouper.kernels.select import make_linear


class Mixer(nn.Module):
    """Uses one weight as a layer, one directly, and one in both ways."""

    def __init__(self):
        super().__init__()
        self.layer, self.direct, self.both = (nn.Linear(64, 64, bias=False) for _ in range(3))
        self.head = nn.Linear(64, 64)

    def get_output_embeddings(self):
        return self.head

    def forward(self, x):
        y = self.layer(x) + x @ self.direct.weight.T
        return self.head(self.both(y) + F.linear(y, self.both.weight))


def exchangeable(quantization=None):
    torch.manual_seed(0)
    model = Mixer()
    x = torch.randn(3, 64)
    with torch.no_grad():
        results, layers = observed(linear_layers(model, quantization), lambda: [model(x)])
        return model, x, results[0], [layer.name for layer in layers]


def test_layers_whose_weight_is_an_operand_stay_plain():
    model, x, found, names = exchangeable()
    assert names == ["layer", "head"]
    with torch.no_grad():
        torch.testing.assert_close(found, model(x), rtol=0, atol=0)


def test_a_rounded_layer_is_observed_rounded():
    model, x, found, names = exchangeable("int4")
    assert names == ["layer", "head"]
    with torch.no_grad():
        error = (found - model(x)).abs().max()
        assert 1e-3 < error < 1.0
    assert not model.layer._forward_hooks
    assert not model.layer._forward_pre_hooks


@pytest.mark.parametrize("turn", [
    lambda x: x.transpose(0, 1), lambda x: x[:, ::2], lambda x: x.mT, lambda x: x[None].expand(2, -1, -1, -1),
])  # fmt: skip
def test_any_strides_of_input_give_same_product(turn):
    torch.manual_seed(0)
    x = turn(torch.randn(64, 64, 64))
    weight = torch.randn(32, 64)
    layer = HfLinear(make_linear(weight, None, LinearConfig()), torch.float32)
    torch.testing.assert_close(layer(x), F.linear(x, weight), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("use", [
    lambda w, x: w @ x.mT, lambda w, x: x @ w.T, lambda w, x: F.linear(x, w), lambda w, x: w.float(), lambda w, x: w[0],
    lambda w, x: torch.cat((w, w)), lambda w, x: w.data, lambda w, x: x.matmul(w.t()),
])  # fmt: skip
def test_an_absent_weight_refuses_to_be_computed_with(use):
    weight = AbsentWeight.like((4, 4), torch.bfloat16)
    assert (weight.shape, weight.size(0), weight.ndim, weight.numel()) == ((4, 4), 4, 2, 16)
    assert weight.dtype == torch.bfloat16
    assert weight.is_floating_point()
    with pytest.raises(UnsupportedFeatureError, match="directly"):
        use(weight, torch.randn(4, 4))
