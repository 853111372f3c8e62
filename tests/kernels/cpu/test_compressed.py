"""Weights in twelve bits: every product is that of the plain weights, bit for bit."""

import ctypes

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trouper.kernels.codegen import launch, units
from trouper.kernels.cpu.linear.compressed import (
    COMPRESSED_BLOCKINGS,
    CompressedLinear,
    scratch_bytes,
)
from trouper.kernels.cpu.linear.dense import DenseLinear

pytestmark = [
    pytest.mark.skipif(
        not units.can_multiply(),
        reason="needs native products",
    ),
    pytest.mark.usefixtures("unit"),
]
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 17, 191, 192, 193, 210)
# 0, -0, the least and the greatest denormal, the greatest number, infinities, two that are none, 1
ODD = (0, 0x8000, 1, 0x807F, 0x7F7F, 0x7F80, 0xFF80, 0x7FC0, 0xFFFF, 0x3F80)


def weights(num_out, num_in, seed=0):
    random = torch.Generator().manual_seed(seed)
    return torch.randn(num_out, num_in, generator=random).mul_(0.02).bfloat16()


def bits(x):
    return x.view(torch.int16)


def products_with_unit_vectors(layer):
    return layer.apply(torch.eye(layer.shape[1], dtype=torch.bfloat16)).T


def decoded(layer):
    """The bits of the first panels, as a product of many rows leaves them in its scratch memory."""
    num_out, num_in = layer.shape
    num_rows, num_panels = 17, COMPRESSED_BLOCKINGS[units.bf16_unit()].many.panels
    layer.apply(torch.zeros(num_rows, num_in, dtype=torch.bfloat16))
    size = scratch_bytes(num_rows, num_in, units.bf16_unit())
    memory = (ctypes.c_int16 * (size // 2)).from_address(launch.scratch(size))
    panels = torch.from_numpy(np.array(memory)).view(num_panels, -1)
    return panels[: num_out // 16, : 16 * num_in].unflatten(1, (num_in // 2, 16, 2))


@pytest.mark.parametrize("shape", [(16, 32), (48, 96), (208, 704), (80, 1024)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_equal_plain_weights_for_any_rows(shape, has_bias):
    weight = weights(*shape)
    bias = weights(1, shape[0]).flatten() if has_bias else None
    layer, plain = CompressedLinear.pack(weight, bias), DenseLinear.pack(weight, bias)
    assert isinstance(layer, CompressedLinear)
    x = torch.randn(210, shape[1] + 32).bfloat16()[:, : shape[1]]  # strided
    expected = plain.apply(x)
    for num_rows in ROWS:
        assert torch.equal(layer.apply(x[-num_rows:]), expected[-num_rows:]), num_rows


def test_a_weight_takes_twelve_bits_and_a_little():
    weight = weights(64, 1024)
    assert 0.75 < CompressedLinear.pack(weight).num_bytes / weight.nbytes < 0.78


@given(
    pairs=st.sampled_from([16, 48, 144]),
    panels=st.integers(1, 3),
    centre=st.integers(20, 230),
    exceptions=st.dictionaries(
        st.tuples(st.integers(0, 2), st.integers(0, 2**16)),
        st.sampled_from(ODD) | st.integers(0, 2**16 - 1),
        max_size=7,
    ),
    seed=st.integers(0, 99),
)
def test_every_weight_comes_back_bit_for_bit(pairs, panels, centre, exceptions, seed):
    """Seven exceptions fit into every panel, wherever they are and whatever they hold."""
    random = np.random.default_rng(seed)
    shape = panels * 16, 2 * pairs
    exponents = random.integers(centre, centre + 16, shape)
    pattern = exponents << 7 | random.integers(0, 2, shape) << 15 | random.integers(0, 128, shape)
    for (panel, place), value in exceptions.items():
        row, column = divmod(place % (32 * pairs), 2 * pairs)
        pattern[panel % panels * 16 + row, column] = value
    weight = torch.from_numpy(pattern.astype(np.uint16).view(np.int16)).view(torch.bfloat16)
    layer, plain = CompressedLinear.pack(weight), DenseLinear.pack(weight)
    assert isinstance(layer, CompressedLinear)
    x = torch.randn(20, 2 * pairs).bfloat16()
    for num_rows in (1, 6, 20):
        found, expected = layer.apply(x[:num_rows]), plain.apply(x[:num_rows])
        assert torch.equal(bits(found), bits(expected))
    found = decoded(layer)
    if panels <= len(found):  # or a thread's memory holds what it took last
        assert torch.equal(found, bits(plain.weight))


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, float("inf"), float("nan")])
def test_a_matrix_of_one_value_is_compressed(value):
    weight = torch.full((32, 64), value, dtype=torch.bfloat16)
    weight[0, 0] = 2.0
    layer = CompressedLinear.pack(weight)
    assert isinstance(layer, CompressedLinear)
    x = torch.ones(3, 64, dtype=torch.bfloat16)
    found, expected = layer.apply(x), DenseLinear.pack(weight).apply(x)
    assert torch.equal(bits(found), bits(expected))


def test_panels_choose_their_exponents_alone():
    weight = weights(48, 512)
    weight[:16] *= 2.0**40
    weight[32:] = 0.0
    layer = CompressedLinear.pack(weight)
    assert isinstance(layer, CompressedLinear)
    assert torch.equal(products_with_unit_vectors(layer), weight)


@pytest.mark.parametrize(("num_in", "room"), [(32, 7), (256, 15), (1024, 39)])
def test_too_many_exceptions_leave_the_matrix_dense(num_in, room):
    weight = torch.ones(32, num_in, dtype=torch.bfloat16)
    weight[:4, :16] = 2.0 ** torch.arange(16)  # sixteen exponents, each more often than any other
    for count, kind in ((room, CompressedLinear), (room + 1, DenseLinear)):
        weight[8:16].view(-1)[:count] = 2.0 ** -(1.0 + torch.arange(count) % 30)
        layer = CompressedLinear.pack(weight)
        assert type(layer) is kind
        assert torch.equal(products_with_unit_vectors(layer), weight)


def test_random_bits_stay_as_they_are():
    pattern = torch.randint(-(2**15), 2**15, (64, 512), dtype=torch.int16)
    assert isinstance(CompressedLinear.pack(pattern.view(torch.bfloat16)), DenseLinear)
