"""Ids of tool calls: the form that each dialect's template takes, in all three APIs."""

import re

import pytest

from trouper.frontends.dialects.table import DIALECTS
from trouper.frontends.server.generation.tools import CallIds, num_calls

pytestmark = pytest.mark.anyio

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
ANSWERS = {  # two calls, as the model writes them
    "mistral": '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}',
    "kimi_k2": "<|tool_calls_section_begin|>"
    '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>'
    "<|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
    "<|tool_calls_section_end|>",
    "hermes": '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    '<tool_call>{"name": "g", "arguments": {}}</tool_call>',
}
FORMS = {
    "mistral": dict.fromkeys((CHAT, RESPONSES, MESSAGES), r"[a-zA-Z0-9]{9}"),
    "kimi_k2": dict.fromkeys((CHAT, RESPONSES, MESSAGES), r"functions\.[fg]:[01]"),
    "hermes": {
        CHAT: r"chatcmpl-tool-[0-9a-f]{32}", RESPONSES: r"call_[0-9a-f]{32}_[01]",
        MESSAGES: r"toolu_[0-9a-f]{32}_[01]",
    },
}  # fmt: skip
SCHEMA = {"type": "object"}
USER = {"role": "user", "content": "hi"}
FUNCTIONS = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in "fg"
]
BODIES = {
    CHAT: {"messages": [USER], "tools": FUNCTIONS},
    RESPONSES: {"input": "hi", "tools": [{"type": "function", "name": n, "parameters": SCHEMA} for n in "fg"]},
    MESSAGES: {"messages": [USER], "max_tokens": 9, "tools": [{"name": n, "input_schema": SCHEMA} for n in "fg"]},
}  # fmt: skip


def ids_of(path, reply):
    if path == CHAT:
        return [call["id"] for call in reply["choices"][0]["message"]["tool_calls"]]
    if path == RESPONSES:
        return [item["call_id"] for item in reply["output"] if item["type"] == "function_call"]
    return [block["id"] for block in reply["content"] if block["type"] == "tool_use"]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("dialect", ANSWERS)
async def test_ids_have_the_form_of_the_dialect(says, dialect, path):
    client = says(ANSWERS[dialect], tool_call_parser=dialect)
    ids = ids_of(path, (await client.post(path, BODIES[path])).json)
    assert len(set(ids)) == 2
    assert all(re.fullmatch(FORMS[dialect][path], id) for id in ids), ids
    if dialect == "kimi_k2":
        assert ids == ["functions.f:0", "functions.g:1"]
    else:
        assert ids_of(path, (await client.post(path, BODIES[path])).json) != ids


async def test_numbers_go_on_through_the_conversation(says):
    client = says(ANSWERS["kimi_k2"], tool_call_parser="kimi_k2")
    first = (await client.post(CHAT, BODIES[CHAT])).json["choices"][0]["message"]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": "1"} for call in first["tool_calls"]
    ]
    messages = [USER, first, *results, USER]
    reply = (await client.post(CHAT, {**BODIES[CHAT], "messages": messages})).json
    assert ids_of(CHAT, reply) == ["functions.f:2", "functions.g:3"]


@pytest.mark.parametrize("dialect", ANSWERS)
async def test_a_stream_says_each_id_once(says, dialect):
    client = says(*ANSWERS[dialect], tool_call_parser=dialect)
    answer = await client.post(CHAT, {**BODIES[CHAT], "stream": True})
    choices = [choice for event in answer.events[:-1] for choice in event["choices"]]
    deltas = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
    ids = {delta["index"]: delta["id"] for delta in deltas if "id" in delta}
    assert len([delta for delta in deltas if "id" in delta]) == 2
    assert all(re.fullmatch(FORMS[dialect][CHAT], id) for id in ids.values())


def test_no_two_calls_of_reply_share_id():
    for form in ("random", "letters"):
        ids = CallIds(form, "seed")
        made = {ids.of(i, "f", choice) for i in range(50) for choice in range(50)}
        assert len(made) == 2500
        assert CallIds(form, "other").of(0, "f") not in made


def test_every_dialect_has_a_form():
    forms = {dialect.name: dialect.id_form for dialect in DIALECTS}
    assert {name for name, form in forms.items() if form != "random"} == {"mistral", "kimi_k2"}


def test_calls_in_a_conversation_are_counted():
    messages = [USER, {"role": "assistant", "tool_calls": [{}, {}]}, {"tool_calls": None}, {"tool_calls": "x"}]  # fmt: skip
    assert num_calls(messages) == 2
