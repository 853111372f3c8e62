"""Processors that change one row's logits before anything is drawn; spec section 8.1, steps 3 to 6.

The static part of a row (allowed ids, bias, stop ids) becomes tensors once, when the row is placed;
rows that use none of it are absent from the tables and cost a dictionary look-up a step.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
import torch
from torch import Tensor

from trouper.actors.executor.batch import Rows
from trouper.actors.messages import Sampling


class _Row(msgspec.Struct):
    """Owned by `Penalties`; None = not in use."""

    sampling: Sampling
    allowed: Tensor | None
    stop_ids: Tensor | None
    bias: tuple[Tensor, Tensor] | None  # ids, values
    seen: Tensor | None  # [V] bool: in the prompt or the output
    counts: Tensor | None  # [V] float32: in the output


class Penalties:
    def __init__(self, rows: Rows, vocab_size: int) -> None:
        self._rows = rows
        self._vocab_size = vocab_size
        self._in_use: dict[int, _Row] = {}

    def place(self, row: int, num_tokens: int) -> None:
        s = self._rows.sampling[row]
        self._in_use.pop(row, None)
        is_penalised = s.repetition_penalty != 1 or s.frequency_penalty or s.presence_penalty
        if not (
            s.allowed_token_ids or s.bad_words_ids or s.min_tokens or s.logit_bias or is_penalised
        ):
            return
        seen = counts = None
        if is_penalised:
            tokens = torch.from_numpy(self._rows.token_ids[row, :num_tokens])
            outputs = tokens[self._rows.num_prompt[row] :]
            seen = torch.zeros(self._vocab_size, dtype=torch.bool)
            seen[outputs] = True
            for begin, end in self._rows.token_spans(row):
                seen[tokens[begin:end]] = True
            counts = torch.bincount(outputs, minlength=self._vocab_size).float()
        self._in_use[row] = _Row(
            sampling=s,
            allowed=_ids(s.allowed_token_ids),
            stop_ids=_ids(s.stop_ids) if s.min_tokens else None,
            bias=None,
            seen=seen,
            counts=counts,
        )
        if s.logit_bias:
            ids, values = zip(*s.logit_bias, strict=True)
            self._in_use[row].bias = (torch.tensor(ids), torch.tensor(values))

    def count(self, row: int, token_id: int) -> None:
        """A token was drawn."""
        state = self._in_use.get(row)
        if state is not None and state.seen is not None and state.counts is not None:
            state.seen[token_id] = True
            state.counts[token_id] += 1

    def apply(self, logits_V: Tensor, row: int, end: int) -> None:
        """In place; `end` is the position of the token to be drawn."""
        state = self._in_use.get(row)
        if state is None:
            return
        s = state.sampling
        if state.allowed is not None:
            allowed = logits_V[state.allowed]
            logits_V.fill_(-torch.inf)
            logits_V[state.allowed] = allowed
        if s.bad_words_ids:
            banned = _last_of_bad_words(self._rows.outputs_of(row, end), s.bad_words_ids)
            logits_V[banned] = -torch.inf
        if state.stop_ids is not None and end - self._rows.num_prompt[row] < s.min_tokens:
            logits_V[state.stop_ids] = -torch.inf
        if state.bias is not None:
            ids, values = state.bias
            logits_V.index_add_(0, ids, values)
        if state.seen is not None and state.counts is not None:
            if s.repetition_penalty != 1:
                penalised = torch.where(
                    logits_V > 0, logits_V / s.repetition_penalty, logits_V * s.repetition_penalty
                )
                torch.where(state.seen, penalised, logits_V, out=logits_V)
            if s.frequency_penalty:
                logits_V.sub_(state.counts, alpha=s.frequency_penalty)
            if s.presence_penalty:
                logits_V -= s.presence_penalty * (state.counts > 0)


def _ids(token_ids: Sequence[int]) -> Tensor | None:
    return torch.tensor(token_ids) if token_ids else None


def _last_of_bad_words(outputs: np.ndarray, bad_words_ids: Sequence[Sequence[int]]) -> list[int]:
    """The last token of each bad sequence that the output ends with all but the last token of."""
    longest = max(map(len, bad_words_ids))
    tail = tuple(outputs[len(outputs) - min(len(outputs), longest - 1) :].tolist())
    return [
        word[-1]
        for word in bad_words_ids
        if len(word) == 1 or tail[-len(word) + 1 :] == tuple(word[:-1])
    ]
