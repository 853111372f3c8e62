"""Grammars and parsers of a dialect hold together: what a grammar allows, the parser reads as calls that are valid."""

import json
import random

import jsonschema_rs
import pytest

from trouper import SamplingParams, StructuredOutputsParams
from trouper.actors.rendering.grammar.grammars import Grammars
from trouper.actors.rendering.tokenizer import Tokenizer
from trouper.config.model import DEMO_MODEL
from trouper.errors import TrouperValidationError
from trouper.frontends.dialects.calls import Arguments, CallStarted, Content
from trouper.frontends.dialects.core import AnswerFormat
from trouper.frontends.dialects.grammar import MAX_CALLS, forced_calls, strict_calls
from trouper.frontends.dialects.table import BY_NAME, DIALECTS

V, EOS = 4096, (0, 2)
TOOLS = {
    "f": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 12},
            "unit": {"type": "string", "enum": ["C", "F::=x"]},
            "days": {"type": "integer", "minimum": 0, "maximum": 99},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 5}, "maxItems": 2},
            "deep": {"$ref": "#/$defs/point"},
        },
        "required": ["unit", "days"],
        "additionalProperties": False,
        "$defs": {
            "point": {
                "type": "object",
                "properties": {"x": {"type": "boolean"}},
                "required": ["x"],
                "additionalProperties": False,
            }
        },
    },
    "no.args-1": {"type": "object", "properties": {}, "additionalProperties": False},
}
# What a walk through a grammar tries first, so that texts and lists come to their ends.
ENDS = ["</parameter>\n", "\n</parameter>\n", "</｜DSML｜parameter>\n", "</arg_value>", "<escape>", '<|"|>', '"', "]", "}", ", "]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(DEMO_MODEL)


@pytest.fixture(scope="module")
def grammars(tokenizer):
    return Grammars(tokenizer, V, EOS)


def matcher_of(grammars, lark):
    wanted = StructuredOutputsParams(grammar=lark)
    return grammars.compile(SamplingParams(structured_outputs=wanted)).matcher()


def walk(matcher, tokenizer, seed, longest=300):
    """Write a text that the grammar allows, by drawn tokens; None: it has not ended."""
    draw, found = random.Random(seed), []
    ends = [tokenizer.encode(end, add_special_tokens=False) for end in ENDS]
    while len(found) < longest:
        if matcher.is_accepting() and (matcher.is_stopped() or draw.random() < 0.3):
            return tokenizer.decode(found)
        fitting = [ids for ids in ends if matcher.validate_tokens(ids) == len(ids)]
        if fitting and draw.random() < 0.7:
            ids = draw.choice(fitting)
        else:
            bits = matcher.compute_bitmask()
            allowed = [i for i in range(V) if bits[i // 8] >> i % 8 & 1 and i not in EOS]
            if not allowed:
                return tokenizer.decode(found)
            ids = [draw.choice(allowed)]
        assert matcher.consume_tokens(ids)
        found += ids
    return None


def calls_in(dialect, text):
    parser = AnswerFormat(tools=dialect, reasoning=dialect.reasoning).parser(TOOLS)
    events = [*parser.feed(text), *parser.end()]
    names = [event.name for event in events if isinstance(event, CallStarted)]
    arguments = [""] * len(names)
    for event in events:
        if isinstance(event, Arguments):
            arguments[event.index] += event.text
    content = "".join(event.text for event in events if isinstance(event, Content))
    return list(zip(names, arguments, strict=True)), content.strip()


def check(calls, text):
    assert calls, text
    for name, arguments in calls:
        value = json.loads(arguments)
        schema = {**TOOLS[name], "$defs": TOOLS["f"]["$defs"]}
        # a text between tags has no bounds
        schema = json.loads(json.dumps(schema).replace("maxLength", "x-length"))
        assert jsonschema_rs.validator_for(schema).is_valid(value), (text, value)


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
@pytest.mark.parametrize("is_parallel", [False, True])
def test_what_grammar_allows_is_read_as_valid_calls(grammars, tokenizer, dialect, is_parallel):
    lark = forced_calls(dialect, TOOLS, is_parallel=is_parallel, token_ids={})
    prototype = matcher_of(grammars, lark)
    texts = [walk(prototype.deep_copy(), tokenizer, seed) for seed in range(3)]
    texts = [text for text in texts if text is not None]
    assert texts
    for text in texts:
        calls, content = calls_in(dialect, text)
        check(calls, text)
        assert content == ""
        assert len(calls) <= (MAX_CALLS if is_parallel else 1)


@pytest.mark.parametrize("name", ["hermes", "mistral", "qwen3_coder", "glm45", "gemma4"])
def test_marks_tokens_stand_in_grammar_by_their_ids(grammars, name):
    dialect = BY_NAME[name]
    marks = {*dialect.section, *dialect.call, *dialect.name_end, dialect.literal_quote} - {"", "\n"}
    token_ids = {mark: 100 + i for i, mark in enumerate(sorted(marks))}
    lark = forced_calls(dialect, TOOLS, is_parallel=True, token_ids=token_ids)
    assert f"<[{token_ids[dialect.marks[0]]}]>" in lark
    assert json.dumps(dialect.marks[0], ensure_ascii=False) not in lark
    assert matcher_of(grammars, lark)


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "deepseek_v31", "olmo3"])
def test_under_auto_call_behind_its_mark_matches_its_schema(grammars, tokenizer, name):
    lark = strict_calls(BY_NAME[name], TOOLS, is_parallel=True, token_ids={})
    prototype = matcher_of(grammars, lark)

    def allows(text):
        ids = tokenizer.encode(text, add_special_tokens=False)
        return prototype.deep_copy().validate_tokens(ids) == len(ids)

    assert allows("any text, a < b")
    forced = forced_calls(BY_NAME[name], TOOLS, is_parallel=False, token_ids={})
    call = next(filter(None, (walk(matcher_of(grammars, forced), tokenizer, seed) for seed in range(9))))  # fmt: skip
    assert allows(f"let me see {call}")
    assert not allows(f"let me see {BY_NAME[name].marks[0]} oops")


def test_dialects_without_marks_have_no_grammar_under_auto():
    assert strict_calls(BY_NAME["json"], TOOLS, is_parallel=True, token_ids={}) is None


def test_parameters_that_are_no_object_are_refused():
    with pytest.raises(TrouperValidationError, match="must be an object"):
        forced_calls(BY_NAME["json"], {"f": {"type": "array"}}, is_parallel=True, token_ids={})
