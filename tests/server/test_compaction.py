"""`/v1/responses/compact` and `/v1/responses/input_tokens`."""

import pytest

pytestmark = pytest.mark.anyio

PATH = "/v1/responses"
COMPACT, COUNT = f"{PATH}/compact", f"{PATH}/input_tokens"
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "2"}
TALK = [
    {"role": "developer", "content": "be brief"},
    {"role": "user", "content": "hi"},
    CALL,
    OUTPUT,
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": [{"type": "input_text", "text": "so?"}]},
]


async def test_conversation_becomes_what_user_said_and_summary(says):
    client = says("all is well", finish_reason="stop")
    reply = (await client.post(COMPACT, {"input": TALK, "tools": [TOOL], "stream": True})).json
    assert reply["object"] == "response.compaction"
    first, second, compaction = reply["output"]
    assert [each["content"][0]["text"] for each in (first, second)] == ["hi", "so?"]
    assert compaction["type"] == "compaction"
    assert reply["usage"]["output_tokens"] > 0
    prompt, *_ = client.engine.asked[0]
    roles = [message["role"] for message in prompt["messages"]]
    assert roles == ["system", "user", "assistant", "tool", "assistant", "user", "user"]
    assert "summary" in prompt["messages"][-1]["content"]
    assert len(prompt["tools"]) == 1

    items = [*reply["output"], {"role": "user", "content": "go on"}]
    assert (await client.post(PATH, {"input": items})).status == 200
    prompt, *_ = client.engine.asked[1]
    summary = prompt["messages"][2]
    assert summary["role"] == "user"
    assert summary["content"].endswith("\nall is well")


async def test_a_conversation_that_is_kept_can_be_compacted(says):
    client = says("yes", responses_store_bytes=2**20)
    first = (await client.post(PATH, {"input": "hi"})).json
    reply = (await client.post(COMPACT, {"previous_response_id": first["id"]})).json
    assert [item["type"] for item in reply["output"]] == ["message", "compaction"]
    assert (await client.get(f"{PATH}/{reply['id']}")).status == 404


async def test_reasoning_is_no_summary(says):
    client = says("<think>hm", finish_reason="length", reasoning_parser="deepseek_r1")
    answer = await client.post(COMPACT, {"input": TALK})
    assert (answer.status, answer.error["code"]) == (500, "no_summary")


async def test_input_tokens_are_those_of_the_prompt(client):
    fields = {"input": TALK[:2], "instructions": "x", "tools": [TOOL]}
    counted = (await client.post(COUNT, fields)).json
    reply = (await client.post(PATH, {**fields, "max_output_tokens": 1})).json
    wanted = {"object": "response.input_tokens", "input_tokens": reply["usage"]["input_tokens"]}
    assert counted == wanted


@pytest.mark.parametrize("path", [COMPACT, COUNT])
@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({}, 400, "input"),
        ({"input": []}, 400, "input"),
        ({"input": [{"type": "what"}]}, 400, "input[0].type"),
        ({"input": "x" * 100_000}, 400, "input"),
        ({"input": "x", "model": "what"}, 404, None),
        ({"input": "x", "tools": [{**TOOL, "name": "a b"}]}, 400, "tools[0].name"),
    ],
)
async def test_what_is_refused(client, path, fields, status, param):
    answer = await client.post(path, fields)
    assert (answer.status, answer.error["param"]) == (status, param)


async def test_no_response_has_these_names(client):
    assert (await client.get(COMPACT)).status == 405
