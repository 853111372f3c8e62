"""Edit the logits of one request before its token is sampled: allowed and forbidden tokens, bias, penalties.

The static parts (allowed ids, bias, stop ids) are prepared once, when a sequence takes its slot. Slots without edits are
absent from the table and cost nothing. Generated tokens are read from the request slots. If a repetition penalty is the
only edit, as in many models' own generation configs, the sampling kernel applies it.
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
    """One token in the tree of `BadWords`, reached by the tokens behind it.

    `before` contains the next nodes by the preceding token, and `last` the tokens that are forbidden at this point.
    """

    __slots__ = ("before", "last")

    def __init__(self) -> None:
        self.before: dict[int, _Node] = {}
        self.last: list[int] = []


class BadWords:
    """The token sequences that one request forbids, as a tree over all but their last tokens, from right to left.

    The cost of a lookup does not grow with the number of sequences. A step walks backwards from the newest token while some
    sequence agrees with the output: one node in nearly all steps, and at most the length of the longest sequence.
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
        """List the tokens that would complete a forbidden sequence after `outputs`.

        Forbidden words of one token are always included.
        """
        node = self._root
        found = [*node.last]
        for token in reversed(outputs[max(0, len(outputs) - self._longest) :].tolist()):
            if (node := node.before.get(token)) is None:
                break
            found += node.last
        return found


class _Edits(msgspec.Struct):
    """The edits of one slot. A field is None if the request does not use it."""

    sampling: Sampling
    allowed: Tensor | None
    stop_ids: Tensor | None
    bias: tuple[Tensor, Tensor] | None  # ids, values
    # The distinct tokens of the prompt, for a repetition penalty.
    prompt_ids: np.ndarray | None
    bad_words: BadWords | None


class Penalties:
    """The edits of all slots.

    It edits logits in place, one row after another, and only the rows of slots with edits. They are stored by slot
    between steps.
    """

    def __init__(self, slots: RequestSlots, grammars: GrammarMasks) -> None:
        self._slots = slots
        self._grammars = grammars
        self._in_use: dict[int, _Edits] = {}

    def place(self, slot: int) -> float:
        """Prepare the edits of the sequence that took the slot.

        Returns:
            The repetition penalty that the sampling kernel must apply: 1 means none, 0 that the slot is edited here.
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
        """Whether none of these slots has edits.

        The logits can then be sampled as they are.  This is the most frequent case.
        """
        return self._in_use.keys().isdisjoint(slots)

    def apply(
        self, logits_TV: Tensor, slots_R: np.ndarray, ends_R: np.ndarray, picked_R: np.ndarray
    ) -> list[int]:
        """Edit the logits of these slots in place.

        Args:
            ends_R: the position of each token to be sampled.
            picked_R: the row of logits of each slot.

        Returns:
            The indices of slots with infinite logits or NaN. These rows are not edited.
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
        # A row with infinite numbers or NaN fails later, without any effect on others.
        with np.errstate(all="ignore"):
            logits_V[ids] -= penalty.astype(np.float32)


def _ids(token_ids: Sequence[int]) -> Tensor | None:
    return torch.tensor(token_ids) if token_ids else None
