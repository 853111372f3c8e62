"""Which rows of logits are finite; then the repetition penalty, in place.

Logits of tokens that have occurred are divided by it if they are above 0, else multiplied.

    logits [R, V]     float32, rows may be strided
    token_ids [S, L]  int64; row i of the logits has had the first ends[i] of its row rows[i]
    penalty [R]       float32, 1 = off
    is_finite [R]     bool

Laws:
  * A token that occurs twice counts once: all are read before any is written.
  * What is no token of the vocabulary counts for nothing.

Roofline: bytes = 4 R V from memory, 8 for each token that has occurred.
"""

import numpy as np
import torch
from torch import Tensor

from trouper.kernels import launch
from trouper.kernels.draw import TOKENS_PER_THREAD


def penalise_repetition_(
    logits_RV: Tensor,
    token_ids_SL: np.ndarray,
    rows_R: np.ndarray,
    ends_R: np.ndarray,
    penalty_R: np.ndarray,
) -> np.ndarray:
    """Which rows were finite, [R] bool.  `token_ids`, `rows` and `ends` are int64, the others float32."""
    if not launch.is_available():
        is_finite_R = torch.isfinite(logits_RV).all(-1).numpy()
        for i in np.flatnonzero(penalty_R != 1):
            ids = token_ids_SL[rows_R[i], : ends_R[i]]
            penalise_repetition_reference_(logits_RV[i].numpy(), ids, penalty_R[i])
        return is_finite_R
    assert logits_RV.dtype == torch.float32
    from trouper.kernels.penalise_rows import penalise_rows

    rows_R, ends_R = (np.ascontiguousarray(x, np.int64) for x in (rows_R, ends_R))
    penalty_R = np.ascontiguousarray(penalty_R, np.float32)
    num_bytes = 4 * token_ids_SL.shape[1]
    is_finite_R = np.empty(len(rows_R), dtype=np.bool_)
    is_long = logits_RV.numel() + int(ends_R.sum()) >= 2 * TOKENS_PER_THREAD
    num_threads = torch.get_num_threads() if is_long else 1
    launch.compiled(penalise_rows)(
        len(rows_R),
        logits_RV.data_ptr(),
        logits_RV.stride(0),
        logits_RV.shape[1],
        token_ids_SL.ctypes.data,
        token_ids_SL.strides[0] // token_ids_SL.itemsize,
        rows_R.ctypes.data,
        ends_R.ctypes.data,
        penalty_R.ctypes.data,
        is_finite_R.ctypes.data,
        launch.scratch(num_threads * num_bytes),
        num_bytes,
        num_threads=num_threads,
    )
    return is_finite_R


def compile_repetition() -> None:
    """Before the first step, which would else wait."""
    if launch.is_available():
        from trouper.kernels.penalise_rows import penalise_rows

        launch.compiled(penalise_rows)


def penalise_repetition_reference_(
    logits_V: np.ndarray, ids: np.ndarray, penalty: np.float32
) -> None:
    logits = logits_V[ids]
    with np.errstate(all="ignore"):  # a row that is not finite fails later, and alone
        logits_V[ids] = np.where(logits > 0, logits / penalty, logits * penalty)
