"""The operations of recurrent mixers by torch, token by token: the reference of `kernels/cpu/recurrent_ops.py`.

    T  tokens    C  channels    K  taps    H  heads    S  rows of the states

    causal_conv   y_t = act(Σ_k w_k ⊙ x_{t-K+1+k} + b)                          state [S, K - 1, C]: the last inputs
    gated_delta   S ← g S;  δ = β (v - Sᵀ k);  S ← S + k δᵀ;  o = Sᵀ q           state [S, H, dk, dv] float32
    ssd           h ← a h + u ⊗ B;  y = h C + D x,  u = Δ x                      state [S, H, P, N] float32
    gated_norm    rms(x) w ⊙ act(z), or rms(x ⊙ act(z)) w

The tokens of a step belong to entries, one for each sequence.  The state behind a token is a function of all tokens
before it, in order; it does not depend on how they are divided into steps.  The last tokens of an entry may be drafts:
their outputs are computed, but the state that is kept is the one before them.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# torch leaves the types of unflatten, repeat and some others open.

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

L2_EPS = 1e-6
# Behind every token of any step.
NEVER = 2**62
# The saves of a step without any.
NO_SAVES = np.array([[NEVER, -1]])


class Entries(NamedTuple):
    """The sequences of a step: int64 tensors [C] and `saves`, which kernels read by address.

    An entry with a negative row is padding: nothing is read or written for it.  An entry that starts at position 0
    begins with a state of zeros, whatever its row contains.
    """

    firsts: Tensor  # the entry's first token in the step
    counts: Tensor
    rows: Tensor  # of the states
    starts: Tensor  # the position of the first token
    settled: Tensor  # the tokens before the drafts; at least one
    keeps: Tensor  # where `keep_drafts` puts the entry's first draft
    # [S + 1, 2]: states are copied to another row behind settled tokens of the step.  Each pair is the number of the next token and the
    # row.  They are in the order of the tokens, and the last pair is `NEVER` and -1.
    saves: Tensor = torch.tensor([[NEVER, -1]])

    @classmethod
    def of(cls, *arrays: np.ndarray) -> "Entries":
        """Return the seven arrays of numpy as tensors in the same memory."""
        from_numpy = cast("Callable[[np.ndarray], Tensor]", cast("Any", torch).from_numpy)
        return cls(*map(from_numpy, arrays))


class TokenTurn(NamedTuple):
    """The tokens of a step that come at the same place in their entries, so that they can be computed together."""

    tokens: Tensor
    rows: Tensor
    are_first: Tensor  # whether the position is 0


def turns(entries: Entries, state: Tensor) -> Iterator[TokenTurn]:
    """Yield the first token of each entry, then the second of each longer one, and so on.

    The caller updates `state` before it asks for the next turn. At the end, rows with drafts have the state before these again.
    """
    firsts, counts, rows, starts, settled, _, saves = (x.to("cpu") for x in entries)
    used, saved = rows >= 0, dict(cast("list[tuple[int, int]]", saves.tolist()))
    before_drafts: list[tuple[Tensor, Tensor]] = []
    for i in range(int(counts[used].max()) if used.any() else 0):
        now = used & (counts > i)
        tokens = firsts[now] + i
        yield TokenTurn(tokens, rows[now], starts[now] + i == 0)
        for token, row in zip(tokens.tolist(), rows[now].tolist(), strict=True):
            if token + 1 in saved:
                state[saved[token + 1]] = state[row]
        ends = rows[now & (settled == i + 1) & (counts > settled)]
        before_drafts.append((ends, state[ends]))
    for ends, kept in before_drafts:
        state[ends] = kept


def keep_drafts(x_TX: Tensor, kept_DX: Tensor, entries: Entries) -> None:
    """Copy the rows of drafts to another tensor; see `RecurrentOps.keep_drafts`."""
    x_TX = x_TX.narrow(1, 0, kept_DX.shape[1])
    for first, count, row, _, settled, keep in zip(
        *(x.tolist() for x in entries[:-1]), strict=True
    ):
        if row >= 0:
            kept_DX[keep : keep + count - settled] = x_TX[first + settled : first + count]


def causal_conv(
    x_TC: Tensor,
    weight_KC: Tensor,
    bias_C: Tensor | None,
    state_SKC: Tensor,
    entries: Entries,
    *,
    has_silu: bool,
) -> Tensor:
    """Return the convolution of each channel with its last K inputs, and keep the last K - 1 of them."""
    y_TC, weight_KC = torch.empty(x_TC.shape, dtype=x_TC.dtype), weight_KC.float()
    for tokens, rows, are_first in turns(entries, state_SKC):
        before = state_SKC[rows].masked_fill(are_first[:, None, None], 0)
        window = torch.cat((before, x_TC[tokens][:, None]), 1)
        state_SKC[rows] = window[:, 1:]
        total = (window.float() * weight_KC).sum(1)
        total = total if bias_C is None else total + bias_C.float()
        y_TC[tokens] = (F.silu(total) if has_silu else total).to(x_TC.dtype)
    return y_TC


def delta_gates(
    a_TH: Tensor, b_TH: Tensor, rates_H: Tensor, bias_H: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the decay exp(rate · softplus(a + bias)) and the strength σ(b), both float32."""
    return torch.exp(rates_H * F.softplus(a_TH.float() + bias_H)), b_TH.float().sigmoid()


def gated_delta(
    q_THK: Tensor,
    k_THK: Tensor,
    v_THV: Tensor,
    decay: Tensor,
    beta_TH: Tensor,
    state_SHKV: Tensor,
    entries: Entries,
    *,
    normalises: bool,
) -> Tensor:
    """Return the outputs [T, H, dv] of the gated delta rule; see `RecurrentOps.gated_delta`."""
    q, k, v = q_THK.float(), k_THK.float(), v_THV.float()
    if normalises:
        q, k = (x * (x.square().sum(-1, keepdim=True) + L2_EPS).rsqrt() for x in (q, k))
    num_shared = v.shape[1] // k.shape[1]
    q = (q * q.shape[-1] ** -0.5).repeat_interleave(num_shared, 1)
    k = k.repeat_interleave(num_shared, 1)
    decay = decay[..., None, None] if decay.dim() == 2 else decay[..., None]
    out_THV = torch.empty(v.shape, dtype=v_THV.dtype)
    for tokens, rows, are_first in turns(entries, state_SHKV):
        state = state_SHKV[rows].masked_fill(are_first[:, None, None, None], 0) * decay[tokens]
        told = (state * k[tokens][..., None]).sum(2)
        delta = beta_TH[tokens][..., None] * (v[tokens] - told)
        state = state + k[tokens][..., None] * delta[:, :, None]
        state_SHKV[rows] = state
        out_THV[tokens] = (state * q[tokens][..., None]).sum(2).to(out_THV.dtype)
    return out_THV


def ssd_gates(
    dt_TH: Tensor, rates_H: Tensor, bias_H: Tensor, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """Return Δ = clamp(softplus(dt + bias)) and the decay exp(rate · Δ), both float32."""
    delta_TH = F.softplus(dt_TH.float() + bias_H).clamp(low, high)
    return delta_TH, torch.exp(rates_H * delta_TH)


def ssd(
    x_THP: Tensor,
    delta_TH: Tensor,
    decay_TH: Tensor,
    b_TGN: Tensor,
    c_TGN: Tensor,
    skip_H: Tensor | None,
    state_SHPN: Tensor,
    entries: Entries,
) -> Tensor:
    """Return the outputs [T, H, P] of Mamba-2's recurrence; see `RecurrentOps.ssd`."""
    x, num_shared = x_THP.float(), x_THP.shape[1] // b_TGN.shape[1]
    b_THN, c_THN = (y.float().repeat_interleave(num_shared, 1) for y in (b_TGN, c_TGN))
    out_THP = torch.empty(x.shape, dtype=x_THP.dtype)
    for tokens, rows, are_first in turns(entries, state_SHPN):
        state = state_SHPN[rows].masked_fill(are_first[:, None, None, None], 0)
        inputs = (delta_TH[tokens][..., None] * x[tokens])[..., None] * b_THN[tokens][:, :, None]
        state = state * decay_TH[tokens][..., None, None] + inputs
        state_SHPN[rows] = state
        y = (state * c_THN[tokens][:, :, None]).sum(-1)
        y = y if skip_H is None else y + skip_H.float()[:, None] * x[tokens]
        out_THP[tokens] = y.to(out_THP.dtype)
    return out_THP


def gated_norm(
    x_TX: Tensor, gate_TX: Tensor, weight_X: Tensor, eps: float, *, group: int, is_gate_first: bool
) -> Tensor:
    """Return the RMS norm of each group of columns, multiplied by SiLU(gate) before or after it."""
    x, gate = x_TX.float(), F.silu(gate_TX.float())
    x = (x * gate if is_gate_first else x).unflatten(-1, (-1, group))
    x = (x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()).flatten(-2)
    x = x * weight_X.float().repeat(x.shape[-1] // len(weight_X))
    return (x if is_gate_first else x * gate).to(x_TX.dtype)
