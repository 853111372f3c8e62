"""The tokens that a grammar allows next, for the slots whose requests have one: a bit for each of the vocabulary.

Laws:
  * What is allowed is a function of (grammar, output tokens): a matcher is made when a sequence takes its slot, and reads
    the outputs where the steps have written them.  So it is the same after a preemption, a restart, or at any number of
    steps in flight.
  * Where the output can only end, the ids that end it are allowed and no others; `ignore_eos` and `min_tokens` yield.
  * A grammar that takes more steps than it may ends its own sequence.
  * A plain row, whose draw nothing but the grammar bounds, is drawn from all tokens, and the grammar asked afterwards.  The
    token has the largest logit with noise of all; if it is allowed, it has the largest of those allowed, and is what a mask
    would have given.  If not, the bits are filled and it is drawn again.  To ask takes 1 µs, to fill the bits of a
    vocabulary of 49,152 up to 400.
  * A matcher has read final tokens alone.  A draft is gone along by a copy; and where drafts are verified, each position has
    the mask behind the tokens before it, which is asked for when those have turned out right.
  * Reasoning comes first: all tokens may stand in it but those that end an output which must match a grammar, until its
    budget is used up; then its end is forced, token by token, and the grammar begins.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import Any

import msgspec
import numpy as np

from trouper.actors.executor.sampling.ahead import Ahead, AheadMatcher, FreeAhead, forced_tokens
from trouper.actors.executor.sampling.reasoning import ReasoningProgress
from trouper.actors.executor.steps.request_slots import RequestSlots
from trouper.actors.messages.requests import Grammar, GrammarWork

GRAMMAR_ERROR = -3  # in place of a token: the grammar's matcher has failed


class _Matching(msgspec.Struct):
    """The grammar of one slot, and how far its matcher has read."""

    grammar: Grammar
    matcher: Any
    end: int  # position of the first token that was not read
    forced: deque[int]  # tokens that must come next, as far as they were asked for
    reasoning: ReasoningProgress | None = None
    were_forced: bytearray = msgspec.field(default_factory=bytearray)  # 1 for outputs that were
    is_plain: bool = False
    is_unchecked: bool = False  # the token to be drawn next is asked after when it is drawn
    can_only_end: bool = False
    has_failed: bool = False

    @property
    def is_followed(self) -> bool:
        """Whether the grammar alone says what may come next."""
        return self.matcher is not None and (self.reasoning is None or self.reasoning.is_over)

    def consume(self, outputs: list[int]) -> None:
        """Let the matcher read outputs."""
        self.matcher.consume_tokens(outputs)
        for token in outputs:
            self.were_forced.append(bool(self.forced))
            if self.forced and self.forced.popleft() != token:
                self.forced.clear()

    def next_forced(self) -> int | None:
        """Return the only token that may come next, if there is but one.

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
        self._seconds, self._num_tokens, self._num_redrawn = 0.0, 0, 0  # since `take_work`
        self._words_SW = np.zeros((0, 0), dtype=np.int32)
        self.addresses = np.zeros(
            len(slots.sampling), dtype=np.int64
        )  # of each slot's bits; 0 = all are allowed

    def place(self, slot: int, grammar: Grammar | None, *, is_plain: bool = False) -> None:
        """Take the grammar of the sequence that took the slot.

        Args:
            is_plain: tokens of the slot are drawn from logits as they are, and bounded by the grammar alone.
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
        """Forget all matchers."""
        self._in_use.clear()
        self.addresses[:] = 0

    @property
    def any_in_use(self) -> bool:
        """Whether any slot has a grammar."""
        return bool(self._in_use)

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
        """Read the outputs before `ends`, and fill the bits that the draw needs; what is drawn goes through `refused`."""
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
        """Ask after the tokens that were drawn without bits, and fill those of the slots where they may not stand.

        Returns:
            The indices of the tokens that must be drawn again, and of the slots whose grammars have failed.
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
        """Return what has been done since the last time; None: nothing."""
        if not self._num_tokens:
            return None
        work = GrammarWork(self._seconds, self._num_tokens, self._num_redrawn)
        self._seconds, self._num_tokens, self._num_redrawn = 0.0, 0, 0
        return work

    def ahead(self, slot: int, end: int) -> Ahead | None:
        """Return what goes ahead of the outputs before `end`; None: the slot has no grammar, or its output can only end."""
        matching = self._in_use.get(slot)
        if matching is None:
            return None
        self._read(slot, matching, end)
        ends = matching.grammar.eos_token_ids
        if not matching.is_followed:
            return FreeAhead(ends)
        if matching.matcher.is_stopped():
            return None
        matching.next_forced()  # spelled here, where it is kept
        return AheadMatcher(matching.matcher, ends, matching.forced)

    def were_forced(self, slot: int) -> bytearray:
        """Tell of the outputs read so far which the grammar forced, by 1; those that were not asked after have 0."""
        matching = self._in_use.get(slot)
        return bytearray() if matching is None else matching.were_forced

    def is_plain(self, slot: int) -> bool:
        """Whether the tokens of a slot with a grammar are drawn first, and the grammar asked afterwards."""
        return self._in_use[slot].is_plain

    def allow_all(self, slot: int) -> None:
        """Let the next tokens of a slot be drawn from all; they go through `follow`."""
        self.addresses[slot] = 0

    def follow(self, slot: int, end: int, token_K: np.ndarray, draw: Callable[[int], int]) -> None:
        """Settle the tokens for position `end` and those after it, one behind the other, as far as the draft is right.

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
        """Return what stands behind the tokens that were read, if that is settled; None: it must be drawn by the bits."""
        is_drawn = matching.is_plain
        if is_drawn and token < 0:  # no token
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
        """Yield index, slot, grammar and number of the slots that have a grammar."""
        if not self._in_use:
            return
        pairs = zip(slots_R.tolist(), numbers_R.tolist(), strict=True)
        for i, (slot, number) in enumerate(pairs):
            matching = self._in_use.get(slot)
            if matching is not None:
                yield i, slot, matching, number

    def _read(self, slot: int, matching: _Matching, end: int) -> None:
        """Take the outputs that are there since the last time."""
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
        """Whether the token may stand next; an end may not that could be put off under `ignore_eos`."""
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
        """Fill the bits of a slot; the grammar may fail."""
        words_W = self._words_SW[slot]
        self.addresses[slot] = words_W.ctypes.data
        is_filled = self._fill_reasoning(matching, words_W) or matching.matcher is None
        matching.has_failed = not (is_filled or self._fill_matching(matching, words_W))

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
    """Begin to follow the reasoning of an output; None: there is none.

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
