"""Structural tags in both forms: which texts they allow."""

import json

import pytest

from trouper import SamplingParams, StructuredOutputsParams
from trouper.actors.rendering.grammar.grammars import Grammars
from trouper.actors.rendering.tokenizer import Tokenizer
from trouper.config.model import DEMO_MODEL
from trouper.errors import GrammarError

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
JSON = {"type": "json_schema", "json_schema": SCHEMA}
TAG = {"type": "tag", "begin": "<f>", "content": JSON, "end": "</f>"}
TEXT_TAG = {"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": "</t>"}
OLD = {"triggers": ["<"], "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}]}


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(DEMO_MODEL)


@pytest.fixture(scope="module")
def grammars(tokenizer):
    return Grammars(tokenizer, 4096, (0, 2))


@pytest.fixture
def matches(tokenizer, grammars):
    def matches(tag, text):
        params = StructuredOutputsParams(structural_tag=json.dumps(tag))
        compiled = grammars.compile(SamplingParams(structured_outputs=params))
        matcher, ids = compiled.matcher(), tokenizer.encode(text, add_special_tokens=False)
        if matcher.validate_tokens(ids) < len(ids):
            return False
        matcher.consume_tokens(ids)
        return matcher.is_accepting()

    return matches


def triggered(**options):
    return {"format": {"type": "triggered_tags", "triggers": ["<f", "<t"], "tags": [TAG, TEXT_TAG], **options}}  # fmt: skip


def separated(**options):
    return {"format": {"type": "tags_with_separator", "tags": [TAG], "separator": ", ", **options}}


@pytest.mark.parametrize(
    ("tag", "good", "bad"),
    [
        (OLD, ["", "text", 'so <f>{"a":1}</f> and <f>{"a":2}</f>.'], ["<x>", '<f>{"b":1}</f>']),
        ({"format": {"type": "const_string", "value": "yes"}}, ["yes"], ["", "no"]),
        ({"format": JSON}, ['{"a": 1}'], ["{}"]),
        ({"format": {"type": "regex", "pattern": r"\d/\d{2}"}}, ["1/23"], ["1/2"]),
        ({"format": {"type": "grammar", "grammar": 'start: "a" | "b"'}}, ["a", "b"], ["c"]),
        ({"format": {"type": "grammar", "grammar": 'root ::= "a"+'}}, ["a", "aa"], ["b"]),
        ({"format": {"type": "any_text"}}, ["", "any <f>"], []),
        ({"format": {"type": "sequence", "elements": [TAG, TAG]}}, ['<f>{"a":1}</f><f>{"a":1}</f>'], ['<f>{"a":1}</f>']),
        ({"format": {"type": "or", "elements": [TAG, TEXT_TAG]}}, ['<f>{"a":1}</f>', "<t>a < b</t>"], ["<t>"]),
        (triggered(), ["", 'x <f>{"a":1}</f> <t>y</t> z'], ["<f>x</f>"]),
        (triggered(at_least_one=True), ["x <t>y</t> z"], ["", "x"]),
        (triggered(stop_after_first=True), ["x <t>y</t>", "x"], ["<t>y</t> <f>{}</f>"]),
        (separated(), ["", '<f>{"a":1}</f>, <f>{"a":2}</f>'], ["x"]),
        (separated(at_least_one=True, stop_after_first=True), ['<f>{"a":1}</f>'], ["", '<f>{"a":1}</f>, <f>{"a":2}</f>']),
    ],
)  # fmt: skip
def test_a_text_matches_or_not(matches, tag, good, bad):
    assert [text for text in good if not matches(tag, text)] == []
    assert [text for text in bad if matches(tag, text)] == []


@pytest.mark.parametrize(
    "tag",
    [
        {}, {"format": 3}, {"format": {"type": "qwen_xml"}}, {"format": {"type": "sequence", "elements": []}},
        {"format": {"type": "tag", "begin": "<f>"}}, {"format": {"type": "regex", "pattern": "("}},
        {"format": {"type": "grammar", "grammar": "root ::= ("}}, {**OLD, "triggers": ["["]}, {**OLD, "triggers": []},
        {"format": {"type": "grammar", "grammar": "start: x"}},
    ],
)  # fmt: skip
def test_what_has_not_form_of_its_type_is_refused(matches, tag):
    with pytest.raises(GrammarError):
        matches(tag, "")
