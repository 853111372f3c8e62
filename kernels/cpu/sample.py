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

Roofline: 4 R V bytes from memory, but instructions are the bound: see `sample_rows.py`.
Measured on one Xeon core (Emerald Rapids), logits with deviation 3, in brackets with the partitions of torch and numpy:
256 rows of 4,096, temperature 0.4 and top-p 0.95: 0.98 ms (5.3); 16 rows of 151,936: top-p 0.9 3.3 (365), top-k 50 1.9
(9.2), neither 1.2 (4.9), greedy 0.44 (0.45).
"""

import numpy as np
import torch
from torch import Tensor

from trouper.kernels.codegen import launch, units
from trouper.kernels.reference.sampling import sample_reference

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
    from trouper.kernels.cpu.sample_rows import held_bytes, sample_rows

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
        from trouper.kernels.cpu.sample_rows import sample_rows

        launch.compiled(sample_rows)
