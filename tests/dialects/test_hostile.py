"""Long answers that are made to be slow to read: their work is bounded, and the cuts still do not matter."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trouper.frontends.dialects import json_scanner
from trouper.frontends.dialects.calls import MAX_STEPS
from trouper.frontends.dialects.core import AnswerParser
from trouper.frontends.dialects.events import Content
from trouper.frontends.dialects.json_scanner import MAX_DEPTH, JSONScanner
from trouper.frontends.dialects.table import BY_NAME

from .test_core import TOOLS, parse

ENDLESS = [
    ("hermes", "", "<tool_call>"),
    ("hermes", "", '<tool_call>{"name":"f","arguments":{}}</tool_call>'),
    ("hermes", "<tool_call>{", '"a":1,'),
    ("hermes", '<tool_call>{"name":"f","arguments":{"a":', "[],"),
    ("hermes", '<tool_call>{"name":"f","arguments":{"a":"', '\\"'),
    ("mistral", "[TOOL_CALLS]f", "[" * 60 + "]" * 60),
    ("qwen3_coder", "<tool_call><function=f>", "<parameter=a>1</parameter>"),
    ("qwen3_coder", "<tool_call>", "<function=f>"),
    ("pythonic", "[f(a=[", "1,"),
    ("pythonic", "[f(a=[", "[],"),
    ("pythonic", "[f(a='", "\\n"),
    ("gemma4", "<|tool_call>call:f{a:[", "1,"),
    ("openai", "", "<|channel|>commentary to=functions.f<|message|>{}<|call|>"),
    ("openai", "", "<|channel|>"),
]


@pytest.mark.parametrize(("name", "beginning", "pattern"), ENDLESS)
def test_what_is_endless_gives_the_same_events_in_pieces(name, beginning, pattern):
    text = (beginning + pattern * 3000)[:40_000]
    pieces = [text[i : i + 997] for i in range(0, len(text), 997)]
    assert parse(name, pieces) == parse(name, [text])


def test_behind_the_last_step_of_an_answer_calls_are_content():
    call = '<tool_call>{"name":"f","arguments":{}}</tool_call>'
    found = parse("hermes", [call * MAX_STEPS])
    calls = [event for event in found if event[0] == "CallStarted"]
    assert 0 < len(calls) < MAX_STEPS
    assert found[-1][0] == "Content"
    assert found[-1][1].endswith(call)


def test_a_list_of_numbers_is_one_step_however_long():
    numbers = ", ".join(map(str, range(3 * MAX_STEPS)))
    (_, arguments, _) = parse("pythonic", [f"[f(l=[{numbers}])]"])
    assert arguments == ["Arguments", 0, f'{{"l": [{numbers}]}}']


@given(
    st.sampled_from(["{", "[", '"']),
    st.text(st.sampled_from('[]{}"\\aü\ud800'), max_size=300),
    st.integers(1, 300),
)
def test_the_end_of_a_value_is_the_same_by_steps_and_by_arrays(opening, text, cut):
    text = opening + text
    stepped, swept = JSONScanner(), JSONScanner()
    expected = stepped._step(text, 0, len(text))
    found = swept._sweep(text, 0, min(cut, len(text)))
    if found < 0 and cut < len(text):
        found = swept._sweep(text, cut, len(text))
    assert (found, swept.is_too_deep) == (expected, stepped.is_too_deep)


def test_a_value_that_is_too_deep_is_no_argument():
    deep = "[" * (MAX_DEPTH + 1) + "1" * json_scanner.AT_ONCE
    assert JSONScanner().end_in(deep, 0) == MAX_DEPTH
    assert parse("json", [deep]) == [["Content", deep]]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "beginning", "pattern"), ENDLESS)
def test_a_megabyte_takes_a_fraction_of_a_second(name, beginning, pattern):
    text = (beginning + pattern * 2**20)[: 2**20]
    parser = AnswerParser(BY_NAME[name], TOOLS)
    started = time.process_time()
    for i in range(0, len(text), 1024):
        parser.feed(text[i : i + 1024])
    parser.end()
    assert time.process_time() - started < 0.5  # 0.05 s on a quiet machine


def test_content_goes_on_as_it_comes():
    parser = AnswerParser(BY_NAME["hermes"], TOOLS)
    assert parser.feed("so <") == [Content("so ")]
    assert parser.feed("b>") == [Content("<b>")]
