"""The operations of recurrent mixers, each declared once: convolutions, gated delta nets and Mamba-2.

`RecurrentOps` computes them by torch; `cpu/recurrent_ops.py` by compiled kernels.  `kernels/reference/recurrent.py` has
the formulas.

    T  tokens of a step    C  channels    K  taps    H  heads    S  rows of the states

Laws:
  * The state behind a token, and its output, have the same bits however the tokens are divided into steps, and whatever
    other sequences a step contains.
  * Only the rows of a step's entries and saves are read or written.  A row at position 0 is not read.
  * Drafts do not change a state.  Their outputs have the bits that they would have without being drafts.
  * A state that is saved inside a chunk has the bits that it would have if the chunk ended there.
"""

import torch
from torch import Tensor

from trouper.kernels.reference import recurrent as reference
from trouper.kernels.reference.recurrent import Entries


class RecurrentOps:
    """The operations by torch.  Activations have the model's dtype, and recurrent states are float32.

    Tensors of tokens may be columns of a wider tensor.  A state may be part of a wider row: only its first dimension
    may be strided.
    """

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"

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
        """Return the convolution [T, C] of each channel over its last K inputs, and keep the last K - 1 inputs.

        Args:
            weight_KC: [K, C], the weight of the newest input last.
            state_SKC: [S, K - 1, C] in the dtype of x.
            has_silu: apply SiLU to the result.
        """
        return reference.causal_conv(x_TC, weight_KC, bias_C, state_SKC, entries, has_silu=has_silu)

    def short_conv(
        self,
        bcx_TX: Tensor,
        weight_KC: Tensor,
        bias_C: Tensor | None,
        state_SKC: Tensor,
        entries: Entries,
    ) -> Tensor:
        """Return c ⊙ causal_conv(b ⊙ x) for the thirds b, c and x of the columns (LFM2)."""
        b_TC, c_TC, x_TC = bcx_TX.chunk(3, -1)
        return c_TC * self.causal_conv(b_TC * x_TC, weight_KC, bias_C, state_SKC, entries)

    def keep_drafts(self, x_TX: Tensor, kept_DX: Tensor, entries: Entries) -> None:
        """Copy the rows of all drafts of a step, so that accepted ones can move the states forward after the step.

        Args:
            x_TX: the inputs of a mixer's operations; columns beyond those of `kept_DX` are not copied.
            kept_DX: the first draft of an entry is put into row `entries.keeps`, the others behind it.
        """
        reference.keep_drafts(x_TX, kept_DX, entries)

    def delta_gates(
        self, a_TH: Tensor, b_TH: Tensor, rates_H: Tensor, bias_H: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return decay and strength [T, H] of gated delta nets, float32, for `gated_delta`.

        Args:
            rates_H: -exp(A_log), float32.
            bias_H: the bias of a, float32.
        """
        return reference.delta_gates(a_TH, b_TH, rates_H, bias_H)

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
        """Advance states by the gated delta rule, and return what queries read from them: [T, H, dv].

        Queries are multiplied by dk^-½.  The number of value heads is a multiple of that of key heads, and consecutive
        value heads share a key head.

        Args:
            decay: what remains of a state, [T, H] for whole heads or [T, H, dk] for each of its rows; float32.
            beta_TH: the strength of each update, float32.
            normalises: divide queries and keys by their length.
        """
        return reference.gated_delta(
            q_THK, k_THK, v_THV, decay, beta_TH, state_SHKV, entries, normalises=normalises
        )

    def ssd_gates(
        self, dt_TH: Tensor, rates_H: Tensor, bias_H: Tensor, low: float, high: float
    ) -> tuple[Tensor, Tensor]:
        """Return Δ and decay [T, H] of Mamba-2, float32, for `ssd`.

        Args:
            rates_H: -exp(A_log), float32.
            low: the least Δ.
            high: the largest Δ, which may be infinite.
        """
        return reference.ssd_gates(dt_TH, rates_H, bias_H, low, high)

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
        """Advance states by Mamba-2's recurrence, and return its outputs [T, H, P].

        Args:
            b_TGN: what inputs are written to, [T, groups, N]; consecutive heads share a group.
            c_TGN: what outputs are read from, likewise.
            skip_H: D, the share of x in the output.
        """
        return reference.ssd(x_THP, delta_TH, decay_TH, b_TGN, c_TGN, skip_H, state_SHPN, entries)

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
        """Return the RMS norm of each group of columns, multiplied by SiLU(gate).

        Args:
            weight_X: weights of all columns, or of one group if all groups share them.
            is_gate_first: multiply before the norm (Mamba-2), not after it (gated delta nets).
        """
        return reference.gated_norm(
            x_TX, gate_TX, weight_X, eps, group=group, is_gate_first=is_gate_first
        )

    def mul_sigmoid(self, x_TX: Tensor, gate_TX: Tensor) -> Tensor:
        """Return x ⊙ σ(gate), the gated output of an attention."""
        return (x_TX.float() * torch.sigmoid(gate_TX.float())).to(x_TX.dtype)
