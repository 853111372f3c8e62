"""Tokens drawn in one pass: the formulas' tokens, whatever the shape, the neighbours and the threads."""

import numpy as np
import pytest
import torch

from trouper.kernels.draw import draw, draw_reference
from trouper.kernels.noise import gumbel


def rows(num_rows, vocab_size, seed=0):
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    logits = 4 * torch.randn(num_rows, vocab_size)
    temperatures = 0.2 + torch.rand(num_rows)
    return logits, temperatures, rng.integers(0, 2**64, num_rows, np.uint64), np.arange(num_rows)


@pytest.mark.parametrize("vocab_size", [1, 15, 16, 17, 31, 32, 100, 4099, 70_000])
def test_the_tokens_are_those_of_the_formulas(vocab_size):
    logits, temperatures, seeds, positions = rows(9, vocab_size)
    found = draw(logits, temperatures, seeds, positions)
    expected = draw_reference(logits, temperatures, seeds, positions)
    noise = gumbel(seeds, positions, np.arange(vocab_size, dtype=np.uint32))
    noisy = logits / temperatures.unsqueeze(1) + noise
    best, own = (noisy.gather(1, ids.unsqueeze(1)) for ids in (expected, found))
    torch.testing.assert_close(own, best, atol=4e-6, rtol=0)  # rounding may swap near ties


def test_a_row_is_drawn_alike_among_any_others_and_on_any_threads():
    logits, temperatures, seeds, positions = rows(5, 20_000)
    found = draw(logits, temperatures, seeds, positions)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        wide = torch.zeros(5, 20_016)[:, :20_000].copy_(logits)
        assert torch.equal(draw(wide, temperatures, seeds, positions), found)
    finally:
        torch.set_num_threads(before)
    for i in range(5):
        one = slice(i, i + 1)
        alone = draw(logits[one], temperatures[one], seeds[one], positions[one])
        assert torch.equal(alone, found[one])


def test_excluded_tokens_and_those_that_are_not_numbers_are_never_drawn():
    logits, temperatures, seeds, positions = rows(64, 40)
    logits[:] = -torch.inf
    assert not draw(
        logits, temperatures, seeds, positions
    ).any()  # the first where all are excluded
    logits[:, 7] = -3.0
    logits[:, 9] = torch.nan
    assert (draw(logits, temperatures, seeds, positions) == 7).all()


def test_the_draws_follow_the_distribution():
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05] + [0.0] * 12)
    count = 20_000
    logits = probabilities.log().repeat(count, 1)
    seeds = np.full(count, 3, np.uint64)
    found = draw(logits, torch.ones(count), seeds, np.arange(count))
    shares = torch.bincount(found, minlength=16) / count
    torch.testing.assert_close(shares, probabilities, atol=0.015, rtol=0)


def test_greater_temperatures_flatten():
    logits = torch.arange(16.0).repeat(2000, 1)
    seeds, positions = np.full(2000, 1, np.uint64), np.arange(2000)
    cold, hot = (draw(logits, torch.full((2000,), t), seeds, positions) for t in (0.05, 100.0))
    assert (cold == 15).all()
    assert len(hot.unique()) == 16
