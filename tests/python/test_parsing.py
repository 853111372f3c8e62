"""Answers are parsed without an engine, and a file adds dialects."""

import pytest

from trouper.config.model import DEMO_MODEL
from trouper.errors import TrouperValidationError
from trouper.frontends.dialects.core import answer_format
from trouper.frontends.python.parsing import read_plugin
from trouper.parsing import Arguments, CallEnded, CallStarted, Content, Reasoning, parser_for

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
PLUGIN = """
from trouper.parsing import Dialect
DIALECTS = [Dialect(name="mine", call=("<<", ">>"))]
"""


def test_an_answer_is_parsed_offline():
    model = str(DEMO_MODEL)
    parser = parser_for(model, [TOOL], tool_call_parser="hermes", reasoning_parser="qwen3")
    text = '<think>hm</think>so <tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert [*parser.feed(text), *parser.end()] == [
        Reasoning("hm"), Content("so "), CallStarted(0, "f"), Arguments(0, "{}"), CallEnded(0),
    ]  # fmt: skip
    assert parser.num_calls == {"ok": 1, "bare": 0, "content": 0}


def test_calls_without_marks_and_marks_without_calls_are_counted():
    parser = parser_for(str(DEMO_MODEL), [TOOL], tool_call_parser="hermes")
    parser.feed('{"name": "f", "arguments": {}} <tool_call>oops</tool_call>')
    parser.end()
    assert parser.num_calls == {"ok": 0, "bare": 1, "content": 1}


def test_a_file_adds_dialects(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(PLUGIN)
    more = read_plugin(path)
    assert answer_format(["<< >>"], {}, (), more=more).tools is more[0]
    assert answer_format([], {}, (), tool_call_parser="mine", more=more).tools is more[0]


@pytest.mark.parametrize("text", ["", "DIALECTS = 3", "DIALECTS = [3]", "raise SystemExit", "("])
def test_a_file_without_dialects_is_refused(tmp_path, text):
    path = tmp_path / "bad.py"
    path.write_text(text)
    with pytest.raises(TrouperValidationError, match="tool_parser_plugin"):
        read_plugin(path)
