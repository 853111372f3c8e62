"""Rotary position embedding, in place, and the write of keys and values to the cache.

    (x₁, x₂) -> (x₁ cos - x₂ sin, x₂ cos + x₁ sin),   x₁, x₂ the halves of the rotated part of a head

    x        [T, N, D]     tokens × (q heads, then k heads) × head width; rows may be strided
    table    [P, 2, R]     positions × (cos, signed sin) × rotated width R ≤ D; see `rope_table`
    rotation [2, T, 1, R]  the rows of the table for this batch, gathered once a step

The table includes the sign of x₂ sin, so the rotation is x · cos + roll(x, R/2) · sin: three calls.  The table has the
model's dtype, rounded like in transformers, and its angles are computed in float32.  The halves convention is that of
GPT-NeoX (`rotate_half` in transformers).

    cache[:, h, slot_t] = kv[t, :, h]

    kv     [T, 2, H, D]   tokens × (k, v) × heads × head width; rows may be strided
    cache  [2, H, S, D]   one layer
    slots  [T]            int64, all different

Roofline: rope_ 2 e T N D bytes and 3 T N R FLOPs; kv_write_ 4 e T H D bytes.  One call writes keys and values: 9 µs at
T = 16, H = 8, D = 128.
"""


# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# torch leaves the types of split, view and some others open.

import torch
from torch import Tensor


def rope_table(
    inverse_frequencies: Tensor, num_positions: int, scale: float, dtype: torch.dtype
) -> Tensor:
    """Return the table [P, 2, R] for `inverse_frequencies` [R/2].

    Args:
        scale: factor of cos and sin (yarn, longrope).
    """
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies.float())
    cos, sin = angles.cos() * scale, angles.sin() * scale
    return torch.stack(
        (torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)),
        dim=1,
    ).to(dtype)


def rotation_of(table: Tensor, positions_T: Tensor) -> Tensor:
    return table.index_select(0, positions_T).transpose(0, 1).unsqueeze(2)


def rope_(x_TND: Tensor, rotation: Tensor) -> None:
    """Rotate the heads `x_TND` in place."""
    cos_T1R, sin_T1R = rotation
    width = cos_T1R.shape[-1]
    x_TNR = x_TND if width == x_TND.shape[-1] else x_TND[..., :width]
    torch.addcmul(x_TNR * cos_T1R, x_TNR.roll(width // 2, -1), sin_T1R, out=x_TNR)


def rope_reference(
    x_TND: Tensor, positions_T: Tensor, inverse_frequencies: Tensor, scale: float = 1.0
) -> Tensor:
    """Rotate a copy in float64, as a product of complex numbers."""
    half = inverse_frequencies.numel()
    angles_TR = torch.outer(positions_T.double(), inverse_frequencies.double())
    x1, x2, rest = x_TND.double().split((half, half, x_TND.shape[-1] - 2 * half), dim=-1)
    turned = (
        torch.complex(x1, x2) * torch.polar(torch.full_like(angles_TR, scale), angles_TR)[:, None]
    )
    return torch.cat((turned.real, turned.imag, rest), dim=-1).to(x_TND.dtype)


def kv_write_(cache_2HSD: Tensor, kv_T2HD: Tensor, slots_T: Tensor) -> None:
    cache_2HSD.index_copy_(2, slots_T, kv_T2HD.permute(1, 2, 0, 3))


def kv_write_reference(cache_2HSD: Tensor, kv_T2HD: Tensor, slots_T: Tensor) -> Tensor:
    out = cache_2HSD.clone()
    for kv_2HD, slot in zip(kv_T2HD, slots_T.tolist(), strict=True):
        out[:, :, slot] = kv_2HD
    return out
