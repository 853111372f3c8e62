"""Experts by compiled kernels equal those by torch, and no token's bits depend on the others."""

import pytest
import torch

from trouper.kernels.codegen import units
from trouper.kernels.cpu.experts import NativeExperts, grouped
from trouper.kernels.cpu.linear.dense import DenseLinear
from trouper.kernels.cpu.linear.quantization import E2M1, IntegerWeight
from trouper.kernels.experts import PlainExperts, Routing, route
from trouper.kernels.reference.norms import silu_and_mul
from trouper.kernels.select import make_experts, make_linear

from .test_integer_linear import weight_in_blocks

pytestmark = pytest.mark.skipif(not units.is_available(), reason="no compiled kernels here")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
# experts, of a token, hidden size, width
SHAPES = {
    "few": (8, 2, 64, 96),
    "no register's number": (20, 3, 96, 160),
    "many": (130, 8, 256, 64),
}


def both(shape, dtype, **rule):
    if not units.can_multiply():
        pytest.skip("no compiled products of floats here")
    torch.manual_seed(0)
    count, top_k, hidden, width = shape
    routing = Routing(count, top_k, **{"is_normalised": False} | rule)

    def linears(num_out, num_in):
        weights = [torch.randn(num_out, num_in, dtype=dtype) / num_in**0.5 for _ in range(count)]
        return [DenseLinear.pack(weight) for weight in weights]

    parts = linears(2 * width, hidden), linears(hidden, width), routing
    return grouped(*parts), PlainExperts(*parts)


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


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("is_normalised", [False, True])
@pytest.mark.parametrize("bias", [None, 0.3, -5.0])
def test_sigmoids_and_biases_choose_like_torch(shape, is_normalised, bias):
    bias_X = None if bias is None else bias * torch.rand(shape[0])
    rule = {"is_sigmoid": True, "scale": 1.5, "choice_bias": bias_X}
    native, plain = both(shape, torch.float32, is_normalised=is_normalised, **rule)
    x, logits, other = inputs(11, shape, torch.float32)
    found, wanted = (e.forward(x, logits, other, silu_and_mul) for e in (native, plain))
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_bias_changes_the_choice_but_no_weight():
    logits, bias = torch.tensor([[0.0, 1.0, 2.0, -1.0]]), torch.tensor([0.9, 0.0, 0.0, 0.0])
    ids, weights = route(logits, Routing(4, 2, False, is_sigmoid=True, choice_bias=bias))
    assert ids.tolist() == [[0, 2]]
    torch.testing.assert_close(weights, torch.tensor([[0.0, 2.0]]).sigmoid())


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_token_does_not_depend_on_its_batch(dtype):
    shape = SHAPES["few"]
    native, _ = both(shape, dtype)
    x, logits, _ = inputs(100, shape, dtype)
    together = native.forward(x, logits, None, silu_and_mul)
    for i in (0, 57, 99):
        alone = native.forward(x[i : i + 1], logits[i : i + 1], None, silu_and_mul)
        assert torch.equal(alone[0], together[i])


def test_of_equal_logits_the_first_experts_are_taken():
    ids, weights = route(torch.zeros(1, 16), Routing(10, 3, False))
    assert ids.tolist() == [[0, 1, 2]]
    torch.testing.assert_close(weights, torch.full((1, 3), 0.1))
    native, plain = both(SHAPES["few"], torch.float32)
    x = torch.randn(1, 64)
    found, wanted = (e.forward(x, torch.zeros(1, 16), None, silu_and_mul) for e in (native, plain))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_nan_logits_spoil_only_their_own_token(bad):
    shape = SHAPES["few"]
    native, _ = both(shape, torch.float32)
    x, logits, _ = inputs(3, shape, torch.float32)
    before = native.forward(x, logits, None, silu_and_mul)
    x[1], logits[1] = bad, bad
    after = native.forward(x, logits, None, silu_and_mul)
    assert torch.equal(after[[0, 2]], before[[0, 2]])
    assert not after[1].isfinite().any()


UNITS = {"dots": units.can_decode(), "bytes": True}
# form of the weights: format, groups of inputs (None: one), float32 scales, zeros, minima
FORMS = {
    "int4": ("int4", 32, False, False, False),
    "int4 of checkpoints": ("int4", 64, True, True, False),
    "int4 with minima": ("int4", 32, True, False, True),
    "e2m1": ("fp4", 32, False, False, False),
    "int8": ("int8", None, False, False, False),
    "int8 in groups of 16": ("int8", 16, True, False, False),
    "int8 with minima": ("int8", 32, True, False, True),
}


def integers(num_out, num_in, form):
    fmt, group, is_float, has_zeros, has_minima = form
    num_groups = 1 if group is None else num_in // group
    q_OI = torch.randint(-8, 8, (num_out, num_in), dtype=torch.int8)
    if fmt == "int8":
        q_OI = torch.randint(-127, 128, (num_out, num_in), dtype=torch.int8)
    elif fmt == "fp4":
        q_OI = torch.tensor(E2M1, dtype=torch.int8)[q_OI.int() + 8]
    scales = torch.rand(num_out, num_groups) / (127 if fmt == "int8" else 8) / num_in**0.5 + 1e-4
    zeros = torch.randint(-8, 8, (num_out, num_groups), dtype=torch.int8)
    return IntegerWeight(
        fmt,
        torch.bfloat16,
        q_OI,
        scales if is_float else scales.bfloat16(),
        zeros if has_zeros else None,
        torch.randn(num_out, num_groups) / num_in**0.5 if has_minima else None,
    )


def both_of_integers(shape, form, *, has_bias=False):
    torch.manual_seed(0)
    count, top_k, hidden, width = shape

    def linears(num_out, num_in):
        found = [make_linear(integers(num_out, num_in, form)) for _ in range(count)]
        for linear in found if has_bias else ():
            linear.bias = torch.randn(num_out, dtype=torch.bfloat16)
        return found

    parts = linears(2 * width, hidden), linears(hidden, width), Routing(count, top_k, True)
    return make_experts(*parts), PlainExperts(*parts)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_integer_experts_equal_their_own_layers(unit, form, monkeypatch):
    if not UNITS[unit]:
        pytest.skip("no such instructions here")
    monkeypatch.setattr(units, "integer_unit", lambda **properties: unit)
    shape = (6, 1, 64, 96)  # the sum of one expert, times one, is its output
    native, plain = both_of_integers(shape, form, has_bias=form[0] != "int8")
    assert type(native) is NativeExperts
    for num_tokens in (1, 3, 7, 61):
        x, logits, _ = inputs(num_tokens, shape, torch.bfloat16)
        found, wanted = (e.forward(x, logits, None, silu_and_mul) for e in (native, plain))
        assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    ("fmt", "group", "has_minima"),
    [("int4", 32, True), pytest.param("int6", 16, False, marks=pytest.mark.slow)],
)
def test_experts_with_scales_in_blocks_equal_their_layers(fmt, group, has_minima):
    torch.manual_seed(0)
    linears = [
        [
            make_linear(weight_in_blocks(fmt, group, has_minima=has_minima, shape=shape))
            for _ in range(4)
        ]
        for shape in ((512, 256), (256, 256))
    ]
    native, plain = (make(*linears, Routing(4, 1, True)) for make in (make_experts, PlainExperts))
    assert type(native) is NativeExperts
    for num_tokens in (1, 5, 23):
        x, logits, _ = inputs(num_tokens, (4, 1, 256, 256), torch.bfloat16)
        found, wanted = (e.forward(x, logits, None, silu_and_mul) for e in (native, plain))
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("unit", UNITS)
def test_integer_experts_do_not_depend_on_the_batch(unit, monkeypatch):
    if not UNITS[unit]:
        pytest.skip("no such instructions here")
    monkeypatch.setattr(units, "integer_unit", lambda **properties: unit)
    shape = SHAPES["few"]
    native, plain = both_of_integers(shape, FORMS["int4 with minima"])
    x, logits, other = inputs(90, shape, torch.bfloat16)
    together = native.forward(x, logits, other, silu_and_mul)
    wanted = plain.forward(x, logits, other, silu_and_mul)
    torch.testing.assert_close(together, wanted, atol=2e-2, rtol=2e-2)
    for i in (0, 44, 89):
        own = slice(i, i + 1)
        alone = native.forward(x[own], logits[own], other[own], silu_and_mul)
        assert torch.equal(alone[0], together[i])


def test_mixed_integer_experts_are_plain_experts():
    forms = ["int4 with minima", "int4"]
    linears = [make_linear(integers(64, 64, FORMS[form])) for form in forms * 2]
    assert type(make_experts(linears, linears, Routing(4, 2, False))) is PlainExperts


def test_products_may_differ_in_their_integers():
    first, second = (
        [make_linear(integers(*shape, FORMS[form])) for _ in range(4)]
        for shape, form in (((128, 64), "int4"), ((64, 64), "int8 in groups of 16"))
    )
    assert type(make_experts(first, second, Routing(4, 2, False))) is NativeExperts
