"""The operations of recurrent mixers by compiled kernels, one launch each for any mixture of prompts and single tokens.

Shapes that do not fill whole registers are computed by torch.
"""

import torch
from torch import Tensor

from trouper.kernels.codegen.launch import compiled, float_bits, scratch
from trouper.kernels.codegen.units import LANES, Kind
from trouper.kernels.cpu.memory import Float32Copies, num_threads_for, padded
from trouper.kernels.cpu.recurrences import (
    delta_gates,
    delta_scratch_bytes,
    gated_delta,
    ssd,
    ssd_gates,
    ssd_scratch_bytes,
    tile_of,
)
from trouper.kernels.cpu.recurrent_entries import (
    CONV_TILE,
    Gates,
    causal_conv,
    gated_norm,
    keep_drafts,
    mul_sigmoid,
)
from trouper.kernels.recurrent import RecurrentOps
from trouper.kernels.reference.recurrent import Entries

# Numbers that one thread convolves faster than it wakes another one: 2 ns each.
FEW = 2**12


class NativeRecurrentOps(RecurrentOps):
    """`RecurrentOps` by compiled kernels, for activations of one dtype, bfloat16 or float32."""

    def __init__(self, kind: Kind) -> None:
        self._kind: Kind = kind
        self._delta_gates = compiled(delta_gates, kind)
        self._ssd_gates = compiled(ssd_gates, kind)
        self._ssd = compiled(ssd, kind)
        self._mul_sigmoid = compiled(mul_sigmoid, kind)
        self._keep_drafts = compiled(keep_drafts, kind)
        self._float32 = Float32Copies()

    def causal_conv(
        self,
        x_TC: Tensor,
        weight_KC: Tensor,
        bias_C: Tensor | None,
        state_SKC: Tensor,
        entries: Entries,
        *,
        has_silu: bool = False,
    ) -> Tensor:
        if x_TC.shape[1] % LANES:
            return super().causal_conv(
                x_TC, weight_KC, bias_C, state_SKC, entries, has_silu=has_silu
            )
        return self._conv(x_TC, weight_KC, bias_C, state_SKC, entries, "plain", has_silu=has_silu)

    def short_conv(
        self,
        bcx_TX: Tensor,
        weight_KC: Tensor,
        bias_C: Tensor | None,
        state_SKC: Tensor,
        entries: Entries,
    ) -> Tensor:
        if weight_KC.shape[1] % LANES:
            return super().short_conv(bcx_TX, weight_KC, bias_C, state_SKC, entries)
        return self._conv(bcx_TX, weight_KC, bias_C, state_SKC, entries, "gates", has_silu=False)

    def _conv(
        self,
        x_TX: Tensor,
        weight_KC: Tensor,
        bias_C: Tensor | None,
        state_SKC: Tensor,
        entries: Entries,
        kind: Gates,
        *,
        has_silu: bool,
    ) -> Tensor:
        num_tokens, (taps, width) = len(x_TX), weight_KC.shape
        num_vectors = 2 if width % (2 * LANES) == 0 else 1
        kernel = compiled(causal_conv, self._kind, taps, has_silu, kind, num_vectors)
        y_TC = padded(num_tokens, width, x_TX.dtype)
        num_items = len(entries.rows) * -(-width // CONV_TILE)
        kernel(
            num_items,
            *_addresses(entries),
            x_TX.data_ptr(),
            x_TX.stride(0),
            self._float32.of(weight_KC).data_ptr(),
            0 if bias_C is None else self._float32.of(bias_C).data_ptr(),
            state_SKC.data_ptr(),
            state_SKC.stride(0),
            y_TC.data_ptr(),
            y_TC.stride(0),
            width,
            num_threads=1 if num_tokens * width < FEW else torch.get_num_threads(),
        )
        return y_TC

    def keep_drafts(self, x_TX: Tensor, kept_DX: Tensor, entries: Entries) -> None:
        self._keep_drafts(
            len(entries.rows),
            *_addresses(entries),
            x_TX.data_ptr(),
            x_TX.stride(0),
            kept_DX.data_ptr(),
            kept_DX.shape[1],
            num_threads=1,
        )

    def delta_gates(
        self, a_TH: Tensor, b_TH: Tensor, rates_H: Tensor, bias_H: Tensor
    ) -> tuple[Tensor, Tensor]:
        num_tokens, num_heads = a_TH.shape
        decay_TH, beta_TH = (torch.empty((num_tokens, num_heads)) for _ in range(2))
        self._delta_gates(
            num_tokens,
            a_TH.data_ptr(),
            a_TH.stride(0),
            b_TH.data_ptr(),
            b_TH.stride(0),
            rates_H.data_ptr(),
            bias_H.data_ptr(),
            decay_TH.data_ptr(),
            beta_TH.data_ptr(),
            num_heads,
            num_threads=num_threads_for(num_tokens),
        )
        return decay_TH, beta_TH

    def gated_delta(
        self,
        q_THK: Tensor,
        k_THK: Tensor,
        v_THV: Tensor,
        decay: Tensor,
        beta_TH: Tensor,
        state_SHKV: Tensor,
        entries: Entries,
        *,
        normalises: bool = True,
    ) -> Tensor:
        num_tokens, num_k_heads, k_dim = k_THK.shape
        _, num_heads, v_dim = v_THV.shape
        if k_dim % LANES or v_dim % LANES:
            return super().gated_delta(
                q_THK, k_THK, v_THV, decay, beta_TH, state_SHKV, entries, normalises=normalises
            )
        tile = tile_of(k_dim, v_dim, is_single=num_tokens == len(entries.rows))
        num_bytes, num_threads = delta_scratch_bytes(k_dim, tile), torch.get_num_threads()
        kernel = compiled(gated_delta, self._kind, tile, decay.dim() == 3, normalises)
        out_THV = torch.empty((num_tokens, num_heads, v_dim), dtype=v_THV.dtype)
        kernel(
            len(entries.rows) * num_heads * (v_dim // tile),
            *_addresses(entries),
            *(x.data_ptr() for x in (q_THK, k_THK, v_THV)),
            *(x.stride(0) for x in (q_THK, k_THK, v_THV)),
            decay.data_ptr(),
            beta_TH.data_ptr(),
            state_SHKV.data_ptr(),
            state_SHKV.stride(0),
            num_k_heads,
            num_heads,
            k_dim,
            v_dim,
            float_bits(k_dim**-0.5),
            out_THV.data_ptr(),
            scratch(num_threads * num_bytes),
            num_bytes,
            num_threads=num_threads,
        )
        return out_THV

    def ssd_gates(
        self, dt_TH: Tensor, rates_H: Tensor, bias_H: Tensor, low: float, high: float
    ) -> tuple[Tensor, Tensor]:
        num_tokens, num_heads = dt_TH.shape
        delta_TH, decay_TH = (torch.empty((num_tokens, num_heads)) for _ in range(2))
        self._ssd_gates(
            num_tokens,
            dt_TH.data_ptr(),
            dt_TH.stride(0),
            rates_H.data_ptr(),
            bias_H.data_ptr(),
            float_bits(low),
            float_bits(high),
            delta_TH.data_ptr(),
            decay_TH.data_ptr(),
            num_heads,
            num_threads=num_threads_for(num_tokens),
        )
        return delta_TH, decay_TH

    def ssd(
        self,
        x_THP: Tensor,
        delta_TH: Tensor,
        decay_TH: Tensor,
        b_TGN: Tensor,
        c_TGN: Tensor,
        skip_H: Tensor | None,
        state_SHPN: Tensor,
        entries: Entries,
    ) -> Tensor:
        num_tokens, num_heads, width = x_THP.shape
        _, num_groups, num_states = b_TGN.shape
        if width % LANES or num_states % LANES:
            return super().ssd(x_THP, delta_TH, decay_TH, b_TGN, c_TGN, skip_H, state_SHPN, entries)
        num_bytes, num_threads = ssd_scratch_bytes(num_states), torch.get_num_threads()
        y_THP = torch.empty((num_tokens, num_heads, width), dtype=x_THP.dtype)
        self._ssd(
            len(entries.rows) * num_heads * (width // LANES),
            *_addresses(entries),
            *(x.data_ptr() for x in (x_THP, b_TGN, c_TGN)),
            *(x.stride(0) for x in (x_THP, b_TGN, c_TGN)),
            delta_TH.data_ptr(),
            decay_TH.data_ptr(),
            0 if skip_H is None else self._float32.of(skip_H).data_ptr(),
            state_SHPN.data_ptr(),
            state_SHPN.stride(0),
            num_heads,
            num_groups,
            width,
            num_states,
            y_THP.data_ptr(),
            scratch(num_threads * num_bytes),
            num_bytes,
            num_threads=num_threads,
        )
        return y_THP

    def gated_norm(
        self,
        x_TX: Tensor,
        gate_TX: Tensor,
        weight_X: Tensor,
        eps: float,
        *,
        group: int,
        is_gate_first: bool = False,
    ) -> Tensor:
        num_tokens, width = x_TX.shape
        if group % LANES:
            return super().gated_norm(
                x_TX, gate_TX, weight_X, eps, group=group, is_gate_first=is_gate_first
            )
        y_TX = padded(num_tokens, width, x_TX.dtype)
        compiled(gated_norm, self._kind, is_gate_first)(
            num_tokens * (width // group),
            x_TX.data_ptr(),
            x_TX.stride(0),
            gate_TX.data_ptr(),
            gate_TX.stride(0),
            self._float32.of(weight_X).data_ptr(),
            group if len(weight_X) > group else 0,
            y_TX.data_ptr(),
            y_TX.stride(0),
            width // group,
            group,
            float_bits(eps),
            num_threads=num_threads_for(num_tokens),
        )
        return y_TX

    def mul_sigmoid(self, x_TX: Tensor, gate_TX: Tensor) -> Tensor:
        num_tokens, width = x_TX.shape
        if width % LANES:
            return super().mul_sigmoid(x_TX, gate_TX)
        y_TX = padded(num_tokens, width, x_TX.dtype)
        self._mul_sigmoid(
            num_tokens,
            x_TX.data_ptr(),
            x_TX.stride(0),
            gate_TX.data_ptr(),
            gate_TX.stride(0),
            y_TX.data_ptr(),
            y_TX.stride(0),
            width,
            num_threads=num_threads_for(num_tokens),
        )
        return y_TX


def _addresses(entries: Entries) -> list[int]:
    return [x.data_ptr() for x in entries]
