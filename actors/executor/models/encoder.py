"""One bidirectional transformer for every encoder of `encoder_traits`.

Its attention is the usual one, or DeBERTa's, where scores also depend on the distance between two tokens (*DeBERTa: Decoding-enhanced
BERT with Disentangled Attention*, ICLR 2021):

    score(q, k) = (Q_q · K_k + Q_q · PK_d + K_k · PQ_d) / sqrt(D · number of terms),    d = bucket(q - k)

PK and PQ are the same for every text, so they are computed once, at load.

T  tokens of all sequences, one after the other      N  heads    D  head width    E  hidden size
"""

import math
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from trouper.actors.executor.models.encoder_traits import (
    Act,
    DistanceTraits,
    EncoderExpertsTraits,
    EncoderTraits,
)
from trouper.actors.executor.models.layers import make_rope_table
from trouper.kernels.cpu.attention.varlen import (
    ROWS,
    Group,
    is_native,
    positions_of,
    tiles_of,
    varlen_attention,
)
from trouper.kernels.cpu.encoder_ops import LayerNorm, TokenEmbedding
from trouper.kernels.linear import LinearMethod
from trouper.kernels.reference.norms import (
    gelu_and_mul,
    gelu_tanh_and_mul,
    rms_norm,
    rope_,
    rotation_of,
    silu_and_mul,
)


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


ACT_AND_MUL = {"silu": silu_and_mul, "gelu": gelu_and_mul, "gelu_tanh": gelu_tanh_and_mul}


class RmsNorm:
    """A norm by the root of the mean square, called like `LayerNorm`.

    It has a weight and no bias, and does not subtract the mean.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight, self._eps = weight, eps

    def __call__(self, x_TD: Tensor, residual_TD: Tensor | None = None) -> Tensor:
        x_TD = x_TD if residual_TD is None else x_TD + residual_TD
        return rms_norm(x_TD, self._weight, self._eps)


Norm = LayerNorm | RmsNorm


class EncoderExperts:
    """Experts in place of an MLP: each token goes through the few that the router likes most, weighted by its shares.

    Args:
        router_XE: one row for each of X experts.
        ups, downs: the two products of each expert.
        bias_E: added to the sum.
    """

    def __init__(
        self,
        traits: EncoderExpertsTraits,
        act: Act,
        *,
        router_XE: Tensor,
        ups: Sequence[LinearMethod],
        downs: Sequence[LinearMethod],
        bias_E: Tensor | None,
    ) -> None:
        self._traits, self._act, self._router_XE, self._bias_E = traits, act, router_XE, bias_E
        self._ups, self._downs = ups, downs

    def __call__(self, x_TE: Tensor) -> Tensor:
        """Return [T, E]; only experts that some token has chosen compute, on their tokens."""
        shares_TX = F.linear(x_TE, self._router_XE).softmax(-1, dtype=torch.float32)
        shares_TK, chosen_TK = shares_TX.topk(self._traits.num_chosen, dim=-1)
        if self._traits.is_renormalized:
            shares_TK = shares_TK / shares_TK.sum(-1, keepdim=True)
        out_TE = torch.zeros_like(x_TE)
        chosen = chosen_TK.numpy()
        numbers: list[int] = np.unique(chosen).tolist()
        for number in numbers:
            rows, ranks = (torch.as_tensor(place) for place in np.nonzero(chosen == number))
            wide_RF = self._ups[number].apply_act(x_TE[rows], self._act)
            shares_R1 = shares_TK[rows, ranks, None].to(x_TE.dtype)
            out_TE.index_add_(0, rows, self._downs[number].apply(wide_RF) * shares_R1)
        return out_TE if self._bias_E is None else out_TE + self._bias_E


class EncoderLayer:
    """The weights of one layer; `attention_norm` is None where ModernBERT's first layer has none.

    `distances` are the keys and the queries of DeBERTa's distances, [2 · span, N, D] each. `relative_bias` [buckets, N] is the table of
    UMT5's layers; the layers of T5 share one.
    """

    def __init__(
        self,
        *,
        qkv: LinearMethod,
        o: LinearMethod,
        up: LinearMethod | None,
        down: LinearMethod | None,
        attention_norm: Norm | None,
        mlp_norm: Norm,
        distances: tuple[Tensor | None, Tensor | None] = (None, None),
        experts: EncoderExperts | None = None,
        relative_bias: Tensor | None = None,
    ) -> None:
        self.distances, self.experts = distances, experts
        self.relative_bias = relative_bias
        self.qkv, self.o, self.up, self.down = qkv, o, up, down
        self.attention_norm, self.mlp_norm = attention_norm, mlp_norm


class Encoder:
    """The weights of an encoder, and its forward pass.

    It computes whole sequences at once and keeps nothing between calls, so threads may share it.
    """

    def __init__(
        self,
        traits: EncoderTraits,
        *,
        embedding: TokenEmbedding,  # whose first position is that of the first token
        norm: Norm | None,
        projection: LinearMethod | None,
        layers: Sequence[EncoderLayer],
        final_norm: Norm | None,
        relative_bias: Tensor | None,  # [buckets, N]
        max_model_len: int,
    ) -> None:
        self.traits = traits
        self.dtype = embedding.dtype
        self._embedding, self._norm, self._projection = embedding, norm, projection
        self._layers, self._final_norm = layers, final_norm
        # By layer.  Each takes 2 × max_model_len numbers for each head.
        shared = self._spread(relative_bias, max_model_len)
        self._biases = [
            shared
            if layer.relative_bias is None
            else self._spread(layer.relative_bias, max_model_len)
            for layer in layers
        ]
        self.is_native = traits.distances is None and is_native(self.dtype, traits.head_dim)
        # Whether its launches can be recorded and replayed: every operation is a compiled kernel.
        self.is_recordable = (
            self.is_native and traits.norm_kind == "layer" and traits.experts is None
        )
        self._rope_tables = [
            make_rope_table(rope, max_model_len, self.dtype) for rope in traits.ropes
        ]

    def _spread(self, bias_BN: Tensor | None, num_positions: int) -> Tensor | None:
        if bias_BN is None:
            return None
        return spread_bias(bias_BN, num_positions, self.traits.max_distance)

    @property
    def num_bytes(self) -> int:
        """The bytes of weights that a batch reads, without the embeddings.

        It decides whether one thread computes the model faster than several.
        """
        linears = [x for la in self._layers for x in (la.qkv, la.o, la.up, la.down)]
        return sum(x.shape[0] * x.shape[1] for x in linears if x) * self.dtype.itemsize

    def positions(self, token_ids: np.ndarray, groups: Sequence[Group]) -> np.ndarray:
        """Return [T] int64, the row of the position table for each token."""
        positions = positions_of(groups)
        if not self.has_padding(token_ids):
            return positions
        is_padding = token_ids == self.traits.padding_id
        counts = np.cumsum(~is_padding)
        starts = np.flatnonzero(positions == 0)
        lengths = np.diff(np.append(starts, len(counts)))
        before = np.repeat(counts[starts] - ~is_padding[starts], lengths)
        last_row = self.traits.num_positions - self.traits.position_offset
        return np.where(is_padding, last_row, counts - before - 1)

    def has_padding(self, token_ids: np.ndarray) -> bool:
        """Check whether a text has the padding token, which takes no position in RoBERTa's family."""
        padding_id = self.traits.padding_id
        return padding_id is not None and bool((token_ids == padding_id).any())

    def forward(
        self,
        token_ids_T: Tensor,
        positions_T: Tensor,
        type_ids_T: Tensor,
        groups: Sequence[Group],
    ) -> Tensor:
        """Compute the hidden states [T, E] after the last norm.

        Sequences of one length form a group; they follow each other without padding.
        """
        num_tokens = len(token_ids_T)
        if self._layers[0].qkv.is_compiled_per_size:  # padding rows belong to no sequence
            more = (0, rounded(num_tokens) - num_tokens)
            token_ids_T, positions_T = F.pad(token_ids_T, more), F.pad(positions_T, more)
            type_ids_T = F.pad(type_ids_T, more)
        tiles = tiles_of(groups) if self.is_native else None
        x_TE = self.forward_padded(token_ids_T, positions_T, type_ids_T, groups, tiles)
        return x_TE[:num_tokens]

    def forward_padded(
        self,
        token_ids_T: Tensor,
        positions_T: Tensor,
        type_ids_T: Tensor,
        groups: Sequence[Group],
        tiles: np.ndarray | None,
    ) -> Tensor:
        """Compute the same for any rows; some may belong to no sequence.

        Args:
            tiles: of the groups; they live as long as this is recorded.
        """
        x_TE = self._embedding(token_ids_T, type_ids_T, positions_T)
        x_TE = x_TE if self._norm is None else self._norm(x_TE)
        x_TE = x_TE if self._projection is None else self._projection.apply(x_TE)
        rotations = [rotation_of(table, positions_T) for table in self._rope_tables]
        for i, layer in enumerate(self._layers):
            rotation = rotations[self.traits.layer_ropes[i]] if rotations else None
            window = self.traits.windows[i] if self.traits.windows else None
            bias = self._biases[i]
            attend = partial(self._attend, layer, rotation, window, bias, groups, tiles)
            if self.traits.norm_first:
                y_TE = x_TE if layer.attention_norm is None else layer.attention_norm(x_TE)
                x_TE = layer.o.apply_add(attend(y_TE), x_TE)
                x_TE = self._add_mlp(layer, layer.mlp_norm(x_TE), x_TE)
            else:
                assert layer.attention_norm is not None
                x_TE = layer.attention_norm(layer.o.apply(attend(x_TE)), x_TE)
                x_TE = layer.mlp_norm(self._mlp(layer, x_TE), x_TE)
        return x_TE if self._final_norm is None else self._final_norm(x_TE)

    def _attend(
        self,
        layer: EncoderLayer,
        rotation: Tensor | None,
        window: int | None,
        bias: Tensor | None,
        groups: Sequence[Group],
        tiles: np.ndarray | None,
        x_TE: Tensor,
    ) -> Tensor:
        traits = self.traits
        qkv_T3ND = layer.qkv.apply(x_TE).view(-1, 3, traits.num_heads, traits.head_dim)
        if traits.distances is not None:
            return disentangled_attention(qkv_T3ND, groups, traits.distances, *layer.distances)
        if rotation is not None:
            rope_(qkv_T3ND.flatten(1, 2).narrow(1, 0, 2 * traits.num_heads), rotation)
        return varlen_attention(
            qkv_T3ND,
            groups,
            scale=traits.scale,
            window=window,
            bias=bias,
            tiles=tiles,
        )

    def _mlp(self, layer: EncoderLayer, x_TE: Tensor) -> Tensor:
        if layer.experts is not None:
            return layer.experts(x_TE)
        assert layer.down is not None
        return layer.down.apply(self._widen(layer, x_TE))

    def _add_mlp(self, layer: EncoderLayer, x_TE: Tensor, residual_TE: Tensor) -> Tensor:
        """Return the sum of the MLP and the residual, in one product if the layer has one MLP."""
        if layer.down is None:
            return self._mlp(layer, x_TE) + residual_TE
        return layer.down.apply_add(self._widen(layer, x_TE), residual_TE)

    def _widen(self, layer: EncoderLayer, x_TE: Tensor) -> Tensor:
        """Compute the first half of the MLP."""
        traits = self.traits
        assert layer.up is not None
        if traits.is_gated:
            return ACT_AND_MUL[traits.act](layer.up.apply(x_TE))
        return layer.up.apply_act(x_TE, traits.act)


def rounded(num_tokens: int) -> int:
    """Round up to the next of sixteen sizes in each power of two: at most a sixteenth more rows.

    oneDNN makes code for each new size: 25 to 50 ms for a batch of 4,000 tokens.
    """
    step = 1 << max(0, (num_tokens - 1).bit_length() - 5)
    return -(-num_tokens // step) * step


def spread_bias(bias_BN: Tensor, num_positions: int, max_distance: int) -> Tensor:
    """Spread T5's buckets (Raffel et al. 2020) by distance, as `varlen_attention` reads them: half for keys
    on the right, half of the rest for exact distances, the others logarithmic up to `max_distance`."""
    away = num_positions - torch.arange(2 * num_positions + ROWS)  # key - query
    half = bias_BN.shape[0] // 2
    exact = half // 2
    distance = away.abs()
    far = torch.log(distance.float() / exact) / math.log(max_distance / exact) * (half - exact)
    logarithmic = (exact + far.clamp(min=0).long()).clamp(max=half - 1)
    buckets = (away > 0) * half + torch.where(distance < exact, distance, logarithmic)
    return bias_BN[buckets].T.float().contiguous()
