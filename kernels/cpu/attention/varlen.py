"""Attention of encoders: whole, independent sequences without padding and without a cache, in both directions.

    qkv   [T, 3, N, D]   the sequences one after the other, those of equal length adjacent
    out   [T, N D]
    group                first token, number of sequences n, their length L, number of visible keys K

The tokens of a sequence from K on see the others but are invisible.  With a `window` w a token sees tokens at most w
positions away.  A `bias` [N, 2 P + ROWS] float32, P ≥ L, is added to the scores by distance: bias[n, P + query - key].

    native   bfloat16 and float32, D a multiple of 16: `whole_attention` of `prefill.py`
    torch    everything else: the sequences of one length are one dense [n, L] batch, a view without a copy; windows are
             cut into tiles of queries, so that the work grows with L w

Law: the implementation depends on the dtype, the width and the machine, never on a batch.

Roofline: 4 Σ L² N D FLOPs, 4 e T N D bytes.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from trouper.kernels.codegen import launch, units

# Queries of a tile: `WHOLE_SIDE` of prefill.py, and those of a tile in torch.
ROWS = 64
QUERY_TILE = 256
UNLIMITED = 2**62


class Group(NamedTuple):
    first: int
    num_sequences: int
    length: int
    # At most the length.  Each token's window must contain one of these keys.
    num_keys: int = UNLIMITED

    @property
    def end(self) -> int:
        """Return the index of the first token behind the group.

        The next group begins there, because groups follow each other without padding. Offsets count tokens of the
        flat batch.
        """
        return self.first + self.num_sequences * self.length

    @property
    def keys(self) -> int:
        return min(self.num_keys, self.length)


def is_native(dtype: torch.dtype, width: int) -> bool:
    if units.kind_of(dtype) is None:
        return False
    from trouper.kernels.cpu.attention.prefill import can_prefill

    return width % 16 == 0 and can_prefill(1, width)


def positions_of(groups: Sequence[Group]) -> np.ndarray:
    """Return the position of each token in its sequence, [T] int64.

    All sequences of a group have one length, so the positions repeat. It is the index for tables of positions.
    """
    return np.concatenate([np.tile(np.arange(g.length), g.num_sequences) for g in groups])


def tiles_of(groups: Sequence[Group]) -> np.ndarray:
    """Return [P, 4] int64: first token and number of keys of a sequence, first query, number of queries.

    Each row is one work item of the attention kernel.
    """
    return np.array(
        [
            (group.first + i * group.length, group.keys, query, min(ROWS, group.length - query))
            for group in groups
            for i in range(group.num_sequences)
            for query in range(0, group.length, ROWS)
        ],
        np.int64,
    )


def varlen_attention(
    qkv_T3ND: Tensor,
    groups: Sequence[Group],
    *,
    scale: float,
    window: int | None = None,
    bias: Tensor | None = None,
    tiles: np.ndarray | None = None,
) -> Tensor:
    """Return the output [T, N · D].

    Args:
        scale: factor of the scores.
        window: largest distance of a visible key; all keys are visible by default.
        bias: added to the scores by distance.
        tiles: `tiles_of(groups)` for the native kernel; without them torch computes.
    """
    if tiles is not None:
        return _native([*qkv_T3ND.unbind(1)], tiles, scale, window, bias)
    num_tokens, _, num_heads, width = qkv_T3ND.shape
    out_TND = qkv_T3ND.new_empty((num_tokens, num_heads, width))
    for group in groups:
        first, num, length, _ = group
        part = qkv_T3ND.narrow(0, first, num * length).view(num, length, 3, num_heads, width)
        q, k, v = part.permute(2, 0, 3, 1, 4)  # [n, N, L, D] each
        k, v = k[:, :, : group.keys], v[:, :, : group.keys]
        target = out_TND.narrow(0, first, num * length).view(num, length, num_heads, width)
        if window is None or length <= window + 1:
            mask = None if bias is None else _matrix(bias, length)[..., : group.keys].to(q.dtype)
            target.copy_(_attend(q, k, v, mask, scale).transpose(1, 2))
            continue
        for begin in range(0, length, QUERY_TILE):
            end = min(begin + QUERY_TILE, length)
            low, high = max(0, begin - window), min(group.keys, end + window)
            mask = _band(begin, end, low, high, window, qkv_T3ND.device)
            out = _attend(q[:, :, begin:end], k[:, :, low:high], v[:, :, low:high], mask, scale)
            target[:, begin:end] = out.transpose(1, 2)
    return out_TND.flatten(1)


def attend_both_ways(q_BLND: Tensor, k_BLND: Tensor, v_BLND: Tensor, scale: float) -> Tensor:
    """Return the attention [B, L, N, D] of sequences of one length, from separate queries, keys and values.

    The layout is that of a vision tower's projections, which need not be joined.  `is_native` must accept the width.
    """
    num, length, num_heads, width = q_BLND.shape
    parts = [_rows_of(x_BLND) for x_BLND in (q_BLND, k_BLND, v_BLND)]
    tiles = tiles_of([Group(0, num, length)])
    return _native(parts, tiles, scale, None, None).view(num, length, num_heads, width)


def _rows_of(x_BLND: Tensor) -> Tensor:
    """Return the heads of all tokens [T, N, D], those of a token adjacent in memory."""
    num, length, num_heads, width = x_BLND.shape
    strides = x_BLND.stride()
    is_dense = strides[2:] == (width, 1) and (num == 1 or strides[0] == length * strides[1])
    # torch may give any stride to a dimension of one, also in a contiguous tensor.
    stride = strides[1] if is_dense else num_heads * width
    x_BLND = x_BLND if is_dense else x_BLND.contiguous()
    return x_BLND.as_strided((num * length, num_heads, width), (stride, width, 1))


def _native(
    parts: Sequence[Tensor],
    tiles: np.ndarray,
    scale: float,
    window: int | None,
    bias: Tensor | None,
) -> Tensor:
    """Launch the kernel for queries, keys and values [T, N, D]."""
    from trouper.kernels.cpu.attention.prefill import whole_attention
    from trouper.kernels.cpu.attention.tile import scratch_bytes

    num_tokens, num_heads, width = parts[0].shape
    out_TE = parts[0].new_empty((num_tokens, num_heads * width))
    num_threads, num_bytes = torch.get_num_threads(), scratch_bytes(width, ROWS)
    kind = "f32" if out_TE.itemsize == 4 else "bf16"
    launch.compiled(whole_attention, kind, units.bf16_unit())(
        len(tiles) * num_heads,
        *(part.data_ptr() for part in parts),
        *(part.stride(0) for part in parts),
        tiles.ctypes.data,
        num_heads,
        width,
        launch.float_bits(scale),
        UNLIMITED if window is None else window,
        0 if bias is None else bias.data_ptr(),
        0 if bias is None else bias.shape[1],
        out_TE.data_ptr(),
        launch.scratch(num_threads * num_bytes),
        num_bytes,
        num_threads=num_threads,
    )
    return out_TE


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)


def _band(begin: int, end: int, low: int, high: int, window: int, device: torch.device) -> Tensor:
    queries = torch.arange(begin, end, device=device)[:, None]
    return (queries - torch.arange(low, high, device=device)).abs() <= window


def _matrix(bias: Tensor, length: int) -> Tensor:
    """Return the bias as a matrix [N, L, L], queries by keys."""
    middle = (bias.shape[1] - ROWS) // 2
    places = torch.arange(length)
    return bias[:, middle + places[:, None] - places]


def varlen_attention_reference(
    qkv_T3ND: Tensor,
    groups: Sequence[Group],
    *,
    scale: float,
    window: int | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Compute one sequence after the other in float64, with all scores at once.

    Tests compare the kernels with it. It is slow and simple on purpose.
    """
    outs: list[Tensor] = []
    for group in groups:
        first, num, length, _ = group
        for i in range(num):
            part = qkv_T3ND.narrow(0, first + i * length, length).double()
            q, k, v = part.permute(1, 2, 0, 3)  # [N, L, D]
            scores = q @ k.transpose(1, 2) * scale
            if bias is not None:
                scores += _matrix(bias, length).double()
            if window is not None:
                positions = torch.arange(length)
                far = (positions[:, None] - positions).abs() > window
                scores.masked_fill_(far, -torch.inf)
            scores[:, :, group.keys :] = -torch.inf
            outs.append((scores.softmax(-1) @ v).transpose(0, 1).flatten(1))
    return torch.cat(outs).to(qkv_T3ND.dtype)
