"""The draw of a token for each row on the device, and the logprobs of the drawn token and of the most probable ones.

    token = arg max over the kept v of x[v] + g(seed, position, v)

    x = logits / temperature;  g is Gumbel noise, and zero in a greedy row (temperature 0)

    logits [R, V], edited [R, V] float32   the second if the row is edited
    rows, ends [R]                         int32: device row, and the position of the token; row -1 is padding
    threshold, last_tie [R]                the kept tokens: see `top_k_top_p`
    tokens [M, …] int32                    token `end` of the row is written
    sampled [R] int32                      the token, or -1 if a logit is not finite, no token is left, or the row is padding

The lowest id wins among equal values.  The vocabulary is split into blocks, and a second kernel merges the best of each
block; a maximum does not depend on their order.

The noise has the same bits as `kernels/reference/sampling.py`, with logarithms within one or two ulps.  The hardware's
logarithm has an absolute error of 2⁻²², which is useless near one, the source of the largest noise.  So `log` is Cephes'
logf: an exact split and a polynomial.

Roofline: e R V bytes; greedy 256 × 152 k bfloat16 in 18 µs; with noise bound by arithmetic (about 12 integer and 60 float
operations for a token) at about 50 µs.  Target 70 %.

The logprobs are those of the raw logits, before penalties and temperature:

    logprob[v] = logits[v] - log Σ e^logits,      rank = number of v with logits[v] ≥ own

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
from trouper.kernels.cuda.sampling_rows import (
    BLOCKS,
    TEMPERATURE,
    SamplingRows,
    load_number,
    load_scaled,
    load_word,
)
from trouper.kernels.cuda.top_k_top_p import float_of, order_of
from trouper.kernels.reference.sampling import WORD

_A = tl.constexpr(0x7FEB352D)
_B = tl.constexpr(0x846CA68B)
_SEED = tl.constexpr(WORD["seed"])


@triton.jit
def gumbel(key0, key1, token_ids):
    """Return float32 noise for the row's keys and any block of token ids.

    It is a pure function, so a token's noise does not depend on the batch; see `row_keys`.
    """
    bits = hash32(token_ids.to(tl.uint32), key0, key1) >> 9
    return -log(-log((bits.to(tl.float32) + 0.5) * 1.1920928955078125e-07))  # 2⁻²³


@triton.jit
def row_keys(low, high, position):
    """Return two uint32 words for the two words of a seed, uint32, and a position, int32.

    Together with a token id they determine its noise; the CPU computes the same words.
    """
    mixed = hash32(hash32(position.to(tl.uint32), low, high), high, low)
    return mixed, hash32(mixed ^ low, high, low ^ low)


@triton.jit
def hash32(x, key0, key1):
    x = x ^ key0
    x = x ^ (x >> 16)
    x = x * _A + key1
    x = x ^ (x >> 15)
    x = x * _B
    return x ^ (x >> 16)


@triton.jit
def log(x):
    """Return the logarithm of normal positive float32.  The relative error is below 2⁻²³, also near one."""
    bits = x.to(tl.int32, bitcast=True) - 0x3F3504F3  # √½, so that the rest is in [√½, √2)
    exponent = (bits >> 23).to(tl.float32)
    f = ((bits & 0x7FFFFF) + 0x3F3504F3).to(tl.float32, bitcast=True) - 1.0
    y = f * 7.0376836292e-2 - 1.1514610310e-1
    y = y * f + 1.1676998740e-1
    y = y * f - 1.2420140846e-1
    y = y * f + 1.4249322787e-1
    y = y * f - 1.6668057665e-1
    y = y * f + 2.0000714765e-1
    y = y * f - 2.4999993993e-1
    y = y * f + 3.3333331174e-1
    square = f * f
    y = y * f * square - 2.12194440e-4 * exponent - 0.5 * square
    return f + y + 0.693359375 * exponent


@triton.jit
def _best_of_block_kernel(
    logits_ptr,
    edited_ptr,
    rows_ptr,
    ends_ptr,
    threshold_ptr,
    last_tie_ptr,
    parameters_ptr,
    is_edited_ptr,
    values_ptr,
    ids_ptr,
    V,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + i).to(tl.int64)
    if row < 0:
        return
    temperature = load_number(parameters_ptr, row, TEMPERATURE)
    is_edited = tl.load(is_edited_ptr + row)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_range = token < V
    x = load_scaled(logits_ptr, edited_ptr, i * V + token, in_range, is_edited, temperature)
    # -inf is a mask in an edited row, and a fault in any other.
    is_bad = (x != x) | (x == float("inf")) | ((x == float("-inf")) & (is_edited == 0))
    num_bad = tl.sum((is_bad & in_range).to(tl.int32), 0)
    if temperature > 0:
        threshold = tl.load(threshold_ptr + i)
        is_tie = (x == threshold) & (token <= tl.load(last_tie_ptr + i))
        low = load_word(parameters_ptr, row, _SEED).to(tl.uint32)
        high = load_word(parameters_ptr, row, _SEED + 1).to(tl.uint32)
        key0, key1 = row_keys(low, high, tl.load(ends_ptr + i))
        x = tl.where((x > threshold) | is_tie, x + gumbel(key0, key1, token), float("-inf"))
    # Triton does not define whether a maximum with NaN is NaN.
    x = tl.where(x == x, x, float("-inf"))
    best, place = tl.max(x, 0, return_indices=True, return_indices_tie_break_left=True)
    at = i * tl.num_programs(1) + tl.program_id(1)
    tl.store(values_ptr + at, tl.where(num_bad > 0, float("nan"), best))
    tl.store(ids_ptr + at, tl.program_id(1) * BLOCK + place)


@triton.jit
def _best_kernel(
    values_ptr,
    ids_ptr,
    rows_ptr,
    ends_ptr,
    tokens_ptr,
    history_ptr,
    sampled_ptr,
    tokens_stride_r,
    V,
    BLOCKS: tl.constexpr,
    PADDED: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    tl.store(sampled_ptr + i, -1)
    row = tl.load(rows_ptr + i).to(tl.int64)
    if row < 0:
        return
    block = tl.arange(0, PADDED)
    value = tl.load(values_ptr + i * BLOCKS + block, mask=block < BLOCKS, other=float("-inf"))
    num_bad = tl.sum((value != value).to(tl.int32), 0)
    value = tl.where(value == value, value, float("-inf"))
    best, place = tl.max(value, 0, return_indices=True, return_indices_tie_break_left=True)
    if (num_bad > 0) | (best == float("-inf")):
        return
    token = tl.load(ids_ptr + i * BLOCKS + place)
    tl.store(sampled_ptr + i, token)
    tl.store(tokens_ptr + row * tokens_stride_r + tl.load(ends_ptr + i), token)
    seen_ptr = history_ptr + row * V + token
    tl.store(seen_ptr, tl.load(seen_ptr) + 2)


def sample(
    logits_RV: Tensor,
    edited_RV: Tensor,
    rows_R: Tensor,
    ends_R: Tensor,
    threshold_R: Tensor,
    last_tie_R: Tensor,
    tokens: Tensor,
    sampling: SamplingRows,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Draw a token for each row, and write it to `tokens` at the row's end.

    Returns the ids [R] int32; -1 marks a row with logits that are not finite.
    """
    num_rows, vocab_size = logits_RV.shape
    assert logits_RV.is_contiguous(), "logits must be contiguous"
    assert edited_RV.is_contiguous(), "edited must be contiguous"
    out = torch.empty_like(rows_R) if out is None else out
    config = config_of(BLOCKS, logits_RV.device, vocab_size)
    num_blocks = triton.cdiv(vocab_size, config["BLOCK"])
    values = logits_RV.new_empty(num_rows, num_blocks, dtype=torch.float32)
    ids = torch.empty_like(values, dtype=torch.int32)
    _best_of_block_kernel[(num_rows, num_blocks)](
        logits_RV,
        edited_RV,
        rows_R,
        ends_R,
        threshold_R,
        last_tie_R,
        sampling.parameters,
        sampling.is_edited,
        values,
        ids,
        vocab_size,
        **config,
    )
    _best_kernel[(num_rows,)](
        values,
        ids,
        rows_R,
        ends_R,
        tokens,
        sampling.history,
        out,
        tokens.stride(0),
        vocab_size,
        BLOCKS=num_blocks,
        PADDED=triton.next_power_of_2(num_blocks),
        **MERGE,
    )
    return out


@triton.jit
def _put_tokens_kernel(sampled_ptr, rows_ptr, ends_ptr, tokens_ptr, tokens_stride_r):
    i = tl.program_id(0)
    row = tl.load(rows_ptr + i).to(tl.int64)
    token = tl.load(sampled_ptr + i)
    if (row < 0) | (token < 0):
        return
    tl.store(tokens_ptr + row * tokens_stride_r + tl.load(ends_ptr + i), token)


def put_tokens_(sampled_R: Tensor, rows_R: Tensor, ends_R: Tensor, tokens: Tensor) -> None:
    """Write the ids that another device has sampled to `tokens`, like `sample` on that device.

    Ranks without logits use it. All ranks then continue with equal tokens.
    """
    _put_tokens_kernel[(len(sampled_R),)](
        sampled_R, rows_R, ends_R, tokens, tokens.stride(0), **MERGE
    )


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
