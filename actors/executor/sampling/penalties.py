"""Processors that change one row's logits before anything is drawn; spec section 8.1, steps 3 to 6.

The static part of a row (allowed ids, bias, stop ids) is made once, when the row is placed; rows that use none of it are
absent from the table and cost nothing.  What was generated is read where the steps have written it.  A repetition
penalty that is alone, as models ask for in their own files, is left to the call that draws.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
import torch
from torch import Tensor

from trouper.actors.executor.batch import Rows
from trouper.actors.executor.sampling.bad_words import BadWords
from trouper.actors.messages.plans import Sampling
from trouper.kernels.cpu.sampling.sample import penalise_repetition_reference_


class _Row(msgspec.Struct):
    """Owned by `Penalties`; None = not in use."""

    sampling: Sampling
    allowed: Tensor | None
    stop_ids: Tensor | None
    bias: tuple[Tensor, Tensor] | None  # ids, values
    prompt_ids: np.ndarray | None  # each once, for a repetition penalty
    bad_words: BadWords | None


class Penalties:
    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._in_use: dict[int, _Row] = {}

    def place(self, row: int) -> float:
        """The repetition penalty that is left to `draw`; 1 = none, 0 = the row is edited here, and looked at."""
        s = self._rows.sampling[row]
        self._in_use.pop(row, None)
        is_counted = s.frequency_penalty or s.presence_penalty
        is_edited = s.allowed_token_ids or s.bad_words_ids or s.min_tokens or s.logit_bias
        is_mixed = row in self._rows.embeds and s.repetition != 1
        if not (is_counted or is_edited or is_mixed):
            return s.repetition
        prompt_ids = None
        if s.repetition != 1:
            tokens, spans = self._rows.token_ids[row], self._rows.token_spans(row)
            prompt_ids = np.unique(np.concatenate([tokens[begin:end] for begin, end in spans]))
        self._in_use[row] = _Row(
            sampling=s,
            allowed=_ids(s.allowed_token_ids),
            stop_ids=_ids(s.stop_ids) if s.min_tokens else None,
            bias=None,
            prompt_ids=prompt_ids,
            bad_words=BadWords(s.bad_words_ids) if s.bad_words_ids else None,
        )
        if s.logit_bias:
            ids, values = zip(*s.logit_bias, strict=True)
            self._in_use[row].bias = (torch.tensor(ids), torch.tensor(values))
        return 0.0

    def leave_alone(self, rows: Sequence[int]) -> bool:
        return self._in_use.keys().isdisjoint(rows)

    def apply(
        self, logits_TV: Tensor, rows_R: np.ndarray, ends_R: np.ndarray, picked_R: np.ndarray
    ) -> list[int]:
        """In place; `ends` are the positions of the tokens to be drawn.  Tells whose logits were not finite."""
        spoiled: list[int] = []
        if not self._in_use:
            return spoiled
        columns = zip(rows_R.tolist(), ends_R.tolist(), picked_R.tolist(), strict=True)
        for i, (row, end, picked) in enumerate(columns):
            state = self._in_use.get(row)
            if state is None:
                continue
            logits_V = logits_TV[picked]
            if not np.isfinite(logits_V.numpy()).all():
                spoiled.append(i)
                continue
            outputs = self._rows.outputs_of(row, end)
            _edit(logits_V, state, outputs)
            _penalise(logits_V.numpy(), state, outputs)
        return spoiled


def _edit(logits_V: Tensor, state: _Row, outputs: np.ndarray) -> None:
    s = state.sampling
    if state.allowed is not None:
        allowed = logits_V[state.allowed]
        logits_V.fill_(-torch.inf)
        logits_V[state.allowed] = allowed
    if state.bad_words is not None:
        logits_V[state.bad_words.next_after(outputs)] = -torch.inf
    if state.stop_ids is not None and len(outputs) < s.min_tokens:
        logits_V[state.stop_ids] = -torch.inf
    if state.bias is not None:
        ids, values = state.bias
        logits_V.index_add_(0, ids, values)


def _penalise(logits_V: np.ndarray, state: _Row, outputs: np.ndarray) -> None:
    s = state.sampling
    if state.prompt_ids is not None:
        ids = np.concatenate([state.prompt_ids, outputs])
        penalise_repetition_reference_(logits_V, ids, np.float32(s.repetition))
    if s.frequency_penalty or s.presence_penalty:
        ids, counts = np.unique(outputs, return_counts=True)
        penalty = counts * s.frequency_penalty + s.presence_penalty
        with np.errstate(all="ignore"):  # a row that is not finite fails later, and alone
            logits_V[ids] -= penalty.astype(np.float32)


def _ids(token_ids: Sequence[int]) -> Tensor | None:
    return torch.tensor(token_ids) if token_ids else None
