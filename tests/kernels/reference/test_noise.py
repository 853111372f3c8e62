import numpy as np
import pytest
import torch

from trouper.kernels.reference.sampling import gumbel, gumbel_reference, hash32


def noise(seed, position, token_ids):
    return gumbel(np.array([seed], np.uint64), np.array([position]), np.asarray(token_ids))[0]


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**63 + 12345, 2**64 - 1])
@pytest.mark.parametrize("position", [0, 1, 4095, 2**31])
def test_it_equals_the_reference_in_pythons_integers(seed, position):
    token_ids = [0, 1, 31, 151_935, 2**31]
    expected = [gumbel_reference(seed, position, token) for token in token_ids]
    torch.testing.assert_close(
        noise(seed, position, token_ids), torch.tensor(expected), atol=2e-5, rtol=2e-5
    )


def test_noise_depends_on_seed_position_and_token():
    seeds, positions = np.array([3, 3, 9], np.uint64), np.array([5, 6, 5])
    together = gumbel(seeds, positions, np.arange(100))
    for i in range(3):
        assert torch.equal(together[i], noise(int(seeds[i]), positions[i], np.arange(100)))
    own = gumbel(seeds, positions, np.array([[7, 8], [8, 7], [99, 0]]))
    assert torch.equal(own[1], together[1, [8, 7]])
    assert len({float(x) for x in together.flatten()}) == 300


@pytest.mark.parametrize("vary", ["seed", "seed's upper half", "position", "token"])
def test_each_of_its_keys_yields_independent_uniform_bits(vary):
    """A chi-square over 256 cells, and no correlation of neighbours, along each axis."""
    n = 1 << 16
    along = np.arange(n)
    fixed = np.full(n, 77)
    seeds = {"seed": along, "seed's upper half": along << 32}.get(vary, fixed).astype(np.uint64)
    positions = along if vary == "position" else fixed
    tokens = along if vary == "token" else fixed
    values = gumbel(seeds, positions, tokens[:, None])[:, 0].double()
    uniform = torch.exp(-torch.exp(-values))
    cells = torch.histc(uniform, 256, 0, 1)
    chi_square = float(((cells - n / 256) ** 2 / (n / 256)).sum())
    assert 160 < chi_square < 360  # 255 ± 22.6
    centred = uniform - 0.5
    for lag in (1, 2, 16, 256):
        correlation = float((centred[lag:] * centred[:-lag]).mean() * 12)
        assert abs(correlation) < 5 / n**0.5


def test_noise_is_finite_and_has_gumbels_moments():
    values = gumbel(np.arange(16, dtype=np.uint64), np.arange(16), np.arange(20_000))
    assert values.isfinite().all()
    assert abs(float(values.mean()) - 0.5772) < 0.01
    assert abs(float(values.var()) - np.pi**2 / 6) < 0.02


def test_the_hash_is_a_bijection():
    hashed = hash32(np.arange(1 << 16, dtype=np.uint32), np.uint32(0xDEADBEEF), np.uint32(42))
    assert len(np.unique(hashed)) == 1 << 16
