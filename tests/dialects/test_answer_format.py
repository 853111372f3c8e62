"""What a model's answers look like is read off its chat template; reasoning is counted by tokens."""

import pytest

from trouper.frontends.dialects.core import ReasoningTokens, answer_format

SPAN = ("<think>", "</think>")
HERMES = "{% if tools %}<tool_call></tool_call>{% endif %}"


def make(template, special=(), **options):
    return answer_format([template], dict.fromkeys(special, 7), special, **options)


def test_dialect_and_reasoning_are_read_off_the_template():
    found = make(HERMES + "{{ content.split('</think>') }}")
    assert (found.tools.name, found.reasoning) == ("hermes", SPAN)
    assert make(HERMES).reasoning is None
    assert make("{{ messages }}").tools.name == "json"


def test_name_wins_over_template_and_none_looks_for_nothing():
    found = make(HERMES, tool_call_parser="mistral", reasoning_parser="qwen3")
    assert (found.tools.name, found.reasoning) == ("mistral", SPAN)
    found = make(HERMES + "</think>", tool_call_parser="none", reasoning_parser="none")
    assert (found.tools, found.reasoning) == (None, None)


def test_template_may_have_reasoning_of_another_dialect():
    assert make("[TOOL_CALLS]<think></think>").reasoning == SPAN
    assert make("[TOOL_CALLS][THINK][/THINK]").reasoning == ("[THINK]", "[/THINK]")


def test_marks_that_are_special_tokens_are_known():
    assert make(HERMES, special=["<tool_call>"]).has_special_marks
    assert not make(HERMES, special=["<|im_end|>"]).has_special_marks
    assert make(HERMES + "</think>", special=["</think>"]).has_special_marks


@pytest.mark.parametrize(
    ("tokens", "begins_inside", "expected"),
    [
        (["<think>", "a", "b", "</think>", "c"], False, 2),
        (["<th", "ink>", "a", "</thi", "nk>", "c"], False, 3),  # a part of the mark is counted
        (["a", "b", "</think>", "c"], True, 2),
        (["a", "b", "</think>", "c"], False, 0),
        (["\n", "<think>", "a"], False, 1),
        (["a", "<think>", "b"], False, 0),
    ],
)
def test_tokens_inside_the_reasoning_are_counted(tokens, begins_inside, expected):
    counter = ReasoningTokens(SPAN, begins_inside=begins_inside, text_of=lambda i: tokens[i])
    assert sum(counter.add([i]) for i in range(len(tokens))) == expected
