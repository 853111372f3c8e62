"""Causal attention of a ragged batch over a paged KV cache, read through views without copies.

    out = softmax(cap(scale · q Kᵀ) + mask) V per query head;  cap(s) = c · tanh(s / c), or s without a cap

    q      [T, N, D]      tokens × query heads × head width;  N = H · G, heads of a group adjacent
    k, v   [T, H, D]      this step's own keys and values, already written to the cache
    cache  [2, H, S, D]   keys and values of one layer × slots
    out    [T, N · D]

Each tile of the plan attends to every run of cache slots as a view, then to its own keys, and the parts are merged by their
log-sum-exp.  A single query turns the G heads of its group into rows, so that each key is read once for all of them (one
call of 8 x [2, 128] x [128, 1024]: 460 µs on one core, and 3377 µs with separate heads).  A longer tile expands K and V
over the group with stride 0.

Roofline of a decode: 2 e H L D bytes, 4 N L D FLOPs for L keys; bound by memory.
Measured at L = 1024, H = 8, D = 128, bfloat16 on one EPYC core: 459 µs = 9 GB/s, of about 20.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# torch leaves the types of split, view and some others open.

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trouper.kernels.reference.attention_plan import QueryTile, SlotRun

# The largest number of queries in a tile with a cap, whose scores are a matrix in memory: 8 heads x 256 x 8192 x 4 B = 64 MiB.
MAX_TILE_CAPPED = 256


class AttendedPart(NamedTuple):
    """The attention of some queries over some of the keys."""

    out: Tensor  # [..., rows, D]
    lse: Tensor  # [..., rows] float32: log of the sum of exp(score)


Attend = Callable[[Tensor, Tensor, Tensor, bool, Tensor | None], AttendedPart]


def paged_attention(
    q_TND: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    cache_2HSD: Tensor,
    tiles: Sequence[QueryTile],
    masks: dict[int, Tensor],
    *,
    scale: float,
    softcap: float | None = None,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """Return the output [T, N · D].

    Args:
        masks: the plan's masks as tensors, by the id of the array; see `mask_tensors`.
        sinks_N: for each head the score of an extra key without a value, visible to every query.
    """
    num_tokens, num_q, width = q_TND.shape
    num_kv = cache_2HSD.shape[1]
    # The last layer attends only for tokens that are read, and the first chunk of a long prompt has none.
    if num_tokens == 0:
        return q_TND.new_empty((0, num_q * width))
    q_THGD = q_TND.view(num_tokens, num_kv, num_q // num_kv, width)
    k_1HSD, v_1HSD = cache_2HSD.unsqueeze(1)
    attend = _capped(scale, softcap) if softcap else _flash(scale)
    sinks_HG = None if sinks_N is None else sinks_N.float().view(num_kv, -1)
    # One call splits the rows for all single queries.
    rows_1HGD = q_THGD.split(1)
    outs: list[Tensor] = []
    for first, count, runs in tiles:
        if count == 1:
            q = rows_1HGD[first]
            parts = [
                attend(q, k_1HSD.narrow(2, r.slot, r.length), v_1HSD.narrow(2, r.slot, r.length), False, None)
                for r in runs
            ]  # fmt: skip
            outs.append(_sunk(_merge(parts, q.dtype), sinks_HG))
            continue
        q = q_THGD.narrow(0, first, count).permute(1, 2, 0, 3)
        parts = [_over_run(attend, q, k_1HSD, v_1HSD, run, masks) for run in runs]
        k, v = (
            x.narrow(0, first, count).transpose(0, 1).unsqueeze(1).expand(q.shape)
            for x in (k_THD, v_THD)
        )
        parts.append(attend(q, k, v, True, None))
        sinks_HG1 = None if sinks_HG is None else sinks_HG.unsqueeze(2)
        outs.append(_sunk(_merge(parts, q.dtype), sinks_HG1).permute(2, 0, 1, 3))
    out_THGD = outs[0] if len(outs) == 1 else torch.cat(outs)
    return out_THGD.reshape(num_tokens, num_q * width)


def mask_tensors(tiles: Sequence[QueryTile], dtype: torch.dtype) -> dict[int, Tensor]:
    """Return the masks of a plan as numbers to add to the scores: 0 or -inf."""
    found = {}
    for mask in (run.mask for tile in tiles for run in tile.runs):
        if mask is None:
            continue
        hidden = torch.from_numpy(~mask)
        found[id(mask)] = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)
    return found


def _over_run(
    attend: Attend,
    q_HGCD: Tensor,
    k_1HSD: Tensor,
    v_1HSD: Tensor,
    run: SlotRun,
    masks: dict[int, Tensor],
) -> AttendedPart:
    """Return the attention over one run.  Queries that see none of its keys get weight zero."""
    num_kv, group, count, width = q_HGCD.shape
    shape = (num_kv, group, run.length, width)
    k, v = (
        x.narrow(2, run.slot, run.length).transpose(0, 1).expand(shape) for x in (k_1HSD, v_1HSD)
    )
    mask = None if run.mask is None else masks[id(run.mask)]
    part = attend(q_HGCD.narrow(2, 0, run.num_queries), k, v, False, mask)
    missing = count - run.num_queries
    if not missing:
        return part
    return AttendedPart(
        F.pad(part.out, (0, 0, 0, missing)), F.pad(part.lse, (0, missing), value=-torch.inf)
    )


def _merge(parts: list[AttendedPart], dtype: torch.dtype) -> AttendedPart:
    if len(parts) == 1:
        return parts[0]
    lse = torch.stack([part.lse for part in parts])
    weights = lse.softmax(0).unsqueeze(-1)
    out = torch.stack([part.out for part in parts])
    return AttendedPart((out * weights).sum(0).to(dtype), lse.logsumexp(0))


def _sunk(part: AttendedPart, sinks: Tensor | None) -> Tensor:
    """Return the output of attention with one more key of score `sinks` and value 0."""
    if sinks is None:
        return part.out
    return (part.out * torch.sigmoid(part.lse - sinks).unsqueeze(-1)).to(part.out.dtype)


def _flash(scale: float) -> Attend:
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def attend(
        q: Tensor, k: Tensor, v: Tensor, is_causal: bool, mask: Tensor | None
    ) -> AttendedPart:
        return AttendedPart(*flash(q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale))

    return attend


def _capped(scale: float, softcap: float) -> Attend:
    def attend(
        q: Tensor, k: Tensor, v: Tensor, is_causal: bool, mask: Tensor | None
    ) -> AttendedPart:
        scores = (q @ k.transpose(-1, -2)).float().mul_(scale / softcap).tanh_().mul_(softcap)
        if is_causal:
            rows = scores.shape[-2:]
            scores.masked_fill_(torch.ones(rows, dtype=torch.bool).triu_(1), -torch.inf)
        if mask is not None:
            scores += mask
        lse = scores.logsumexp(-1)
        return AttendedPart(scores.sub_(lse.unsqueeze(-1)).exp_().to(v.dtype) @ v, lse)

    return attend


def paged_attention_reference(
    q_TND: Tensor,
    cache_2HSD: Tensor,
    slots: Sequence[Sequence[int]],
    starts: Sequence[int],
    counts: Sequence[int],
    *,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """Gather all keys and compute in float64.  slots[i][p] is the cache slot of position p of column i."""
    outs = []
    queries = q_TND.double().split(list(counts))
    for q, where, start, count in zip(queries, slots, starts, counts, strict=True):
        group = q.shape[1] // cache_2HSD.shape[1]
        index = torch.tensor(where[: start + count])
        k, v = cache_2HSD[:, :, index].double().repeat_interleave(group, dim=1)
        scores = torch.einsum("tnd,nld->ntl", q, k) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        query_T1 = torch.arange(start, start + count)[:, None]
        key_1L = torch.arange(start + count)[None]
        hidden = key_1L > query_T1
        if window:
            hidden |= key_1L <= query_T1 - window
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks_N is not None:
            sinks_NT1 = sinks_N.double()[:, None, None].expand(-1, count, 1)
            scores = torch.cat((scores, sinks_NT1), -1)
        weights = scores.softmax(-1)[..., : start + count]
        outs.append(torch.einsum("ntl,nld->tnd", weights, v).flatten(1))
    return torch.cat(outs).to(q_TND.dtype)
