"""The operations of a decoder by the kernels of this folder: one pass over memory, one launch each."""

import functools
from collections.abc import Sequence
from itertools import pairwise

import msgspec
import numpy as np
import torch
from torch import Tensor

from trouper.kernels.codegen import units
from trouper.kernels.codegen.launch import compiled, float_bits, scratch
from trouper.kernels.codegen.units import LANES, Kind
from trouper.kernels.cpu.attention import decode, prefill
from trouper.kernels.cpu.attention import tile as attention_tile
from trouper.kernels.cpu.fused.activations import act_and_mul, activate, finish_logits
from trouper.kernels.cpu.fused.embed_and_pool import embed
from trouper.kernels.cpu.fused.norms import fused_add_norm
from trouper.kernels.cpu.fused.qk_norm_rope_kv_write import qk_norm_rope_kv_write
from trouper.kernels.cpu.memory import Float32Copies, num_threads_for, padded
from trouper.kernels.ops import HostTokens, Integers, OpsConfig, q_and_k
from trouper.kernels.reference.ops import finished_logits

KINDS: dict[torch.dtype, Kind] = {torch.bfloat16: "bf16", torch.float32: "f32"}
UNLIMITED = 2**62


class NativePlan(msgspec.Struct, frozen=True, dict=True):
    """Plan of a step's attention: the arrays that the kernels read, and how many pieces they hold."""

    block_ids: np.ndarray
    spans: np.ndarray  # [., 8], see decode.py
    merges: np.ndarray  # [., 3]
    partials: np.ndarray  # [., N, D + 2]
    heads: int  # of a piece
    tiles: np.ndarray  # [., 4], see prefill.py
    window: int
    later: "tuple[NativePlan, ...]" = ()  # of further spans: a recorded step has none

    @functools.cached_property
    def words(self) -> np.ndarray:
        """Addresses and sizes of the arrays, for kernels; a recording writes those of a later plan over them."""
        arrays = self.block_ids, self.spans, self.partials, self.merges
        tables, spans, partials, merges = (x.ctypes.data for x in arrays)
        return np.array((
            tables, self.block_ids.shape[1], spans, len(self.spans), self.heads, partials, merges, len(self.merges),
        ))  # fmt: skip


class NativeOps:
    """`CpuOps` by compiled kernels; tensors that come in are contiguous in their last dimensions."""

    def __init__(self, config: OpsConfig) -> None:
        kind = KINDS[config.dtype]
        self._config = config
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
        self._span = decode.SPAN
        self._tile = prefill.SIDE // self._group
        self._decode_scratch = decode.scratch_bytes(self._group, config.head_dim)
        self._prefill_scratch = attention_tile.scratch_bytes(
            config.head_dim, prefill.SIDE, prefill.PARTS
        )
        self._eps, self._alpha = float_bits(config.norm_eps), float_bits(config.residual_scale)
        self._scale, self._cap = float_bits(config.scale), float_bits(config.softcap or 0.0)
        is_clamped = config.activation == "clamped_swiglu"
        bounds = (config.swiglu_alpha, config.swiglu_limit) if is_clamped else ()
        self._bounds = [float_bits(bound) for bound in bounds]
        self._float32 = Float32Copies()

    def __repr__(self) -> str:
        return "<NativeOps>"

    def plan(
        self,
        block_ids: np.ndarray,
        rows: Integers,
        starts: Integers,
        counts: Integers,
        window: int | None,
        are_prompts: np.ndarray | None = None,
    ) -> NativePlan:
        rows_C, starts_C, counts_C = (np.asarray(x, np.int64) for x in (rows, starts, counts))
        firsts_C, ends_C = np.cumsum(counts_C) - counts_C, starts_C + 1
        begins_C = np.zeros_like(ends_C) if window is None else np.maximum(0, ends_C - window)
        is_lone_C = counts_C == 1 if are_prompts is None else ~are_prompts
        tile = self._tile * self._parts_of_a_piece(counts_C[~is_lone_C])
        is_one_span_C = is_lone_C & (begins_C // self._span == starts_C // self._span)
        columns = firsts_C, rows_C, begins_C, ends_C
        sizes_C = self._tokens_of_spans(is_lone_C, rows_C, starts_C, begins_C)
        nothing_C = np.zeros_like(ends_C)
        lone = *columns, nothing_C - 1, sizes_C, nothing_C + 1, nothing_C
        spans = [np.stack(lone, axis=1)[is_one_span_C & (sizes_C > 0)]]
        merges: list[tuple[int, int, int]] = []
        tiles: list[tuple[int, int, int, int]] = []
        num_partials, later = 0, list[NativePlan]()
        for i in np.flatnonzero(~is_one_span_C & (sizes_C > 0)).tolist():
            first, row, begin, end = (int(x[i]) for x in columns)
            if is_lone_C[i]:
                cuts = np.arange(begin // self._span, -(-end // self._span)) * self._span
                cuts[0] = begin
                num, size = len(cuts), int(sizes_C[i])
                own = np.empty((num, 8), dtype=np.int64)
                own[:] = first, row, 0, end, 0, size, 0, num
                own[:, 2], own[:-1, 3], own[-1, 6] = cuts, cuts[1:], 1
                own[:, 4] = np.arange(num_partials, num_partials + num)
                spans.append(own)
                merges += [(first + t, num_partials + t * num, num) for t in range(size)]
                num_partials += size * num
                if len(merges) > decode.ROUND - decode.MOST_TOKENS:
                    later.append(self._plan_of(block_ids, spans, merges, num_partials))
                    spans, merges, num_partials = [], [], 0
            else:
                start, count = int(starts_C[i]), int(counts_C[i])
                # the last tile sees the most keys: it begins first
                tiles += [
                    (first + offset, min(tile, count - offset), row, start + offset)
                    for offset in reversed(range(0, count, tile))
                ]
        return self._plan_of(block_ids, spans, merges, num_partials, tiles, window, later)

    def _plan_of(
        self,
        block_ids: np.ndarray,
        spans: Sequence[np.ndarray],
        merges: Sequence[tuple[int, int, int]],
        num_partials: int,
        tiles: Sequence[tuple[int, int, int, int]] = (),
        window: int | None = None,
        later: Sequence[NativePlan] = (),
    ) -> NativePlan:
        spans_P = np.concatenate((np.empty((0, 8), np.int64), *spans))
        num_heads, width = self._config.num_q_heads, self._config.head_dim
        return NativePlan(
            block_ids,
            spans_P,
            np.array(merges, dtype=np.int64).reshape(-1, 3),
            np.empty((num_partials, num_heads, width + 2), np.float32),
            self._heads_of_a_piece(len(spans_P)),
            np.array(tiles, dtype=np.int64).reshape(-1, 4),
            UNLIMITED if window is None else window,
            tuple(later),
        )

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

    def begin_step(
        self, tokens: HostTokens, table_VE: Tensor, scale: float, rope_tables: Sequence[Tensor]
    ) -> tuple[Tensor, tuple[Tensor, Tensor, list[Tensor]]]:
        x_TE = self.embed(table_VE, tokens.ids_T, scale)
        return x_TE, self.begin(tokens.positions_T, tokens.slots_T, rope_tables)

    def begin(
        self, positions_T: Tensor, slots_T: Tensor, rope_tables: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        return positions_T, slots_T, [self._float32.of(table) for table in rope_tables]

    def norm(self, x_TE: Tensor, weight: Tensor) -> Tensor:
        z_TE = padded(len(x_TE), x_TE.shape[1], x_TE.dtype)
        self._norm_of_sum(x_TE, None, weight, z_TE)
        return z_TE

    def norm_(self, x_TX: Tensor, weight: Tensor) -> None:
        self._norm_of_sum(x_TX, None, weight, x_TX)

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
        num_threads = num_threads_for(num_tokens)
        self._qk_norm_rope_kv_write(
            num_tokens,
            qkv_TND.data_ptr(),
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
        sinks = 0 if sinks_N is None else self._float32.of(sinks_N).data_ptr()
        num_threads = torch.get_num_threads()
        width = config.num_q_heads * config.head_dim
        out_TN = padded(len(qkv_TND), width, qkv_TND.dtype)
        fresh_and_cached = (
            qkv_TND.data_ptr(),
            qkv_TND.stride(0),
            cache_2HSD.data_ptr(),
            cache_2HSD.shape[2],
        )
        model = (
            config.num_kv_heads,
            self._group,
            config.head_dim,
            config.block_size,
            self._scale,
            self._cap,
        )
        if len(plan.tiles):
            self._prefill(
                len(plan.tiles) * config.num_kv_heads,
                *fresh_and_cached,
                plan.block_ids.ctypes.data,
                plan.block_ids.shape[1],
                plan.tiles.ctypes.data,
                *model,
                plan.window,
                sinks,
                out_TN.data_ptr(),
                out_TN.stride(0),
                scratch(num_threads * self._prefill_scratch),
                self._prefill_scratch,
                num_threads=num_threads,
            )
        for part in (part for part in (plan, *plan.later) if len(part.spans)):
            self._decode(
                len(part.spans) * (config.num_kv_heads // part.heads),
                *fresh_and_cached,
                part.words.ctypes.data,
                *model,
                sinks,
                out_TN.data_ptr(),
                out_TN.stride(0),
                scratch(num_threads * self._decode_scratch),
                self._decode_scratch,
                num_threads=num_threads,
            )
            self._merge(
                len(part.merges) * config.num_q_heads,
                part.words.ctypes.data,
                config.num_q_heads,
                config.head_dim,
                sinks,
                out_TN.data_ptr(),
                out_TN.stride(0),
            )
        return out_TN

    def _tokens_of_spans(
        self, is_lone_C: np.ndarray, rows_C: np.ndarray, starts_C: np.ndarray, begins_C: np.ndarray
    ) -> np.ndarray:
        """Return how many tokens the spans of an entry have: 0 where it is in those of an entry before; no result depends on it.

        Those that verify drafts follow each other in one sequence, and share their keys unless one sees a block more.
        """
        sizes_C = np.ones_like(starts_C)
        last_spans_C = starts_C // self._span
        follows = is_lone_C[1:] & is_lone_C[:-1] & (rows_C[1:] == rows_C[:-1])
        follows &= (starts_C[1:] == starts_C[:-1] + 1) & (begins_C[1:] == begins_C[:-1])
        follows &= last_spans_C[1:] == last_spans_C[:-1]
        if not follows.any():
            return sizes_C
        firsts = np.append(np.flatnonzero(np.append(True, ~follows)), len(starts_C))
        few_heads = self._config.num_kv_heads < 4 * torch.get_num_threads()
        for first, stop in zip(firsts[:-1].tolist(), firsts[1:].tolist(), strict=True):
            num = stop - first
            if num > 1:
                num_spans = max(-(-num // decode.MOST_TOKENS), 2 if few_heads else 1)
                sizes_C[first:stop] = 0
                cuts = [first + num * i // num_spans for i in range(num_spans + 1)]
                for begin, end in pairwise(cuts):
                    sizes_C[begin] = end - begin
        return sizes_C

    def _parts_of_a_piece(self, counts: np.ndarray) -> int:
        """Return how many tiles of queries a piece has, so that each thread gets four pieces; no result depends on it."""
        num_tiles = int((-(-counts // self._tile)).sum())
        most = num_tiles * self._config.num_kv_heads // (4 * torch.get_num_threads())
        return max(1, min(most, prefill.PARTS))

    def _heads_of_a_piece(self, num_spans: int) -> int:
        """Return how many heads a piece has, so that each thread gets four pieces; no result depends on it.

        A thread that goes on to the next head knows what it will read.
        """
        heads, num_threads = self._config.num_kv_heads, torch.get_num_threads()
        while heads % 2 == 0 and num_spans * self._config.num_kv_heads < 4 * heads * num_threads:
            if num_threads == 1:
                break
            heads //= 2
        return heads

    def act_and_mul(self, gate_up_TM: Tensor) -> Tensor:
        num_tokens, width = len(gate_up_TM), gate_up_TM.shape[1] // 2
        y_TM = padded(num_tokens, width, gate_up_TM.dtype)
        self._act_and_mul(
            num_tokens,
            gate_up_TM.data_ptr(),
            y_TM.data_ptr(),
            y_TM.stride(0),
            width,
            *self._bounds,
            num_threads=num_threads_for(num_tokens),
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
            return finished_logits(product_RV, scale, cap)
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
