"""`/v1/responses`."""

import json

import pytest

pytestmark = pytest.mark.anyio

PATH = "/v1/responses"
GREEDY = {"input": "hi", "temperature": 0, "max_output_tokens": 6}


def named_events(body):
    frames = body.decode().split("\n\n")
    assert frames[-1] == ""
    found = []
    for frame in frames[:-1]:
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


async def test_a_whole_answer(client):
    reply = (await client.post(PATH, GREEDY)).json
    chat = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 6}
    wanted = (await client.post("/v1/chat/completions", chat)).json
    (item,) = reply["output"]
    assert item["content"][0]["text"] == wanted["choices"][0]["message"]["content"]
    assert (reply["status"], item["role"]) == ("incomplete", "assistant")
    assert reply["incomplete_details"] == {"reason": "max_output_tokens"}
    assert reply["usage"]["input_tokens"] == wanted["usage"]["prompt_tokens"]
    assert reply["store"] is False


async def test_a_stream_of_typed_events(client):
    whole = (await client.post(PATH, GREEDY)).json
    events = named_events((await client.post(PATH, {**GREEDY, "stream": True})).body)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    text = whole["output"][0]["content"][0]["text"]
    assert "".join(event.get("delta", "") for event in events) == text
    assert events[-1]["response"]["usage"]["output_tokens"] == 6


async def test_instructions_and_parts(client):
    fields = {
        **GREEDY, "instructions": "be brief",
        "input": [
            {"role": "developer", "content": "x"},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "y"}]},
        ],
    }  # fmt: skip
    assert (await client.post(PATH, fields)).status == 200


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"input": []}, 400, "input"), ({"input": None}, 400, "input"),
        ({"input": [{"role": 1}]}, 400, "input[0].role"),
        ({"max_output_tokens": 0}, 400, "max_output_tokens"),
        ({"max_output_tokens": 513}, 400, "max_output_tokens"),
        ({"input": "x" * 100_000}, 400, "input"), ({"temperature": 3}, 400, "temperature"),
        ({"previous_response_id": "x"}, 400, "previous_response_id"), ({"tools": [{}]}, 400, "tools"),
        ({"input": [{"type": "function_call_output"}]}, 400, "input[0]"),
        ({"text": {"format": {}}}, 400, "text.format"), ({"model": "x"}, 404, None),
    ],
)  # fmt: skip
async def test_what_is_refused(client, fields, status, param):
    answer = await client.post(PATH, {**GREEDY, **fields})
    assert (answer.status, answer.error["param"]) == (status, param)
