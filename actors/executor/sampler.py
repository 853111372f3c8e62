"""From logits to tokens, in the order of spec section 8.1; and the logprobs that were asked for.

    R  rows that sample in this step     V  vocabulary

Laws:
  * A row's token is a function of its own logits, parameters, seed and position alone.
  * A step is a few calls, whatever the number of rows: each call of torch lets go of the interpreter's lock, and a
    busy event loop takes it.
"""

import math
from collections.abc import Sequence

import msgspec
import numpy as np
import torch
from torch import Tensor

from trouper.actors.executor.batch import Rows
from trouper.actors.executor.penalties import Penalties
from trouper.actors.messages import NO_VALID_TOKEN, Sampling, TokenLogprobs
from trouper.kernels.draw import ROW, draw

NO_TOP_K = 2**31 - 1  # more than any vocabulary


class Sampled(msgspec.Struct, frozen=True):
    token_ids: list[int]  # -1 where the row's logits were not finite; NO_VALID_TOKEN
    logprobs: list[TokenLogprobs | None]  # empty when nobody asked


class Sampler:
    """Keeps, by row, what outlives a step."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._penalties = Penalties(rows)
        self._parameters = np.zeros(len(rows.sampling), dtype=ROW)
        self._wishes: dict[int, Sampling] = {}  # of rows that want logprobs

    def place(self, row: int) -> None:
        """A sequence took the row."""
        self._penalties.place(row)
        s = self._rows.sampling[row]
        log_min_p = math.log(s.min_p) if s.min_p else -math.inf
        top_k = min(s.top_k, NO_TOP_K)
        self._parameters[row] = (s.seed % 2**64, s.temperature, s.top_p, log_min_p, top_k)
        self._wishes.pop(row, None)
        if s.logprobs is not None or s.logprob_token_ids:
            self._wishes[row] = s

    def sample(self, logits_RV: Tensor, row_ids: Sequence[int], ends: Sequence[int]) -> Sampled:
        """Draw one token a row and write it into the row, at its end; the logits are overwritten.

        Args:
            logits_RV: raw logits, float32.
            row_ids: the R device rows.
            ends: position of the token to be drawn, = number of tokens before it.
        """
        rows_R, ends_R = np.array(row_ids), np.array(ends)
        raw = {
            i: logits_RV[i].log_softmax(-1) for i, row in enumerate(row_ids) if row in self._wishes
        }
        is_finite_R = self._penalties.apply(logits_RV, rows_R, ends_R)
        token_R = draw(logits_RV, self._parameters[rows_R], ends_R)
        # it is drawn only where nothing else is left
        is_excluded_R = np.isneginf(logits_RV.numpy()[np.arange(len(token_R)), token_R])
        is_drawn_R = is_finite_R & ~is_excluded_R
        self._rows.token_ids[rows_R[is_drawn_R], ends_R[is_drawn_R]] = token_R[is_drawn_R]
        token_R[is_excluded_R] = NO_VALID_TOKEN
        token_R[~is_finite_R] = -1
        token_ids = token_R.tolist()
        logprobs: list[TokenLogprobs | None] = [None] * len(token_ids) if raw else []
        for i, raw_V in raw.items():
            s = self._wishes[row_ids[i]]
            if token_ids[i] >= 0:
                logprobs[i] = token_logprobs(
                    raw_V, token_ids[i], s.logprobs or 0, s.logprob_token_ids
                )
        return Sampled(token_ids, logprobs)


def token_logprobs(
    logprobs_V: Tensor, token_id: int, num_top: int, token_ids: Sequence[int] = ()
) -> TokenLogprobs:
    """The token first, then the `num_top` best (-1 = all) by falling logprob, or exactly `token_ids`."""
    own = logprobs_V[token_id]
    rank = int((logprobs_V >= own).sum())
    if token_ids:
        ids = torch.tensor(token_ids)
        order = logprobs_V[ids].argsort(descending=True, stable=True)
        ids = ids[order]
    elif num_top < 0:
        ids = logprobs_V.argsort(descending=True, stable=True)
    else:
        ids = logprobs_V.topk(min(num_top, logprobs_V.numel())).indices
    ids = torch.cat((torch.tensor([token_id]), ids[ids != token_id]))
    return TokenLogprobs(tuple(ids.tolist()), tuple(logprobs_V[ids].tolist()), rank)
