"""The operations of a decoder by compiled kernels, each one launch and one pass over memory.

A decoding step of a small model takes about a millisecond on a CPU, so a torch call of 5 µs for each of many small
operations would cost more than the arithmetic.  Every method passes addresses and sizes to one compiled kernel, which
the constructor chose for the model's dtype, norm and activation.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trouper.kernels.codegen import units
from trouper.kernels.codegen.launch import compiled, float_bits, scratch
from trouper.kernels.codegen.units import LANES, Kind
from trouper.kernels.cpu.attention import decode, prefill
from trouper.kernels.cpu.attention import tile as attention_tile
from trouper.kernels.cpu.attention.plan import AttentionPlanner, NativePlan
from trouper.kernels.cpu.memory import Float32Copies, num_parts_for, num_threads_for, padded
from trouper.kernels.cpu.norms import (
    act_and_mul,
    activate,
    embed,
    finish_logits,
    fused_add_norm,
    qk_norm_rope_kv_write,
)
from trouper.kernels.ops import CpuOps, Integers, OpsConfig, Spans

KINDS: dict[torch.dtype, Kind] = {torch.bfloat16: "bf16", torch.float32: "f32"}


class NativeOps(CpuOps):
    """`CpuOps` by compiled kernels, for bfloat16 and float32.

    `select.can_be_native` checks that the widths suit the kernels.  Constants such as ε are passed as the bits of a
    float32, because kernels take 64-bit integers only.
    """

    def __init__(self, config: OpsConfig) -> None:
        super().__init__(config)
        kind = KINDS[config.dtype]
        self._group = config.num_q_heads // config.num_kv_heads
        self._prefill = compiled(prefill.prefill_attention, kind, units.bf16_unit())
        unit = decode.unit_of(kind, config.head_dim)
        self._decode = compiled(decode.decode_attention, kind, unit)
        self._merge = compiled(decode.merge_partials, kind)
        self._fused_add_norm = compiled(fused_add_norm, kind, config.norm)
        self._qk_norm_rope_kv_write = compiled(
            qk_norm_rope_kv_write, kind, config.norm, config.is_norm_last
        )
        self._act_and_mul = compiled(act_and_mul, kind, config.activation)
        self._activate = compiled(activate, kind, config.activation)
        self._embed = compiled(embed, kind)
        self._finish_logits = compiled(finish_logits, kind)
        self._planner = AttentionPlanner(config)
        self._decode_scratch = decode.scratch_bytes(self._group, config.head_dim)
        self._prefill_scratch = attention_tile.scratch_bytes(
            config.head_dim, prefill.SIDE, prefill.PARTS
        )
        self._eps, self._alpha = float_bits(config.norm_eps), float_bits(config.residual_scale)
        self._heads = (
            config.num_kv_heads,
            self._group,
            config.head_dim,
            config.block_size,
            float_bits(config.scale),
            float_bits(config.softcap or 0.0),
        )
        is_clamped = config.activation == "clamped_swiglu"
        bounds = (config.swiglu_alpha, config.swiglu_limit) if is_clamped else ()
        self._bounds = [float_bits(bound) for bound in bounds]
        self._float32 = Float32Copies()

    def plan(
        self,
        block_ids: np.ndarray,
        rows: Integers,
        starts: Integers,
        counts: Integers,
        window: int | None,
        are_prompts: np.ndarray | None = None,
        spans: Spans | None = None,
    ) -> NativePlan:
        return self._planner.plan(block_ids, rows, starts, counts, window, are_prompts, spans)

    def plan_tables(self, tables: Sequence[np.ndarray], *args: Any) -> list[NativePlan]:
        plan = self._planner.plan(tables[0], *args)
        return [plan, *(plan.with_blocks(table) for table in tables[1:])]

    def embed(self, table_VE: Tensor, ids_T: Tensor, scale: float) -> Tensor:
        assert table_VE.is_contiguous()
        num_tokens, width = len(ids_T), table_VE.shape[1]
        x_TE = torch.empty((num_tokens, width), dtype=table_VE.dtype)
        self._embed(
            num_tokens,
            table_VE.data_ptr(),
            width,
            ids_T.data_ptr(),
            float_bits(scale),
            x_TE.data_ptr(),
            num_threads=num_threads_for(num_tokens),
        )
        return x_TE

    def begin(
        self, positions_T: Tensor, slots_T: Tensor, rope_tables: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        return positions_T, slots_T, [self._float32.of(table) for table in rope_tables]

    def with_slots(
        self, step: tuple[Tensor, Tensor, list[Tensor]], slots_T: Tensor
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        return step[0], slots_T, step[2]

    def norm(self, x_TE: Tensor, weight: Tensor) -> Tensor:
        z_TE = padded(len(x_TE), x_TE.shape[1], x_TE.dtype)
        self._norm_of_sum(x_TE, None, weight, z_TE)
        return z_TE

    def norm_(self, x_TX: Tensor, weight: Tensor) -> None:
        self._norm_of_sum(x_TX, None, weight, x_TX)

    def fused_add_norm(
        self,
        x_TE: Tensor,
        y_TE: Tensor,
        weight: Tensor | None,
        post_weight: Tensor | None = None,
    ) -> Tensor:
        if post_weight is not None:
            y_TE = self.norm(y_TE, post_weight)
        z_TE = x_TE if weight is None else padded(len(x_TE), x_TE.shape[1], x_TE.dtype)
        self._norm_of_sum(x_TE, y_TE, weight, z_TE)
        return z_TE

    def _norm_of_sum(
        self, x_TE: Tensor, y_TE: Tensor | None, weight: Tensor | None, z_TE: Tensor
    ) -> None:
        num_tokens, width = x_TE.shape
        self._fused_add_norm(
            num_tokens,
            x_TE.data_ptr(),
            x_TE.stride(0),
            0 if y_TE is None else y_TE.data_ptr(),
            0 if y_TE is None else y_TE.stride(0),
            0 if weight is None else self._float32.of(weight).data_ptr(),
            z_TE.data_ptr(),
            z_TE.stride(0),
            width,
            self._alpha,
            self._eps,
            num_threads=num_threads_for(num_tokens),
        )

    def qk_norm_rope_kv_write(
        self,
        qkv_TND: Tensor,
        head_norm: Tensor | None,
        step: tuple[Tensor, Tensor, list[Tensor]],
        rope: int | None,
        cache_2HSD: Tensor,
        query_rope: int | None = None,
    ) -> None:
        config = self._config
        positions_T, slots_T, tables = step
        query_rope = rope if query_rope is None else query_rope
        num_tokens, num_bytes = len(qkv_TND), 4 * config.head_dim + 64
        parts = num_parts_for(num_tokens)
        num_threads = num_threads_for(num_tokens * parts)
        self._qk_norm_rope_kv_write(
            num_tokens * parts,
            qkv_TND.data_ptr(),
            qkv_TND.stride(0),
            0 if head_norm is None else self._float32.of(head_norm).data_ptr(),
            0 if query_rope is None else tables[query_rope].data_ptr(),
            0 if rope is None else tables[rope].data_ptr(),
            positions_T.data_ptr(),
            cache_2HSD.data_ptr(),
            slots_T.data_ptr(),
            cache_2HSD.shape[2],
            config.num_q_heads,
            config.num_kv_heads,
            config.head_dim,
            0 if rope is None else tables[rope].shape[-1],
            self._eps,
            parts,
            scratch(num_threads * num_bytes),
            num_bytes,
            num_threads=num_threads,
        )

    def attend(
        self,
        qkv_TND: Tensor,
        cache_2HSD: Tensor,
        plan: NativePlan,
        sinks_N: Tensor | None = None,
    ) -> Tensor:
        config = self._config
        out_TN = padded(len(qkv_TND), config.num_q_heads * config.head_dim, qkv_TND.dtype)
        sinks = 0 if sinks_N is None else self._float32.of(sinks_N).data_ptr()
        qkv_and_cache = (
            qkv_TND.data_ptr(),
            qkv_TND.stride(0),
            cache_2HSD.data_ptr(),
            cache_2HSD.shape[2],
        )
        target = sinks, out_TN.data_ptr(), out_TN.stride(0)
        if len(plan.tiles):
            self._attend_prompts(qkv_and_cache, plan, target)
        for part in (part for part in (plan, *plan.later) if len(part.spans)):
            self._attend_spans(qkv_and_cache, part, target)
        return out_TN

    def _attend_prompts(
        self, qkv_and_cache: tuple[int, ...], plan: NativePlan, target: tuple[int, int, int]
    ) -> None:
        num_threads = torch.get_num_threads()
        self._prefill(
            len(plan.tiles) * self._config.num_kv_heads,
            *qkv_and_cache,
            plan.block_ids.ctypes.data,
            plan.block_ids.shape[1],
            plan.tiles.ctypes.data,
            *self._heads,
            *target,
            scratch(num_threads * self._prefill_scratch),
            self._prefill_scratch,
            num_threads=num_threads,
        )

    def _attend_spans(
        self, qkv_and_cache: tuple[int, ...], plan: NativePlan, target: tuple[int, int, int]
    ) -> None:
        config, words = self._config, plan.words.ctypes.data
        num_threads = torch.get_num_threads()
        self._decode(
            len(plan.spans) * (config.num_kv_heads // plan.heads),
            *qkv_and_cache,
            words,
            *self._heads,
            *target,
            scratch(num_threads * self._decode_scratch),
            self._decode_scratch,
            num_threads=num_threads,
        )
        num_items = len(plan.merges) * config.num_q_heads
        self._merge(num_items, words, config.num_q_heads, config.head_dim, *target)

    def act_and_mul(self, gate_up_TM: Tensor) -> Tensor:
        num_tokens, width = len(gate_up_TM), gate_up_TM.shape[1] // 2
        y_TM, parts = padded(num_tokens, width, gate_up_TM.dtype), num_parts_for(num_tokens)
        self._act_and_mul(
            num_tokens * parts,
            gate_up_TM.data_ptr(),
            y_TM.data_ptr(),
            y_TM.stride(0),
            width,
            parts,
            *self._bounds,
            num_threads=num_threads_for(num_tokens * parts),
        )
        return y_TM

    def activate(self, x_TM: Tensor) -> Tensor:
        num_tokens, width = x_TM.shape
        y_TM = padded(num_tokens, width, x_TM.dtype)
        self._activate(
            num_tokens,
            x_TM.data_ptr(),
            y_TM.data_ptr(),
            y_TM.stride(0),
            width,
            num_threads=num_threads_for(num_tokens),
        )
        return y_TM

    def finish_logits(self, product_RV: Tensor, scale: float, cap: float | None) -> Tensor:
        if product_RV.dtype == torch.float32 and scale == 1 and not cap:
            return product_RV
        num_rows, vocab_size = product_RV.shape
        if vocab_size < LANES:
            return super().finish_logits(product_RV, scale, cap)
        logits_RV = torch.empty((num_rows, vocab_size), dtype=torch.float32)
        self._finish_logits(
            num_rows,
            product_RV.data_ptr(),
            logits_RV.data_ptr(),
            vocab_size,
            float_bits(scale),
            float_bits(cap or 0.0),
            num_threads=num_threads_for(num_rows),
        )
        return logits_RV
