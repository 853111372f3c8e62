"""Grammars that are dear to compile or to follow: refused by counting, before a thread is kept by them."""

import json

import pytest

from trouper import SamplingParams, StructuredOutputsParams
from trouper.actors.messages.requests import key_of
from trouper.actors.rendering.grammar.grammars import Grammars
from trouper.actors.rendering.grammar.matchers import ENTRY_BYTES, Matchers
from trouper.actors.rendering.grammar.schemas import MAX_WORK, work_of
from trouper.actors.rendering.grammar.sources import grammar_source
from trouper.actors.rendering.tokenizer import Tokenizer
from trouper.config.model import DEMO_MODEL
from trouper.errors import GrammarError


def record(num):
    return {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(num)}}


def multiple(number):
    return {"type": "integer", "multipleOf": number}


DEAR = {
    "properties": record(2_100),
    "objects": {"type": "array", "items": {"anyOf": [record(1_200), record(1_300), record(1_400)]}},
    "multiple": multiple(1_000_003),
    "many multiples": {"type": "object", "properties": {f"p{i}": multiple(9_973) for i in range(12)}},
    "a common multiple": {"allOf": [multiple(997), multiple(991)]},
}  # fmt: skip


@pytest.fixture(scope="module")
def grammars():
    return Grammars(Tokenizer.load(DEMO_MODEL), 4096, (0, 2))


def compiled(grammars, **kinds):
    params = StructuredOutputsParams(**kinds)
    return grammars.compile(SamplingParams(structured_outputs=params))


@pytest.mark.parametrize("name", DEAR)
def test_what_is_dear_is_refused_however_it_comes(grammars, name):
    schema = DEAR[name]
    assert work_of(schema) > MAX_WORK
    lark = f"start: %json {json.dumps(schema)}"
    structure = {"begin": "<f>", "end": "</f>", "schema": schema}
    tag = json.dumps({"structures": [structure], "triggers": ["<f"]})
    for kinds in ({"json": schema}, {"grammar": lark}, {"structural_tag": tag}):
        with pytest.raises(GrammarError, match="too complex") as caught:
            compiled(grammars, **kinds)
        assert caught.value.code == "schema_too_complex"


@pytest.mark.parametrize(
    "schema",
    [
        record(500), multiple(86_400), multiple(10**9), multiple(0.01), multiple(0.0000001), multiple(2.5),
        {"type": "object", "properties": {f"p{i}": multiple(60 + i % 2) for i in range(40)}},
    ],
    ids=lambda schema: str(schema)[:40],
)  # fmt: skip
def test_what_people_write_is_not_refused(grammars, schema):
    assert work_of(schema) < MAX_WORK
    assert compiled(grammars, json=schema) is not None


@pytest.mark.parametrize("number", [True, "7", None, 0, float("inf"), -1])
def test_what_is_no_multiple_costs_nothing(number):
    assert work_of({"multipleOf": number}) == 0


@pytest.mark.parametrize(
    ("kinds", "code"),
    [
        ({"json": {"$ref": "#"}}, "invalid_schema"),
        ({"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}}, "invalid_schema"),
        ({"grammar": "root ::= root"}, "invalid_grammar"),
        ({"grammar": 'root ::= root "a"'}, "invalid_grammar"),
        ({"grammar": "start: start"}, "invalid_grammar"),
    ],
    ids=str,
)
def test_a_grammar_that_no_text_matches_is_refused(grammars, kinds, code):
    with pytest.raises(GrammarError, match="no text matches it") as caught:
        compiled(grammars, **kinds)
    assert caught.value.code == code


def test_left_recursion_with_a_beginning_is_a_grammar(grammars):
    assert compiled(grammars, grammar='start: start "a" | "b"').matcher().consume_tokens([]) is True


def test_grammars_asked_for_last_are_kept_by_their_bytes():
    read = Grammars(Tokenizer.load(DEMO_MODEL), 4096, (0, 2))._read_vocabulary
    kept = Matchers(read, 3 * (1000 + ENTRY_BYTES))
    sources = {n: grammar_source(StructuredOutputsParams(regex=f"a{{{n}}}")) for n in range(1, 6)}
    for number in (1, 2, 3, 1, 4):
        kept.compile(sources[number], 1000)
    assert repr(kept) == "<Matchers: 3 kept, 0 held>"
    assert [kept.compile(sources[n], 1000).seconds is None for n in (1, 3, 4)] == [True] * 3
    assert kept.compile(sources[5], 4000).seconds is not None
    assert repr(kept) == "<Matchers: 1 kept, 0 held>"


def test_grammar_is_kept_until_last_release():
    read = Grammars(Tokenizer.load(DEMO_MODEL), 4096, (0, 2))._read_vocabulary
    held, source = Matchers(read, 0), grammar_source(StructuredOutputsParams(regex="a+"))
    for _ in range(2):
        held.hold(source)
    held.release(key_of(source))
    assert held.compile(source).seconds is None
    for _ in range(2):
        held.release(key_of(source))
    assert held.compile(source).seconds is not None
