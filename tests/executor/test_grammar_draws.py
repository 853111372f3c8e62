"""What is drawn under a grammar: the token that its mask would have given, also where the grammar is asked afterwards."""

import json

import numpy as np
import pytest
import torch

from trouper import SamplingParams, StructuredOutputsParams
from trouper.actors.executor.sampling.grammar import GRAMMAR_ERROR, GrammarMasks
from trouper.actors.executor.sampling.sampler import Sampler
from trouper.actors.executor.steps.request_slots import RequestSlots
from trouper.actors.messages.requests import SequenceId
from trouper.actors.messages.steps import NewSequence, Sampling
from trouper.actors.rendering.grammar.grammars import Grammars
from trouper.actors.rendering.tokenizer import Tokenizer
from trouper.config.model import DEMO_MODEL
from trouper.kernels.reference.sampling import NOT_FINITE

V, EOS, PROMPT = 4096, (0, 2), (5, 6)
FIELDS = {"name": {"type": "string", "maxLength": 8}, "size": {"type": "integer"}, "kind": {"enum": ["big", "bigger"]}}  # fmt: skip
TAG = {"structures": [{"begin": "<f=a>", "end": "</f>", "schema": {"type": "integer"}}], "triggers": ["<f="]}  # fmt: skip
KINDS = {
    "schema": {"json": {"type": "object", "properties": FIELDS, "required": [*FIELDS]}},
    "object": {"json_object": True},
    "regex": {"regex": "[0-9]{3}-[a-f]*(foo|foobar)?"},
    "choice": {"choice": ["hello world", "hello", "help me"]},
    "lark": {"grammar": 'start: "a" ("b" start)* /[xyz]+/'},
    "tag": {"structural_tag": json.dumps(TAG)},
}

ENDLESS = 'start: ("a"{1000}){1000}'  # too many to be looked through at the second token


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(DEMO_MODEL)


@pytest.fixture(scope="module")
def grammars(tokenizer):
    return Grammars(tokenizer, V, EOS)


def compiled(grammars, kinds, ignore_eos=False):
    params = StructuredOutputsParams(**kinds)
    return grammars.compile(SamplingParams(structured_outputs=params, ignore_eos=ignore_eos))


class Row:
    """A slot with a grammar whose tokens a sampler draws from logits that are given."""

    def __init__(self, grammar, sampling):
        self.slots = RequestSlots(1, 256, 16)
        self.sampler = Sampler(self.slots)
        self.num_drawn = 0
        self.end = len(PROMPT)
        self.slots.place(NewSequence(0, SequenceId(0), PROMPT, len(PROMPT), (1,), sampling))
        self.sampler.place(0, grammar)
        draw = self.sampler.draw

        def counted(*args):
            self.num_drawn += 1
            return draw(*args)

        self.sampler.draw = counted

    def draw(self, logits_V):
        ends = np.array([self.end])
        (token,) = self.sampler.sample(logits_V[None].clone(), np.array([0]), ends).token_ids
        self.end += 1
        return token


def allowed_by(matcher, ignore_eos):
    """The bits of a matcher that has read the prefix, without the law that is tested."""
    if matcher.is_stopped():
        return set(EOS)
    found = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    allowed = set(np.flatnonzero(found[:V]).tolist())
    return set(EOS) if matcher.is_stopped() else allowed - (set(EOS) if ignore_eos else set())


def drawn_by_mask(logits_V, allowed, sampling, end):
    """The token that a row without a grammar draws when all others are out of reach."""
    slots = RequestSlots(1, 256, 16)
    sampler = Sampler(slots)
    slots.place(NewSequence(0, SequenceId(0), PROMPT, len(PROMPT), (1,), sampling))
    sampler.place(0)
    masked_V = torch.full((V,), -1e4)
    ids = sorted(allowed)
    masked_V[ids] = logits_V[ids]
    return sampler.sample(masked_V[None], np.array([0]), np.array([end])).token_ids[0]


@pytest.mark.parametrize(
    ("kind", "options", "ignore_eos"),
    [
        *((kind, {}, False) for kind in KINDS),
        ("regex", {}, True),
        ("object", {"temperature": 0.0}, False),
        ("schema", {"top_p": 0.8}, False),
        ("schema", {"top_k": 9, "temperature": 1.4}, True),
        ("tag", {"min_p": 0.05}, False),
    ],
    ids=lambda value: "-".join(value) or "plain" if isinstance(value, dict) else str(value),
)
def test_token_is_one_that_mask_gives(grammars, kind, options, ignore_eos):
    grammar = compiled(grammars, KINDS[kind], ignore_eos)
    numbers = torch.Generator().manual_seed(len(kind))
    for seed in range(2):
        sampling = Sampling(seed=seed, **options)
        row, matcher = Row(grammar, sampling), grammar.matcher()
        for _ in range(12):
            logits_V = 4 * torch.randn(V, generator=numbers)
            allowed = allowed_by(matcher.deep_copy(), ignore_eos)
            if seed:  # a model that often says what fits
                logits_V[sorted(allowed)] += 9
            expected = drawn_by_mask(logits_V, allowed, sampling, row.end)
            assert row.draw(logits_V) == expected
            if expected in EOS:
                break
            assert matcher.consume_token(expected)


def test_unfitting_token_is_drawn_twice(grammars):
    grammar = compiled(grammars, {"regex": "[a-z]{100}"})
    fits = sorted(allowed_by(grammar.matcher(), ignore_eos=False))[0]
    for token, num_drawn in ((fits, 1), (EOS[0], 2)):
        row = Row(grammar, Sampling())
        logits_V = torch.zeros(V)
        logits_V[token] = 50
        row.draw(logits_V)
        assert row.num_drawn == num_drawn


def test_what_grammar_forces_is_drawn_whatever_logits(grammars, tokenizer):
    row = Row(compiled(grammars, {"choice": ["a sentence of words"]}), Sampling())
    numbers = torch.Generator().manual_seed(1)
    ids = []
    while (token := row.draw(9 * torch.randn(V, generator=numbers))) not in EOS:
        ids.append(token)
    assert tokenizer.decode(ids) == "a sentence of words"
    assert row.num_drawn <= len(ids) + 2


def test_logits_that_are_not_finite_fail_whatever_grammar(grammars):
    logits_V = torch.zeros(V)
    logits_V[7] = torch.nan
    assert Row(compiled(grammars, {"regex": "[a-z]+"}), Sampling()).draw(logits_V) == NOT_FINITE


@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}])
def test_grammar_that_takes_too_many_steps_later_fails_there(grammars, options):
    row = Row(compiled(grammars, {"grammar": ENDLESS}), Sampling(**options))
    assert GRAMMAR_ERROR in [row.draw(torch.zeros(V)) for _ in range(3)]


@pytest.mark.parametrize("kind", KINDS)
def test_asking_after_token_and_its_bit_say_same(grammars, kind):
    numbers = np.random.default_rng(3)
    matcher = compiled(grammars, KINDS[kind]).matcher()
    for _ in range(8):
        if matcher.is_stopped():
            break
        forced = matcher.compute_ff_tokens()
        allowed = allowed_by(matcher, ignore_eos=False)
        if forced:
            assert allowed == {forced[0]}
        else:
            assert allowed == {token for token in range(V) if matcher.validate_tokens([token])}
        choices = sorted(allowed - set(EOS))
        if not choices:
            break
        assert matcher.consume_token(int(numbers.choice(choices)))


class Slot:
    """A slot with a grammar and outputs."""

    def __init__(self, grammar, outputs=()):
        self.slots = RequestSlots(1, 256, 16)
        self.masks = GrammarMasks(self.slots)
        self.end = len(PROMPT) + len(outputs)
        tokens = (*PROMPT, *outputs)
        self.slots.place(NewSequence(0, SequenceId(0), tokens, len(PROMPT), (1,), Sampling()))
        self.masks.place(0, grammar, is_plain=True)

    def allowed(self, end):
        assert self.masks.fill(np.array([0]), np.array([end])) == []
        bits = np.unpackbits(self.masks.words(0).view(np.uint8), bitorder="little")
        return set(np.flatnonzero(bits).tolist())


def test_forced_tokens_are_those_that_masks_allow_one_after_other(grammars, tokenizer):
    schema = {"type": "object", "properties": {"long_name": {"const": "a value"}}, "required": ["long_name"]}  # fmt: skip
    grammar = compiled(grammars, {"json": schema})
    outputs = tokenizer.encode('{"', add_special_tokens=False)
    slot = Slot(grammar, outputs)
    forced = slot.masks.ahead(0, slot.end).forced()
    assert tokenizer.decode(forced).startswith("long_name")
    for i, token in enumerate(forced):
        assert slot.allowed(slot.end + i) == {token}
        slot.slots.token_ids[0, slot.end + i] = token


def test_nothing_is_forced_where_choice_or_no_grammar(grammars):
    slot = Slot(compiled(grammars, {"regex": "[0-9]{3}"}))
    assert slot.masks.ahead(0, slot.end).forced() == []
    slot.masks.place(0, None)
    assert slot.masks.ahead(0, slot.end) is None


def test_going_ahead_changes_no_mask(grammars, tokenizer):
    grammar = compiled(grammars, KINDS["schema"])
    outputs = tokenizer.encode('{"na', add_special_tokens=False)
    asked, other = Slot(grammar, outputs), Slot(grammar, outputs)
    for _ in range(2):
        ahead = asked.masks.ahead(0, asked.end)
        while forced := ahead.forced():
            assert all(map(ahead.take, forced))
        assert not ahead.take(EOS[0])
    assert asked.allowed(asked.end) == other.allowed(other.end)
