"""The token sequences that one request forbids, made for a lookup whose cost does not grow with their number.

Edits of one request's logits before its token is drawn: allowed and forbidden ids, bias, penalties.

The static part (allowed ids, bias, stop ids) is made once, when a sequence takes its slot; slots that use none of it are
absent from the table and cost nothing.  What was generated is read where the steps have written it.  A repetition
penalty that is alone, as models ask for in their own files, is left to the call that draws.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
import torch
from torch import Tensor

from trouper.actors.executor.sampling.grammar import GrammarMasks
from trouper.actors.executor.steps.request_slots import RequestSlots
from trouper.actors.messages.steps import Sampling
from trouper.kernels.cpu.sampling.sample import apply_repetition_penalty_reference_


class _Node:
    """One token of the sequences' beginnings, which are read from their ends."""

    __slots__ = ("before", "last")

    def __init__(self) -> None:
        self.before: dict[int, _Node] = {}  # by the token that stands before
        self.last: list[int] = []  # forbidden behind the tokens on the way here


class BadWords:
    """A tree over all tokens of each sequence but its last, from the right to the left.

    A step walks from the newest token backwards for as long as some sequence agrees with the output: one look
    for nearly every step, and never more than the longest sequence has tokens.
    """

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        self._root = _Node()
        self._longest = max(map(len, sequences)) - 1
        for *beginning, last in sequences:
            node = self._root
            for token in reversed(beginning):
                node = node.before.setdefault(token, _Node())
            node.last.append(last)

    def next_after(self, outputs: np.ndarray) -> list[int]:
        """List the tokens that would complete a sequence after `outputs`."""
        node = self._root
        found = [*node.last]
        for token in reversed(outputs[max(0, len(outputs) - self._longest) :].tolist()):
            if (node := node.before.get(token)) is None:
                break
            found += node.last
        return found


class _Edits(msgspec.Struct):
    """The edits of one slot; None = not in use."""

    sampling: Sampling
    allowed: Tensor | None
    stop_ids: Tensor | None
    bias: tuple[Tensor, Tensor] | None  # ids, values
    prompt_ids: np.ndarray | None  # each once, for a repetition penalty
    bad_words: BadWords | None


class Penalties:
    """The edits of all slots.  Logits are edited in place, one row of them after another."""

    def __init__(self, slots: RequestSlots, grammars: GrammarMasks) -> None:
        self._slots = slots
        self._grammars = grammars
        self._in_use: dict[int, _Edits] = {}

    def place(self, slot: int) -> float:
        """Prepare the edits of the sequence that took the slot.

        Returns:
            The repetition penalty that is left to `draw`: 1 = none, 0 = the slot is edited here.
        """
        s = self._slots.sampling[slot]
        self._in_use.pop(slot, None)
        is_counted = s.frequency_penalty or s.presence_penalty
        is_edited = s.allowed_token_ids or s.bad_words_ids or s.min_tokens or s.logit_bias
        is_mixed = self._slots.has_embeds(slot) and s.repetition != 1
        if not (is_counted or is_edited or is_mixed):
            return s.repetition
        prompt_ids = None
        if s.repetition != 1:
            tokens, spans = self._slots.token_ids[slot], self._slots.token_spans(slot)
            prompt_ids = np.unique(np.concatenate([tokens[begin:end] for begin, end in spans]))
        self._in_use[slot] = _Edits(
            sampling=s,
            allowed=_ids(s.allowed_token_ids),
            stop_ids=_ids(s.stop_ids) if s.min_tokens else None,
            bias=None,
            prompt_ids=prompt_ids,
            bad_words=BadWords(s.bad_words_ids) if s.bad_words_ids else None,
        )
        if s.logit_bias:
            ids, values = zip(*s.logit_bias, strict=True)
            self._in_use[slot].bias = (torch.tensor(ids), torch.tensor(values))
        return 0.0

    def leave_alone(self, slots: Sequence[int]) -> bool:
        """Whether none of these slots is edited here."""
        return self._in_use.keys().isdisjoint(slots)

    def apply(
        self, logits_TV: Tensor, slots_R: np.ndarray, ends_R: np.ndarray, picked_R: np.ndarray
    ) -> list[int]:
        """Edit in place; `ends` are the positions of the tokens to be drawn.

        Returns:
            The indices of the slots whose logits were not finite; these are left alone.
        """
        spoiled: list[int] = []
        if not self._in_use:
            return spoiled
        entries = zip(slots_R.tolist(), ends_R.tolist(), picked_R.tolist(), strict=True)
        for i, (slot, end, picked) in enumerate(entries):
            edits = self._in_use.get(slot)
            if edits is None:
                continue
            logits_V = logits_TV[picked]
            if not np.isfinite(logits_V.numpy()).all():
                spoiled.append(i)
                continue
            outputs = self._slots.outputs_of(slot, end)
            _edit(logits_V, edits, outputs, can_only_end=self._grammars.can_only_end(slot))
            _penalise(logits_V.numpy(), edits, outputs)
        return spoiled


def _edit(logits_V: Tensor, edits: _Edits, outputs: np.ndarray, can_only_end: bool) -> None:
    s = edits.sampling
    if edits.allowed is not None:
        allowed = logits_V[edits.allowed]
        logits_V.fill_(-torch.inf)
        logits_V[edits.allowed] = allowed
    if edits.bad_words is not None:
        logits_V[edits.bad_words.next_after(outputs)] = -torch.inf
    if edits.stop_ids is not None and len(outputs) < s.min_tokens and not can_only_end:
        logits_V[edits.stop_ids] = -torch.inf
    if edits.bias is not None:
        ids, values = edits.bias
        logits_V.index_add_(0, ids, values)


def _penalise(logits_V: np.ndarray, edits: _Edits, outputs: np.ndarray) -> None:
    s = edits.sampling
    if edits.prompt_ids is not None:
        ids = np.concatenate([edits.prompt_ids, outputs])
        apply_repetition_penalty_reference_(logits_V, ids, np.float32(s.repetition))
    if s.frequency_penalty or s.presence_penalty:
        ids, counts = np.unique(outputs, return_counts=True)
        penalty = counts * s.frequency_penalty + s.presence_penalty
        with np.errstate(all="ignore"):  # a row that is not finite fails later, and alone
            logits_V[ids] -= penalty.astype(np.float32)


def _ids(token_ids: Sequence[int]) -> Tensor | None:
    return torch.tensor(token_ids) if token_ids else None
