"""Stop strings match what the client sees: not the reasoning, and not the syntax of calls."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trouper.actors.output.stops import TextState, VisibleStops
from trouper.frontends.dialects.calls import Content
from trouper.frontends.dialects.core import AnswerFormat
from trouper.frontends.dialects.table import BY_NAME
from trouper.frontends.server.generation.parsers import (
    CallsAndReasoning,
    ParserChain,
    StopStrings,
    VisibleContent,
)

from .test_tools import ANSWER, CHAT, PATH, TOOL

pytestmark = pytest.mark.anyio
HERMES = AnswerFormat(tools=BY_NAME["hermes"], reasoning=("<think>", "</think>"))
SCHEMAS = {"f": {"type": "object"}}
THOUGHT = "<think>Question: which?\n</think>\n\n"
CALL = f"<tool_call>\n{ANSWER}\n</tool_call>"


def links(stop, **options):
    options = {"is_included": False, "is_late": False, **options}
    parser = CallsAndReasoning(HERMES.parser(SCHEMAS))
    return ParserChain([parser, StopStrings(stop, **options)])


def content_of(text, stop, size, **options):
    chain = links(stop, **options)
    parts = [part for i in range(0, len(text), size) for part in chain.feed(text[i : i + size])]
    parts += chain.feed("", "whole")
    return "".join(part.text for part in parts if isinstance(part, Content)), chain.stop, parts


@pytest.mark.parametrize(
    ("text", "stop", "content", "found"),
    [
        (THOUGHT + "yes. Question: 2", ["Question:"], "yes. ", "Question:"),
        (THOUGHT + "yes", ["Question:", "\n"], "yes", None),
        (THOUGHT + CALL, ["\n", "name", "}"], "", None),
        ("so " + CALL + " on\nand on", ["\n"], "so  on", "\n"),
        ("abcabd", ["abd", "bd"], "abc", "abd"),
        ("abcabd", ["d", "ca"], "ab", "ca"),
    ],
)
def test_content_is_cut_at_first_that_is_seen(text, stop, content, found):
    for size in (1, 3, 100):
        assert content_of(text, stop, size)[:2] == (content, found)


def test_nothing_comes_behind_a_stop_string():
    _, _, parts = content_of("a. " + CALL + "b", [". "], 1)
    assert parts == [Content("a")]
    assert content_of("a. b", [". "], 1, is_included=True)[:2] == ("a. ", ". ")


@given(st.text(st.sampled_from("ab<\n"), max_size=30), st.lists(st.text(st.sampled_from("ab<\n"), min_size=1, max_size=3), min_size=1, max_size=3), st.integers(1, 5), st.booleans())  # fmt: skip
def test_without_marks_it_is_what_the_engine_does(text, stop, size, is_included):
    text = f"x{text}"
    state = TextState(lambda i: text[i], stop, include_stop=is_included)
    expected = state.push(range(len(text)), is_last=True)
    found = content_of(text, stop, size, is_included=is_included)
    assert found[:2] == (expected.text, expected.stop)


def test_engine_ends_output_where_stop_string_is_seen():
    text = THOUGHT + "yes\nno"
    watched = VisibleStops(
        lambda i: text[i], ["\n", "Question"], VisibleContent(HERMES.parser(SCHEMAS))
    )
    delta = watched.push(range(len(text)))
    assert (delta.text, delta.stop) == (THOUGHT + "yes\n", "\n")
    assert delta.num_tokens == len(THOUGHT) + 4


def test_what_was_held_back_is_looked_through_at_end():
    watched = VisibleStops(lambda i: "a<"[i], ["<"], VisibleContent(HERMES.parser(SCHEMAS)))
    assert watched.push([0, 1], is_last=True).stop == "<"


def test_visible_stops_cut_at_engines_position():
    chain = links(["b"], is_late=True)
    parts = [*chain.feed("ab, ab, a"), *chain.feed("b", "whole", "b")]
    assert "".join(part.text for part in parts) == "ab, ab, a"
    assert chain.stop == "b"


# Through the server


REASONING = {"reasoning_parser": "qwen3"}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_in_the_reasoning_stops_nothing(says, stream):
    client = says(THOUGHT, "yes. ", "Quest", "ion: 2", **REASONING)
    body = {"messages": CHAT["messages"], "stop": ["Question:"], "stream": stream}
    answer = await client.post(PATH, body)
    if stream:
        choices = [choice for event in answer.events[:-1] for choice in event["choices"]]
        content = "".join(choice["delta"].get("content") or "" for choice in choices)
    else:
        choices = answer.json["choices"]
        content = choices[0]["message"]["content"]
    assert content == "yes. "
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("stop", "Question:")


async def test_messages_and_responses_match_what_is_seen(says):
    client = says(THOUGHT, "yes. Question: 2", **REASONING)
    body = {"messages": CHAT["messages"], "max_tokens": 9, "stop_sequences": ["Question:"]}
    reply = (await client.post("/v1/messages", body)).json
    assert [block.get("text") for block in reply["content"]] == [None, "yes. "]
    assert (reply["stop_reason"], reply["stop_sequence"]) == ("stop_sequence", "Question:")
    reply = (await client.post("/v1/responses", {"input": "hi", "stop": ["Question:"]})).json
    assert reply["output"][-1]["content"][0]["text"] == "yes. "
    assert reply["status"] == "completed"


@pytest.mark.parametrize("stream", [False, True])
async def test_forced_call_is_made_whatever_stop_strings(client, stream):
    body = {**CHAT, "tool_choice": "required", "stop": ["\n", "{", "}", '"', "f"], "max_tokens": 60}
    answer = await client.post(
        PATH, {**body, "parallel_tool_calls": False, "stream": stream, "seed": 1}
    )
    if stream:
        choices = [choice for event in answer.events[:-1] for choice in event["choices"]]
        calls = [call for each in choices for call in each["delta"].get("tool_calls", ())]
    else:
        choices = answer.json["choices"]
        calls = choices[0]["message"]["tool_calls"]
    assert calls[0]["function"]["name"] == TOOL["function"]["name"]
    json.loads("".join(call["function"]["arguments"] for call in calls))


async def test_the_engine_itself_stops_at_what_is_seen(client):
    body = {**CHAT, "stop": ["e"], "seed": 1, "max_tokens": 100}
    (choice,) = (await client.post(PATH, body)).json["choices"]
    assert choice["stop_reason"] == "e"
    assert "e" not in choice["message"]["content"]
