"""Grammars: what is refused and how, and what a slot may draw next."""

import json

import numpy as np
import pytest

from trouper import SamplingParams, StructuredOutputsParams
from trouper.actors.executor.sampling.grammar import GrammarMasks
from trouper.actors.executor.steps.request_slots import RequestSlots
from trouper.actors.messages.requests import SequenceId
from trouper.actors.messages.steps import NewSequence, Sampling
from trouper.actors.rendering.grammar.grammars import Grammars
from trouper.actors.rendering.tokenizer import Tokenizer
from trouper.config.generation import structured_outputs_config
from trouper.config.model import DEMO_MODEL
from trouper.errors import GrammarError, TrouperValidationError, UnsupportedFeatureError

V, EOS = 4096, (0, 2)
NESTED: dict = {}
for _ in range(70):
    NESTED = {"items": NESTED}


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(DEMO_MODEL)


@pytest.fixture(scope="module")
def grammars(tokenizer):
    return Grammars(tokenizer, V, EOS)


def compiled(grammars, ignore_eos=False, **kinds):
    params = StructuredOutputsParams(**kinds)
    return grammars.compile(SamplingParams(structured_outputs=params, ignore_eos=ignore_eos))


@pytest.mark.parametrize(
    ("kinds", "code"),
    [
        ({"json": {"type": "objec"}}, "invalid_schema"),
        ({"json": {"not": {}}}, "invalid_schema"),
        ({"json": {"if": {}, "then": {}}}, "invalid_schema"),
        ({"json": {"$ref": "http://example.org/x"}}, "invalid_schema"),
        ({"json": {"pattern": "(", "type": "string"}}, "invalid_schema"),
        ({"json": "{"}, "invalid_schema"),
        ({"json": "[]"}, "invalid_schema"),
        ({"json": {"const": {1, 2}}}, "invalid_schema"),
        ({"json": NESTED}, "schema_too_complex"),
        ({"json": json.dumps(NESTED)}, "schema_too_complex"),
        ({"json": "[" * 100_000}, "schema_too_complex"),
        ({"json": {"enum": [f"v{i}" * 20 for i in range(10_000)]}}, "schema_too_complex"),
        ({"regex": "("}, "invalid_grammar"),
        ({"regex": "a" * 2**19}, "schema_too_complex"),
        ({"grammar": "start: foo"}, "invalid_grammar"),
        ({"regex": "\ud800"}, "invalid_grammar"),
        ({"choice": ["\ud800"]}, "invalid_grammar"),
        ({"grammar": "root ::= ("}, "invalid_grammar"),
        ({"structural_tag": "{}"}, "invalid_grammar"),
        ({"structural_tag": '{"structures": [1], "triggers": ["<"]}'}, "invalid_grammar"),
    ],
    ids=lambda value: ascii(value)[:40],
)
def test_invalid_grammar_has_code_and_next_compiles(grammars, kinds, code):
    with pytest.raises(GrammarError) as caught:
        compiled(grammars, **kinds)
    assert caught.value.code == code
    assert caught.value.parameter == "structured_outputs"
    assert compiled(grammars, regex="[0-9]+") is not None


@pytest.mark.parametrize(
    "kinds",
    [
        {}, {"regex": "a", "choice": ["a"]}, {"regex": 1}, {"choice": []}, {"choice": "ab"}, {"choice": [1]},
        {"json": [1]}, {"json_object": False}, {"json_object": "yes"}, {"grammar": b"a"},
        {"regex": "a", "whitespace_pattern": 1},
    ],
)  # fmt: skip
def test_exactly_one_kind_of_the_right_type(kinds):
    with pytest.raises(TrouperValidationError, match="structured_outputs"):
        StructuredOutputsParams(**kinds)


class Row:
    """A slot with a grammar, and the bits of what it may draw next."""

    def __init__(self, grammar, prompt=(5, 6), outputs=()):
        self.slots = RequestSlots(2, 512, 16)
        self.masks = GrammarMasks(self.slots)
        self.end = len(prompt) + len(outputs)
        tokens = (*prompt, *outputs)
        self.slots.place(NewSequence(1, SequenceId(0), tokens, len(prompt), (1,), Sampling()))
        self.masks.place(1, grammar)

    def append(self, token):
        self.slots.token_ids[1, self.end] = token
        self.end += 1

    def allowed(self):
        assert self.masks.fill(np.array([1]), np.array([self.end])) == []
        bits = np.unpackbits(self.masks.words(1).view(np.uint8), bitorder="little")
        return set(np.flatnonzero(bits).tolist())


def bits_of(matcher):
    found = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    return set(np.flatnonzero(found).tolist())


SCHEMA = {"properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yes"]}}, "required": ["a", "b"]}  # fmt: skip
KINDS = [
    ({"json": {"type": "object", **SCHEMA}}, '{"a": -12, "b": "yes"}'),
    ({"regex": "[0-9]{3}-[a-f]*"}, "123-abc"),
    ({"choice": ["hello world", "hello"]}, "hello world"),
    ({"grammar": 'root ::= "a" [0-9]+ ";"'}, "a123;"),
    (
        {"grammar": r'root ::= "\u00e9\U0001F600" [\u0041-\u0043]'},
        "é😀B",
    ),  # as llama.cpp reads them
    ({"grammar": r'root ::= "\u0022\u005c\\u00e9" [\u005d]'}, '"\\\\u00e9]'),
]


@pytest.mark.parametrize(("kinds", "text"), KINDS)
def test_masks_equal_those_of_fresh_matcher(grammars, tokenizer, kinds, text):
    grammar = compiled(grammars, **kinds)
    outputs = tokenizer.encode(text, add_special_tokens=False)
    row = Row(grammar)
    for i, token in enumerate(outputs):
        fresh = grammar.matcher()
        assert fresh.consume_tokens(outputs[:i])
        allowed = row.allowed()
        assert token in allowed
        assert allowed == bits_of(fresh) == Row(grammar, outputs=outputs[:i]).allowed()
        row.append(token)
    assert set(EOS) <= row.allowed()


def test_where_output_can_only_end_ends_alone_are_allowed(grammars, tokenizer):
    for ignore_eos in (False, True):
        row = Row(compiled(grammars, ignore_eos, regex="a"))
        row.append(*tokenizer.encode("a", add_special_tokens=False))
        assert row.allowed() == set(EOS)
        assert row.masks.can_only_end(1)


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_ignore_eos_avoids_optional_end(grammars, tokenizer, ignore_eos):
    row = Row(compiled(grammars, ignore_eos, regex="[0-9]{1,3}"))
    assert not row.allowed() & set(EOS)
    row.append(*tokenizer.encode("1", add_special_tokens=False))
    assert bool(row.allowed() & set(EOS)) is not ignore_eos
    assert not row.masks.can_only_end(1)


def test_token_that_grammar_forbids_breaks_its_own_row_only(grammars):
    row = Row(compiled(grammars, regex="[0-9]+"))
    row.slots.place(NewSequence(0, SequenceId(1), (5, 6), 2, (1,), Sampling()))
    row.masks.place(0, compiled(grammars, regex="[a-z]+"))
    row.append(1)
    assert row.masks.fill(np.array([0, 1]), np.array([2, 3])) == [1]


def test_a_slot_given_away_has_no_mask(grammars):
    row = Row(compiled(grammars, regex="[0-9]+"))
    assert row.masks.addresses[1]
    row.masks.place(1, None)
    assert not row.masks.addresses.any()
    assert not row.masks.any_in([0, 1])


def test_a_grammar_is_compiled_once_for_all_requests(grammars):
    first, second = (compiled(grammars, regex="a{3}b") for _ in range(2))
    assert (first.compile_s is None, second.compile_s) == (False, None)
    assert first.matcher() is not second.matcher()


@pytest.mark.parametrize(
    ("options", "text", "fits"),
    [
        ({}, '{"a":\n  1}', True), ({}, '{"a":\n\n1}', False), ({}, '{"a":1,"b":2}', True),
        ({"disable_any_whitespace": True}, '{"a": 1}', False),
        ({"disable_any_whitespace": True}, '{"a":1}', True),
        ({"disable_additional_properties": True}, '{"a":1,"b":2}', False),
        ({"whitespace_pattern": " "}, '{"a": 1}', True),
    ],
)  # fmt: skip
def test_options_of_json(grammars, tokenizer, options, text, fits):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    matcher = compiled(grammars, json=schema, **options).matcher()
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert (matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()) is fits


def test_tags_in_text(grammars, tokenizer):
    structure = {"begin": "<f=a>", "end": "</f>", "schema": {"type": "integer"}}
    tag = json.dumps({"structures": [structure], "triggers": ["<f="]})
    matcher = compiled(grammars, structural_tag=tag).matcher()
    ids = tokenizer.encode("so <f=a>12</f> it is", add_special_tokens=False)
    assert matcher.try_consume_tokens(ids) == len(ids)
    matcher = compiled(grammars, structural_tag=tag).matcher()
    ids = tokenizer.encode("so <f=a>x", add_special_tokens=False)
    assert matcher.try_consume_tokens(ids) < len(ids)


def test_defaults_of_engine_hold_where_request_says_nothing(tokenizer):
    config = structured_outputs_config({"disable_any_whitespace": True, "backend": "xgrammar"})
    closed = Grammars(tokenizer, V, EOS, config=config)
    matcher = compiled(closed, json_object=True).matcher()
    assert matcher.consume_tokens(tokenizer.encode("{", False))
    assert not matcher.validate_tokens(tokenizer.encode(" ", False))


def test_an_engine_may_take_no_grammars(tokenizer):
    refusing = Grammars(tokenizer, V, EOS, config=structured_outputs_config({"backend": "none"}))
    with pytest.raises(UnsupportedFeatureError, match="structured_outputs_config"):
        compiled(refusing, json_object=True)


@pytest.mark.parametrize(
    "config", [{"backend": "magic"}, {"unknown": 1}, {"disable_any_whitespace": 3}]
)
def test_a_bad_option_names_itself(config):
    with pytest.raises(TrouperValidationError, match="structured_outputs_config"):
        structured_outputs_config(config)
