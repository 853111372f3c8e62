"""One decoder-only transformer for every architecture of the registry: what differs are its traits.

    T  tokens of all sequences of a step, one after the other      N  query heads    H  KV heads
    E  hidden size                M  MLP width                      D  head width     S  cache slots

It knows nothing of sequences: the batch brings positions, slots and the plan of the attention.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from trouper.actors.executor.models.rotary import make_rope_table
from trouper.actors.executor.models.traits import DecoderTraits, LayerTraits
from trouper.kernels.act_mul import gelu_tanh_mul, silu_mul
from trouper.kernels.attention_plan import Tile
from trouper.kernels.kv_write import kv_write_
from trouper.kernels.linear import Linear, linear
from trouper.kernels.paged_attention import mask_tensors, paged_attention
from trouper.kernels.rms_norm import rms_norm, rms_norm_heads_
from trouper.kernels.rope import rope_, rotation_of

LOGITS_AT_ONCE = 256  # rows; 256 x 152k vocabulary x 4 B = 150 MiB


class Layer:
    """The weights of one layer; a norm is None where the architecture has none."""

    def __init__(
        self,
        traits: LayerTraits,
        *,
        qkv: Linear,  # E -> (N + 2 H) D
        o: Linear,  # N D -> E
        gate_up: Linear,  # E -> 2 M
        down: Linear,  # M -> E
        attention_norm: Tensor | None = None,
        attention_post_norm: Tensor | None = None,
        mlp_norm: Tensor | None = None,
        mlp_post_norm: Tensor | None = None,
        head_norm: Tensor | None = None,  # [N + H, D]: of each head of q and k
        q_norm: Tensor | None = None,  # [N D]: of all heads together
        k_norm: Tensor | None = None,
    ) -> None:
        self.traits = traits
        self.qkv, self.o, self.gate_up, self.down = qkv, o, gate_up, down
        self.attention_norm, self.attention_post_norm = attention_norm, attention_post_norm
        self.mlp_norm, self.mlp_post_norm = mlp_norm, mlp_post_norm
        self.head_norm, self.q_norm, self.k_norm = head_norm, q_norm, k_norm


class Decoder:
    def __init__(
        self,
        traits: DecoderTraits,
        *,
        embedding: Tensor,  # [vocabulary, E]
        layers: Sequence[Layer],
        norm: Tensor,
        head: Linear | None,  # None: it never gives logits
        max_model_len: int,
    ) -> None:
        self.traits = traits
        self.dtype = embedding.dtype
        self._embedding, self._layers, self._norm, self._head = embedding, layers, norm, head
        # transformers rounds the scale to the model's dtype before it multiplies
        self._embedding_scale = torch.tensor(traits.embedding_scale, dtype=self.dtype)
        self._act_mul = {"silu": silu_mul, "gelu_tanh": gelu_tanh_mul}[traits.activation]
        self._rope_tables = [
            make_rope_table(rope, max_model_len, self.dtype) for rope in traits.ropes
        ]

    def forward(
        self,
        token_ids_T: Tensor,
        positions_T: Tensor,
        slots_T: Tensor,
        plans: Mapping[int | None, Sequence[Tile]],
        caches: Sequence[Tensor],
        embeds: Sequence[tuple[int, Tensor]] = (),
    ) -> Tensor:
        """Hidden states [T, E] after the last norm; the caches gain this step's keys and values.

        Args:
            plans: the tiles of the attention, by window.
            caches: of each layer [2, H, S, D].
            embeds: rows that stand for the embeddings of tokens: the first token, and the rows.
        """
        rotations = [rotation_of(table, positions_T) for table in self._rope_tables]
        masks = {window: mask_tensors(tiles, self.dtype) for window, tiles in plans.items()}
        x_TE = F.embedding(token_ids_T, self._embedding)
        scale = None if self.traits.embedding_scale == 1 else self._embedding_scale
        if scale is not None:
            x_TE *= scale
        for first, rows_PE in embeds:
            part_PE = x_TE.narrow(0, first, len(rows_PE)).copy_(rows_PE)
            if scale is not None and not self.traits.embeds_are_scaled:
                part_PE *= scale
        for layer, cache in zip(self._layers, caches, strict=True):
            window, rope = layer.traits.window, layer.traits.rope
            y_TE = (
                x_TE if layer.attention_norm is None else self._norm_of(x_TE, layer.attention_norm)
            )
            y_TE = self._attention(
                layer,
                y_TE,
                None if rope is None else rotations[rope],
                slots_T,
                plans[window],
                masks[window],
                cache,
            )
            self._add(x_TE, y_TE, layer.attention_post_norm)
            y_TE = x_TE if layer.mlp_norm is None else self._norm_of(x_TE, layer.mlp_norm)
            y_TE = linear(self._act_mul(linear(y_TE, layer.gate_up)), layer.down)
            self._add(x_TE, y_TE, layer.mlp_post_norm)
        return self._norm_of(x_TE, self._norm)

    @property
    def num_bytes(self) -> int:
        """What a step reads: the weights without the embedding."""
        linears = [
            *([] if self._head is None else [self._head]),
            *(x for la in self._layers for x in (la.qkv, la.o, la.gate_up, la.down)),
        ]
        return sum(linear.shape[0] * linear.shape[1] for linear in linears) * self.dtype.itemsize

    def logits(self, hidden_RE: Tensor) -> Tensor:
        """[R, vocabulary] float32."""
        assert self._head is not None
        logits = linear(hidden_RE, self._head).float()
        if self.traits.logits_scale != 1:
            logits *= self.traits.logits_scale
        cap = self.traits.final_softcap
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits

    def _norm_of(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, self.traits.norm_eps)

    def _add(self, x_TE: Tensor, y_TE: Tensor, post_norm: Tensor | None) -> None:
        """x += scale · norm(y): the residual sum, in place."""
        if post_norm is not None:
            y_TE = self._norm_of(y_TE, post_norm)
        x_TE.add_(y_TE, alpha=self.traits.residual_scale)

    def _attention(
        self,
        layer: Layer,
        x_TE: Tensor,
        rotation: Tensor | None,
        slots_T: Tensor,
        tiles: Sequence[Tile],
        masks: dict[int, Tensor],
        cache_2HSD: Tensor,
    ) -> Tensor:
        traits = self.traits
        num_q, num_kv, width = traits.num_q_heads, traits.num_kv_heads, traits.head_dim
        qkv_TND = linear(x_TE, layer.qkv).view(-1, num_q + 2 * num_kv, width)
        self._norm_qk(qkv_TND, layer)
        if rotation is not None:
            rope_(qkv_TND.narrow(1, 0, num_q + num_kv), rotation)
        kv_T2HD = qkv_TND.narrow(1, num_q, 2 * num_kv).unflatten(1, (2, num_kv))
        kv_write_(cache_2HSD, kv_T2HD, slots_T)
        q_TND = qkv_TND.narrow(1, 0, num_q)
        k_THD, v_THD = kv_T2HD.unbind(1)
        out_TN = paged_attention(
            q_TND,
            k_THD,
            v_THD,
            cache_2HSD,
            tiles,
            masks,
            scale=traits.attention_scale,
            softcap=traits.attention_softcap,
        )
        return linear(out_TN, layer.o)

    def _norm_qk(self, qkv_TND: Tensor, layer: Layer) -> None:
        """In place; over each head, or over all heads of q and of k (OLMo-2), or not at all."""
        num_q, num_kv = self.traits.num_q_heads, self.traits.num_kv_heads
        if layer.head_norm is not None:
            qk_TND = qkv_TND.narrow(1, 0, num_q + num_kv)
            rms_norm_heads_(qk_TND, layer.head_norm, self.traits.norm_eps)
        elif layer.q_norm is not None and layer.k_norm is not None:
            for first, num_heads, weight in (
                (0, num_q, layer.q_norm),
                (num_q, num_kv, layer.k_norm),
            ):
                x_TND = qkv_TND.narrow(1, first, num_heads)
                x_TND.copy_(self._norm_of(x_TND.flatten(1), weight).view(x_TND.shape))
