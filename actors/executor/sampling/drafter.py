"""Drafts of the next tokens of each sequence, and their verification.

A step of several tokens of one sequence costs little more than a step of one, because weights are read once.  So likely
tokens are drafted and verified together.  A draft comes from text that followed the same tokens before, in this sequence
or in recent answers, or from a second model.

    known tokens  … 5 8 2 7 9 | 5 8 2          the last three occurred before,
    drafts                            7 9      so their continuation is verified: one step samples up to three tokens

Laws:
  * A draft changes no token.  Each token is sampled from the logits behind its predecessors, with the noise of its own
    position, like in a step without drafts; everything after a wrong draft is dropped.
  * A draft is a function of the tokens in the slot, of how earlier drafts of its sequence fared, and of recent answers
    with the same cache salt and adapter.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from trouper.actors.executor.sampling.grammar import GrammarMasks
from trouper.actors.executor.sampling.grammar_drafts import GrammarDrafts
from trouper.actors.executor.sampling.matching import (
    CHANCES_OF_MODEL,
    SEPARATOR,
    Pace,
    RecentAnswers,
    positions_after_match,
)
from trouper.actors.executor.sampling.sampler import PromptLogprobs, Sampled, entry_failures
from trouper.actors.executor.steps.request_slots import RequestSlots
from trouper.actors.messages.steps import StepDone, StepPlan, TokenLogprobs
from trouper.config.speculation import SpeculativeConfig

# Fewer tokens that match another answer predict little about this one.
LEAST_MATCHING_OTHERS = 3
# If only a few tokens match, a place near the passage that the text recently followed is a better source than the latest
# place: the number of tokens before it and behind it, and the number of tokens for which it is remembered.
FEW_MATCHING, BEFORE, BEHIND, AGE = 2, 4, 24, 16


class SecondModel(Protocol):
    """A second model that proposes drafts, such as `DraftModel`.

    `cost` is the time of a drafted token, in steps of the model that verifies it.
    """

    @property
    def cost(self) -> float: ...

    def place(self, slot: int, *, has_drafts: bool) -> None: ...

    def propose(self, plan: StepPlan, lengths: Sequence[int]) -> list[list[int]]: ...

    def keep(self, slot: int, end: int, num_right: int) -> None: ...


class Drafter:
    """Drafts for the sequences in the slots, one step after the other.

    Args:
        grammars: the grammars of the slots, which take part in their drafts.
        model: the model that proposes drafts; by default they come from the text.
    """

    def __init__(
        self,
        config: SpeculativeConfig,
        slots: RequestSlots,
        grammars: GrammarMasks,
        model: SecondModel | None = None,
    ) -> None:
        self._config, self._model = config, model
        self._slots = slots
        self._paces: dict[int, Pace] = {}  # by slot; sequences with a grammar have none
        self._drafts: list[list[int]] = []  # for each entry of the current step
        most = config.suffix_decoding_max_cached_requests if config.method == "suffix" else 0
        self._recent = RecentAnswers(most) if most else None
        self._bound = GrammarDrafts(
            slots,
            grammars,
            longest=config.suffix_decoding_max_tree_depth,
            most_answers=most,
        )
        self._families: dict[int, str] = {}  # by slot
        # The position where the next step of a slot begins: all tokens before it are computed.
        self._ends: dict[int, int] = {}
        # The number of matching tokens of a slot's last draft, the place where they matched, and the position of the draft.
        self._found: dict[int, tuple[int, int | None, int]] = {}
        # A place that a slot's text follows, and the position of its continuation.
        self._trails: dict[int, tuple[int, int]] = {}

    def leave(self, slot: int) -> None:
        """Store the answer of a slot's sequence for later drafts, before another sequence takes the slot."""
        end, num_prompt = self._ends.pop(slot, 0), int(self._slots.num_prompt[slot])
        self._bound.leave(slot, end)
        if self._recent is not None and end > num_prompt + 1:
            # The end of the prompt is included, because the same answer may follow the same end.
            first = max(0, num_prompt - self._config.suffix_decoding_max_tree_depth)
            token_ids = self._slots.token_ids[slot, first:end]
            self._recent.add(self._families[slot], token_ids)

    def place(self, slot: int, family: str = "", *, has_grammar: bool) -> None:
        """Begin with another sequence in a slot, and forget how the drafts of the previous one fared."""
        self._families[slot] = family
        for held in (self._paces, self._found, self._trails):
            held.pop(slot, None)
        if has_grammar:
            self._bound.place(slot, family)
        else:
            self._paces[slot] = self._pace()
        if self._model is not None:
            self._model.place(slot, has_drafts=not has_grammar)

    def _pace(self) -> Pace:
        most = self._config.num_speculative_tokens
        if self._model is None:
            return Pace(most)
        return Pace(most, self._model.cost, CHANCES_OF_MODEL, least=1)

    def settled(self, plan: StepPlan) -> StepPlan:
        """Return a plan with the positions unknown when it was made.  It must be the next plan to run."""
        starts = plan.num_computed_tokens
        if plan.num_unknown_tokens:
            starts = tuple(
                self._ends[slot] if unknown else start
                for slot, start, unknown in zip(
                    plan.request_slots, starts, plan.num_unknown_tokens, strict=True
                )
            )
            plan = msgspec.structs.replace(plan, num_computed_tokens=starts)
        for slot, start, count in zip(
            plan.request_slots, starts, plan.num_scheduled_tokens, strict=True
        ):
            self._ends[slot] = start + count
        return plan

    def propose(self, plan: StepPlan) -> np.ndarray | None:
        """Write drafts into the slots, behind the tokens that the plan computes.

        Returns:
            The number of drafted tokens for each entry [C], or None if there are none.
        """
        if self._model is not None:
            rooms = plan.num_lookahead_tokens or (0,) * len(plan.request_slots)
            lengths = [
                self._length(*entry) for entry in zip(plan.request_slots, rooms, strict=True)
            ]
            self._drafts = self._model.propose(plan, lengths)
            for i, (slot, room) in enumerate(zip(plan.request_slots, rooms, strict=True)):
                if room and slot not in self._paces:
                    self._drafts[i] = self._draft(slot, plan.num_computed_tokens[i] + 1, room)
            return self._counts()
        if not plan.num_lookahead_tokens:
            return None
        entries = plan.request_slots, plan.num_computed_tokens, plan.num_lookahead_tokens
        self._drafts = [
            self._draft(slot, start + 1, room) if room else []
            for slot, start, room in zip(*entries, strict=True)
        ]
        return self._counts()

    def _counts(self) -> np.ndarray | None:
        return np.array([len(draft) for draft in self._drafts]) if any(self._drafts) else None

    def _length(self, slot: int, room: int) -> int:
        pace = self._paces.get(slot)
        return 0 if pace is None or not room or pace.rests() else pace.length(0, room)

    def _draft(self, slot: int, end: int, room: int) -> list[int]:
        pace = self._paces.get(slot)
        if pace is None:
            found = self._bound.draft(slot, end, room)
            self._slots.token_ids[slot, end : end + len(found)] = found
            return found
        if pace.rests():
            return []
        token_L = self._slots.token_ids[slot]
        recent = None if self._recent is None else self._recent.of(self._families[slot])
        match = find(token_L[:end], self._config, recent, self._trail(slot, end))
        if match is None:
            return []
        if match.num_matching > FEW_MATCHING:
            self._follow(slot, match.place, end)
        room = min(room, match.num_following(self._config))
        draft = match.draft(pace.length(match.num_matching, room))
        self._found[slot] = match.num_matching, match.place, end
        token_L[end : end + len(draft)] = draft
        return draft.tolist()

    def _trail(self, slot: int, end: int) -> int | None:
        """Return the place of the token at `end` in the passage that the text recently followed, or None."""
        place, since = self._trails.get(slot, (0, -AGE))
        return place + end - since if end - since < AGE else None

    def _follow(self, slot: int, place: int | None, end: int) -> None:
        if place is not None:
            self._trails[slot] = place, end

    def _note(self, slot: int, num_drafted: int, num_right: int) -> None:
        """Record how many tokens of a slot's draft were right."""
        if self._model is not None:
            self._paces[slot].note(0, num_drafted, num_right)
            return
        num_matching, place, end = self._found[slot]
        self._paces[slot].note(num_matching, num_drafted, num_right)
        if num_right:
            self._follow(slot, place, end)

    def verify(self, plan: StepPlan, sampled: Sampled, prompt_logprobs: PromptLogprobs) -> StepDone:
        """Complete the plan with the sampled tokens, up to and including the first that differs from its draft."""
        tokens, logprobs = iter(sampled.token_ids), iter(sampled.logprobs)
        token_ids: list[tuple[int, ...]] = []
        found: list[tuple[TokenLogprobs, ...]] = []
        for i, (slot, draft, is_sampled) in enumerate(
            zip(plan.request_slots, self._drafts, plan.num_sampled_tokens, strict=True)
        ):
            drawn = [next(tokens) for _ in range(len(draft) + 1)] if is_sampled else []
            num_right = num_equal(draft, drawn)
            if draft and slot in self._bound:
                self._bound.note(slot, num_right)
            elif draft:
                self._note(slot, len(draft), num_right)
                if self._model is not None:
                    end = plan.num_computed_tokens[i] + plan.num_scheduled_tokens[i]
                    self._model.keep(slot, end, num_right)
            token_ids.append(tuple(drawn[: num_right + 1]))
            if sampled.logprobs:
                own = [next(logprobs) for _ in drawn][: num_right + 1]
                found.append(tuple(each for each in own if each is not None))
        kept, failed = entry_failures(token_ids)
        for slot, run in zip(plan.request_slots, kept, strict=True):
            self._ends[slot] += max(0, len(run) - 1)
        num_drafts = tuple(map(len, self._drafts))
        return StepDone(plan.step, kept, tuple(found), prompt_logprobs, failed, num_drafts)


class Match(NamedTuple):
    """A place where the same tokens as at the end of the known text have a continuation."""

    text: np.ndarray  # the continuation
    num_matching: int
    place: int | None  # in the sequence's own text; None in another answer

    def num_following(self, config: SpeculativeConfig) -> int:
        """Count the tokens that may be drafted from this place.

        The limit depends on the configuration and on the length of the match. Longer matches are trusted more.
        """
        most, factor = config.num_speculative_tokens, config.suffix_decoding_max_spec_factor
        if factor is not None and config.method == "suffix":
            most = min(most, max(1, int(self.num_matching * factor)))
        # Another sequence's answer ends at a separator.
        if self.place is None:
            ends = np.flatnonzero(self.text[:most] == SEPARATOR)
            return int(ends[0]) if len(ends) else min(most, len(self.text))
        return most

    def draft(self, length: int) -> np.ndarray:
        """Return the next tokens.  A continuation shorter than `length` is repeated, because repetitive text tends to go on."""
        return np.resize(self.text[:length], length)


def find(
    token_L: np.ndarray,
    config: SpeculativeConfig,
    recent: np.ndarray | None = None,
    near: int | None = None,
) -> Match | None:
    """Find a continuation of the known tokens [L] in the text itself or in recent answers.

    Returns None if their end occurs nowhere else.

    Args:
        recent: answers of other sequences, with separators.  They are used if more of their tokens match than in the text.
        near: a place near which the text is likely to continue; it is preferred if only a few tokens match.
    """
    if config.method == "ngram":
        longest, shortest = config.prompt_lookup_max, config.prompt_lookup_min
    else:
        longest, shortest = config.suffix_decoding_max_tree_depth, 1
    place, num_matching = last_match(token_L, token_L, longest, near)
    if recent is not None and len(recent) and num_matching < longest:
        behind, most = last_match(recent, token_L, longest)
        if most > num_matching and most >= LEAST_MATCHING_OTHERS:
            return Match(recent[behind:], most, None)
    return Match(token_L[place:], num_matching, place) if num_matching >= shortest else None


def last_match(
    text_M: np.ndarray, token_L: np.ndarray, longest: int, near: int | None = None
) -> tuple[int, int]:
    """Find the latest place in a text, except its end, where most of the last tokens match, at most `longest`.

    Args:
        near: a place preferred to the latest if only a few tokens match: the first match around it is used.

    Returns:
        The position behind the match, and the number of matching tokens, 0 if the last token does not occur.
    """
    found = list(positions_after_match(text_M, token_L, longest))
    if not found:
        return len(text_M), 0
    ends, num_matching = found[-1], len(found)
    if near is not None and num_matching <= FEW_MATCHING:
        close = ends[(ends > near - BEFORE) & (ends <= near + BEHIND)]
        if len(close):
            return int(close[0]), num_matching
    return int(ends[-1]), num_matching


def num_equal(draft: Sequence[int], drawn: Sequence[int]) -> int:
    """Count the tokens of a draft that equal the drawn tokens, up to the first difference.

    These drafts are accepted, and the next drawn token replaces the first wrong one.
    """
    for i, (guess, token) in enumerate(zip(draft, drawn, strict=False)):
        if guess != token:
            return i
    return min(len(draft), len(drawn))
