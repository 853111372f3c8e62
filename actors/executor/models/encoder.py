"""One bidirectional transformer for every encoder of `encoder_traits`.

T  tokens of all sequences, one after the other      N  heads    D  head width    E  hidden size
"""

import math
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from trouper.actors.executor.models.disentangled import disentangled_attention
from trouper.actors.executor.models.encoder_traits import EncoderTraits
from trouper.actors.executor.models.rotary import make_rope_table
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
from trouper.kernels.reference.activation import gelu_and_mul, gelu_tanh_and_mul, silu_and_mul
from trouper.kernels.reference.rope import rope_, rotation_of

ACT_AND_MUL = {"silu": silu_and_mul, "gelu": gelu_and_mul, "gelu_tanh": gelu_tanh_and_mul}
MAX_DISTANCE = 128  # of MPNet's buckets


class EncoderLayer:
    """The weights of one layer; `attention_norm` is None where ModernBERT's first layer has none.

    `distances` are the keys and the queries of DeBERTa's distances, [2 · span, N, D] each.
    """

    def __init__(
        self,
        *,
        qkv: LinearMethod,
        o: LinearMethod,
        up: LinearMethod,
        down: LinearMethod,
        attention_norm: LayerNorm | None,
        mlp_norm: LayerNorm,
        distances: tuple[Tensor | None, Tensor | None] = (None, None),
    ) -> None:
        self.distances = distances
        self.qkv, self.o, self.up, self.down = qkv, o, up, down
        self.attention_norm, self.mlp_norm = attention_norm, mlp_norm


class Encoder:
    """The weights of a model, and its forward pass."""

    def __init__(
        self,
        traits: EncoderTraits,
        *,
        embedding: TokenEmbedding,  # whose first position is that of the first token
        norm: LayerNorm | None,
        projection: LinearMethod | None,
        layers: Sequence[EncoderLayer],
        final_norm: LayerNorm | None,
        relative_bias: Tensor | None,  # [buckets, N]
        max_model_len: int,
    ) -> None:
        self.traits = traits
        self.dtype = embedding.dtype
        self._embedding, self._norm, self._projection = embedding, norm, projection
        self._layers, self._final_norm = layers, final_norm
        self._bias = None if relative_bias is None else spread_bias(relative_bias, max_model_len)
        self.is_native = traits.distances is None and is_native(self.dtype, traits.head_dim)
        self._rope_tables = [
            make_rope_table(rope, max_model_len, self.dtype) for rope in traits.ropes
        ]

    @property
    def num_bytes(self) -> int:
        """The bytes that a batch reads: the weights without the embeddings."""
        linears = [x for la in self._layers for x in (la.qkv, la.o, la.up, la.down)]
        return sum(x.shape[0] * x.shape[1] for x in linears) * self.dtype.itemsize

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
        """Compute the hidden states [T, E] after the last norm."""
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
        """Compute the same of any rows, of which some may belong to no sequence.

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
            attend = partial(self._attend, layer, rotation, window, groups, tiles)
            if self.traits.norm_first:
                y_TE = x_TE if layer.attention_norm is None else layer.attention_norm(x_TE)
                x_TE = layer.o.apply_add(attend(y_TE), x_TE)
                x_TE = layer.down.apply_add(self._widen(layer, layer.mlp_norm(x_TE)), x_TE)
            else:
                assert layer.attention_norm is not None
                x_TE = layer.attention_norm(layer.o.apply(attend(x_TE)), x_TE)
                x_TE = layer.mlp_norm(layer.down.apply(self._widen(layer, x_TE)), x_TE)
        return x_TE if self._final_norm is None else self._final_norm(x_TE)

    def _attend(
        self,
        layer: EncoderLayer,
        rotation: Tensor | None,
        window: int | None,
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
            scale=traits.head_dim**-0.5,
            window=window,
            bias=self._bias,
            tiles=tiles,
        )

    def _widen(self, layer: EncoderLayer, x_TE: Tensor) -> Tensor:
        """Compute the first half of the MLP."""
        traits = self.traits
        if traits.is_gated:
            return ACT_AND_MUL[traits.act](layer.up.apply(x_TE))
        return layer.up.apply_act(x_TE, traits.act)


def rounded(num_tokens: int) -> int:
    """Round up to the next of sixteen sizes in each power of two: at most a sixteenth more rows.

    oneDNN makes code for each size it meets: 25 to 50 ms a batch of 4,000 tokens whose size is new.
    """
    step = 1 << max(0, (num_tokens - 1).bit_length() - 5)
    return -(-num_tokens // step) * step


def spread_bias(bias_BN: Tensor, num_positions: int) -> Tensor:
    """Spread T5's buckets (Raffel et al. 2020) by distance, as `varlen_attention` reads them: half for keys
    on the right, half of the rest for exact distances, the others logarithmic up to `MAX_DISTANCE`."""
    away = num_positions - torch.arange(2 * num_positions + ROWS)  # key - query
    half = bias_BN.shape[0] // 2
    exact = half // 2
    distance = away.abs()
    far = torch.log(distance.float() / exact) / math.log(MAX_DISTANCE / exact) * (half - exact)
    logarithmic = (exact + far.clamp(min=0).long()).clamp(max=half - 1)
    buckets = (away > 0) * half + torch.where(distance < exact, distance, logarithmic)
    return bias_BN[buckets].T.float().contiguous()
