"""Processors that change one row's logits before anything is drawn; spec section 8.1, steps 3 to 6.

The static part of a row (allowed ids, bias, stop ids, ids of its prompt) is made once, when the row is placed;
rows that use none of it are absent from the tables and cost a dictionary look-up a step.  What was generated is
read where the steps have written it.  Penalties change the logits of ids that have occurred, those of all rows in
a few calls: two calls of torch for each row took 60 µs, and each of them let go of the interpreter's lock.
"""

from collections.abc import Sequence
from typing import NamedTuple

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
    prompt_ids: np.ndarray | None  # each once; None = it is not penalised


class Penalties:
    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._in_use: dict[int, _Row] = {}

    def place(self, row: int) -> None:
        s = self._rows.sampling[row]
        self._in_use.pop(row, None)
        is_penalised = s.repetition_penalty != 1 or s.frequency_penalty or s.presence_penalty
        if not (
            s.allowed_token_ids or s.bad_words_ids or s.min_tokens or s.logit_bias or is_penalised
        ):
            return
        prompt_ids = None
        if is_penalised:
            tokens, spans = self._rows.token_ids[row], self._rows.token_spans(row)
            prompt_ids = np.unique(np.concatenate([tokens[begin:end] for begin, end in spans]))
        self._in_use[row] = _Row(
            sampling=s,
            allowed=_ids(s.allowed_token_ids),
            stop_ids=_ids(s.stop_ids) if s.min_tokens else None,
            bias=None,
            prompt_ids=prompt_ids,
        )
        if s.logit_bias:
            ids, values = zip(*s.logit_bias, strict=True)
            self._in_use[row].bias = (torch.tensor(ids), torch.tensor(values))

    def apply(self, logits_RV: Tensor, row_ids: Sequence[int], ends: Sequence[int]) -> None:
        """In place; `ends` are the positions of the tokens to be drawn."""
        penalised: list[_Penalised] = []
        for i, (row, end) in enumerate(zip(row_ids, ends, strict=True)):
            state = self._in_use.get(row)
            if state is None:
                continue
            outputs = self._rows.outputs_of(row, end)
            _edit(logits_RV[i], state, outputs)
            if state.prompt_ids is not None:
                penalised.append(_Penalised(i, state.sampling, state.prompt_ids, outputs))
        with np.errstate(all="ignore"):  # a row that is not finite fails later, and alone
            _penalise_known(logits_RV.numpy(), penalised)
            _penalise_generated(logits_RV.numpy(), penalised)


class _Penalised(NamedTuple):
    column: int
    sampling: Sampling
    prompt_ids: np.ndarray
    outputs: np.ndarray


def _edit(logits_V: Tensor, state: _Row, outputs: np.ndarray) -> None:
    s = state.sampling
    if state.allowed is not None:
        allowed = logits_V[state.allowed]
        logits_V.fill_(-torch.inf)
        logits_V[state.allowed] = allowed
    if s.bad_words_ids:
        logits_V[_last_of_bad_words(outputs, s.bad_words_ids)] = -torch.inf
    if state.stop_ids is not None and len(outputs) < s.min_tokens:
        logits_V[state.stop_ids] = -torch.inf
    if state.bias is not None:
        ids, values = state.bias
        logits_V.index_add_(0, ids, values)


def _penalise_known(logits_RV: np.ndarray, rows: Sequence[_Penalised]) -> None:
    """Whatever has occurred, in the prompt or the output."""
    rows = [row for row in rows if row.sampling.repetition_penalty != 1]
    if not rows:
        return
    ids = np.concatenate([ids for row in rows for ids in (row.prompt_ids, row.outputs)])
    lengths = [len(row.prompt_ids) + len(row.outputs) for row in rows]
    columns = np.repeat([row.column for row in rows], lengths)
    penalties = np.array([row.sampling.repetition_penalty for row in rows], dtype=np.float32)
    logits, penalty = logits_RV[columns, ids], penalties.repeat(lengths)
    # an id that occurs twice is written twice, with one value
    logits_RV[columns, ids] = np.where(logits > 0, logits / penalty, logits * penalty)


def _penalise_generated(logits_RV: np.ndarray, rows: Sequence[_Penalised]) -> None:
    """Whatever has been generated, as often, or at all."""
    for row in rows:
        s = row.sampling
        if s.frequency_penalty or s.presence_penalty:
            ids, counts = np.unique(row.outputs, return_counts=True)
            penalty = counts * s.frequency_penalty + s.presence_penalty
            logits_RV[row.column, ids] -= penalty.astype(np.float32)


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
