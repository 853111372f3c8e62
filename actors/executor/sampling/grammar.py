"""The tokens that a grammar allows next, for the slots whose requests have one: a bit for each of the vocabulary.

Laws:
  * What is allowed is a function of (grammar, output tokens): a matcher is made when a sequence takes its slot, and reads
    the outputs where the steps have written them.  So it is the same after a preemption, a restart, or at any number of
    steps in flight.
  * Where the output can only end, the ids that end it are allowed and no others; `ignore_eos` and `min_tokens` yield.
  * A grammar that takes more steps than it may ends its own sequence.
  * Reasoning comes first: all tokens may stand in it but those that end an output which must match a grammar, until its
    budget is used up; then its end is forced, token by token, and the grammar begins.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from trouper.actors.executor.request_slots import RequestSlots
from trouper.actors.executor.sampling.reasoning import ReasoningProgress
from trouper.actors.messages.grammar import Grammar

GRAMMAR_ERROR = -3  # in place of a token: the grammar's matcher has failed


class _Matching(msgspec.Struct):
    """The grammar of one slot, and how far its matcher has read."""

    grammar: Grammar
    matcher: Any
    end: int  # position of the first token that was not read
    reasoning: ReasoningProgress | None = None
    can_only_end: bool = False


class GrammarMasks:
    """The masks of all slots.

    Memory: a matcher of some 10 KiB for each slot with a grammar, and max_num_seqs × V / 8 bytes of bits, which are
    taken when the first grammar comes: 4.9 MB at 256 slots of 152,000 tokens.
    """

    def __init__(self, slots: RequestSlots) -> None:
        self._slots = slots
        self._in_use: dict[int, _Matching] = {}
        self._words_SW = np.zeros((0, 0), dtype=np.int32)
        self.addresses = np.zeros(
            len(slots.sampling), dtype=np.int64
        )  # of each slot's bits; 0 = all are allowed

    def place(self, slot: int, grammar: Grammar | None) -> None:
        """Take the grammar of the sequence that took the slot."""
        self._in_use.pop(slot, None)
        self.addresses[slot] = 0
        if grammar is None:
            return
        num_words = -(-grammar.num_tokens // 32)
        if self._words_SW.shape[1] < num_words:
            self._words_SW = np.zeros((len(self.addresses), num_words), dtype=np.int32)
        matcher, end = grammar.matcher(), int(self._slots.num_prompt[slot])
        self._in_use[slot] = _Matching(grammar, matcher, end, _reasoning(grammar, matcher))
        self.addresses[slot] = self._words_SW[slot].ctypes.data

    def clear(self) -> None:
        """Forget all matchers."""
        self._in_use.clear()
        self.addresses[:] = 0

    def any_in(self, slots: Sequence[int]) -> bool:
        """Whether one of these slots has a grammar."""
        return not self._in_use.keys().isdisjoint(slots)

    def can_only_end(self, slot: int) -> bool:
        """Whether the bits filled last allow nothing but the end of the output."""
        matching = self._in_use.get(slot)
        return matching is not None and matching.can_only_end

    def words(self, slot: int) -> np.ndarray:
        """Return the bits filled last, 32 in a word."""
        return self._words_SW[slot]

    def fill(self, slots_R: np.ndarray, ends_R: np.ndarray) -> list[int]:
        """Read the outputs before `ends`, and fill the bits of the tokens that may stand there.

        Returns:
            The indices of the slots whose grammars have failed.
        """
        broken: list[int] = []
        if not self._in_use:
            return broken
        for i, (slot, end) in enumerate(zip(slots_R.tolist(), ends_R.tolist(), strict=True)):
            matching = self._in_use.get(slot)
            if matching is not None and not self._advance(slot, matching, end):
                broken.append(i)
        return broken

    def _advance(self, slot: int, matching: _Matching, end: int) -> bool:
        matcher, words_W = matching.matcher, self._words_SW[slot]
        outputs: list[int] = self._slots.token_ids[slot, matching.end : end].tolist()
        matching.end = end
        matching.can_only_end = False
        if matching.reasoning is not None:
            take = matching.reasoning.take
            outputs = [token for token in outputs if take(token)]
        if matcher is not None and outputs:
            matcher.consume_tokens(outputs)
        if self._fill_reasoning(matching, words_W):
            return True
        return matcher is None or self._fill_matching(matching, words_W)

    def _fill_reasoning(self, matching: _Matching, words_W: np.ndarray) -> bool:
        """Fill the bits where the output is in its reasoning, or may be anything; False: a grammar says more."""
        reasoning, matcher = matching.reasoning, matching.matcher
        if reasoning is not None and (forced := reasoning.forced) is not None:
            words_W[:] = 0
            _set(words_W, forced)
            return True
        if matcher is not None and (reasoning is None or not reasoning.is_inside):
            return False
        words_W[:] = -1
        if matcher is not None:  # an output that ended here would not match
            self._set_ends(words_W.view(np.uint32), matching.grammar, allow=False)
        return True

    def _fill_matching(self, matching: _Matching, words_W: np.ndarray) -> bool:
        matcher = matching.matcher
        if matcher.is_error():
            return False
        matching.can_only_end = matcher.is_stopped()
        if matching.can_only_end:
            words_W[:] = 0
        else:
            num_words = -(-matching.grammar.num_tokens // 32)
            matcher.unsafe_compute_mask_ptr(words_W.ctypes.data, 4 * num_words)
            matching.can_only_end = matcher.is_stopped() and not matcher.is_error()
        if matching.can_only_end or matching.grammar.ignore_eos:
            self._set_ends(words_W.view(np.uint32), matching.grammar, allow=matching.can_only_end)
        if matching.reasoning is not None and matching.reasoning.opening is not None:
            _set(words_W, matching.reasoning.opening)
        return not matcher.is_error()

    @staticmethod
    def _set_ends(words_W: np.ndarray, grammar: Grammar, *, allow: bool) -> None:
        for token in grammar.eos_token_ids:
            bit = np.uint32(1 << token % 32)
            if allow:
                words_W[token // 32] |= bit
            else:
                words_W[token // 32] &= ~bit


def _reasoning(grammar: Grammar, matcher: Any) -> ReasoningProgress | None:
    """Begin to follow the reasoning of an output; None: there is none.

    An opening of several tokens that the grammar allows to begin is the grammar's own.
    """
    thinking = grammar.thinking
    if thinking is None:
        return None
    may_be_both = not thinking.begins_inside and len(thinking.start_ids) > 1
    if (
        matcher is not None
        and may_be_both
        and matcher.validate_tokens(list(thinking.start_ids[:1]))
    ):
        return None
    return ReasoningProgress(thinking, grammar.text_of, has_grammar=matcher is not None)


def _set(words_W: np.ndarray, token: int) -> None:
    words_W.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)
