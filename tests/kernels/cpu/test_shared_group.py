"""The operations of ranks together equal those of one device that has all heads and columns."""

import mmap
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
import torch

from trouper.kernels.codegen import units
from trouper.kernels.cpu.exchange_sizes import ExchangeSizes
from trouper.kernels.cpu.rank_exchange import RankExchange
from trouper.kernels.cpu.shared_group import SharedGroup
from trouper.kernels.ops import OpsConfig
from trouper.kernels.ranks import RankShare
from trouper.kernels.select import make_ops

LOCAL = OpsConfig(
    dtype=torch.float32,
    num_q_heads=2,
    num_kv_heads=1,
    head_dim=16,
    hidden_size=64,
    intermediate_size=32,
    block_size=16,
    norm_eps=1e-6,
    residual_scale=0.5,
    activation="silu",
    scale=0.3,
    softcap=None,
)


def group_of(rank, memory):
    sizes = ExchangeSizes(2, 2**16, 4 * 40)
    exchange = RankExchange(rank, sizes, memory)
    share = RankShare(40, LOCAL.norm_eps, LOCAL.residual_scale, 24 * rank)
    return SharedGroup(exchange, share)


def run_ranks(function):
    """Call `function(rank, group)` for two ranks that share a vocabulary of 40."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    memory = mmap.mmap(-1, ExchangeSizes(2, 2**16, 4 * 40).num_bytes)
    groups = [group_of(rank, memory) for rank in range(2)]
    try:
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(function, range(2), groups))
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(not units.can_multiply(), reason="needs compiled kernels")
def test_ranks_together_compute_what_one_device_does():
    torch.manual_seed(0)
    num_rows = 4
    x, parts = torch.randn(num_rows, 64), torch.randn(2, num_rows, 64)
    weight, post = torch.rand(2, 64)
    q, k, v = (
        torch.randn(num_rows, 4, 16),
        torch.randn(num_rows, 2, 16),
        torch.ones(num_rows, 2, 16),
    )
    q_weight, k_weight = torch.rand(4, 16), torch.rand(2, 16)
    product = torch.randn(num_rows, 40)
    whole = make_ops(msgspec.structs.replace(LOCAL, num_q_heads=4, num_kv_heads=2))

    def rank(number, group):
        residual = x.clone()
        normed = group.fused_add_norm(residual, parts[number], weight, post)
        qs, ks = slice(2 * number, 2 * number + 2), slice(number, number + 1)
        heads = torch.cat([q[:, qs], k[:, ks], v[:, ks]], 1)
        group.all_heads_norm_(heads, q_weight[qs], k_weight[ks])
        own = product[:, slice(24) if number == 0 else slice(24, 40)].contiguous()
        return residual, normed, heads, group.finish_logits(own, 0.7, 2.0).clone()

    first, second = run_ranks(rank)
    residual = x.clone()
    normed = whole.fused_add_norm(residual, parts.sum(0), weight, post)
    qkv = torch.cat([q, k, v], 1)
    whole.all_heads_norm_(qkv, q_weight, k_weight)
    logits = whole.finish_logits(product, 0.7, 2.0)
    for found in (first, second):
        torch.testing.assert_close(found[0], residual, atol=2e-6, rtol=2e-6)
        torch.testing.assert_close(found[1], normed, atol=2e-6, rtol=2e-6)
        torch.testing.assert_close(found[3], logits, atol=1e-6, rtol=1e-6)
    for start, end in ((0, 2), (2, 3), (3, 4)):
        both = torch.cat([first[2][:, start:end], second[2][:, start:end]], 1)
        want = qkv[:, 2 * start : 2 * end]
        torch.testing.assert_close(both, want, atol=2e-6, rtol=2e-6)


@pytest.mark.skipif(not units.can_multiply(), reason="needs compiled kernels")
def test_more_rows_of_logits_than_the_sheet_has_come_in_turns():
    torch.manual_seed(0)
    product = torch.randn(11, 40)  # the sheet has four rows

    def rank(number, group):
        own = product[:, slice(24) if number == 0 else slice(24, 40)].contiguous()
        return group.finish_logits(own, 2.0, None)

    for found in run_ranks(rank):
        torch.testing.assert_close(found, 2 * product)
