"""Products of float32 by three bfloat16 each: as exact as those by float32's own instructions."""

import pytest
import torch

from trouper.kernels.codegen.recording import Arena, Recording
from trouper.kernels.cpu.linear import split_fp32
from trouper.kernels.cpu.linear.dense import DenseLinear
from trouper.kernels.cpu.linear.split_fp32 import SplitLinear
from trouper.kernels.select import this_processor

pytestmark = pytest.mark.skipif(not this_processor().has_tiles, reason="needs AMX")


def spread(*shape):
    """Of both signs, from 2^-20 to 2^20."""
    return torch.randn(shape) * torch.exp2(torch.randint(-20, 21, shape))


def nearly_round(*shape):
    """What is cut off them is as much as can be."""
    return 1 + torch.randint(1, 2**16, shape) * 2.0**-23


def positive(*shape):
    return torch.rand(shape)


@pytest.mark.parametrize("numbers", [torch.randn, positive, spread, nearly_round])
@pytest.mark.parametrize("num_in", [32, 64, 384, 1536])
def test_the_error_is_at_most_that_of_float32(num_in, numbers):
    torch.manual_seed(0)
    weight = numbers(48, num_in)
    layers = [kind.pack(weight) for kind in (SplitLinear, DenseLinear)]
    x = numbers(700, num_in)
    exact = x.double() @ weight.double().T
    sizes = x.double().abs() @ weight.double().abs().T
    errors = [(layer.apply(x) - exact) / sizes for layer in layers]
    ours, theirs = (float(error.square().mean().sqrt()) for error in errors)
    assert ours < theirs
    ours, theirs = (float(error.abs().max()) for error in errors)
    assert ours < theirs


def test_no_bit_of_a_number_is_lost():
    """A product by one is the number, if it is neither tiny nor huge."""
    torch.manual_seed(0)
    layer = SplitLinear.pack(torch.eye(64))
    for exponent in (-100, -60, 0, 60, 126):
        x = (1 + torch.rand(200, 64)) * 2.0**exponent
        assert torch.equal(layer.apply(x), x)


@pytest.mark.parametrize("num_rows", [3, 40])
def test_what_is_no_number_stays_in_its_row(num_rows):
    torch.manual_seed(0)
    layer = SplitLinear.pack(torch.randn(32, 64), torch.randn(32))
    x = torch.randn(num_rows, 64)
    expected = layer.apply(x)
    others = torch.arange(num_rows) != 1
    for bad in (torch.inf, -torch.inf, torch.nan):
        x[1, 7] = bad
        found = layer.apply(x)
        assert not found[1].isfinite().any()
        assert torch.equal(found[others], expected[others])


def test_tiny_numbers_are_zeros():
    layer = SplitLinear.pack(torch.eye(32))
    x = torch.full((20, 32), 1e-40)
    assert torch.equal(layer.apply(x), torch.zeros(20, 32))


@pytest.mark.parametrize("num_rows", [1, 16, 17, 64, 97, 700])
def test_stretches_of_rows_give_the_same(monkeypatch, num_rows):
    torch.manual_seed(0)
    layer = SplitLinear.pack(torch.randn(80, 96), torch.randn(80))
    x = torch.randn(num_rows, 96)
    expected = layer.apply(x)
    blocking = split_fp32.BLOCKING._replace(most_bytes=1)
    monkeypatch.setattr(split_fp32, "BLOCKING", blocking)
    assert torch.equal(layer.apply(x), expected)


def test_a_recording_computes_what_the_inputs_hold():
    torch.manual_seed(0)
    first, second = (SplitLinear.pack(torch.randn(96, 96)) for _ in range(2))
    for num_rows in (4, 40):
        x = torch.randn(num_rows, 96)
        recording = Recording(Arena(), (x,), lambda x=x: second.apply(first.apply(x)))
        for _ in range(3):
            x.copy_(torch.randn(num_rows, 96))
            recording.replay()
            assert torch.equal(recording.result, second.apply(first.apply(x)))


def test_stretches_are_equal_and_hold_all_rows():
    step = split_fp32.MANY.rows
    for num_rows in (0, 1, 16, 31, 200, 10_000):
        for num_in in (32, 1536, 2**20):
            for num_threads in (1, 3):
                rows = split_fp32.rows_at_once(num_rows, num_in, num_threads)
                assert rows % step == 0 or not num_rows
                assert 0 < rows < num_rows + step or not num_rows
                most = num_threads * split_fp32.BLOCKING.most_bytes + step * num_in * 6
                assert split_fp32.parts_bytes(rows, num_in) <= most
