"""The operations of several ranks equal those of one device with all heads and columns.

The ranks are threads over one mapping; `tests/robustness/test_ranks.py` uses processes.
"""

import ctypes
import mmap
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
import torch

from trouper.kernels.codegen import units
from trouper.kernels.codegen.recording import Arena, Recording
from trouper.kernels.cpu import rank_exchange, rank_sums
from trouper.kernels.cpu.exchange_sizes import ExchangeSizes
from trouper.kernels.cpu.rank_exchange import RankExchange, RanksDisagreeError, SharedGroup
from trouper.kernels.ops import OpsConfig, RankShare
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


def run_groups(function):
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

    first, second = run_groups(rank)
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
def test_logits_beyond_the_sheet_come_in_batches():
    torch.manual_seed(0)
    product = torch.randn(11, 40)  # the sheet has four rows

    def rank(number, group):
        own = product[:, slice(24) if number == 0 else slice(24, 40)].contiguous()
        return group.finish_logits(own, 2.0, None)

    for found in run_groups(rank):
        torch.testing.assert_close(found, 2 * product)


pytestmark = pytest.mark.skipif(not units.can_multiply(), reason="needs compiled kernels")
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
EPS = 1e-5


@pytest.fixture(autouse=True)
def one_thread():
    """Let each rank compute with one thread, so that no team of threads waits for a core that spins."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run_ranks(num_ranks, function, *, part_bytes=2**18, sheet_numbers=0):
    """Call `function(group)` on a thread for each rank; returns their results."""
    sizes = ExchangeSizes(num_ranks, part_bytes, sheet_numbers)
    memory = mmap.mmap(-1, sizes.num_bytes)
    with ThreadPoolExecutor(num_ranks) as pool:
        groups = [RankExchange(rank, sizes, memory) for rank in range(num_ranks)]
        return list(pool.map(function, groups))


def norm(x, weight):
    x = x.double()
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("num_rows", [1, 5, 33])
@pytest.mark.parametrize("has_post_norm", [False, True])
def test_sum_with_norms_equals_float64_on_all_ranks(dtype, num_ranks, num_rows, has_post_norm):
    torch.manual_seed(0)
    width = 48
    parts = torch.randn(num_ranks, num_rows, width).to(dtype)
    x = torch.randn(num_rows, width).to(dtype)
    weight, post = torch.rand(2, width) + 0.5

    def rank(group):
        residual = torch.zeros(num_rows, width + 16, dtype=dtype)[:, :width]
        residual.copy_(x)
        z = group.fused_add_norm(
            residual, parts[group.rank], weight, post if has_post_norm else None, alpha=0.5, eps=EPS
        )
        group.check()
        return residual.clone(), z.clone()

    found = run_ranks(num_ranks, rank)
    total = parts.double().sum(0)
    want_x = x.double() + 0.5 * (norm(total, post) if has_post_norm else total)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(found[0][0].double(), want_x, atol=tolerance, rtol=tolerance)
    want_z = norm(found[0][0], weight)
    torch.testing.assert_close(found[0][1].double(), want_z, atol=tolerance, rtol=tolerance)
    for other in found[1:]:
        assert torch.equal(other[0], found[0][0])
        assert torch.equal(other[1], found[0][1])


def test_sums_never_read_overwritten_parts():
    def rank(group):
        sums = []
        for i in range(1000):
            rows = 1 + i % 7
            part = torch.full((rows, 16), float(i + group.rank))
            sums.append(group.sum(part).unique().item())
        group.check()
        return sums

    for sums in run_ranks(2, rank):
        assert sums == [2.0 * i + 1 for i in range(1000)]


def test_a_sum_is_part_of_a_recording():
    def rank(group):
        x, y = torch.zeros(2, 16), torch.zeros(2, 16)
        recording = Recording(Arena(), (x, y), lambda: group.fused_add_norm(x, y))
        found = []
        for i in range(5):
            x.fill_(i)
            y.fill_(10 * group.rank + 1)
            recording.replay()
            found.append(recording.result.unique().item())
        group.check()
        return found

    assert run_ranks(2, rank) == [[12.0 + i for i in range(5)]] * 2


@pytest.mark.parametrize("num_copies", [1, 2])
def test_a_shared_norm_counts_each_key_head_once(num_copies):
    torch.manual_seed(0)
    num_ranks, num_rows, q_width, k_width = 2, 3, 32, 16
    q = torch.randn(num_rows, num_ranks * q_width)
    k = torch.randn(num_rows, num_ranks * k_width // num_copies)
    q_weight, k_weight = torch.rand(q.shape[1]), torch.rand(k.shape[1])

    def rank(group):
        qs = slice(group.rank * q_width, (group.rank + 1) * q_width)
        first = group.rank // num_copies * k_width
        ks = slice(first, first + k_width)
        rows = torch.cat([q[:, qs], k[:, ks], torch.ones(num_rows, k_width)], 1)
        sides = rows[:, :q_width], rows[:, q_width : q_width + k_width]
        group.norm_heads_(*sides, q_weight[qs], k_weight[ks], num_copies=num_copies, eps=EPS)
        return rows

    want_q, want_k = norm(q, q_weight).float(), norm(k, k_weight).float()
    for number, rows in enumerate(run_ranks(num_ranks, rank)):
        first = number // num_copies * k_width
        want = torch.cat(
            [
                want_q[:, number * q_width : (number + 1) * q_width],
                want_k[:, first : first + k_width],
                torch.ones(num_rows, k_width),
            ],
            1,
        )
        torch.testing.assert_close(rows, want, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_gathered_logits_last_until_the_next_call(dtype):
    torch.manual_seed(0)
    widths, num_rows = (32, 21), 6
    product = torch.randn(2, num_rows, sum(widths)).to(dtype)
    starts = 0, widths[0]

    def rank(group):
        found = []
        for part in product:  # the second is not written before all have copied the first
            own = part[:, starts[group.rank] :][:, : widths[group.rank]].contiguous()
            sheet = group.gather_logits(own, starts[group.rank], sum(widths), 2.0, 3.0)
            found.append(sheet.clone())
        group.check()
        return found

    want = 3.0 * torch.tanh(product.float() * 2.0 / 3.0)
    for found in run_ranks(2, rank, sheet_numbers=num_rows * sum(widths)):
        torch.testing.assert_close(torch.stack(found), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("votes", "verdict"), [((True, True), True), ((True, False), False), ((False, False), False)]
)
def test_all_agree_only_if_every_rank_does(votes, verdict):
    assert run_ranks(2, lambda group: group.all_agree(votes[group.rank])) == [verdict] * 2


@pytest.mark.parametrize("what", ["step", "rows"])
def test_ranks_detect_different_calls(what):
    def rank(group):
        group.begin_step(7 + group.rank if what == "step" else 7)
        rows = 1 + group.rank if what == "rows" else 1
        group.sum(torch.ones(rows, 16))
        group.sum(torch.ones(3, 16))  # nothing is waited for any more
        with pytest.raises(RanksDisagreeError) as caught:
            group.check()
        return str(caught.value)

    first, second = run_ranks(2, rank)
    ours, theirs = ("step 7 with 1 rows", "step 8 with 1 rows") if what == "step" else ("step 7 with 1 rows", "step 7 with 2 rows")  # fmt: skip
    assert f"rank 0 was in {ours}, rank 1 in {theirs}" in first
    assert f"rank 1 was in {theirs}, rank 0 in {ours}" in second


def test_a_peer_two_exchanges_ahead_disagrees():
    sizes = ExchangeSizes(2, 4096)
    memory = mmap.mmap(-1, sizes.num_bytes)
    group = RankExchange(0, sizes, memory)
    peer = memoryview(memory).cast("q")[
        16:
    ]  # of rank 1: its number, and the labels of the last two
    peer[0], peer[2] = 3, 1
    group.sum(torch.ones(1, 16))
    with pytest.raises(RanksDisagreeError, match="exchange 3; 1 are done here"):
        group.check()
    peer.release()


@pytest.mark.parametrize("num_done", [5, 2**31, 2**32 - 1, 2**40 + 2**31])
def test_a_rank_sleeps_after_many_exchanges(monkeypatch, num_done):
    """The system compares the low half of the peer's counter with what it is given, and else returns at once."""
    sizes = ExchangeSizes(2, 4096)
    memory = mmap.mmap(-1, sizes.num_bytes)
    numbers = memoryview(memory).cast("q")
    peer = numbers[16:]  # of rank 1, as above
    sleeps = []

    @ctypes.CFUNCTYPE(ctypes.c_long, *[ctypes.c_long] * 4)
    def syscall(number, address, operation, value):
        if (number, operation) == (rank_sums.FUTEX, rank_sums.WAIT):
            counter = ctypes.c_uint32.from_address(address).value
            sleeps.append(ctypes.c_uint32(value).value == counter)
            peer[1 + (num_done + 1) % 2], peer[0] = 1, num_done + 1
        return 0

    address = ctypes.cast(syscall, ctypes.c_void_p).value
    monkeypatch.setattr(rank_exchange, "address_in_torch", lambda _: address)
    group = RankExchange(0, sizes, memory)
    group._state[rank_sums.NUM_DONE] = numbers[0] = peer[0] = num_done
    group.sum(torch.ones(1, 16))
    group.check()
    assert sleeps == [True]
    peer.release()
    numbers.release()


def test_what_does_not_fit_is_refused():
    def rank(group):
        with pytest.raises(
            ValueError, match="a part of 8192 bytes exceeds the shared buffer of 4096 bytes"
        ):
            group.sum(torch.ones(128, 16))
        with pytest.raises(ValueError, match="2 rows of logits exceed the sheet of 16 numbers"):
            group.gather_logits(torch.ones(2, 16), 0, 16, 1.0, None)

    run_ranks(1, rank, part_bytes=4096, sheet_numbers=16)
