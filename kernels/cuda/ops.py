"""The operations of a decoder by Triton kernels, for steps described by tensors on the device.

No launch depends on a value on the device: the kernels themselves read everything that changes from step to step, so a step
of padded size can be captured in a CUDA graph.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from trouper.kernels.cuda.decode_attention import decode_attention
from trouper.kernels.cuda.embed import embed
from trouper.kernels.cuda.norms import act_and_mul, fused_add_rms_norm
from trouper.kernels.cuda.prefill_attention import prefill_attention
from trouper.kernels.cuda.qk_norm_rope_kv_write import qk_norm_rope_kv_write_
from trouper.kernels.ops import Ops, OpsConfig


class DeviceTokens(NamedTuple):
    """The tokens of one step with C entries and T tokens, including padding: int32 tensors on the device."""

    bounds: Tensor  # [C + 1]: first token of each entry, then the number of tokens
    request_slots: Tensor  # [C]
    num_computed_tokens: Tensor  # [C]: position of the first token
    token_ids: Tensor  # [slots, …]: ids of each sequence by position
    block_ids: Tensor  # [slots, …]: blocks of each sequence
    num_tokens: int  # T
    # Whether every entry has at most one token.
    is_decode: bool


class DevicePlan(NamedTuple):
    """The attention of a step in the layers of one window.

    It only combines both, because the kernels read everything else from tensors on the device.
    """

    tokens: DeviceTokens
    window: int | None


class DeviceStep(NamedTuple):
    """The tensors that all layers of a step share. They are computed by one launch at the start of the step."""

    positions_T: Tensor  # int32
    slots_T: Tensor  # int32, negative for a padding token
    rope_tables: Sequence[Tensor]


class TritonOps(Ops):
    """`Ops` on a CUDA device.  Hidden states of padding tokens are arbitrary.

    Args:
        max_length: the longest sequence; it bounds grids and changes no result.
        is_invariant: whether an entry of one token must have the bits that it would have in a longer chunk.
    """

    def __init__(self, config: OpsConfig, *, max_length: int, is_invariant: bool = False) -> None:
        super().__init__(config)
        self._max_length = max_length
        self._is_invariant = is_invariant

    def plan(self, tokens: DeviceTokens, window: int | None) -> DevicePlan:
        return DevicePlan(tokens, window)

    def begin_step(
        self, tokens: DeviceTokens, table_VE: Tensor, scale: float, rope_tables: Sequence[Tensor]
    ) -> tuple[Tensor, DeviceStep]:
        x_TE, positions_T, slots_T = embed(
            tokens.bounds,
            tokens.request_slots,
            tokens.num_computed_tokens,
            tokens.token_ids,
            tokens.block_ids,
            table_VE,
            num_tokens=tokens.num_tokens,
            block_size=self._config.block_size,
            alpha=scale,
        )
        return x_TE, DeviceStep(positions_T, slots_T, rope_tables)

    def norm(self, x_TE: Tensor, weight: Tensor) -> Tensor:
        return fused_add_rms_norm(x_TE, None, weight, self._config.norm_eps)

    def norm_(self, x_TX: Tensor, weight: Tensor) -> None:
        fused_add_rms_norm(x_TX, None, weight, self._config.norm_eps, out=x_TX)

    def fused_add_norm(
        self,
        x_TE: Tensor,
        y_TE: Tensor,
        weight: Tensor | None,
        post_weight: Tensor | None = None,
    ) -> Tensor:
        return fused_add_rms_norm(
            x_TE,
            y_TE,
            weight,
            self._config.norm_eps,
            alpha=self._config.residual_scale,
            post_weight_E=post_weight,
        )

    def qk_norm_rope_kv_write(
        self,
        qkv_TND: Tensor,
        head_norm: Tensor | None,
        step: DeviceStep,
        rope: int | None,
        cache_2HSD: Tensor,
        query_rope: int | None = None,
    ) -> None:
        qk_norm_rope_kv_write_(
            qkv_TND,
            cache_2HSD,
            step.positions_T,
            step.slots_T,
            norm_ND=head_norm,
            table_P2R=None if rope is None else step.rope_tables[rope],
            query_table_P2R=None if query_rope is None else step.rope_tables[query_rope],
            eps=self._config.norm_eps,
            is_norm_last=self._config.is_norm_last,
        )

    def attend(
        self,
        qkv_TND: Tensor,
        cache_2HSD: Tensor,
        plan: DevicePlan,
        sinks_N: Tensor | None = None,
    ) -> Tensor:
        assert sinks_N is None, "models with sinks are mixtures of experts, which no GPU computes"
        config, tokens = self._config, plan.tokens
        num_q = config.num_q_heads
        out_TX = qkv_TND.new_empty(len(qkv_TND), num_q * config.head_dim)
        arguments = (
            qkv_TND.narrow(1, 0, num_q),
            cache_2HSD,
            tokens.bounds,
            tokens.request_slots,
            tokens.num_computed_tokens,
            tokens.block_ids,
        )
        scoring = {
            "block_size": config.block_size,
            "scale": config.scale,
            "softcap": config.softcap,
            "window": plan.window,
            "out": out_TX,
        }
        if not self._is_invariant:
            decode_attention(*arguments, max_length=self._max_length, **scoring)
        if self._is_invariant or not tokens.is_decode:
            prefill_attention(*arguments, min_count=1 if self._is_invariant else 2, **scoring)
        return out_TX

    def act_and_mul(self, gate_up_TM: Tensor) -> Tensor:
        activation = self._config.activation
        if activation in ("silu", "gelu_tanh"):
            return act_and_mul(gate_up_TM, activation)
        return super().act_and_mul(gate_up_TM)

    def finish_logits(self, product_RV: Tensor, scale: float, cap: float | None) -> Tensor:
        """Return the logits, in the dtype of the product if nothing changes them: the sampling kernels read any float."""
        if scale == 1 and not cap:
            return product_RV
        return super().finish_logits(product_RV, scale, cap)
