"""Draw a token for each row of a step: the largest logit / temperature + Gumbel noise among the tokens that pass top-k,
top-p and min-p.

    logits [T, V]     float32, may be strided; row i uses logits picked[i], which penalties overwrite; no token is drawn
                      for a negative index
    parameters [S]    `ROW`: the parameters of row i are at index rows[i]
    tokens [S, L]     int64: the first ends[i] tokens of rows[i] have occurred; read only for a penalty
    masks [S]         int64: address of a bit mask that allows token v by bit v % 32 of word v // 32; 0 allows all
    token [R]         int64: the token, NOT_FINITE for logits with NaN or infinity, NOTHING_LEFT if all are -inf

The repetition penalty comes first: it divides positive logits of tokens that have occurred, and multiplies negative ones.
Then the mask applies.  A row with temperature 0 takes the smallest id among the largest logits; equal logits are ordered
by their ids.  One call draws any mixture of rows.

Laws:
  * A row's token depends only on its own row.  The noise equals that of `noise.gumbel` up to rounding.
  * A token that occurs twice is penalised once, because all logits are read before any is written.  Ids outside the
    vocabulary have no effect.

Roofline: 4 R V bytes from memory, but instructions are the bound: see `sample_rows.py` and `top_k_top_p.py`.
Measured on one Xeon core (Emerald Rapids), logits with deviation 3, in brackets with the partitions of torch and numpy:
256 rows of 4,096, temperature 0.4 and top-p 0.95: 0.98 ms (5.3); 16 rows of 151,936: top-p 0.9 3.3 (365), top-k 50 1.9
(9.2), neither 1.2 (4.9), greedy 0.44 (0.45).
"""

import ctypes
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trouper.kernels.codegen import launch, units
from trouper.kernels.cpu.sampling.row_layout import NOT_FINITE, NOTHING_LEFT
from trouper.kernels.reference.noise import gumbel

# A thread takes 10 µs for this many tokens, and a second thread takes 3 µs to wake.
TOKENS_PER_THREAD = 2**15
LEAST = 16  # the smallest vocabulary of the kernel


def sample(
    logits_TV: Tensor,
    picked_R: np.ndarray,
    parameters_S: np.ndarray,
    rows_R: np.ndarray,
    ends_R: np.ndarray,
    tokens_SL: np.ndarray,
    masks_S: np.ndarray,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """Return the tokens [R] int64.

    Args:
        ends_R: number of tokens of each row, which is also the position of the drawn token.
        out: memory for the tokens.  A recording needs it, and needs all other arrays to keep their addresses.
    """
    assert logits_TV.dtype == torch.float32
    if not units.is_available() or logits_TV.shape[1] < LEAST:
        return sample_reference(
            logits_TV, picked_R, parameters_S, rows_R, ends_R, tokens_SL, masks_S, out
        )
    from trouper.kernels.cpu.sampling.sample_rows import sample_rows
    from trouper.kernels.cpu.sampling.top_k_top_p import held_bytes

    picked_R, rows_R, ends_R = (np.ascontiguousarray(x) for x in (picked_R, rows_R, ends_R))
    num_rows, vocab_size = len(rows_R), logits_TV.shape[1]
    token_R = np.empty(num_rows, dtype=np.int64) if out is None else out
    is_long = num_rows * vocab_size + int(ends_R.sum()) >= 2 * TOKENS_PER_THREAD
    num_threads = torch.get_num_threads() if is_long else 1
    num_bytes = max(held_bytes(vocab_size), 4 * tokens_SL.shape[1])
    launch.compiled(sample_rows)(
        num_rows,
        logits_TV.data_ptr(),
        logits_TV.stride(0),
        picked_R.ctypes.data,
        parameters_S.ctypes.data,
        rows_R.ctypes.data,
        ends_R.ctypes.data,
        tokens_SL.ctypes.data,
        tokens_SL.strides[0] // tokens_SL.itemsize,
        masks_S.ctypes.data,
        token_R.ctypes.data,
        vocab_size,
        launch.scratch(num_threads * num_bytes),
        num_bytes,
        num_threads=num_threads,
    )
    return token_R


def compile_sample() -> None:
    """Compile the sampling kernel in advance, so that the first step does not wait for it.

    Does nothing without compiled kernels.
    """
    if units.is_available():
        from trouper.kernels.cpu.sampling.sample_rows import sample_rows

        launch.compiled(sample_rows)


def sample_reference(
    logits_TV: Tensor,
    picked_R: np.ndarray,
    parameters_S: np.ndarray,
    rows_R: np.ndarray,
    ends_R: np.ndarray,
    tokens_SL: np.ndarray,
    masks_S: np.ndarray,
    out: np.ndarray | None = None,
) -> np.ndarray:
    token_R = np.empty(len(rows_R), dtype=np.int64) if out is None else out
    for i, (picked, row, end) in enumerate(zip(picked_R, rows_R, ends_R, strict=True)):
        if picked < 0:
            continue
        logits: np.ndarray = logits_TV[picked].numpy()
        parameters: Any = parameters_S[row]
        if parameters["repetition"]:
            if not np.isfinite(logits).all():
                token_R[i] = NOT_FINITE
                continue
            apply_repetition_penalty_reference_(
                logits, tokens_SL[row, :end], parameters["repetition"]
            )
        if masks_S[row]:
            logits[~_allowed(int(masks_S[row]), len(logits))] = -np.inf
        logits = np.where(np.isnan(logits), -np.inf, logits)
        if parameters["temperature"] and not np.isneginf(logits).all():
            kept = top_k_top_p_reference(logits, parameters)
            noise = gumbel(
                parameters["seed"].reshape(1),
                np.array([end]),
                np.arange(len(logits), dtype=np.uint32),
            )
            noisy = logits / parameters["temperature"] + noise[0].numpy()
            logits = np.where(kept, noisy, -np.inf)
        token_R[i] = logits.argmax() if not np.isneginf(logits).all() else NOTHING_LEFT
    return token_R


def _allowed(address: int, vocab_size: int) -> np.ndarray:
    num_bytes = -(-vocab_size // 32) * 4
    bits = np.frombuffer(ctypes.string_at(address, num_bytes), np.uint8)
    return np.unpackbits(bits, count=vocab_size, bitorder="little").astype(bool)


def apply_repetition_penalty_reference_(
    logits_V: np.ndarray, ids: np.ndarray, penalty: np.float32
) -> None:
    ids = ids[(ids >= 0) & (ids < len(logits_V))]
    logits = logits_V[ids]
    # A row that is not finite fails later, without affecting other rows.
    with np.errstate(all="ignore"):
        logits_V[ids] = np.where(logits > 0, logits / penalty, logits * penalty)


def top_k_top_p_reference(logits_V: np.ndarray, row: np.void) -> np.ndarray:
    """Return which tokens may be drawn, computed by a stable sort in float64.

    Tests compare the kernels' selection without a sort with it.
    """
    order = np.argsort(-logits_V, kind="stable")
    with np.errstate(invalid="ignore"):  # -inf minus -inf
        x = (logits_V[order].astype(np.float64) - logits_V[order[0]]) / row["temperature"]
    kept = x >= row["log_min_p"]
    if 0 < row["top_k"] < len(x):
        kept[row["top_k"] :] = False
    if row["top_p"] < 1:
        mass = np.where(kept, np.exp(x), 0)
        kept &= mass.cumsum() - mass < row["top_p"] * mass.sum()
    kept_V = np.empty_like(kept)
    kept_V[order] = kept
    return kept_V
