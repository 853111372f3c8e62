"""Drafts inside a grammar: what is proposed, how long it is, and that no draft changes what is drawn.

The matcher here is a set of texts, looked through whole at each question.
"""

import ctypes

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trouper.actors.executor.sampling.drafter import num_equal
from trouper.actors.executor.sampling.grammar import GRAMMAR_ERROR, AheadMatcher, FreeAhead
from trouper.actors.executor.sampling.grammar_drafts import (
    FORCED,
    NUM_MATCHING,
    PRIOR_WEIGHT,
    WORTH_IN_GRAMMAR,
    GrammarDrafts,
    Guess,
    History,
    look_ahead,
    matching_positions,
)
from trouper.actors.executor.sampling.matching import SEPARATOR, STEP_COSTS, Shares, best_length
from trouper.actors.executor.sampling.sampler import Sampler
from trouper.actors.executor.steps.request_slots import RequestSlots
from trouper.actors.messages.requests import Grammar, GrammarRules, ReasoningRules, SequenceId
from trouper.actors.messages.steps import NewSequence, Sampling
from trouper.kernels.reference.sampling import NOT_FINITE

V, END, PROMPT = 32, 0, (9, 8, 7)
symbols = st.integers(1, 4)
texts = st.lists(st.lists(symbols, min_size=1, max_size=9).map(tuple), min_size=1, max_size=6)


class Texts:
    """A matcher of the texts of a finite language, with llguidance's names."""

    def __init__(self, texts, read=(), error_behind=None):
        self.texts, self.read, self.error_behind = texts, tuple(read), error_behind

    def next(self):
        num = len(self.read)
        return {t[num] for t in self.texts if t[:num] == self.read and len(t) > num}

    def deep_copy(self):
        return Texts(self.texts, self.read, self.error_behind)

    def is_error(self):
        return self.error_behind is not None and len(self.read) > self.error_behind

    def is_stopped(self):
        return self.is_error() or not self.next()

    def validate_tokens(self, tokens):
        if self.is_error():
            return 0
        (token,) = tokens
        return int(token in self.next() or (token == END and self.read in self.texts))

    def consume_token(self, token):
        assert self.validate_tokens([token])
        self.read += (token,)
        return not self.is_error()

    def consume_tokens(self, tokens):
        for token in tokens:
            if token != END and not self.is_error():
                self.consume_token(token)

    def compute_ff_tokens(self):
        copy, found = self.deep_copy(), []
        while not copy.is_stopped() and len(copy.next()) == 1 and copy.read not in copy.texts:
            found += copy.next()
            copy.consume_token(found[-1])
        return found

    def unsafe_compute_mask_ptr(self, address, num_bytes):
        allowed = sum(1 << token for token in range(V) if self.validate_tokens([token]))
        ctypes.memmove(address, allowed.to_bytes(num_bytes, "little"), num_bytes)


def grammar_of(texts, *, ignore_eos=False, error_behind=None, thinking=None):
    """A grammar of these texts; of None: behind the reasoning the output may be anything."""
    rules = GrammarRules(
        source=None if texts is None else "", eos_token_ids=(END,), ignore_eos=ignore_eos,
        num_tokens=V, reasoning=thinking,
    )  # fmt: skip
    matcher = None if texts is None else Texts(texts, error_behind=error_behind)
    return Grammar(rules, lambda: matcher and matcher.deep_copy(), str)


class Row:
    """A slot with a grammar, whose logits are a function of the tokens."""

    def __init__(self, grammar, sampling, spoiled=()):
        self.slots = RequestSlots(1, 64, 16)
        self.sampler = Sampler(self.slots)
        self.spoiled = spoiled
        self.slots.place(NewSequence(0, SequenceId(0), PROMPT, len(PROMPT), (1,), sampling))
        self.sampler.place(0, grammar)

    def logits_of(self, end):
        history = self.slots.token_ids[0, :end].tolist()
        seed = abs(hash(tuple(history))) % 2**31
        logits_V = 3 * torch.randn(V, generator=torch.Generator().manual_seed(seed))
        if end - len(PROMPT) in self.spoiled:
            logits_V[3] = torch.nan
        return logits_V

    def draw(self, end, draft=()):
        """Verify a draft behind `end` tokens; return what stays of what was drawn."""
        self.slots.token_ids[0, end : end + len(draft)] = draft
        ends_R = np.arange(end, end + len(draft) + 1)
        logits_TV = torch.stack([self.logits_of(each) for each in ends_R.tolist()])
        drawn = self.sampler.sample(logits_TV, np.zeros_like(ends_R), ends_R).token_ids
        num_right = next((i for i, t in enumerate(draft) if t != drawn[i]), len(draft))
        return drawn[: num_right + 1]


SAMPLINGS = [
    Sampling(temperature=0.0),
    Sampling(seed=1),
    Sampling(seed=2, top_k=3),
    Sampling(seed=3, repetition_penalty=1.3),
    Sampling(seed=4, presence_penalty=0.5, logit_bias=((2, 1.5),)),
    Sampling(seed=5, min_tokens=4, stop_ids=(END,)),
]


def one_by_one(grammar, sampling, spoiled=(), most=20):
    row, found = Row(grammar, sampling, spoiled), []
    while (not found or found[-1] > END) and len(found) < most:
        found += row.draw(len(PROMPT) + len(found))
    return found


def verified(grammar, sampling, spoiled, wanted, next_guess):
    """Draw as `one_by_one` does, with drafts of the tokens that `next_guess` gives, as far as they may stand."""
    row, found = Row(grammar, sampling, spoiled), []
    while (not found or found[-1] > END) and len(found) < len(wanted):
        end = len(PROMPT) + len(found)
        ahead, draft = row.sampler.grammars.ahead(0, end), []
        while ahead is not None and len(draft) < 5:
            place = len(found) + len(draft)
            token = next_guess(wanted[place] if place < len(wanted) else 1)
            if token <= END or not ahead.take(token):
                break
            draft.append(token)
        drawn = row.draw(end, draft)
        found += next((drawn[:i] for i, token in enumerate(drawn) if i and token < 0), drawn)
    return found[: len(wanted)]


@given(
    texts, st.sampled_from(SAMPLINGS), st.booleans(), st.none() | st.integers(0, 4),
    st.sets(st.integers(0, 8), max_size=1), st.data(),
)  # fmt: skip
@settings(max_examples=200)
def test_no_draft_changes_what_is_drawn(texts, sampling, ignore_eos, error_behind, spoiled, data):
    grammar = grammar_of(texts, ignore_eos=ignore_eos, error_behind=error_behind)
    wanted = one_by_one(grammar, sampling, spoiled)
    guess = lambda right: data.draw(st.sampled_from([right, right, right, 1, 2, 3, 4]))  # noqa: E731
    assert verified(grammar, sampling, spoiled, wanted, guess) == wanted


@given(
    st.none() | texts, st.sampled_from(SAMPLINGS), st.none() | st.integers(0, 4), st.booleans(), st.data()
)  # fmt: skip
@settings(max_examples=100)
def test_no_draft_changes_the_reasoning_before_a_grammar(texts, sampling, budget, inside, data):
    thinking = ReasoningRules("2021", "2223", (20, 21), (22, 23), inside, budget)
    grammar = grammar_of(texts, thinking=thinking)
    wanted = one_by_one(grammar, sampling)
    guess = lambda right: data.draw(st.sampled_from([right, right, right, 1, 20, 22, 23]))  # noqa: E731
    assert verified(grammar, sampling, (), wanted, guess) == wanted


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda s: str(s.seed))
def test_a_draft_of_the_truth_stays_whole(sampling):
    grammar = grammar_of([(1, 2, 3, 4, 1), (1, 2, 4, 4, 2), (2, 3, 1, 1, 1), (1, 2, 3, 1)])
    wanted = one_by_one(grammar, sampling)
    row = Row(grammar, sampling)
    draft = wanted[: wanted.index(END)]
    assert row.draw(len(PROMPT), draft) == wanted


def test_failure_within_draft_keeps_what_came_before():
    grammar = grammar_of([(1, 2, 3, 4)], error_behind=1)
    assert one_by_one(grammar, Sampling()) == [1, 2, GRAMMAR_ERROR]
    assert Row(grammar, Sampling()).draw(len(PROMPT), [1, 2, 3]) == [1, 2, GRAMMAR_ERROR]
    spoiled = Row(grammar_of([(1, 2, 3, 4)]), Sampling(), {2})
    assert spoiled.draw(len(PROMPT), [1, 2, 3]) == [1, 2, NOT_FINITE]


@given(texts, st.lists(symbols | st.just(FORCED), max_size=20), st.integers(0, 7))
def test_draft_follows_grammar_and_leaves_history_and_matcher_alone(texts, before, room):
    history = History(np.array(before, dtype=np.int32))
    known = history.shapes.copy()
    masks = Row(grammar_of(texts), Sampling()).sampler.grammars
    ahead = masks.ahead(0, len(PROMPT))
    drafted = look_ahead(history, ahead, room, 8, Shares(PRIOR_WEIGHT), 0.0)
    assert len(drafted) <= room
    assert (history.shapes == known).all()
    along, chance = Texts(texts), 1.0
    for each in drafted:
        forced = along.compute_ff_tokens()
        assert (each.guess is None) == bool(forced)
        assert each.token in along.next()
        assert each.token == forced[0] if forced else each.token in before
        assert 0 < each.chance <= chance if each.guess else each.chance == chance
        along.consume_token(each.token)
        chance = each.chance
    if len(drafted) < room:
        assert not along.compute_ff_tokens()
    again = masks.ahead(0, len(PROMPT))
    assert [again.take(each.token) for each in drafted] == [True] * len(drafted)


def test_behind_another_name_comes_what_came_behind_names_before():
    name = (13, 14, 15)
    fields = [1, FORCED, 2, 3, 20, 4, 1, FORCED, 2, 3, 21, 4]  # of two other names
    third = [1, *name, 2, 3, 22]
    language = Texts([tuple(third), (*third[:-1], 23), (16,), (1, *name, 17), (1, *name, 2, 18)])
    ahead = Row(grammar_of(language.texts), Sampling()).sampler.grammars.ahead(0, len(PROMPT))
    drafted = look_ahead(
        History(np.array(fields, dtype=np.int32)), ahead, 7, 8, Shares(PRIOR_WEIGHT), 0.0
    )
    assert [each.token for each in drafted[:6]] == third[:6]
    assert [each.guess is None for each in drafted[:6]] == [False, True, True, True, False, False]


def brute_force_places(shapes, longest):
    """All earlier places, with how many shapes agree there."""
    num_matching = {}
    for end in range(1, len(shapes)):
        num = 0
        while num < min(longest, end) and shapes[end - 1 - num] == shapes[-1 - num]:
            num += 1
        if num:
            num_matching[end] = num
    return num_matching


@given(st.lists(st.integers(0, 2), max_size=30), st.integers(NUM_MATCHING, 6))
def test_places_are_those_where_last_shapes_stood(shapes, longest):
    alike, best = matching_positions(np.array(shapes, dtype=np.int32), longest)
    found = brute_force_places(shapes, longest)
    two = [end for end, num in found.items() if num >= NUM_MATCHING]
    assert alike.tolist() == (two or list(found))
    most = max(found.values(), default=0)
    assert best == max((end for end, num in found.items() if num == most), default=-1)


@given(st.lists(st.floats(0, 1), max_size=7))
def test_length_is_one_that_saves_most(chances):
    saved = [WORTH_IN_GRAMMAR * sum(chances[:k]) - STEP_COSTS[k] for k in range(len(chances) + 1)]
    assert saved[best_length(chances, WORTH_IN_GRAMMAR)] == pytest.approx(max(saved))


def test_forced_tokens_are_drafted_and_unlikely_not():
    assert best_length([1.0], WORTH_IN_GRAMMAR) == 1
    assert best_length([1.0] * 7, WORTH_IN_GRAMMAR) == 7
    assert best_length([0.05, 0.01], WORTH_IN_GRAMMAR) == 0


def test_guesses_that_were_wrong_are_trusted_less():
    trust, guess = Shares(PRIOR_WEIGHT), Guess(5, 1, 1)
    first = trust.chance(guess.kind, guess.share)
    trust.note(guess.kind, was_right=False)
    assert trust.chance(guess.kind, guess.share) < first
    for _ in range(20):
        trust.note(guess.kind, was_right=True)
    assert trust.chance(guess.kind, guess.share) > 0.8
    other = Guess(5, 3, 3)
    assert trust.chance(other.kind, other.share) == 3 / 4


def bound(slots, sampler, most_answers=9):
    return GrammarDrafts(slots, sampler.grammars, longest=8, most_answers=most_answers)


def finish(drafts, slots, sampler, grammar, family, outputs):
    """Let a sequence in slot 0 answer; return how many steps it took."""
    slots.place(NewSequence(0, SequenceId(0), PROMPT, len(PROMPT), (1,), Sampling()))
    sampler.place(0, grammar)
    drafts.place(0, family)
    end, num_steps = len(PROMPT), 0
    while end < len(PROMPT) + len(outputs):
        rest = outputs[end - len(PROMPT) :]
        draft = drafts.draft(0, end, 7)
        num_right = num_equal(draft, rest)
        drafts.note(0, num_right)
        new = rest[: num_right + 1]
        slots.token_ids[0, end : end + len(new)] = new
        end, num_steps = end + len(new), num_steps + 1
    drafts.leave(0, end)
    return num_steps


def test_similar_answer_in_family_is_drafted():
    slots = RequestSlots(1, 64, 16)
    sampler = Sampler(slots)
    drafts = bound(slots, sampler)
    outputs = [1, 2, 3, 4, 2, 1, 3, 3, 1, 4]
    others = [(*outputs[:i], 9 - outputs[i]) for i in range(len(outputs))]
    grammar = grammar_of([tuple(outputs), *others])  # a choice at each token
    numbers = [finish(drafts, slots, sampler, grammar, name, outputs) for name in "aabb"]
    assert numbers[0] == numbers[2] > 2 * numbers[1]
    assert numbers[3] == numbers[1]
    none = bound(slots, sampler, most_answers=0)
    assert len({finish(none, slots, sampler, grammar, "a", outputs) for _ in range(2)}) == 1


def test_a_separator_and_an_end_are_not_drafted():
    history = History(np.array([5, SEPARATOR, 5], dtype=np.int32))
    ahead = AheadMatcher(Texts([(1, 5), (1,)], (1,)), (END,))
    assert look_ahead(history, ahead, 7, 8, Shares(PRIOR_WEIGHT), 0.0) == []
    history = History(np.array([1, END, 1], dtype=np.int32))
    for ahead in (AheadMatcher(Texts([(1, 5), (1,)], (1,)), (END,)), FreeAhead((END,))):
        assert look_ahead(history, ahead, 7, 8, Shares(PRIOR_WEIGHT), 0.0) == []


def test_where_no_grammar_is_followed_text_alone_is_drafted():
    history = History(np.array([1, 2, 3, 1, 2, 3, 1], dtype=np.int32))
    drafted = look_ahead(history, FreeAhead((END,)), 4, 8, Shares(PRIOR_WEIGHT))
    assert [each.token for each in drafted] == [2, 3, 1, 2]
