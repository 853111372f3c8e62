"""Tool calls of chats: what the model wrote, as OpenAI's clients read it."""

import json

import pytest

from trouper.frontends.server.app import create_app

from .client import Client
from .scripted import ScriptedEngine, completion, output

pytestmark = pytest.mark.anyio

PATH = "/v1/chat/completions"
TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "tools": [TOOL]}
ANSWER = '{"name": "f", "arguments": {"a": 1}}'


@pytest.fixture
def says(engine):
    """A client of a server whose model says these pieces."""

    def says(*pieces, finish_reason="stop"):
        def script(number, params):
            for i, piece in enumerate(pieces):
                is_last = i == len(pieces) - 1
                reason = finish_reason if is_last else None
                yield output(completion(piece, i, finish_reason=reason), is_last=is_last)

        return Client(create_app(ScriptedEngine(engine, script)))

    return says


async def test_a_call_is_a_part_of_the_message(says):
    reply = (await says(ANSWER).post(PATH, CHAT)).json
    (choice,) = reply["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert call.pop("id").startswith("call_")
    assert call == {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


async def test_a_streamed_call_has_id_and_name_once_and_then_arguments(says):
    answer = await says(*ANSWER).post(PATH, {**CHAT, "stream": True})
    choices = [choice for event in answer.events[:-1] for choice in event["choices"]]
    deltas = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
    assert [each["index"] for each in deltas] == [0] * len(deltas)
    assert deltas[0]["id"].startswith("call_")
    assert deltas[0]["function"]["name"] == "f"
    assert all("id" not in each and "name" not in each["function"] for each in deltas[1:])
    assert json.loads("".join(each["function"]["arguments"] for each in deltas)) == {"a": 1}
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == ""
    assert choices[-1]["finish_reason"] == "tool_calls"


async def test_an_answer_without_a_call_is_content(says):
    answer = await says("{", '"x": 1}').post(PATH, {**CHAT, "stream": True})
    choices = [choice for event in answer.events[:-1] for choice in event["choices"]]
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == '{"x": 1}'
    assert choices[-1]["finish_reason"] == "stop"


async def test_with_tool_choice_none_a_call_is_text(says):
    reply = (await says(ANSWER).post(PATH, {**CHAT, "tool_choice": "none"})).json
    message = reply["choices"][0]["message"]
    assert message["content"] == ANSWER
    assert "tool_calls" not in message


async def test_a_call_that_is_cut_off_ends_by_length(says):
    reply = (await says(ANSWER[:-3], finish_reason="length").post(PATH, CHAT)).json
    assert reply["choices"][0]["finish_reason"] == "length"


async def test_calls_and_their_results_go_back_into_the_conversation(says):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        *CHAT["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "2"},
    ]
    assert (await says("two").post(PATH, {**CHAT, "messages": messages})).status == 200


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [{**TOOL, "type": "x"}]}, "tools[0].type"),
        ({"tools": [{"function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"function": {"name": "f", "parameters": 1}}]}, "tools[0].function.parameters"),
    ],
)
async def test_what_is_wrong_is_named(says, fields, parameter):
    answer = await says("x").post(PATH, {**CHAT, **fields})
    assert (answer.status, answer.error["param"]) == (400, parameter)
