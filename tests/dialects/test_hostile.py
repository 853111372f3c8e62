"""Long answers that are made to be slow to read: their work is bounded, and the cuts still do not matter."""

import ast
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trouper.bench.studies.server.parsers import HOSTILE, SLICE, hostile_text, parser_of
from trouper.frontends.dialects import core, reader
from trouper.frontends.dialects.calls import MAX_STEPS, Content
from trouper.frontends.dialects.core import AnswerParser
from trouper.frontends.dialects.reader import MAX_DEPTH, JSONScanner
from trouper.frontends.dialects.table import BY_NAME

from .test_core import TOOLS, parse

UNREAD = re.compile(r"(\d+) characters not read")


@pytest.mark.parametrize(("name", "beginning", "pattern"), HOSTILE)
def test_what_is_endless_gives_same_events_in_pieces(name, beginning, pattern):
    text = hostile_text(beginning, pattern, 40_000)
    pieces = [text[i : i + 997] for i in range(0, len(text), 997)]
    assert parse(name, pieces) == parse(name, [text])


def test_behind_last_step_of_answer_calls_are_content():
    call = '<tool_call>{"name":"f","arguments":{}}</tool_call>'
    found = parse("hermes", [call * MAX_STEPS])
    calls = [event for event in found if event[0] == "CallStarted"]
    assert 0 < len(calls) < MAX_STEPS
    assert found[-1][0] == "Content"
    assert found[-1][1].endswith(call)


def test_list_of_numbers_is_one_step_however_long():
    numbers = ", ".join(map(str, range(3 * MAX_STEPS)))
    (_, arguments, _) = parse("pythonic", [f"[f(l=[{numbers}])]"])
    assert arguments == ["Arguments", 0, f'{{"l": [{numbers}]}}']


@given(
    st.sampled_from(["{", "[", '"']),
    st.text(st.sampled_from('[]{}"\\aü\ud800'), max_size=300),
    st.integers(1, 300),
)
def test_end_of_value_is_same_by_steps_and_by_arrays(opening, text, cut):
    text = opening + text
    stepped, swept = JSONScanner(), JSONScanner()
    expected = stepped._step(text, 0, len(text))
    found = swept._sweep(text, 0, min(cut, len(text)))
    if found < 0 and cut < len(text):
        found = swept._sweep(text, cut, len(text))
    assert (found, swept.is_too_deep) == (expected, stepped.is_too_deep)


def test_value_that_is_too_deep_is_no_argument():
    deep = "[" * (MAX_DEPTH + 1) + "1" * reader.AT_ONCE
    assert JSONScanner().end_in(deep, 0) == MAX_DEPTH
    assert parse("json", [deep]) == [["Content", deep]]


def calls_of(dialect, text):
    """Functions that a whole answer calls, in deltas of 1,024 characters; and the most that it keeps unread."""
    parser, num_calls, most_unread = parser_of(dialect), 0, 0
    pieces = [text[i : i + SLICE] for i in range(0, len(text), SLICE)]

    def count(frame, event, arg):
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    before = sys.getprofile()
    for piece in pieces:
        sys.setprofile(count)
        parser.feed(piece)
        sys.setprofile(before)
        most_unread = max(most_unread, int(UNREAD.search(repr(parser))[1]))
    return num_calls, most_unread


@pytest.mark.parametrize(("name", "beginning", "pattern"), HOSTILE)
def test_work_grows_with_the_text_and_no_faster(name, beginning, pattern):
    short, _ = calls_of(name, hostile_text(beginning, pattern, 2**17))
    long, unread = calls_of(name, hostile_text(beginning, pattern, 2**18))
    assert long < 2.1 * short + 1000
    assert long < 100 * MAX_STEPS + 150 * 2**18 / SLICE
    assert unread < 2 * SLICE


def test_content_goes_on_as_it_comes():
    parser = AnswerParser(BY_NAME["hermes"], TOOLS)
    assert parser.feed("so <") == [Content("so ")]
    assert parser.feed("b>") == [Content("<b>")]


def test_nothing_that_a_model_writes_is_evaluated():
    called = {
        node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        for path in Path(core.__file__).parent.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
    }
    assert not called & {
        "eval",
        "exec",
        "compile_command",
        "__import__",
        "import_module",
    }
