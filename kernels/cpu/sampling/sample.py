"""A token for each row of a step: the arg max of logit / temperature + Gumbel noise over what top-k, top-p and min-p leave.

    logits [T, V]     float32, may be strided; row i draws from those at picked[i], in which penalties are written, and
                      not at all where that is below 0
    parameters [S]    `ROW`: of the device's rows;  row i is the one at rows[i]
    tokens [S, L]     int64, the first ends[i] of row rows[i] have occurred: where a penalty is asked for
    masks [S]         int64: the address of the row's bits, which allow token v by bit v % 32 of word v // 32; 0 = all are
    token [R]         int64; NOT_FINITE, or NOTHING_LEFT where all are -inf; what is not a number is never drawn

First logits of tokens that have occurred are divided by the repetition penalty if they are above 0, else multiplied.  A
row of temperature 0 takes the first of the largest.  A mask comes after the penalties.  Equal logits are in the order of their ids.  One call draws any
mixture of rows.

Laws:
  * A row's token depends on its own row alone.  The noise is `noise.gumbel`'s up to rounding.
  * A token that occurs twice is penalised once: all are read before any is written.  What is no token of the vocabulary
    counts for nothing.

Roofline: bytes = 4 R V from memory; but instructions bound it, see `sample_rows.py` and `top_k_top_p.py`.
Measured, one Xeon core (Emerald Rapids), logits of deviation 3; in brackets with torch's and numpy's partitions:
256 rows of 4,096, temperature 0.4 and top-p 0.95: 0.98 ms (5.3); 16 rows of 151,936: top-p 0.9 3.3 (365), top-k 50 1.9 (9.2),
neither 1.2 (4.9), greedy 0.44 (0.45).
"""

import ctypes
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trouper.kernels.codegen import launch, units
from trouper.kernels.cpu.sampling.row_layout import NOT_FINITE, NOTHING_LEFT
from trouper.kernels.reference.noise import gumbel

TOKENS_PER_THREAD = 2**15  # 10 µs; to wake a second thread costs 3
LEAST = 16  # tokens in a vocabulary of the kernel's


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
    """Return tokens [R], int64; `ends` are also their positions.  Logits, parameters and tokens as above, the rest int64.

    What is recorded wants an `out`, and other arrays that stay where they are.
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
    """Compile the kernel, so that the first step does not wait for it."""
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
    with np.errstate(all="ignore"):  # a row that is not finite fails later, and alone
        logits_V[ids] = np.where(logits > 0, logits / penalty, logits * penalty)


def top_k_top_p_reference(logits_V: np.ndarray, row: np.void) -> np.ndarray:
    """Return which tokens may be drawn, by a stable sort and in float64."""
    order = np.argsort(-logits_V, kind="stable")
    with np.errstate(invalid="ignore"):  # -inf less -inf
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
