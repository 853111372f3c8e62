"""One decoder-only transformer for every architecture of the registry: what differs are its traits.

    T  tokens of all sequences of a step, one after the other      N  query heads    H  KV heads
    E  hidden size                M  MLP width                      D  head width     S  cache slots

It knows nothing of sequences: the batch brings positions, slots and the plan of the attention.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trouper.actors.executor.models.rotary import make_rope_table
from trouper.actors.executor.models.traits import DecoderTraits, LayerTraits
from trouper.kernels.cpu.linear.layer import Linear, linear
from trouper.kernels.ops import Ops, OpsConfig

LOGITS_AT_ONCE = 256  # rows; 256 x 152k vocabulary x 4 B = 150 MiB


class Read(NamedTuple):
    """The tokens of a step whose hidden states are read: of the others the last layer computes keys and values alone."""

    tokens_R: Tensor  # int64
    plans: Mapping[int | None, Any]  # of their attention, each a column of its own


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
        ops: Ops,
    ) -> None:
        self.traits = traits
        self.dtype = embedding.dtype
        self.ops = ops
        self._embedding, self._layers, self._norm, self._head = embedding, layers, norm, head
        # transformers rounds the scale to the model's dtype before it multiplies
        self._embedding_scale = float(torch.tensor(traits.embedding_scale, dtype=self.dtype))
        self._rope_tables = [
            make_rope_table(rope, max_model_len, self.dtype).to(embedding.device)
            for rope in traits.ropes
        ]

    def forward(
        self,
        token_ids_T: Tensor,
        positions_T: Tensor,
        slots_T: Tensor,
        plans: Mapping[int | None, Any],
        caches: Sequence[Tensor],
        embeds: Sequence[tuple[int, Tensor]] = (),
        read: Read | None = None,
    ) -> Tensor:
        """Hidden states after the last norm, [T, E], or [R, E] if only those are read; the caches gain this step's
        keys and values.

        Args:
            plans: of the attention, by window, as `ops.plan` makes them.
            caches: of each layer [2, H, S, D].
            embeds: rows that stand for the embeddings of tokens: the first token, and the rows.
        """
        x_TE = self.embed(token_ids_T, embeds)
        return self.forward_embedded(x_TE, positions_T, slots_T, plans, caches, read)

    def embed(self, token_ids_T: Tensor, embeds: Sequence[tuple[int, Tensor]] = ()) -> Tensor:
        x_TE = self.ops.embed(self._embedding, token_ids_T, self._embedding_scale)
        for first, rows_PE in embeds:
            part_PE = x_TE.narrow(0, first, len(rows_PE)).copy_(rows_PE)
            if not self.traits.embeds_are_scaled:
                part_PE *= self._embedding_scale
        return x_TE

    def forward_embedded(
        self,
        x_TE: Tensor,
        positions_T: Tensor,
        slots_T: Tensor,
        plans: Mapping[int | None, Any],
        caches: Sequence[Tensor],
        read: Read | None = None,
    ) -> Tensor:
        """As `forward`, which begins with `embed`; x is overwritten."""
        ops = self.ops
        step = ops.begin(positions_T, slots_T, self._rope_tables)
        first_norm = self._layers[0].attention_norm
        y_TE = x_TE if first_norm is None else ops.rms_norm(x_TE, first_norm)
        following = [*(layer.attention_norm for layer in self._layers[1:]), self._norm]
        for layer, cache, next_norm in zip(self._layers, caches, following, strict=True):
            qkv_TND = self._projections(layer, y_TE, step, cache)
            if read is not None and layer is self._layers[-1]:
                plans = read.plans
                x_TE, qkv_TND = (each.index_select(0, read.tokens_R) for each in (x_TE, qkv_TND))
                if not len(x_TE):
                    return x_TE
            plan = plans[layer.traits.window]
            y_TE = linear(ops.attend(qkv_TND, cache, plan), layer.o)
            y_TE = self._add(x_TE, y_TE, layer.attention_post_norm, layer.mlp_norm)
            y_TE = linear(ops.act_and_mul(linear(y_TE, layer.gate_up)), layer.down)
            y_TE = self._add(x_TE, y_TE, layer.mlp_post_norm, next_norm)
        return y_TE

    @property
    def num_bytes(self) -> int:
        """What a step reads: the weights without the embedding."""
        return sum(linear.num_bytes for linear in self._linears)

    @property
    def _linears(self) -> list[Linear]:
        return [
            *([] if self._head is None else [self._head]),
            *(x for la in self._layers for x in (la.qkv, la.o, la.gate_up, la.down)),
        ]

    def logits(self, hidden_RE: Tensor) -> Tensor:
        """[R, vocabulary] float32."""
        assert self._head is not None
        product = linear(hidden_RE, self._head)
        scale, cap = self.traits.logits_scale, self.traits.final_softcap
        if product.dtype == torch.float32 and scale == 1 and not cap:
            return product
        return self.ops.finish_logits(product, scale, cap)

    def num_logits(self, num_rows: int) -> int | None:
        """Of so many rows, if their product can be recorded where the layers can."""
        if self._head is None or not self._head.is_compiled:
            return None
        return num_rows * self._head.shape[0]

    def _add(
        self, x_TE: Tensor, y_TE: Tensor, post_norm: Tensor | None, next_norm: Tensor | None
    ) -> Tensor:
        """x += scale · norm(y), the residual sum, in place; the norm of it that is read next."""
        if post_norm is not None:
            y_TE = self.ops.rms_norm(y_TE, post_norm)
        return self.ops.fused_add_rms_norm(x_TE, y_TE, next_norm)

    def _projections(self, layer: Layer, x_TE: Tensor, step: Any, cache_2HSD: Tensor) -> Tensor:
        """Queries, keys and values [T, N + 2 H, D]; the latter two are in the cache."""
        traits = self.traits
        num_heads = traits.num_q_heads + 2 * traits.num_kv_heads
        qkv_TND = linear(x_TE, layer.qkv).view(-1, num_heads, traits.head_dim)
        if layer.q_norm is not None and layer.k_norm is not None:
            self._norm_projections(qkv_TND, layer.q_norm, layer.k_norm)
        self.ops.qk_norm_rope_kv_write(
            qkv_TND, layer.head_norm, step, layer.traits.rope, cache_2HSD
        )
        return qkv_TND

    def _norm_projections(self, qkv_TND: Tensor, q_norm: Tensor, k_norm: Tensor) -> None:
        """In place, over all heads of q and of k (OLMo-2)."""
        num_q, num_kv = self.traits.num_q_heads, self.traits.num_kv_heads
        x_TX, width = qkv_TND.flatten(1), self.traits.head_dim
        self.ops.rms_norm_(x_TX.narrow(1, 0, num_q * width), q_norm)
        self.ops.rms_norm_(x_TX.narrow(1, num_q * width, num_kv * width), k_norm)


def ops_config(traits: DecoderTraits, dtype: torch.dtype, block_size: int) -> OpsConfig:
    """What `make_ops` asks about a model."""
    return OpsConfig(
        dtype=dtype,
        num_q_heads=traits.num_q_heads,
        num_kv_heads=traits.num_kv_heads,
        head_dim=traits.head_dim,
        hidden_size=traits.hidden_size,
        intermediate_size=traits.intermediate_size,
        block_size=block_size,
        norm_eps=traits.norm_eps,
        residual_scale=traits.residual_scale,
        activation=traits.activation,
        scale=traits.attention_scale,
        softcap=traits.attention_softcap,
    )
