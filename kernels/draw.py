"""A token for each row: the arg max of logit / temperature + Gumbel noise over what top-k, top-p and min-p leave.

    logits [R, V]   float32, rows may be strided
    rows [R]        `ROW`: a row's seed and parameters
    positions [R]   int64, of the token that is to be drawn
    token [R]       int64; 0 where all are -inf; what is not a number is never drawn

A row of temperature 0 takes the first of the largest.  Equal logits are in the order of their ids.  One call draws any
mixture of rows.

Law: a row's token depends on its own row alone.  The noise is `noise.gumbel`'s up to rounding.

Roofline: bytes = 4 R V; but instructions bound it, see `draw_rows.py` and `truncation.py`.
Measured, one Xeon core (Emerald Rapids), logits of deviation 3; in brackets with torch's and numpy's partitions:
256 rows of 4,096, temperature 0.4 and top-p 0.95: 0.98 ms (5.3); 16 rows of 151,936: top-p 0.9 3.3 (365), top-k 50 1.9 (9.2),
neither 1.2 (4.9), greedy 0.44 (0.45).
"""

import numpy as np
import torch
from torch import Tensor

from trouper.kernels import launch
from trouper.kernels.noise import gumbel

ROW = np.dtype(
    [
        ("seed", np.uint64),
        ("temperature", np.float32),  # 0 = greedy
        ("top_p", np.float32),  # in (0, 1]; 1 = off
        ("log_min_p", np.float32),  # -inf = off
        ("top_k", np.int32),  # ≤ 0, or as many as there are, = off
    ]
)
TOKENS_PER_THREAD = 2**15  # 10 µs; to wake a second thread costs 3


def draw(logits_RV: Tensor, rows_R: np.ndarray, positions_R: np.ndarray) -> np.ndarray:
    """Tokens [R], int64.

    Args:
        logits_RV: float32.
        rows_R: `ROW`.
        positions_R: int64, of the token that is to be drawn.
    """
    assert logits_RV.dtype == torch.float32
    if not launch.is_available():
        return draw_reference(logits_RV, rows_R, positions_R)
    from trouper.kernels.draw_rows import draw_rows
    from trouper.kernels.simd import LANES
    from trouper.kernels.truncation import held_bytes

    num_rows, vocab_size = logits_RV.shape
    if vocab_size < LANES:
        wide_RV = logits_RV.new_full((num_rows, LANES), -torch.inf)
        wide_RV[:, :vocab_size] = logits_RV
        return draw(wide_RV, rows_R, positions_R)
    rows_R = np.ascontiguousarray(rows_R, ROW)
    positions_R = np.ascontiguousarray(positions_R, np.int64)
    token_R = np.empty(num_rows, dtype=np.int64)
    is_long = num_rows * vocab_size >= 2 * TOKENS_PER_THREAD
    num_threads = torch.get_num_threads() if is_long else 1
    launch.compiled(draw_rows)(
        num_rows,
        logits_RV.data_ptr(),
        logits_RV.stride(0),
        rows_R.ctypes.data,
        positions_R.ctypes.data,
        token_R.ctypes.data,
        vocab_size,
        launch.scratch(num_threads * held_bytes(vocab_size)),
        held_bytes(vocab_size),
        num_threads=num_threads,
    )
    return token_R


def compile_draw() -> None:
    """Before the first step, which would else wait."""
    if launch.is_available():
        from trouper.kernels.draw_rows import draw_rows

        launch.compiled(draw_rows)


def draw_reference(logits_RV: Tensor, rows_R: np.ndarray, positions_R: np.ndarray) -> np.ndarray:
    vocabulary = np.arange(logits_RV.shape[1], dtype=np.uint32)
    noise_RV = gumbel(rows_R["seed"], positions_R, vocabulary).numpy()
    token_R = np.empty(len(rows_R), dtype=np.int64)
    for i, (logits, noise, row) in enumerate(zip(logits_RV.numpy(), noise_RV, rows_R, strict=True)):
        logits = np.where(np.isnan(logits), -np.inf, logits)
        if row["temperature"]:
            kept = kept_reference(logits, row)
            logits = np.where(kept, logits / row["temperature"] + noise, -np.inf)
        token_R[i] = logits.argmax()
    return token_R


def kept_reference(logits_V: np.ndarray, row: np.void) -> np.ndarray:
    """Which tokens may be drawn, by a stable sort and in float64."""
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
