"""Compute the tokens that the grammars of requests allow next, as bit masks of the vocabulary.

`GrammarMasks` has the masks of all slots. Drafting must also know which tokens a grammar would allow behind tokens that are
not sampled yet: `AheadMatcher` follows a draft with a copy of the sequence's matcher, and `FreeAhead` where no grammar applies.

Laws:
  * A mask depends only on the grammar and the output tokens. A matcher is made when a sequence takes its slot, and reads
    outputs from the request slots, so masks are the same after a preemption, after a restart, and with any number of steps
    in flight.
  * If the output can only end, only the ids that end it are allowed, in spite of `ignore_eos` and `min_tokens`.
  * A grammar that exceeds its limit of parser steps ends only its own sequence.
  * A plain row has no restriction except its grammar. It is sampled from all tokens, and the grammar is asked afterwards:
    the token has the largest logit with noise, so if it is allowed, sampling with the mask would have chosen it too. If it
    is not allowed, the mask is filled and the row is sampled again. Asking takes 1 µs; filling the mask for a vocabulary of
    49,152 takes up to 400 µs.
  * A matcher only reads final tokens. A copy of it follows drafts, and may exceed the limits of its grammar without harm to
    the sequence. While drafts are verified, each position uses the mask behind the tokens before it, computed once these are
    accepted.
  * Reasoning precedes the grammar. It may contain all tokens but those that end an output which must match a grammar. When
    its budget is used up, its end is forced token by token, and the grammar begins.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from time import perf_counter
from typing import Any

import msgspec
import numpy as np

from trouper.actors.executor.sampling.reasoning import ReasoningProgress
from trouper.actors.executor.steps.request_slots import RequestSlots
from trouper.actors.messages.requests import Grammar, GrammarWork

# The most tokens to read of a forced text: more than a step verifies, while such a text may have 100,000.
MOST_AHEAD = 32


class AheadMatcher:
    """Follows a draft with a copy of a matcher, which costs 1 µs.

    Args:
        matcher: has consumed the output so far.
        ends: tokens that end an output.
        forced: the tokens that must come next, as far as they are known.
    """

    def __init__(self, matcher: Any, ends: tuple[int, ...], forced: Iterable[int] = ()) -> None:
        self._ends = ends
        self._matcher = matcher.deep_copy()
        self._forced = deque(islice(forced, MOST_AHEAD))

    def forced(self) -> list[int]:
        """List the tokens that must come next, because the grammar allows no other.

        They can be drafted without a model, and are always accepted.
        """
        if not self._forced:
            self._forced.extend(forced_tokens(self._matcher)[:MOST_AHEAD])
        return list(self._forced)

    def take(self, token: int) -> bool:
        """Consume a token. Returns False without doing so if the grammar forbids it here, or if it ends the output."""
        if token in self._ends or self._matcher.validate_tokens([token]) != 1:
            return False
        if self._forced and self._forced.popleft() != token:
            self._forced.clear()
        return self._matcher.consume_token(token)


class FreeAhead:
    """Accepts any token: within reasoning, or behind it if the output has no grammar.

    Args:
        ends: tokens that end an output.
    """

    def __init__(self, ends: tuple[int, ...]) -> None:
        self._ends = ends

    def forced(self) -> list[int]:
        """Return an empty list: without a grammar no token is forced."""
        return []

    def take(self, token: int) -> bool:
        """Consume a token.

        Returns False if it ends the output. Every other token is allowed, because no grammar applies.
        """
        return token not in self._ends


Ahead = AheadMatcher | FreeAhead


def forced_tokens(matcher: Any) -> list[int]:
    """List the tokens that must come next: after each of them, the grammar's mask allows exactly one token.

    The matcher does not advance. The list is empty if there is a choice, also between several spellings of one text.
    """
    return matcher.compute_ff_tokens()


# Replaces a token if the grammar's matcher has failed.
GRAMMAR_ERROR = -3


class _Matching(msgspec.Struct):
    """The grammar of one slot, and the state of its matcher."""

    grammar: Grammar
    matcher: Any
    # The position of the first unread token.
    end: int
    # The tokens that must come next, as far as the matcher was asked for them.
    forced: deque[int]
    reasoning: ReasoningProgress | None = None
    # For each output token, 1 if the grammar forced it.
    were_forced: bytearray = msgspec.field(default_factory=bytearray)
    is_plain: bool = False
    # Whether the next token is sampled first and checked afterwards.
    is_unchecked: bool = False
    can_only_end: bool = False
    has_failed: bool = False

    @property
    def is_followed(self) -> bool:
        """Whether the grammar applies now, because the output has no reasoning or has finished it."""
        return self.matcher is not None and (self.reasoning is None or self.reasoning.is_over)

    def consume(self, outputs: list[int]) -> None:
        """Advance the matcher by output tokens, and record which of them were forced."""
        self.matcher.consume_tokens(outputs)
        for token in outputs:
            self.were_forced.append(bool(self.forced))
            if self.forced and self.forced.popleft() != token:
                self.forced.clear()

    def next_forced(self) -> int | None:
        """Return the only token that may come next, or None if there is a choice.

        A forced text is spelled once, not at each of its tokens: one of 100,000 characters takes 15 ms.
        """
        if not self.forced:
            self.forced.extend(forced_tokens(self.matcher))
        return self.forced[0] if self.forced else None


class GrammarMasks:
    """The masks of all slots.

    Memory: a matcher of some 10 KiB for each slot with a grammar, and max_num_seqs × V / 8 bytes of bits, which are
    taken when the first grammar comes: 4.9 MB at 256 slots of 152,000 tokens.
    """

    def __init__(self, slots: RequestSlots) -> None:
        self._slots = slots
        self._in_use: dict[int, _Matching] = {}
        # The work since the last `take_work`.
        self._seconds, self._num_tokens, self._num_redrawn = 0.0, 0, 0
        self._words_SW = np.zeros((0, 0), dtype=np.int32)
        self.addresses = np.zeros(
            len(slots.sampling), dtype=np.int64
        )  # of each slot's bits; 0 = all are allowed

    def place(self, slot: int, grammar: Grammar | None, *, is_plain: bool = False) -> None:
        """Store the grammar of the sequence that took the slot.

        Args:
            is_plain: tokens of the slot are drawn from logits as they are, and bounded by the grammar only.
        """
        self._in_use.pop(slot, None)
        self.addresses[slot] = 0
        if grammar is None:
            return
        num_words = -(-grammar.num_tokens // 32)
        if self._words_SW.shape[1] < num_words:
            self._words_SW = np.zeros((len(self.addresses), num_words), dtype=np.int32)
        matcher, end = grammar.matcher(), int(self._slots.num_prompt[slot])
        reasoning = _reasoning(grammar, matcher)
        self._in_use[slot] = _Matching(grammar, matcher, end, deque(), reasoning, is_plain=is_plain)
        self.addresses[slot] = self._words_SW[slot].ctypes.data

    def clear(self) -> None:
        """Forget all matchers and masks. The scheduler sends the sequences again after a loss of memory."""
        self._in_use.clear()
        self.addresses[:] = 0

    @property
    def any_in_use(self) -> bool:
        """Whether any slot has a grammar."""
        return bool(self._in_use)

    def any_in(self, slots: Sequence[int]) -> bool:
        """Whether one of these slots has a grammar. A step without any skips all work for masks."""
        return not self._in_use.keys().isdisjoint(slots)

    def can_only_end(self, slot: int) -> bool:
        """Whether the mask filled last allows nothing but the end of the output.

        A minimum number of tokens cannot be kept then. The output then ends.
        """
        matching = self._in_use.get(slot)
        return matching is not None and matching.can_only_end

    def words(self, slot: int) -> np.ndarray:
        """Return the mask filled last, with 32 tokens in each word.

        A set bit allows its token.  The array is a view, valid until the next filling.
        """
        return self._words_SW[slot]

    def fill(self, slots_R: np.ndarray, ends_R: np.ndarray) -> list[int]:
        """Read the outputs before the positions `ends`, and fill the masks of the tokens allowed there.

        Returns:
            The indices of slots with a failed grammar.
        """
        started = perf_counter()
        failed: list[int] = []
        for i, slot, matching, end in self._those_in_use(slots_R, ends_R):
            self._read(slot, matching, end)
            self._fill(slot, matching)
            self._num_tokens += 1
            if matching.has_failed:
                failed.append(i)
        self._seconds += perf_counter() - started
        return failed

    def prepare(self, slots_R: np.ndarray, ends_R: np.ndarray) -> None:
        """Read the outputs before the positions `ends`, and fill the masks that sampling needs.

        Plain rows are sampled without a mask; `refused` checks their tokens afterwards.
        """
        started = perf_counter()
        for _, slot, matching, end in self._those_in_use(slots_R, ends_R):
            self._num_tokens += 1
            self._read(slot, matching, end)
            if not matching.is_plain or not matching.is_followed or matching.matcher.is_stopped():
                self._fill(slot, matching)
            elif (forced := matching.next_forced()) is not None:
                self._allow_one(slot, forced)
            else:
                self.addresses[slot], matching.is_unchecked = 0, True
        self._seconds += perf_counter() - started

    def refused(self, slots_R: np.ndarray, token_R: np.ndarray) -> tuple[list[int], list[int]]:
        """Check the tokens sampled without a mask, and fill the masks of slots with a forbidden one.

        Returns:
            The indices of the tokens that must be drawn again, and of the slots with a failed grammar.
        """
        started = perf_counter()
        refused: list[int] = []
        failed: list[int] = []
        for i, slot, matching, token in self._those_in_use(slots_R, token_R):
            if matching.is_unchecked and token >= 0 and not self._allows(matching, token):
                self._fill(slot, matching)
                refused.append(i)
            if matching.has_failed:
                failed.append(i)
        self._num_redrawn += len(refused)
        self._seconds += perf_counter() - started
        return refused, failed

    def take_work(self) -> GrammarWork | None:
        """Return the work done since the last call, or None if there was none."""
        if not self._num_tokens:
            return None
        work = GrammarWork(self._seconds, self._num_tokens, self._num_redrawn)
        self._seconds, self._num_tokens, self._num_redrawn = 0.0, 0, 0
        return work

    def ahead(self, slot: int, end: int) -> Ahead | None:
        """Return a follower of drafts behind position `end`.

        Returns None if the slot has no grammar, or if its output can only end.
        """
        matching = self._in_use.get(slot)
        if matching is None:
            return None
        self._read(slot, matching, end)
        ends = matching.grammar.eos_token_ids
        if not matching.is_followed:
            return FreeAhead(ends)
        if matching.matcher.is_stopped():
            return None
        # Computed by the slot's own matcher, so that the result is kept for the next call.
        matching.next_forced()
        return AheadMatcher(matching.matcher, ends, matching.forced)

    def were_forced(self, slot: int) -> bytearray:
        """Return 1 for each output token that the grammar is known to have forced, and 0 for all others."""
        matching = self._in_use.get(slot)
        return bytearray() if matching is None else matching.were_forced

    def is_plain(self, slot: int) -> bool:
        """Whether the tokens of a slot with a grammar are sampled without a mask and checked afterwards."""
        return self._in_use[slot].is_plain

    def allow_all(self, slot: int) -> None:
        """Remove the mask of a slot before its next tokens are sampled; `follow` checks them."""
        self.addresses[slot] = 0

    def follow(self, slot: int, end: int, token_K: np.ndarray, draw: Callable[[int], int]) -> None:
        """Sample the tokens of position `end` and later ones, one after another, while the draft is right.

        Args:
            token_K: drawn without bits, if the slot is plain; they are written over, up to the first that the draft, which
                stands in the slot, did not foresee.
            draw: draws the token of this index by the bits.
        """
        matching = self._in_use[slot]
        draft: list[int] = self._slots.token_ids[slot, end : end + len(token_K) - 1].tolist()
        for i in range(len(token_K)):
            started = perf_counter()
            self._read(slot, matching, end + i)
            self._num_tokens += 1
            token = self._settled(slot, matching, int(token_K[i]))
            self._seconds += perf_counter() - started
            token_K[i] = draw(i) if token is None else token
            if i == len(draft) or token_K[i] != draft[i]:
                break

    def _settled(self, slot: int, matching: _Matching, token: int) -> int | None:
        """Return the token behind those already read, or None if it must be sampled again with the mask."""
        is_drawn = matching.is_plain
        # A negative number is a failure, not a token.
        if is_drawn and token < 0:
            return token
        if is_drawn and matching.is_followed and not matching.matcher.is_stopped():
            forced = matching.next_forced()
            if forced is not None or self._allows(matching, token):
                return token if forced is None else forced
        self._fill(slot, matching)
        if matching.has_failed:
            return GRAMMAR_ERROR
        if is_drawn and _is_set(self._words_SW[slot], token):
            return token
        self._num_redrawn += is_drawn
        return None

    def _those_in_use(
        self, slots_R: np.ndarray, numbers_R: np.ndarray
    ) -> Iterator[tuple[int, int, _Matching, int]]:
        """Yield index, slot, grammar and number for each slot with a grammar."""
        if not self._in_use:
            return
        pairs = zip(slots_R.tolist(), numbers_R.tolist(), strict=True)
        for i, (slot, number) in enumerate(pairs):
            matching = self._in_use.get(slot)
            if matching is not None:
                yield i, slot, matching, number

    def _read(self, slot: int, matching: _Matching, end: int) -> None:
        """Read the outputs since the last call."""
        outputs: list[int] = self._slots.token_ids[slot, matching.end : end].tolist()
        matching.end = end
        matching.can_only_end = matching.is_unchecked = matching.has_failed = False
        if matching.reasoning is not None:
            take, num = matching.reasoning.take, len(outputs)
            outputs = [token for token in outputs if take(token)]
            matching.were_forced += bytes(num - len(outputs))
        if matching.matcher is not None and outputs:
            matching.consume(outputs)

    @staticmethod
    def _allows(matching: _Matching, token: int) -> bool:
        """Whether a token is allowed next. With `ignore_eos`, the end is forbidden while something else is possible."""
        grammar = matching.grammar
        if grammar.ignore_eos and token in grammar.eos_token_ids:
            return False
        return matching.matcher.validate_tokens([token]) == 1

    def _allow_one(self, slot: int, token: int) -> None:
        words_W = self._words_SW[slot]
        words_W[:] = 0
        _set(words_W, token)
        self.addresses[slot] = words_W.ctypes.data

    def _fill(self, slot: int, matching: _Matching) -> None:
        """Fill the mask of a slot. The grammar may fail, which only affects its own sequence."""
        words_W = self._words_SW[slot]
        self.addresses[slot] = words_W.ctypes.data
        is_filled = self._fill_reasoning(matching, words_W) or matching.matcher is None
        matching.has_failed = not (is_filled or self._fill_matching(matching, words_W))

    def _fill_reasoning(self, matching: _Matching, words_W: np.ndarray) -> bool:
        """Fill the mask of an output in its reasoning, or without a grammar. Returns False if a grammar must fill it."""
        reasoning, matcher = matching.reasoning, matching.matcher
        if reasoning is not None and (forced := reasoning.forced) is not None:
            words_W[:] = 0
            _set(words_W, forced)
            return True
        if matcher is not None and (reasoning is None or not reasoning.is_inside):
            return False
        words_W[:] = -1
        # An output with a grammar would not match if it ended within its reasoning.
        if matcher is not None:
            self._set_ends(words_W.view(np.uint32), matching.grammar, allow=False)
        return True

    def _fill_matching(self, matching: _Matching, words_W: np.ndarray) -> bool:
        matcher = matching.matcher
        if matcher.is_error():
            return False
        matching.can_only_end = matcher.is_stopped()
        if matching.can_only_end:
            words_W[:] = 0
        elif (forced := matching.next_forced()) is not None:
            words_W[:] = 0
            _set(words_W, forced)
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
    """Begin to follow the reasoning of an output. Returns None if it has none.

    An opening of several tokens that the grammar allows to begin is the grammar's own.
    """
    thinking = grammar.reasoning
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


def _is_set(words_W: np.ndarray, token: int) -> bool:
    return token < 32 * len(words_W) and bool(
        words_W.view(np.uint32)[token // 32] >> token % 32 & 1
    )


def _set(words_W: np.ndarray, token: int) -> None:
    words_W.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)
