"""The n best logprobs of a row, and the logprob and rank of the sampled token.

    logprob[v] = logits[v] - log Σ e^logits, from the raw logits;  rank = number of v with logits[v] ≥ own

    logits [R, V]   any float type
    sampled [R]     int32; a row with -1 is skipped
    ids [R, 1 + n], logprobs [R, 1 + n], ranks [R]   the sampled token first, then the n best, equal ones by rising id;
                                                     the sampled token appears again if it is one of them

Each block of the vocabulary yields its n best as 64-bit keys (the ordered bits of the logit, then the complement of the
id), its maximum and its sum.  A second kernel merges them in order.

Roofline: e R V bytes for R rows.  Target 60 %.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trouper.kernels.cuda.launch import MERGE, Table, config_of
from trouper.kernels.cuda.sampling.sample import log
from trouper.kernels.cuda.sampling.top_k_top_p import float_of, order_of

# By n, a power of two.
CONFIGS: Table = {
    "sm_90": (
        (32, {"BLOCK": 2048, "num_warps": 8}),
        (128, {"BLOCK": 8192, "num_warps": 16}),
    )
}


class TopLogprobs(NamedTuple):
    ids: Tensor  # [R, 1 + n] int32
    logprobs: Tensor  # [R, 1 + n] float32
    ranks: Tensor  # [R] int32


@triton.jit
def _top_of_block_kernel(
    logits_ptr,
    sampled_ptr,
    keys_ptr,
    max_ptr,
    sum_ptr,
    rank_ptr,
    V,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    own_id = tl.load(sampled_ptr + i)
    if own_id < 0:
        return
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + i * V + token, mask=token < V, other=float("-inf")).to(tl.float32)
    own = tl.load(logits_ptr + i * V + own_id).to(tl.float32)
    at = i * tl.num_programs(1) + tl.program_id(1)
    highest = tl.max(x, 0)
    tl.store(max_ptr + at, highest)
    tl.store(sum_ptr + at, tl.sum(tl.exp(x - highest), 0))
    tl.store(rank_ptr + at, tl.sum((x >= own).to(tl.int32), 0))
    key = (order_of(x).to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)
    tl.store(keys_ptr + at * N + tl.arange(0, N), tl.topk(key, N))


@triton.jit(do_not_specialize=["num_top"])
def _top_kernel(
    logits_ptr,
    sampled_ptr,
    keys_ptr,
    max_ptr,
    sum_ptr,
    rank_ptr,
    ids_ptr,
    logprobs_ptr,
    ranks_ptr,
    V,
    num_top,
    N: tl.constexpr,
    BLOCKS: tl.constexpr,
    PADDED: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    own_id = tl.load(sampled_ptr + i)
    if own_id < 0:
        return
    block = tl.arange(0, PADDED)
    in_range = block < BLOCKS
    maxima = tl.load(max_ptr + i * BLOCKS + block, mask=in_range, other=float("-inf"))
    sums = tl.load(sum_ptr + i * BLOCKS + block, mask=in_range, other=0.0)
    rank = tl.sum(tl.load(rank_ptr + i * BLOCKS + block, mask=in_range, other=0), 0)
    highest = tl.max(maxima, 0)
    lse = highest + log(tl.sum(sums * tl.exp(maxima - highest), 0))
    best = tl.full([N], -0x7FFFFFFFFFFFFFFF, tl.int64)
    for first in range(BLOCKS):
        key = tl.load(keys_ptr + (i * BLOCKS + first) * N + tl.arange(0, N))
        best = tl.topk(tl.reshape(tl.join(best, key), [2 * N]), N)
    place = tl.arange(0, N)
    ids = 0x7FFFFFFF - (best & 0xFFFFFFFF).to(tl.int32)
    logprobs = float_of((best >> 32).to(tl.int32)) - lse
    at = i * (1 + num_top)
    tl.store(ids_ptr + at + 1 + place, ids, mask=place < num_top)
    tl.store(logprobs_ptr + at + 1 + place, logprobs, mask=place < num_top)
    tl.store(ids_ptr + at, own_id)
    tl.store(logprobs_ptr + at, tl.load(logits_ptr + i * V + own_id).to(tl.float32) - lse)
    tl.store(ranks_ptr + i, rank)


def top_logprobs(
    logits_RV: Tensor, sampled_R: Tensor, num_top: int, *, out: TopLogprobs | None = None
) -> TopLogprobs:
    """Return the best logprobs, for `num_top` from 0 to 128 and at most the size of the vocabulary."""
    num_rows, vocab_size = logits_RV.shape
    assert logits_RV.is_contiguous(), "logits must be contiguous"
    assert num_top <= vocab_size, f"{num_top} of {vocab_size} tokens"
    if out is None:
        ids = sampled_R.new_empty(num_rows, 1 + num_top)
        logprobs = logits_RV.new_empty(num_rows, 1 + num_top, dtype=torch.float32)
        out = TopLogprobs(ids, logprobs, torch.empty_like(sampled_R))
    padded = triton.next_power_of_2(max(num_top, 2))
    config = config_of(CONFIGS, logits_RV.device, padded)
    num_blocks = triton.cdiv(vocab_size, config["BLOCK"])
    keys = logits_RV.new_empty(num_rows, num_blocks, padded, dtype=torch.int64)
    maxima, sums = logits_RV.new_empty(2, num_rows, num_blocks, dtype=torch.float32)
    ranks = sampled_R.new_empty(num_rows, num_blocks)
    parts = (keys, maxima, sums, ranks)
    _top_of_block_kernel[(num_rows, num_blocks)](
        logits_RV, sampled_R, *parts, vocab_size, N=padded, **config
    )
    _top_kernel[(num_rows,)](
        logits_RV,
        sampled_R,
        *parts,
        *out,
        vocab_size,
        num_top,
        N=padded,
        BLOCKS=num_blocks,
        PADDED=triton.next_power_of_2(num_blocks),
        **MERGE,
    )
    return out


def top_logprobs_reference(logits_V: Tensor, token_id: int, num_top: int) -> TopLogprobs:
    """Compute one row by a stable sort in float64.

    Ties are resolved in favour of the smaller id, as in the kernel.
    """
    logprobs = logits_V.double().log_softmax(0)
    order = logits_V.float().argsort(descending=True, stable=True)[:num_top]
    ids = torch.cat((torch.tensor([token_id]), order))
    rank = (logits_V >= logits_V[token_id]).sum()
    return TopLogprobs(ids.int(), logprobs[ids].float(), rank.int())
