"""The kernel between a fused QKV product and attention: head norms, rotation of q in place, k and v into the cache.

    qkv    [T, N + 2 H, D]  tokens × (q heads, k heads, v heads) × head width, rows contiguous
    norm   [N + H, D]       weights of the norm of each q and k head, or None
    table  [P, 2, R]        positions × (cos, signed sin) × rotated width, in the form of `kernels/reference/norms.py`,
                            or None; the queries may have another one
    cache  [2, H, S, D]     one layer; a head's row of a slot is contiguous
    slots  [T]              int32; a negative slot is a padding token, for which nothing is written

Nothing is rounded between the norm and the cache.  With NORM_LAST the norm follows the rotation.

Roofline: 2 e T (N + 2 H) D bytes, about 10 T (N + H) D FLOPs.  Target 70 % from T = 512.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from trouper.kernels.cuda.launch import Table, config_of
from trouper.kernels.reference.norms import kv_write_reference, rms_norm_reference

# By D: a program has HEADS heads.
CONFIGS: Table = {
    "sm_90": (
        (128, {"HEADS": 8, "num_warps": 4}),
        (256, {"HEADS": 4, "num_warps": 4}),
        (512, {"HEADS": 2, "num_warps": 4}),
    )
}


@triton.jit
def _qk_norm_rope_kv_write_kernel(
    qkv_ptr,
    norm_ptr,
    table_ptr,
    query_table_ptr,
    cache_ptr,
    positions_ptr,
    slots_ptr,
    cache_stride_kv,
    cache_stride_h,
    cache_stride_s,
    eps,
    N: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    D_PAD: tl.constexpr,
    HEADS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_ROPE: tl.constexpr,
    HAS_QUERY_TABLE: tl.constexpr,
    NORM_LAST: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot < 0:
        return
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, D_PAD)
    mask = (head < N + 2 * H)[:, None] & (column < D)[
        None, :
    ]  # HEADS × D_PAD, like all blocks below
    is_qk = (head < N + H)[:, None] & (column < D)[None, :]
    row_ptr = qkv_ptr + (token * (N + 2 * H) + head)[:, None] * D
    raw = tl.load(row_ptr + column[None, :], mask=mask, other=0.0)
    x = raw.to(tl.float32)
    if HAS_NORM and not NORM_LAST:
        scale = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        weight = tl.load(norm_ptr + head[:, None] * D + column[None, :], mask=is_qk, other=0.0)
        x = tl.where(is_qk, x * scale * weight.to(tl.float32), x)
    if HAS_ROPE:
        is_turned = is_qk & (column < R)[None, :]
        partner = tl.where(column < R // 2, column + R // 2, column - R // 2)
        other = tl.load(row_ptr + partner[None, :], mask=is_turned, other=0.0).to(tl.float32)
        if HAS_NORM and not NORM_LAST:
            weight_ptr = norm_ptr + head[:, None] * D + partner[None, :]
            other = other * scale * tl.load(weight_ptr, mask=is_turned, other=0.0).to(tl.float32)
        angles = (tl.load(positions_ptr + token).to(tl.int64) * 2 * R + column)[None, :]
        is_rotated = (column < R)[None, :]
        cos = tl.load(table_ptr + angles, mask=is_rotated, other=0.0).to(tl.float32)
        sin = tl.load(table_ptr + angles + R, mask=is_rotated, other=0.0).to(tl.float32)
        if HAS_QUERY_TABLE:
            is_q = (head < N)[:, None]
            q_cos = tl.load(query_table_ptr + angles, mask=is_rotated, other=0.0).to(tl.float32)
            q_sin = tl.load(query_table_ptr + angles + R, mask=is_rotated, other=0.0).to(tl.float32)
            cos, sin = tl.where(is_q, q_cos, cos), tl.where(is_q, q_sin, sin)
        x = tl.where(is_turned, x * cos + other * sin, x)
        # Every program reads the other half of a rotation before it overwrites q.
        tl.debug_barrier()
    if HAS_NORM and NORM_LAST:
        scale = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        weight = tl.load(norm_ptr + head[:, None] * D + column[None, :], mask=is_qk, other=0.0)
        x = tl.where(is_qk, x * scale * weight.to(tl.float32), x)
    y = x.to(raw.dtype)
    tl.store(row_ptr + column[None, :], y, mask=mask & (head < N)[:, None])
    kv = tl.maximum(head - N, 0).to(tl.int64)
    cache_row = cache_ptr + slot * cache_stride_s + (kv // H) * cache_stride_kv
    cache_row += (kv % H) * cache_stride_h
    tl.store(cache_row[:, None] + column[None, :], y, mask=mask & (head >= N)[:, None])


def qk_norm_rope_kv_write_(
    qkv_TND: Tensor,
    cache_2HSD: Tensor,
    positions_T: Tensor,
    slots_T: Tensor,
    *,
    norm_ND: Tensor | None,
    table_P2R: Tensor | None,
    eps: float,
    query_table_P2R: Tensor | None = None,
    is_norm_last: bool = False,
) -> None:
    """Change q in place, and write k and v to their slots.  The k and v parts of `qkv` do not change."""
    num_tokens, num_heads, width = qkv_TND.shape
    num_kv = cache_2HSD.shape[1]
    num_q = num_heads - 2 * num_kv
    assert num_q > 0, f"{num_heads} heads cannot hold {num_kv} of k and of v"
    assert qkv_TND.is_contiguous(), "qkv must be contiguous"
    assert cache_2HSD.stride(3) == 1, "a head's row of a slot must be contiguous"
    assert norm_ND is None or norm_ND.shape == (num_q + num_kv, width), "norm is not [N + H, D]"
    rotated = 0 if table_P2R is None else table_P2R.shape[2]
    assert rotated <= width, f"{rotated} rotated of {width}"
    config = config_of(CONFIGS, qkv_TND.device, width)
    _qk_norm_rope_kv_write_kernel[(num_tokens, triton.cdiv(num_heads, config["HEADS"]))](
        qkv_TND,
        norm_ND,
        table_P2R,
        query_table_P2R,
        cache_2HSD,
        positions_T,
        slots_T,
        cache_2HSD.stride(0),
        cache_2HSD.stride(1),
        cache_2HSD.stride(2),
        eps,
        N=num_q,
        H=num_kv,
        D=width,
        R=rotated,
        D_PAD=triton.next_power_of_2(width),
        HAS_NORM=norm_ND is not None,
        HAS_ROPE=table_P2R is not None,
        HAS_QUERY_TABLE=query_table_P2R is not None,
        NORM_LAST=is_norm_last,
        **config,
    )


def qk_norm_rope_kv_write_reference(
    qkv_TND: Tensor,
    cache_2HSD: Tensor,
    positions_T: Tensor,
    slots_T: Tensor,
    *,
    norm_ND: Tensor | None,
    table_P2R: Tensor | None,
    eps: float,
    query_table_P2R: Tensor | None = None,
    is_norm_last: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute the same in torch, one operation after the other.

    Changes q in place and writes k and v into the cache.  Tests compare the kernel with it.
    """
    num_kv = cache_2HSD.shape[1]
    qk, v = qkv_TND[:, :-num_kv].double(), qkv_TND[:, -num_kv:]

    def normalised(qk: Tensor) -> Tensor:
        if norm_ND is None:
            return qk
        heads = [rms_norm_reference(qk[:, i], w, eps) for i, w in enumerate(norm_ND)]
        return torch.stack(heads, dim=1)

    if not is_norm_last:
        qk = normalised(qk)
    if table_P2R is not None:
        q, k = qk[:, :-num_kv], qk[:, -num_kv:]
        q_table = table_P2R if query_table_P2R is None else query_table_P2R
        turned = _turned(q, q_table, positions_T), _turned(k, table_P2R, positions_T)
        qk = torch.cat(turned, dim=1)
    if is_norm_last:
        qk = normalised(qk)
    q, k = qk.to(qkv_TND.dtype).split((qk.shape[1] - num_kv, num_kv), dim=1)
    is_real = slots_T >= 0
    kv = torch.stack((k, v), dim=1)[is_real]
    return q, kv_write_reference(cache_2HSD, kv, slots_T[is_real])


def _turned(x_TND: Tensor, table_P2R: Tensor, positions_T: Tensor) -> Tensor:
    width = table_P2R.shape[2]
    cos, sin = table_P2R[positions_T].double().unsqueeze(2).unbind(1)
    turned = x_TND[..., :width] * cos + x_TND[..., :width].roll(width // 2, -1) * sin
    return torch.cat((turned, x_TND[..., width:]), -1)
