"""From logits to tokens, in the order of spec section 8.1; and the logprobs that were asked for.

    R  rows that sample in this step     V  vocabulary

Laws:
  * A row's token is a function of its own logits, parameters, seed and position alone.
  * A step is one call, whatever the number of rows, but for rows that are edited and those who want logprobs: each
    call lets go of the interpreter's lock, and a busy event loop takes it.
"""

import math
from collections.abc import Sequence

import msgspec
import numpy as np
import torch
from torch import Tensor

from trouper.actors.executor.batch import Rows
from trouper.actors.executor.sampling.penalties import Penalties
from trouper.actors.messages.plans import Sampling
from trouper.actors.messages.results import TokenLogprobs
from trouper.kernels.cpu.sampling.sample import NOT_FINITE, ROW, draw

NO_TOP_K = 2**31 - 1  # more than any vocabulary


class Sampled(msgspec.Struct, frozen=True):
    token_ids: list[int]  # or NOT_FINITE, NOTHING_LEFT
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
        repetition = self._penalties.place(row)
        s = self._rows.sampling[row]
        log_min_p = math.log(s.min_p) if s.min_p else -math.inf
        top_k = min(s.top_k, NO_TOP_K)
        seed = s.seed % 2**64
        self._parameters[row] = (seed, s.temperature, s.top_p, log_min_p, top_k, repetition)
        self._wishes.pop(row, None)
        if s.logprobs is not None or s.logprob_token_ids:
            self._wishes[row] = s

    def is_plain(self, rows: Sequence[int]) -> bool:
        """`draw` and `written` are all that these rows need."""
        return self._penalties.leave_alone(rows) and self._wishes.keys().isdisjoint(rows)

    def draw(
        self,
        logits_TV: Tensor,
        picked_R: np.ndarray,
        rows_R: np.ndarray,
        ends_R: np.ndarray,
        out: np.ndarray | None = None,
    ) -> np.ndarray:
        """`kernels.draw` with these rows' parameters and tokens; it can be recorded."""
        tokens_SL = self._rows.token_ids
        return draw(logits_TV, picked_R, self._parameters, rows_R, ends_R, tokens_SL, out)

    def written(self, token_R: np.ndarray, rows_R: np.ndarray, ends_R: np.ndarray) -> list[int]:
        """Each into its row, if it is one."""
        is_drawn_R = token_R >= 0
        self._rows.token_ids[rows_R[is_drawn_R], ends_R[is_drawn_R]] = token_R[is_drawn_R]
        return token_R.tolist()

    def sample(
        self,
        logits_TV: Tensor,
        rows_R: np.ndarray,
        ends_R: np.ndarray,
        picked_R: np.ndarray | None = None,
    ) -> Sampled:
        """Draw one token a row and write it into the row, at its end; the logits are overwritten.

        Args:
            logits_TV: raw logits, float32.
            rows_R: the device rows.
            ends_R: position of the token to be drawn, = number of tokens before it.
            picked_R: which of the logits are a row's; None: those of the same number.
        """
        if picked_R is None:
            picked_R = np.arange(len(rows_R))
        raw: dict[int, Tensor] = {}
        if self._wishes:
            for i, (row, picked) in enumerate(zip(rows_R.tolist(), picked_R.tolist(), strict=True)):
                if row in self._wishes:
                    raw[i] = logits_TV[picked].log_softmax(-1)
        spoiled = self._penalties.apply(logits_TV, rows_R, ends_R, picked_R)
        token_R = self.draw(logits_TV, picked_R, rows_R, ends_R)
        token_R[spoiled] = NOT_FINITE
        token_ids = self.written(token_R, rows_R, ends_R)
        logprobs: list[TokenLogprobs | None] = [None] * len(token_ids) if raw else []
        for i, raw_V in raw.items():
            s = self._wishes[int(rows_R[i])]
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
