"""DeBERTa's disentangled attention: scores depend on the contents of two tokens and on the distance between them.

    score(q, k) = (Q_q · K_k + Q_q · PK_d + K_k · PQ_d) / sqrt(D · number of terms),    d = bucket(q - k)

(*DeBERTa: Decoding-enhanced BERT with Disentangled Attention*, ICLR 2021.)  PK and PQ are the same for every text, so they are computed once, at load.
"""

import math
from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from trouper.kernels.cpu.attention.varlen import Group


class DistanceTraits(msgspec.Struct, frozen=True, kw_only=True):
    """How distances between tokens contribute to scores.

    The table of distances has 2 × `span` rows. With `num_buckets` > 0, distances beyond half of the buckets share buckets by
    their logarithm, up to `max_distance`.
    """

    span: int
    num_buckets: int = 0
    max_distance: int
    has_content_to_position: bool
    has_position_to_content: bool
    norms_table: bool

    @property
    def num_terms(self) -> int:
        return 1 + self.has_content_to_position + self.has_position_to_content


def buckets(traits: DistanceTraits, length: int) -> Tensor:
    """Return the row of the distance table for each query and key, [L, L] int64.

    Near distances have rows of their own, and farther ones share rows on a logarithmic scale.
    """
    at = torch.arange(length)
    distance = at[:, None] - at
    if traits.num_buckets > 0:
        middle = traits.num_buckets // 2
        away = torch.where(distance.abs() < middle, middle - 1, distance.abs()).float()
        # Computed in float32, like in training. In float64, some distances would fall into the next bucket.
        steps = torch.log(away / middle) / torch.log(
            torch.tensor((traits.max_distance - 1) / middle)
        )
        shared = (torch.ceil(steps * (middle - 1)) + middle) * distance.sign()
        distance = torch.where(away <= middle, distance.float(), shared).long()
    return (distance + traits.span).clamp(0, 2 * traits.span - 1)


def disentangled_attention(
    qkv_T3ND: Tensor,
    groups: Sequence[Group],
    traits: DistanceTraits,
    keys_PND: Tensor | None,
    queries_PND: Tensor | None,
) -> Tensor:
    """Return [T, N · D].

    Args:
        keys_PND: the distance table as keys; None without content to position.
        queries_PND: the table as queries; None without position to content.
    """
    num_tokens, _, num_heads, width = qkv_T3ND.shape
    out_TND = qkv_T3ND.new_zeros((num_tokens, num_heads, width))
    scale = 1 / math.sqrt(width * traits.num_terms)
    for group in groups:
        first, num, length, _ = group
        rows_LL = buckets(traits, length)
        target = out_TND.narrow(0, first, num * length).view(num, length, num_heads, width)
        part = qkv_T3ND.narrow(0, first, num * length).view(num, length, 3, num_heads, width)
        # One text at a time, so that its bits do not depend on its neighbours, and only [N, L, L] scores are in memory.
        for text, out in zip(part, target, strict=True):
            q, k, v = text.permute(1, 2, 0, 3)  # [N, L, D] each
            scores = q @ k.transpose(1, 2)
            shape = scores.shape
            if keys_PND is not None:
                scores += (q @ keys_PND.permute(1, 2, 0)).gather(2, rows_LL.expand(shape))
            if queries_PND is not None:
                by_key = k @ queries_PND.permute(1, 2, 0)
                scores += by_key.gather(2, rows_LL.T.expand(shape)).transpose(1, 2)
            scores = (scores.float() * scale)[..., : group.keys].softmax(-1).to(v.dtype)
            out.copy_((scores @ v[:, : group.keys]).transpose(0, 1))
    return out_TND.flatten(1)
