"""Arguments of calls are what the model wrote: a JSON object, or cut where the answer is cut, or content."""

import contextlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trouper.frontends.dialects.calls import MAX_HELD, Arguments, CallStarted, Content
from trouper.frontends.dialects.core import AnswerParser
from trouper.frontends.dialects.table import BY_NAME, DIALECTS
from trouper.frontends.dialects.value_types import ValueTypes, as_json, property_types

from .test_core import GOLDEN

HERMES = "<tool_call>\n{}\n</tool_call>"
TOOLS = {"f": {"properties": {"a": {"type": "string"}, "b": {"type": "integer"}}}, "g": {}}


def read(name, text, schemas=TOOLS, *, is_cut=False, size=None, max_held=MAX_HELD):
    """Return the calls of an answer with their arguments, and its content; in pieces of a size, or whole."""
    parser = AnswerParser(BY_NAME[name], schemas, max_held=max_held)
    pieces = [text] if size is None else [text[i : i + size] for i in range(0, len(text), size)]
    events = [event for piece in pieces for event in parser.feed(piece)]
    events += parser.end(is_cut=is_cut)
    calls = [[event.name, ""] for event in events if isinstance(event, CallStarted)]
    for event in events:
        if isinstance(event, Arguments):
            calls[event.index][1] += event.text
    return calls, "".join(event.text for event in events if isinstance(event, Content))


BROKEN = [
    ("hermes", HERMES.format('{"name": "f", "arguments": {}, "arguments": {"a": "y"}}')),
    ("hermes", HERMES.format('{"name": "f", "parameters": {}, "arguments": {"a": "y"}}')),
    ("hermes", HERMES.format('{"name": "f", "name": "g", "arguments": {}}')),
    ("hermes", HERMES.format('{"name": "f", "arguments": [1]}')),
    ("hermes", HERMES.format('{"name": "f", "arguments": 7}')),
    ("hermes", HERMES.format('{"name": "f", "arguments": "[1]"}')),
    ("hermes", HERMES.format('{"name": "f", "arguments": {"a": }}')),
    ("hermes", HERMES.format('{"name": "f", "arguments": {"a": NaN}}')),
    ("hermes", HERMES.format("{\"name\": \"f\", \"arguments\": {'a': 'y'}}")),
    ("hermes", HERMES.format('{"name": "f", "arguments": {"a": "y",}}')),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": "y'),
    ("hermes", '<tool_call>\n{"name": "f"'),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a" "y"}'),
    ("mistral", "[TOOL_CALLS]f[ARGS][1]"),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{a: 1}<|tool_call_end|>"),
    ("openai", '<|channel|>commentary to=functions.f<|message|>[1]<|call|>'),
    ("openai", '<|channel|>commentary to=functions.f<|message|>{"a": "y"} so<|call|>'),
    ("pythonic", "[f(a=)]"),
    ("pythonic", "[f('y')]"),
    ("pythonic", "[f(a={'x'})]"),
    ("pythonic", "[f(a='y'"),
    ("qwen3_coder", "<tool_call><function=f><parameter=a>y"),
    ("gemma4", '<|tool_call>call:f{a:<|"|>y'),
    ("gemma4", "<|tool_call>call:f{a 1}<tool_call|>"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text"), BROKEN)
def test_what_is_no_object_is_content_and_nothing_is_lost(name, text):
    assert read(name, text) == ([], text)
    for size in (1, 2, 7):
        assert read(name, text, size=size) == ([], text)


def test_broken_call_behind_good_one_is_content():
    good, bad = '{"name": "f", "arguments": {"b": 1}}', '{"name": "g", "arguments": [1]}'
    text = f"[{good}, {bad}]"
    calls, content = read("json", text)
    assert calls == [["f", '{"b": 1}']]
    assert content == f", {bad}]"


CUT = [
    ("hermes", '<tool_call>\n{"name": "f", "arguments": ', ""),
    ("hermes", '<tool_call>\n{"name": "f"', ""),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": "y', '{"a": "y'),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"b": 1}', '{"b": 1}'),
    ("mistral", "[TOOL_CALLS]f[ARGS]", ""),
    ("mistral", '[TOOL_CALLS]f{"a"', '{"a"'),
    ("openai", "<|channel|>commentary to=functions.f<|message|>", ""),
    ("openai", '<|channel|>commentary to=functions.f<|message|>{"a', '{"a'),
    ("pythonic", "[f(", ""),
    ("pythonic", "[f(b=1", '{"b": '),
    ("pythonic", "[f(a='y', l=[1, 2", '{"a": "y", "l": [1, '),
    ("qwen3_coder", "<tool_call><function=f>", ""),
    ("qwen3_coder", "<tool_call><function=f><parameter=a>y", '{"a": "y'),
    ("qwen3_coder", "<tool_call><function=f><parameter=b>1", '{"b": '),
    ("qwen3_coder", "<tool_call><function=f><parameter=b>1</parameter>", '{"b": 1'),
    ("glm45", "<tool_call>f\n<arg_key>b</arg_key><arg_value>1</arg_value>", '{"b": 1'),
    ("gemma4", '<|tool_call>call:f{a:<|"|>y', '{"a": "y'),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "arguments"), CUT)
@pytest.mark.parametrize("max_held", [0, MAX_HELD])
def test_a_cut_call_is_cut(name, text, arguments, max_held):
    for size in (None, 1):
        calls, content = read(name, text, is_cut=True, size=size, max_held=max_held)
        assert (calls, content) == ([["f", arguments]], "")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", HERMES.format('{"name": "f"}')),
        ("hermes", HERMES.format('{"name": "f", "arguments": null}')),
        ("hermes", HERMES.format('{"name": "f", "arguments": ""}')),
        ("hermes", HERMES.format('{"name": "f", "arguments": {}}')),
        ("openai", "<|channel|>commentary to=functions.f<|message|><|call|>"),
        ("pythonic", "[f()]"),
        ("qwen3_coder", "<tool_call><function=f></function></tool_call>"),
        ("glm45", "<tool_call>f</tool_call>"),
    ],
)
def test_call_complete_without_arguments_has_empty_object(name, text):
    assert read(name, text) == ([["f", "{}"]], "")


def test_object_whose_last_bracket_is_missing_is_call():
    text = '<tool_call>\n{"name": "f", "arguments": {"b": 1}'
    assert read("hermes", text) == ([["f", '{"b": 1}']], "")


@pytest.mark.parametrize(
    ("name", "before", "behind"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": ', "}</tool_call>"),
        ("mistral", "[TOOL_CALLS]f[ARGS]", ""),
        ("openai", "<|channel|>commentary to=functions.f<|message|>", "<|call|>"),
        ("llama3_json", '{"name": "f", "parameters": ', "}"),
    ],
)
@pytest.mark.parametrize("size", [None, 1, 50])
@settings(max_examples=20)
@given(value=st.text(st.sampled_from('ab\n\t\x01"ü'), max_size=300))
def test_raw_line_breaks_in_strings_are_escapes(name, before, behind, size, value):
    raw = value.replace('"', '\\"')
    text = f'{before}{{"a": "{raw}",\n "b": 1}}{behind}'
    ((_, arguments),), content = read(name, text, size=size)
    assert json.loads(arguments) == {"a": value, "b": 1}
    assert content == ""


def test_long_arguments_are_given_out_before_their_end():
    parser = AnswerParser(BY_NAME["hermes"], TOOLS)
    assert parser.feed('<tool_call>{"name": "f", "arguments": {"a": "' + "x" * 500) == []
    events = parser.feed("x" * MAX_HELD)
    assert isinstance(events[0], CallStarted)
    assert events[-1].text.endswith("xxx")


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
@settings(max_examples=30)
@given(st.data())
def test_arguments_parse_however_an_answer_is_broken(dialect, data):
    """Whole answers of a dialect, with some characters left out or exchanged."""
    text = data.draw(st.sampled_from([row["answer"] for row in GOLDEN[dialect.name]]))
    for _ in range(data.draw(st.integers(0, 3))):
        start = data.draw(st.integers(0, len(text)))
        end = data.draw(st.integers(start, min(start + 4, len(text))))
        text = (
            text[:start]
            + data.draw(st.sampled_from(["", "{", "]", '"', ",", "1", "\n"]))
            + text[end:]
        )
    for name, arguments in read(dialect.name, text)[0]:
        assert name
        assert isinstance(json.loads(arguments), dict)


ROOT = {
    "$defs": {"name": {"type": "string"}, "loop": {"$ref": "#/$defs/loop"}, "a/b": {"type": "array"}},
    "properties": {
        "optional": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "listed": {"type": ["string", "null"]},
        "reference": {"$ref": "#/$defs/name"},
        "far": {"anyOf": [{"$ref": "#/$defs/name"}, {"type": "integer"}]},
        "both": {"allOf": [{"$ref": "#/$defs/name"}, {"description": "x"}]},
        "narrow": {"allOf": [{"type": ["string", "integer"]}, {"type": ["integer", "null"]}]},
        "enum": {"enum": ["1", "true", "x"]},
        "const": {"const": "123"},
        "mixed": {"enum": ["x", 1, None]},
        "number": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        "flag": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
        "object": {"properties": {"a": {}}},
        "escaped": {"$ref": "#/$defs/a~1b"},
        "loop": {"$ref": "#/$defs/loop"},
        "nothing": {"$ref": "#/$defs/none"},
        "any": {"description": "whatever"},
        "either": {"anyOf": [{"type": "string"}, {}]},
        "date": {"format": "date"},
        "maybe": {"anyOf": [{"enum": ["a", "2"]}, {"type": "null"}]},
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        *((key, text, text) for key in ("optional", "listed", "reference", "far", "both") for text in ("123", "true", '{"a":1}', "[1]", "1.0")),
        ("optional", "null", None), ("reference", "null", "null"), ("listed", "null", None),
        ("narrow", "12", 12), ("narrow", "x", "x"),
        ("enum", "1", "1"), ("enum", "true", "true"), ("const", "123", "123"),
        ("mixed", "1", 1), ("mixed", "x", "x"), ("mixed", "None", None), ("mixed", "7", "7"),
        ("number", "1.5", 1.5), ("number", "1", 1), ("flag", "True", True), ("flag", "1", "1"),
        ("object", '{"a": 1}', {"a": 1}), ("object", "[1]", "[1]"), ("escaped", "[1]", [1]),
        ("loop", "1", 1), ("nothing", "1", 1), ("any", "1", 1), ("any", "x", "x"), ("unknown", "true", True),
        ("either", "1", 1), ("date", "2024", "2024"), ("maybe", "2", "2"), ("maybe", "null", None),
    ],
)  # fmt: skip
def test_bare_value_has_type_that_its_schema_allows(key, text, value):
    assert json.loads(as_json(text, property_types(ROOT, key))) == value
    answer = f"<tool_call>\n<function=f>\n<parameter={key}>\n{text}\n</parameter>\n</function>\n</tool_call>"
    for size in (None, 1):
        ((_, arguments),), _ = read("qwen3_coder", answer, {"f": ROOT}, size=size)
        assert json.loads(arguments) == {key: value}


def test_properties_are_found_through_references_and_parts():
    schema = {
        "$ref": "#/$defs/all",
        "$defs": {"all": {"allOf": [{"properties": {"a": {"type": "string"}}}]}},
    }
    assert property_types(schema, "a").is_text


def test_what_the_model_itself_marks_wins():
    schema = {"f": {"properties": {"a": {"type": ["string", "integer"]}, "b": {"type": "integer"}}}}
    parameter = '<｜DSML｜parameter name="{}" string="{}">{}</｜DSML｜parameter>'
    body = parameter.format("a", "false", 1) + parameter.format("b", "true", 2)
    text = f'<｜DSML｜function_calls><｜DSML｜invoke name="f">{body}</｜DSML｜invoke></｜DSML｜function_calls>'
    ((_, arguments),), _ = read("deepseek_v32", text, schema)
    assert json.loads(arguments) == {"a": 1, "b": "2"}


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=5), st.sets(st.sampled_from(["integer", "number", "boolean", "array", "object", "null"])))  # fmt: skip
def test_json_of_a_bare_value_is_json(value, names):
    for text in (json.dumps(value), str(value)):
        types = ValueTypes(frozenset(names) or None)
        found = json.loads(as_json(text, types))
        assert any(found == reading for reading in readings_of(value, text)), text


def readings_of(value, text):
    """Yield what a bare text may mean: the value, the text itself, the JSON that it spells, and Python's words for literals."""
    yield from (value, text, text.strip())
    literals = {"True": "true", "False": "false", "None": "null"}
    with contextlib.suppress(ValueError):
        yield json.loads(literals.get(text.strip(), text))
