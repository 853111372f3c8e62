"""The operations of a decoder by torch: any dtype, shape and machine; several calls an operation."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# torch leaves the types of split, view and some others open.

import functools
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from trouper.kernels.ops import HostTokens, Integers, OpsConfig, q_and_k
from trouper.kernels.reference.activation import act_and_mul, activate, clamped_swiglu
from trouper.kernels.reference.attention_plan import QueryTile, plan_attention
from trouper.kernels.reference.norms import layer_norm, layer_norm_heads_, rms_norm, rms_norm_heads_
from trouper.kernels.reference.paged_attention import MAX_TILE_CAPPED, mask_tensors, paged_attention
from trouper.kernels.reference.rope import kv_write_, rope_, rotation_of


class TorchOps:
    def __init__(self, config: OpsConfig) -> None:
        self._config = config
        self._max_tile = MAX_TILE_CAPPED if config.softcap else None
        is_rms = config.norm == "rms"
        self._norm = rms_norm if is_rms else layer_norm
        self._norm_heads_ = rms_norm_heads_ if is_rms else layer_norm_heads_
        if config.activation == "clamped_swiglu":
            self._act_and_mul = functools.partial(
                clamped_swiglu, alpha=config.swiglu_alpha, limit=config.swiglu_limit
            )
        else:
            self._act_and_mul = functools.partial(act_and_mul, act=config.activation)

    def __repr__(self) -> str:
        return "<TorchOps>"

    def plan(
        self,
        block_ids: np.ndarray,
        rows: Integers,
        starts: Integers,
        counts: Integers,
        window: int | None,
        are_prompts: np.ndarray | None = None,
    ) -> tuple[tuple[QueryTile, ...], dict[int, Tensor]]:
        size = self._config.block_size
        chosen, firsts, nums = (np.asarray(x).tolist() for x in (rows, starts, counts))
        tables = [
            block_ids[row, : -(-(start + count) // size)]
            for row, start, count in zip(chosen, firsts, nums, strict=True)
        ]
        tiles = plan_attention(
            tables, firsts, nums, block_size=size, window=window, max_tile=self._max_tile
        )
        return tiles, mask_tensors(tiles, self._config.dtype)

    def embed(self, table_VE: Tensor, ids_T: Tensor, scale: float) -> Tensor:
        x_TE = table_VE.index_select(0, ids_T)
        return x_TE if scale == 1 else x_TE.mul_(scale)

    def begin_step(
        self, tokens: HostTokens, table_VE: Tensor, scale: float, rope_tables: Sequence[Tensor]
    ) -> tuple[Tensor, tuple[Tensor, list[Tensor]]]:
        x_TE = self.embed(table_VE, tokens.ids_T, scale)
        return x_TE, self.begin(tokens.positions_T, tokens.slots_T, rope_tables)

    def begin(
        self, positions_T: Tensor, slots_T: Tensor, rope_tables: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        return slots_T, [rotation_of(table, positions_T) for table in rope_tables]

    def norm(self, x_TE: Tensor, weight: Tensor) -> Tensor:
        return self._norm(x_TE, weight, self._config.norm_eps)

    def norm_(self, x_TX: Tensor, weight: Tensor) -> None:
        x_TX.copy_(self.norm(x_TX, weight))

    def all_heads_norm_(self, qkv_TND: Tensor, q_norm: Tensor, k_norm: Tensor) -> None:
        q_TX, k_TX = q_and_k(qkv_TND, q_norm, k_norm)
        self.norm_(q_TX, q_norm)
        self.norm_(k_TX, k_norm)

    def fused_add_norm(
        self,
        x_TE: Tensor,
        y_TE: Tensor,
        weight: Tensor | None,
        post_weight: Tensor | None = None,
    ) -> Tensor:
        if post_weight is not None:
            y_TE = self.norm(y_TE, post_weight)
        x_TE.add_(y_TE, alpha=self._config.residual_scale)
        return x_TE if weight is None else self.norm(x_TE, weight)

    def qk_norm_rope_kv_write(
        self,
        qkv_TND: Tensor,
        head_norm: Tensor | None,
        step: tuple[Tensor, list[Tensor]],
        rope: int | None,
        cache_2HSD: Tensor,
        query_rope: int | None = None,
    ) -> None:
        num_q, num_kv = self._config.num_q_heads, self._config.num_kv_heads
        slots_T, rotations = step
        qk_TND = qkv_TND.narrow(1, 0, num_q + num_kv)
        is_norm_last = self._config.is_norm_last
        if head_norm is not None and not is_norm_last:
            self._norm_heads_(qk_TND, head_norm, self._config.norm_eps)
        if rope is not None and query_rope is None:
            rope_(qk_TND, rotations[rope])
        elif rope is not None and query_rope is not None:
            rope_(qkv_TND.narrow(1, 0, num_q), rotations[query_rope])
            rope_(qkv_TND.narrow(1, num_q, num_kv), rotations[rope])
        if head_norm is not None and is_norm_last:
            self._norm_heads_(qk_TND, head_norm, self._config.norm_eps)
        kv_T2HD = qkv_TND.narrow(1, num_q, 2 * num_kv).unflatten(1, (2, num_kv))
        kv_write_(cache_2HSD, kv_T2HD, slots_T)

    def attend(
        self,
        qkv_TND: Tensor,
        cache_2HSD: Tensor,
        plan: tuple[tuple[QueryTile, ...], dict[int, Tensor]],
        sinks_N: Tensor | None = None,
    ) -> Tensor:
        num_q, num_kv = self._config.num_q_heads, self._config.num_kv_heads
        return paged_attention(
            qkv_TND.narrow(1, 0, num_q),
            qkv_TND.narrow(1, num_q, num_kv),
            qkv_TND.narrow(1, num_q + num_kv, num_kv),
            cache_2HSD,
            *plan,
            scale=self._config.scale,
            softcap=self._config.softcap,
            sinks_N=sinks_N,
        )

    def act_and_mul(self, gate_up_TM: Tensor) -> Tensor:
        return self._act_and_mul(gate_up_TM)

    def activate(self, x_TM: Tensor) -> Tensor:
        return activate(x_TM, self._config.activation)

    def finish_logits(self, product_RV: Tensor, scale: float, cap: float | None) -> Tensor:
        return finished_logits(product_RV, scale, cap)


def finished_logits(product_RV: Tensor, scale: float, cap: float | None) -> Tensor:
    logits_RV = product_RV.float()
    if scale != 1:
        logits_RV *= scale
    return logits_RV.div_(cap).tanh_().mul_(cap) if cap else logits_RV
