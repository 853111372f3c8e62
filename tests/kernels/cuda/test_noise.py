import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from trouper.kernels.cuda.noise import gumbel, log, row_keys
from trouper.kernels.reference.noise import gumbel as gumbel_of_the_cpu_path
from trouper.kernels.reference.noise import row_keys as row_keys_of_the_cpu_path


@triton.jit
def noise_kernel(seeds_ptr, positions_ptr, keys_ptr, out_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    token = tl.arange(0, BLOCK)
    key0, key1 = row_keys(tl.load(seeds_ptr + row), tl.load(positions_ptr + row))
    tl.store(keys_ptr + row * 2, key0.to(tl.int32, bitcast=True))
    tl.store(keys_ptr + row * 2 + 1, key1.to(tl.int32, bitcast=True))
    tl.store(out_ptr + row * N + token, gumbel(key0, key1, token), mask=token < N)


@triton.jit
def log_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, log(tl.load(x_ptr + at)))


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**63 + 12345, 2**64 - 1])
def test_keys_are_those_of_the_cpu_path_and_noise_is_within_rounding(device, seed):
    positions = np.array([0, 1, 4095, 2**31 - 1])
    seeds = np.full(4, seed, dtype=np.uint64)
    num = 5000
    keys = torch.empty(4, 2, dtype=torch.int32, device=device)
    out = torch.full((4, num), torch.nan, device=device)
    noise_kernel[(4,)](
        torch.from_numpy(seeds.view(np.int64)).to(device),
        torch.from_numpy(positions.astype(np.int32)).to(device),
        keys,
        out,
        num,
        BLOCK=8192,
    )
    expected = np.stack(row_keys_of_the_cpu_path(seeds, positions), 1)
    assert keys.cpu().numpy().view(np.uint32).tolist() == expected.tolist()
    noise = gumbel_of_the_cpu_path(seeds, positions, np.arange(num))
    torch.testing.assert_close(out.cpu(), noise, atol=1e-6, rtol=5e-7)


def test_the_logarithm_keeps_its_digits_near_one_and_at_both_ends(device):
    """The arguments that noise uses: (k + ½) / 2²³, and -log of those."""
    k = torch.arange(0.5, 2048)
    u = torch.cat((k, 2**23 - k, torch.linspace(0.5, 2**23 - 0.5, 4096).round() + 0.5))[:8191]
    u = torch.cat((u * 2.0**-23, torch.ones(1)))
    for x in (u, torch.where(u < 1, -u.log(), u)):
        out = torch.full_like(x, torch.nan, device=device)
        log_kernel[(1,)](x.to(device), out, BLOCK=len(x))
        torch.testing.assert_close(out.cpu().double(), x.double().log(), atol=0, rtol=2.5e-7)
