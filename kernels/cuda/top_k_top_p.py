"""The cut of a row's candidates by min-p, then top-k, then top-p, exact and without a sort.

    x = logits / temperature;  keep v if x[v] > threshold, or if x[v] = threshold and v ≤ last_tie

    logits [R, V], edited [R, V] float32   the second if the row is edited
    threshold [R] float32, last_tie [R] int32   -inf and V if nothing is cut off

min-p keeps x ≥ max + log p.  Top-k keeps the k largest of these, equal ones by rising id.  Of these, in falling order,
top-p keeps each token with predecessors that have less than p of the mass.

Gumbel noise is in (-2.82, 16.64), so a value 19.5 below the maximum is never drawn.  The other values, mostly some hundreds,
are compacted once.  The threshold is the smallest τ for which the weight of x > τ is below a target, with weights 1 and
target k, then with weights eˣ and target p · mass.  It is found by bisection over the integers that order floats, in at
most 32 iterations over the candidates.

Roofline: 3 e R V bytes for R rows that truncate.  Target 256 × 152 k in 0.35 ms.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from trouper.kernels.cuda.launch import Table, config_of
from trouper.kernels.cuda.sampling_rows import (
    TEMPERATURE,
    SamplingRows,
    load_number,
    load_scaled,
    load_word,
)
from trouper.kernels.reference.sampling import WORD

REACH = tl.constexpr(19.5)  # 16.64 + 2.82, rounded up
# The order of the smallest finite float.
LEAST_ORDER = tl.constexpr(-2139095040)
_TOP_K = tl.constexpr(WORD["top_k"])
_TOP_P = tl.constexpr(WORD["top_p"])
_LOG_MIN_P = tl.constexpr(WORD["log_min_p"])

# By V.
CONFIGS: Table = {"sm_90": ((1 << 30, {"BLOCK": 2048, "num_warps": 16}),)}


@triton.jit
def order_of(x):
    """Return int32 with the order of the float32.

    Comparisons of integers can then replace those of floats.  Both zeros map to one number.
    """
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _highest(logits_ptr, edited_ptr, base, V, is_edited, temperature, BLOCK: tl.constexpr):
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    for first in range(0, V, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = load_scaled(logits_ptr, edited_ptr, base + at, at < V, is_edited, temperature)
        highest = tl.maximum(highest, x)
    return tl.max(highest, 0)


@triton.jit
def _compact(
    logits_ptr,
    edited_ptr,
    candidates_ptr,
    base,
    V,
    is_edited,
    temperature,
    highest,
    least,
    floor,
    BLOCK: tl.constexpr,
):
    """Write the x ≥ floor of a row to its candidates, in order.  Returns (their number, mass of the x ≥ least)."""
    num = 0
    mass = tl.zeros([BLOCK], tl.float32)
    for first in range(0, V, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = load_scaled(logits_ptr, edited_ptr, base + at, at < V, is_edited, temperature)
        mass += tl.where((x >= least) & (at < V), tl.exp(x - highest), 0.0)
        is_kept = (x >= floor) & (at < V)
        place = num + tl.cumsum(is_kept.to(tl.int32), 0) - 1
        tl.store(candidates_ptr + base + place, x, mask=is_kept)
        num += tl.sum(is_kept.to(tl.int32), 0)
    # Makes the candidates visible to the whole program.
    tl.debug_barrier()
    return num, tl.sum(mass, 0)


@triton.jit
def _weight_above(candidates_ptr, num, order, highest, IS_COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Return (weight of the candidates above `order`, number of those equal to it)."""
    above = tl.zeros([BLOCK], tl.float32)
    ties = tl.zeros([BLOCK], tl.int32)
    for first in range(0, num, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = tl.load(candidates_ptr + at, mask=at < num, other=float("-inf"))
        own = order_of(x)
        weight = tl.where(own > order, 1.0 if IS_COUNT else tl.exp(x - highest), 0.0)
        above += tl.where(at < num, weight, 0.0)
        ties += ((own == order) & (at < num)).to(tl.int32)
    return tl.sum(above, 0), tl.sum(ties, 0)


@triton.jit
def _bisect(
    candidates_ptr, num, low, high, target, highest, IS_COUNT: tl.constexpr, BLOCK: tl.constexpr
):
    """Return the smallest order in (low, high] with less than `target` above it.  `high` must be one."""
    while high - low > 1:
        middle = low + (high - low) // 2
        weight, _ = _weight_above(candidates_ptr, num, middle, highest, IS_COUNT, BLOCK)
        is_below = weight < target
        high = tl.where(is_below, middle, high)
        low = tl.where(is_below, low, middle)
    return high


@triton.jit
def _top_k_top_p_kernel(
    logits_ptr,
    edited_ptr,
    candidates_ptr,
    rows_ptr,
    parameters_ptr,
    is_edited_ptr,
    threshold_ptr,
    last_tie_ptr,
    V,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + i).to(tl.int64)
    tl.store(threshold_ptr + i, float("-inf"))
    tl.store(last_tie_ptr + i, V)
    if row < 0:
        return
    temperature = load_number(parameters_ptr, row, TEMPERATURE)
    top_k = load_word(parameters_ptr, row, _TOP_K)
    top_p = load_number(parameters_ptr, row, _TOP_P)
    log_min_p = load_number(parameters_ptr, row, _LOG_MIN_P)
    has_top_k = (top_k > 0) & (top_k < V)
    if (temperature == 0) | ((log_min_p == float("-inf")) & (top_p >= 1) & (has_top_k == 0)):
        return
    is_edited = tl.load(is_edited_ptr + row)
    base = i * V
    highest = _highest(logits_ptr, edited_ptr, base, V, is_edited, temperature, BLOCK)
    if highest == float("-inf"):
        return
    # The threshold of min-p.
    least = log_min_p + highest
    tl.store(threshold_ptr + i, least)
    if (has_top_k == 0) & (top_p >= 1):
        return
    floor = tl.maximum(least, highest - REACH)
    num, mass = _compact(
        logits_ptr, edited_ptr, candidates_ptr, base, V, is_edited, temperature, highest, least, floor,
        BLOCK,
    )  # fmt: skip
    # The k-th largest decides which tokens count for the mass.
    if has_top_k & (num < top_k) & (floor > least):
        floor = least
        num, mass = _compact(
            logits_ptr, edited_ptr, candidates_ptr, base, V, is_edited, temperature, highest, least,
            floor, BLOCK,
        )  # fmt: skip
    candidates_ptr += base
    bottom = tl.maximum(order_of(floor).to(tl.int64), LEAST_ORDER) - 1
    top = order_of(highest).to(tl.int64)
    order = bottom + 1
    kept_ties = num
    if has_top_k:
        target = top_k.to(tl.float32)
        order = _bisect(candidates_ptr, num, bottom, top, target, highest, True, BLOCK)
        above, ties = _weight_above(candidates_ptr, num, order, highest, True, BLOCK)
        kept_ties = tl.minimum(top_k - above.to(tl.int32), ties)
        mass, _ = _weight_above(candidates_ptr, num, order, highest, False, BLOCK)
        mass += kept_ties * tl.exp(float_of(order.to(tl.int32)) - highest)
    if top_p < 1:
        target = top_p * mass
        k_order = order
        order = _bisect(candidates_ptr, num, k_order - 1, top, target, highest, False, BLOCK)
        above, _ = _weight_above(candidates_ptr, num, order, highest, False, BLOCK)
        needed = tl.ceil(tl.div_rn(target - above, tl.exp(float_of(order.to(tl.int32)) - highest)))
        needed = tl.maximum(needed, 1.0).to(tl.int32)
        kept_ties = tl.where(order > k_order, needed, tl.minimum(needed, kept_ties))
    _, ties = _weight_above(candidates_ptr, num, order, highest, True, BLOCK)
    # Less than k or p is above the floor, so all of it is kept.
    if ties == 0:
        return
    tl.store(threshold_ptr + i, float_of(order.to(tl.int32)))
    if kept_ties < ties:
        last_tie = _find_tie(
            logits_ptr, edited_ptr, base, V, is_edited, temperature, order, kept_ties, BLOCK
        )
        tl.store(last_tie_ptr + i, last_tie)


@triton.jit
def float_of(order):
    return tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.float32, bitcast=True)


@triton.jit
def _find_tie(
    logits_ptr, edited_ptr, base, V, is_edited, temperature, order, number, BLOCK: tl.constexpr
):
    """Return the id of the `number`-th token with this `order`, counting from one."""
    found = V
    seen = 0
    for first in range(0, V, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = load_scaled(logits_ptr, edited_ptr, base + at, at < V, is_edited, temperature)
        is_tie = (order_of(x) == order) & (at < V)
        place = seen + tl.cumsum(is_tie.to(tl.int32), 0)
        found = tl.minimum(found, tl.min(tl.where(is_tie & (place == number), at, V), 0))
        seen += tl.sum(is_tie.to(tl.int32), 0)
    return found


def top_k_top_p(
    logits_RV: Tensor,
    edited_RV: Tensor,
    rows_R: Tensor,
    sampling: SamplingRows,
    *,
    scratch: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Find the cut of each row's candidates by min-p, top-k and top-p.

    Returns (threshold [R] float32, last_tie [R] int32).  Overwrites `scratch` [R, V] float32.
    """
    num_rows, vocab_size = logits_RV.shape
    assert logits_RV.is_contiguous(), "logits must be contiguous"
    assert edited_RV.is_contiguous(), "edited must be contiguous"
    scratch = torch.empty_like(edited_RV) if scratch is None else scratch
    threshold_R = edited_RV.new_empty(num_rows)
    last_tie_R = torch.empty_like(threshold_R, dtype=torch.int32)
    _top_k_top_p_kernel[(num_rows,)](
        logits_RV,
        edited_RV,
        scratch,
        rows_R,
        sampling.parameters,
        sampling.is_edited,
        threshold_R,
        last_tie_R,
        vocab_size,
        **config_of(CONFIGS, logits_RV.device, vocab_size),
    )
    return threshold_R, last_tie_R
