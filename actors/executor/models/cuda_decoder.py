"""The decoder's step on a CUDA device: the same weights and traits, the Triton kernels instead of torch.

Nothing here depends on a value on the device: sizes that change from step to step are read by the kernels
themselves, so a step of padded size can be captured in a CUDA graph.  What is named max_* or padded only
bounds grids.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from trouper.actors.executor.models.decoder import Decoder, Layer
from trouper.kernels.cpu.linear.layer import Linear, linear
from trouper.kernels.cuda.act_and_mul import act_and_mul
from trouper.kernels.cuda.decode_attention import decode_attention
from trouper.kernels.cuda.embed import embed
from trouper.kernels.cuda.fused_add_rms_norm import fused_add_rms_norm
from trouper.kernels.cuda.prefill_attention import prefill_attention
from trouper.kernels.cuda.qk_norm_rope_kv_write import qk_norm_rope_kv_write_


class DeviceBatch(NamedTuple):
    """One step of C columns and T tokens, padding included; the tensors are int32 and on the device."""

    bounds: Tensor  # [C + 1], first token of each column, then the number of tokens
    rows: Tensor  # [C]
    starts: Tensor  # [C], positions
    tokens: Tensor  # [rows, …], the permanent rows
    blocks: Tensor  # [rows, …]
    num_tokens: int  # T
    max_length: int  # no column that decodes is longer
    is_decode: bool  # no column has more than one token
    block_size: int
    is_invariant: bool = False  # a column of one token is computed as a chunk of many would be


class CudaDecoder(Decoder):
    def move(self, place: Callable[[Tensor], Tensor]) -> None:
        """Put each weight where `place` puts it; what shares memory (a tied head) goes on sharing it."""
        moved: dict[int, Tensor] = {}
        before: list[Tensor] = []  # alive until the end, or another tensor could get its id
        for owner in (self, *self._layers, *self._linears):
            for name in owner.__slots__ if isinstance(owner, Linear) else vars(owner):
                tensor = getattr(owner, name)
                if isinstance(tensor, Tensor):
                    if id(tensor) not in moved:
                        before.append(tensor)
                        moved[id(tensor)] = place(tensor)
                    setattr(owner, name, moved[id(tensor)])
        self._rope_tables = [place(table) for table in self._rope_tables]

    def forward_rows(
        self,
        batch: DeviceBatch,
        caches: Sequence[Tensor],
        embeds: Sequence[tuple[int, Tensor]] = (),
    ) -> Tensor:
        """Hidden states [T, E] after the last norm, as `forward`; those of padding tokens are arbitrary."""
        traits = self.traits
        scale = self._embedding_scale
        x_TE, positions_T, slots_T = embed(
            batch.bounds,
            batch.rows,
            batch.starts,
            batch.tokens,
            batch.blocks,
            self._embedding,
            num_tokens=batch.num_tokens,
            block_size=batch.block_size,
            alpha=scale,
        )
        for first, rows_PE in embeds:
            part_PE = x_TE.narrow(0, first, len(rows_PE)).copy_(rows_PE)
            if not traits.embeds_are_scaled:
                part_PE *= scale
        y_TE = post_norm = None
        for layer, cache in zip(self._layers, caches, strict=True):
            hidden_TE = self._sum_and_norm(x_TE, y_TE, post_norm, layer.attention_norm)
            y_TE = self._attend(layer, hidden_TE, batch, positions_T, slots_T, cache)
            hidden_TE = self._sum_and_norm(x_TE, y_TE, layer.attention_post_norm, layer.mlp_norm)
            gate_up_TM = linear(hidden_TE, layer.gate_up)
            y_TE = linear(act_and_mul(gate_up_TM, traits.activation), layer.down)
            post_norm = layer.mlp_post_norm
        return self._sum_and_norm(x_TE, y_TE, post_norm, self._norm)

    def logits(self, hidden_RE: Tensor) -> Tensor:
        """[R, vocabulary]; as the product leaves them if nothing is done to them: the kernels read any float."""
        traits = self.traits
        if self._head is None or traits.logits_scale != 1 or traits.final_softcap:
            return super().logits(hidden_RE)
        return linear(hidden_RE, self._head)

    def _sum_and_norm(
        self, x_TE: Tensor, y_TE: Tensor | None, post_norm: Tensor | None, norm: Tensor | None
    ) -> Tensor:
        return fused_add_rms_norm(
            x_TE,
            y_TE,
            norm,
            self.traits.norm_eps,
            alpha=self.traits.residual_scale,
            post_weight_E=post_norm,
        )

    def _attend(
        self,
        layer: Layer,
        x_TE: Tensor,
        batch: DeviceBatch,
        positions_T: Tensor,
        slots_T: Tensor,
        cache_2HSD: Tensor,
    ) -> Tensor:
        traits, rope = self.traits, layer.traits.rope
        num_q, num_kv, width = traits.num_q_heads, traits.num_kv_heads, traits.head_dim
        qkv_TX = linear(x_TE, layer.qkv)
        if layer.q_norm is not None and layer.k_norm is not None:
            q_TX = qkv_TX.narrow(1, 0, num_q * width)
            k_TX = qkv_TX.narrow(1, num_q * width, num_kv * width)
            fused_add_rms_norm(q_TX, None, layer.q_norm, traits.norm_eps, out=q_TX)
            fused_add_rms_norm(k_TX, None, layer.k_norm, traits.norm_eps, out=k_TX)
        qkv_TND = qkv_TX.view(-1, num_q + 2 * num_kv, width)
        qk_norm_rope_kv_write_(
            qkv_TND,
            cache_2HSD,
            positions_T,
            slots_T,
            norm_ND=layer.head_norm,
            table_P2R=None if rope is None else self._rope_tables[rope],
            eps=traits.norm_eps,
        )
        out_TX = qkv_TX.new_empty(len(qkv_TX), num_q * width)
        plan = (
            qkv_TND.narrow(1, 0, num_q),
            cache_2HSD,
            batch.bounds,
            batch.rows,
            batch.starts,
            batch.blocks,
        )
        scoring = {
            "scale": traits.attention_scale,
            "softcap": traits.attention_softcap,
            "window": layer.traits.window,
        }
        size = batch.block_size
        if not batch.is_invariant:
            decode_attention(
                *plan, max_length=batch.max_length, block_size=size, out=out_TX, **scoring
            )
        if batch.is_invariant or not batch.is_decode:
            least = 1 if batch.is_invariant else 2
            prefill_attention(*plan, min_count=least, block_size=size, out=out_TX, **scoring)
        return linear(out_TX, layer.o)
