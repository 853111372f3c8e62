"""Experts by compiled kernels equal those by torch, and no token's bits depend on the others."""

import pytest
import torch

from trouper.kernels.codegen import units
from trouper.kernels.cpu.experts.native import NativeExperts
from trouper.kernels.cpu.linear.dense import DenseLinear
from trouper.kernels.experts import PlainExperts, Routing
from trouper.kernels.linear import LinearConfig
from trouper.kernels.reference.act_and_mul import silu_and_mul
from trouper.kernels.reference.experts import route
from trouper.kernels.select import make_experts, make_linear

pytestmark = pytest.mark.skipif(not units.can_multiply(), reason="no compiled products here")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
# experts, of a token, hidden size, width
SHAPES = {
    "few": (8, 2, 64, 96),
    "no register's number": (20, 3, 96, 160),
    "many": (130, 8, 256, 64),
}


def both(shape, dtype, *, is_normalised=False, has_shared_gate=False):
    torch.manual_seed(0)
    count, top_k, hidden, width = shape
    routing = Routing(count, top_k, is_normalised, has_shared_gate)

    def linears(num_out, num_in):
        weights = [torch.randn(num_out, num_in, dtype=dtype) / num_in**0.5 for _ in range(count)]
        return [DenseLinear.pack(weight) for weight in weights]

    parts = linears(2 * width, hidden), linears(hidden, width), routing
    return NativeExperts(*parts), PlainExperts(*parts)


def inputs(num_tokens, shape, dtype):
    count, _, hidden, _ = shape
    stride = -(-(count + 1) // 16) * 16
    x = torch.randn(num_tokens, hidden, dtype=dtype)
    return x, 3 * torch.randn(num_tokens, stride, dtype=dtype), torch.randn_like(x)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("is_normalised", [False, True])
@pytest.mark.parametrize("shared", ["none", "plain", "gated"])
def test_kernels_give_what_torch_gives(dtype, shape, is_normalised, shared):
    native, plain = both(
        shape, dtype, is_normalised=is_normalised, has_shared_gate=shared == "gated"
    )
    for num_tokens in (1, 3, 11, 150):
        x, logits, other = inputs(num_tokens, shape, dtype)
        other = None if shared == "none" else other
        found, wanted = (e.forward(x, logits, other, silu_and_mul) for e in (native, plain))
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_token_alone_has_the_bits_it_has_among_others(dtype):
    shape = SHAPES["few"]
    native, _ = both(shape, dtype)
    x, logits, _ = inputs(100, shape, dtype)
    together = native.forward(x, logits, None, silu_and_mul)
    for i in (0, 57, 99):
        alone = native.forward(x[i : i + 1], logits[i : i + 1], None, silu_and_mul)
        assert torch.equal(alone[0], together[i])


def test_of_equal_logits_the_first_experts_are_taken():
    ids, weights = route(torch.zeros(1, 16), 10, 3, is_normalised=False)
    assert ids.tolist() == [[0, 1, 2]]
    torch.testing.assert_close(weights, torch.full((1, 3), 0.1))
    native, plain = both(SHAPES["few"], torch.float32)
    x = torch.randn(1, 64)
    found, wanted = (e.forward(x, torch.zeros(1, 16), None, silu_and_mul) for e in (native, plain))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_logits_that_are_no_numbers_spoil_their_own_token_alone(bad):
    shape = SHAPES["few"]
    native, _ = both(shape, torch.float32)
    x, logits, _ = inputs(3, shape, torch.float32)
    before = native.forward(x, logits, None, silu_and_mul)
    x[1], logits[1] = bad, bad
    after = native.forward(x, logits, None, silu_and_mul)
    assert torch.equal(after[[0, 2]], before[[0, 2]])
    assert not after[1].isfinite().any()


def test_integer_experts_take_the_way_of_any_linear_layer():
    config = LinearConfig(quantization="int4")
    linears = [make_linear(torch.randn(64, 64, dtype=torch.bfloat16), config=config)] * 4
    assert type(make_experts(linears, linears, Routing(4, 2, False))) is PlainExperts
