"""`/v1/responses`: items in and out, tools, formats, and the events in the order of OpenAI's types."""

import json

import pytest
from openai._models import construct_type
from openai.types.responses import Response, ResponseStreamEvent

pytestmark = pytest.mark.anyio

PATH = "/v1/responses"
GREEDY = {"input": "hi", "temperature": 0, "max_output_tokens": 6}
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"type": "function", "name": "f", "description": "adds", "parameters": PARAMETERS}
WITH_TOOL = {"input": "hi", "tools": [TOOL]}
CALL = '{"name": "f", "arguments": {"a": 1}}'
CALL_ITEM = {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 1}'}
OUTPUT_ITEM = {"type": "function_call_output", "call_id": "c", "output": "2"}
BAD_TOOL = {
    **TOOL,
    "parameters": {"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}},
}
NAMESPACE = {"type": "namespace", "name": "n", "description": "numbers", "tools": [TOOL]}
CUSTOM = {"type": "custom", "name": "patch", "description": "changes a file"}
ENCRYPTED = {"include": ["reasoning.encrypted_content"]}
ADDED, DONE = "response.output_item.added", "response.output_item.done"


def named_events(body):
    """The events of a stream, each of which the client's types hold."""
    frames = body.decode().split("\n\n")
    assert frames[-1] == ""
    found = []
    for frame in frames[:-1]:
        lines = [line for line in frame.split("\n") if not line.startswith("id: ")]
        name, data = lines
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        typed = construct_type(type_=ResponseStreamEvent, value=event)
        type(typed).model_validate(event, strict=True)
        found.append(event)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def kinds_of(events):
    kinds = [event["type"] for event in events]
    return [kind for i, kind in enumerate(kinds) if not i or kind != kinds[i - 1]]


async def test_a_whole_answer(client):
    reply = (await client.post(PATH, GREEDY)).json
    Response.model_validate(reply, strict=True)
    chat = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 6}
    wanted = (await client.post("/v1/chat/completions", chat)).json
    (item,) = reply["output"]
    assert item["content"][0]["text"] == wanted["choices"][0]["message"]["content"]
    assert (reply["status"], item["role"]) == ("incomplete", "assistant")
    assert reply["incomplete_details"] == {"reason": "max_output_tokens"}
    assert reply["usage"]["input_tokens"] == wanted["usage"]["prompt_tokens"]
    assert reply["store"] is True


async def test_prompt_and_raw_text_are_shown_on_request(client):
    asked = {**GREEDY, "enable_response_messages": True}
    reply = (await client.post(PATH, asked)).json
    (prompt,), (answer,) = reply["input_messages"], reply["output_messages"]
    assert prompt["type"] == answer["type"] == "raw_message_tokens"
    assert len(prompt["tokens"]) == reply["usage"]["input_tokens"]
    assert len(answer["tokens"]) == reply["usage"]["output_tokens"]
    assert answer["message"] == reply["output"][0]["content"][0]["text"]
    text = (await client.post("/detokenize", {"tokens": prompt["tokens"]})).json["prompt"]
    assert prompt["message"] == text
    last = named_events((await client.post(PATH, {**asked, "stream": True})).body)[-1]["response"]
    assert last["input_messages"] == reply["input_messages"]
    assert last["output_messages"] == reply["output_messages"]
    assert "input_messages" not in (await client.post(PATH, GREEDY)).json


async def test_a_text_has_the_logprobs_of_its_tokens(client):
    asked = {**GREEDY, "include": ["message.output_text.logprobs"], "top_logprobs": 3}
    reply = (await client.post(PATH, asked)).json
    Response.model_validate(reply, strict=True)
    part = reply["output"][0]["content"][0]
    assert "".join(each["token"] for each in part["logprobs"]) == part["text"]
    assert all(len(each["top_logprobs"]) == 3 and each["logprob"] <= 0 for each in part["logprobs"])
    chat = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 6}
    wanted = await client.post(
        "/v1/chat/completions", {**chat, "logprobs": True, "top_logprobs": 3}
    )
    assert part["logprobs"] == wanted.json["choices"][0]["logprobs"]["content"]
    events = named_events((await client.post(PATH, {**asked, "stream": True})).body)
    deltas = [e["logprobs"] for e in events if e["type"] == "response.output_text.delta"]
    assert all(deltas)
    (done,) = [e["logprobs"] for e in events if e["type"] == "response.output_text.done"]
    assert [each for delta in deltas for each in delta] == part["logprobs"] == done
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == done
    bare = (await client.post(PATH, GREEDY)).json["output"][0]["content"][0]
    assert "logprobs" not in bare


async def test_a_format_is_not_said_in_two_ways(client):
    text = {"format": {"type": "json_object"}}
    both = {**GREEDY, "text": text, "structured_outputs": {"regex": "a"}}
    answer = await client.post(PATH, both)
    assert answer.status == 400
    assert answer.error["message"] == "structured_outputs: cannot be combined with text.format"


@pytest.mark.parametrize(
    ("name", "value"), [("min_p", 7), ("logit_bias", {"99999": 1}), ("structured_outputs", {"regex": "(("})]
)  # fmt: skip
async def test_wrong_shared_field_is_named_as_client_has_it(client, name, value):
    answer = await client.post(PATH, {**GREEDY, name: value})
    assert (answer.status, answer.error["param"]) == (400, name)


async def test_a_stream_of_typed_events(client):
    whole = (await client.post(PATH, GREEDY)).json
    events = named_events((await client.post(PATH, {**GREEDY, "stream": True})).body)
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    text = whole["output"][0]["content"][0]["text"]
    assert "".join(event.get("delta", "") for event in events) == text
    assert events[-1]["response"]["usage"]["output_tokens"] == 6


async def test_a_call_is_an_item(says):
    reply = (await says(CALL).post(PATH, WITH_TOOL)).json
    Response.model_validate(reply, strict=True)
    (call,) = reply["output"]
    assert call.pop("id").startswith("fc_")
    assert call.pop("call_id").startswith("call_")
    assert call == {
        "type": "function_call", "status": "completed", "name": "f", "arguments": '{"a": 1}',
    }  # fmt: skip
    assert (reply["tools"], reply["tool_choice"], reply["status"]) == ([TOOL], "auto", "completed")


@pytest.mark.parametrize("pieces", [[CALL], list(CALL)])
async def test_a_streamed_call_has_its_own_events(says, pieces):
    events = named_events((await says(*pieces).post(PATH, {**WITH_TOOL, "stream": True})).body)
    assert kinds_of(events) == [
        "response.created", "response.in_progress", ADDED,
        "response.function_call_arguments.delta", "response.function_call_arguments.done",
        DONE, "response.completed",
    ]  # fmt: skip
    added, done, last = (next(e for e in events if e["type"] == kind) for kind in (ADDED, DONE, "response.completed"))  # fmt: skip
    assert (added["item"]["status"], added["item"]["arguments"]) == ("in_progress", "")
    assert "".join(e["delta"] for e in events if "delta" in e) == '{"a": 1}'
    assert last["response"]["output"] == [done["item"]]
    assert done["item"] == {**added["item"], "status": "completed", "arguments": '{"a": 1}'}


async def test_several_calls_are_several_items_with_ids_of_their_own(says):
    two = f"[{CALL}, {CALL}]"
    events = named_events((await says(*two).post(PATH, {**WITH_TOOL, "stream": True})).body)
    items = events[-1]["response"]["output"]
    assert [item["type"] for item in items] == ["function_call"] * 2
    assert len({item["id"] for item in items} | {item["call_id"] for item in items}) == 4
    assert [e["output_index"] for e in events if e["type"] == ADDED] == [0, 1]


async def test_a_call_that_is_cut_is_incomplete(says):
    reply = (await says(CALL[:-4], finish_reason="length").post(PATH, WITH_TOOL)).json
    assert (reply["status"], reply["output"][-1]["status"]) == ("incomplete", "incomplete")
    assert reply["incomplete_details"] == {"reason": "max_output_tokens"}


REASONED = ("<think>", "hm, ", "so</th", "ink>\n", CALL)


async def test_reasoning_is_an_item_before_the_others(says):
    client = says(*REASONED, reasoning_parser="deepseek_r1")
    reply = (await client.post(PATH, WITH_TOOL)).json
    Response.model_validate(reply, strict=True)
    assert [item["type"] for item in reply["output"]] == ["reasoning", "function_call"]
    assert reply["output"][0]["content"] == [{"type": "reasoning_text", "text": "hm, so"}]
    events = named_events((await client.post(PATH, {**WITH_TOOL, "stream": True})).body)
    assert kinds_of(events)[2:8] == [
        ADDED, "response.content_part.added", "response.reasoning_text.delta",
        "response.reasoning_text.done", "response.content_part.done", DONE,
    ]  # fmt: skip
    deltas = [e["delta"] for e in events if e["type"] == "response.reasoning_text.delta"]
    assert "".join(deltas) == "hm, so"


async def test_reasoning_goes_back_into_the_conversation(says):
    client = says(*REASONED, reasoning_parser="deepseek_r1", responses_store_bytes=2**20)
    first = (await client.post(PATH, WITH_TOOL)).json
    result = {**OUTPUT_ITEM, "call_id": first["output"][1]["call_id"]}
    for fields in (
        {"input": [{"role": "user", "content": "hi"}, *first["output"], result]},
        {"input": [result], "previous_response_id": first["id"]},
    ):
        await client.post(PATH, fields)
        prompt, *_ = client.engine.asked[-1]
        assert [message["role"] for message in prompt["messages"]] == ["user", "assistant", "tool"]
        assert prompt["messages"][1]["reasoning_content"] == "hm, so"


async def test_reasoning_comes_back_as_one_string_that_client_keeps(says):
    client = says(*REASONED, reasoning_parser="deepseek_r1")
    events = named_events(
        (await client.post(PATH, {**WITH_TOOL, **ENCRYPTED, "stream": True})).body
    )
    reasoning, call = events[-1]["response"]["output"]
    assert reasoning in [event.get("item") for event in events if event["type"] == DONE]
    kept = {"type": "reasoning", "summary": [], "encrypted_content": reasoning["encrypted_content"]}
    result = {**OUTPUT_ITEM, "call_id": call["call_id"]}
    items = [{"role": "user", "content": "hi"}, kept, call, result]
    await client.post(PATH, {**WITH_TOOL, **ENCRYPTED, "input": items})
    prompt, *_ = client.engine.asked[-1]
    assert prompt["messages"][1]["reasoning_content"] == "hm, so"


@pytest.mark.parametrize("content", ["gAAAAx", "trouper:reasoning:x", "trouper:compaction:aGk="])
async def test_reasoning_that_another_server_has_encrypted_is_left_out(says, content):
    client = says("yes")
    items = [
        {"role": "user", "content": "hi"},
        {"type": "reasoning", "summary": [], "encrypted_content": content},
        {"type": "web_search_call", "status": "completed"},
        {"role": "user", "content": "so?"},
    ]
    assert (await client.post(PATH, {"input": items})).status == 200
    prompt, *_ = client.engine.asked[0]
    assert [message["role"] for message in prompt["messages"]] == ["user", "user"]


async def functions_of(client, tools, **fields):
    """The functions of the chat that these tools become, and the answer."""
    answer = await client.post(PATH, {"input": "hi", "tools": tools, **fields})
    assert answer.status == 200, answer.body
    prompt, *_ = client.engine.asked[-1]
    return [tool["function"] for tool in prompt["tools"]], answer.json


async def test_unavailable_tool_is_left_out(says):
    tools = [{"type": "web_search", "external_web_access": False}, TOOL]
    functions, reply = await functions_of(says("x"), tools)
    assert [each["name"] for each in functions] == ["f"]
    assert reply["tools"] == [TOOL]


async def test_left_out_tool_is_named_and_logged(client, caplog):
    fields = {**GREEDY, "tools": [TOOL, {"type": "web_search"}], "temprature": 0}
    for _ in range(2):
        headers = (await client.post(PATH, fields)).headers
        assert headers["x-trouper-ignored-tools"] == "web_search"
        assert headers["x-trouper-ignored-fields"] == "temprature"
    assert [
        record.getMessage() for record in caplog.records if "web_search" in record.msg % record.args
    ] == [f"{PATH}: left out the tool 'web_search', which this server cannot run"]


async def test_namespace_becomes_its_functions_and_calls_name_it_again(says):
    called = '{"name": "n__f", "arguments": {"a": 1}}'
    more = {**NAMESPACE, "tools": [TOOL, {**TOOL, "name": "g"}]}
    functions, reply = await functions_of(says(called), [{**TOOL, "name": "h"}, more])
    assert [each["name"] for each in functions] == ["h", "n__f", "n__g"]
    assert [each["description"] for each in functions] == ["adds", "n: numbers\n\nadds", "adds"]
    Response.model_validate(reply, strict=True)
    (call,) = reply["output"]
    assert (call["type"], call["namespace"], call["name"]) == ("function_call", "n", "f")
    client = says("two")
    items = [{"role": "user", "content": "hi"}, call, {**OUTPUT_ITEM, "call_id": call["call_id"]}]
    await client.post(PATH, {"input": items, "tools": [more]})
    prompt, *_ = client.engine.asked[0]
    assert prompt["messages"][1]["tool_calls"][0]["function"]["name"] == "n__f"


async def test_names_too_long_together_are_cut_and_stay_apart(says):
    long = {**NAMESPACE, "name": "n" * 100, "tools": [{**TOOL, "name": c + "f" * 60} for c in "ab"]}
    functions, _ = await functions_of(says("x"), [long])
    names = {each["name"] for each in functions}
    assert len(names) == 2
    assert {len(name) for name in names} == {128}


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "function", "name": "f"},
        {"type": "function", "name": "f", "namespace": "n"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}, {"type": "web_search"}]},
    ],
)  # fmt: skip
async def test_a_tool_of_a_namespace_can_be_chosen(client, choice):
    closed = {
        **TOOL,
        "parameters": {**PARAMETERS, "required": ["a"], "additionalProperties": False},
    }
    tools = [{**NAMESPACE, "tools": [closed]}, {**closed, "name": "g"}, {"type": "web_search"}]
    fields = {"input": "hi", "tools": tools, "tool_choice": choice, "max_output_tokens": 200}
    reply = (await client.post(PATH, {**fields, "parallel_tool_calls": False})).json
    (call,) = reply["output"]
    assert (call["namespace"], call["name"]) == ("n", "f")


PATCHED = '{"name": "patch", "arguments": {"input": "+ a \\"b\\"\\n"}}'


@pytest.mark.parametrize("pieces", [[PATCHED], list(PATCHED)])
async def test_a_custom_tool_is_called_with_a_text(says, pieces):
    lark = {"type": "grammar", "syntax": "lark", "definition": 'start: "+" /.+/'}
    tools = [{**CUSTOM, "format": lark}]
    (function,), reply = await functions_of(says(*pieces), tools)
    assert function["parameters"]["required"] == ["input"]
    assert function["description"].startswith("changes a file")
    assert lark["definition"] in function["description"]
    Response.model_validate(reply, strict=True)
    (call,) = reply["output"]
    assert (call["type"], call["name"], call["input"]) == ("custom_tool_call", "patch", '+ a "b"\n')
    answer = await says(*pieces).post(PATH, {"input": "hi", "tools": tools, "stream": True})
    events = named_events(answer.body)
    assert kinds_of(events)[2:-1] == [
        ADDED, "response.custom_tool_call_input.delta", "response.custom_tool_call_input.done", DONE,
    ]  # fmt: skip
    assert next(e["item"]["input"] for e in events if e["type"] == ADDED) == ""
    assert {e.get("delta") or e.get("input") for e in events[3:5]} == {'+ a "b"\n'}


async def test_call_of_custom_tool_and_its_output_go_back(says):
    client = says("done")
    call = {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "+ a"}
    output = {"type": "custom_tool_call_output", "call_id": "c", "output": "ok"}
    fields = {"input": [{"role": "user", "content": "hi"}, call, output], "tools": [CUSTOM]}
    assert (await client.post(PATH, fields)).status == 200
    prompt, *_ = client.engine.asked[0]
    _, called, result = prompt["messages"]
    assert called["tool_calls"][0]["function"] == {"name": "patch", "arguments": '{"input":"+ a"}'}
    assert result == {"role": "tool", "tool_call_id": "c", "content": "ok"}


async def test_a_custom_tool_keeps_to_its_regular_expression(client):
    regex = {"type": "grammar", "syntax": "regex", "definition": "a{2}|b{3}"}
    fields = {
        "tools": [{**CUSTOM, "format": regex}],
        "tool_choice": {"type": "custom", "name": "patch"},
    }
    reply = (await client.post(PATH, {"input": "hi", "max_output_tokens": 100, **fields})).json
    assert reply["output"][0]["input"] in ("aa", "bbb")


async def test_custom_tool_input_is_kept(says):
    said = '{"name": "patch", "arguments": {"text": "+ a"}}'
    _, reply = await functions_of(says(said), [CUSTOM])
    assert json.loads(reply["output"][0]["input"]) == {"text": "+ a"}


SHELL = {"type": "local_shell"}
LISTED = '{"name": "local_shell", "arguments": {"command": ["ls", "-l"], "timeout_ms": 9}}'


async def test_local_shell_is_called_with_action_and_takes_its_output(says):
    answer = await says(*LISTED).post(PATH, {"input": "hi", "tools": [SHELL], "stream": True})
    events = named_events(answer.body)
    assert kinds_of(events)[2:-1] == [ADDED, DONE]
    (call,) = events[-1]["response"]["output"]
    action = {"type": "exec", "command": ["ls", "-l"], "timeout_ms": 9, "env": {}}
    assert (call["type"], call["action"]) == ("local_shell_call", action)
    for name in ("call_id", "id"):
        client = says("done")
        output = {"type": "local_shell_call_output", name: call["call_id"], "output": "x"}
        items = [{"role": "user", "content": "hi"}, call, output]
        assert (await client.post(PATH, {"input": items, "tools": [SHELL]})).status == 200
        prompt, *_ = client.engine.asked[0]
        arguments = prompt["messages"][1]["tool_calls"][0]["function"]["arguments"]
        assert json.loads(arguments) == {"command": ["ls", "-l"], "timeout_ms": 9}


async def test_local_shell_without_command_is_shown_as_function_called(says):
    said = '{"name": "local_shell", "arguments": {"command": "ls"}}'
    answer = await says(*said).post(PATH, {"input": "hi", "tools": [SHELL], "stream": True})
    (call,) = named_events(answer.body)[-1]["response"]["output"]
    assert (call["type"], call["name"]) == ("function_call", "local_shell")
    assert json.loads(call["arguments"]) == {"command": "ls"}


async def test_an_empty_answer_is_an_empty_message(says):
    events = named_events((await says("").post(PATH, {"input": "hi", "stream": True})).body)
    (item,) = events[-1]["response"]["output"]
    assert item["content"] == [{"type": "output_text", "text": "", "annotations": []}]


async def test_items_of_assistant_turn_are_one_message_of_chat(says):
    client = says("two")
    fields = {
        **WITH_TOOL,
        "instructions": "be brief",
        "input": [
            {"role": "developer", "content": "x"},
            {"role": "user", "content": [{"type": "input_text", "text": "y"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "z"}]},
            CALL_ITEM, {**CALL_ITEM, "call_id": "d"},
            OUTPUT_ITEM, {**OUTPUT_ITEM, "call_id": "d", "output": [{"type": "input_text", "text": "3"}]},
            {"role": "assistant", "content": "done"},
        ],
    }  # fmt: skip
    assert (await client.post(PATH, fields)).status == 200
    prompt, *_ = client.engine.asked[0]
    function = {"name": "f", "arguments": '{"a": 1}'}
    assert prompt["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "system", "content": "x"},
        {"role": "user", "content": [{"type": "input_text", "text": "y"}]},
        {
            "role": "assistant",
            "reasoning_content": "r",
            "content": [{"type": "output_text", "text": "z"}],
            "tool_calls": [
                {"id": id, "type": "function", "function": function} for id in ("c", "d")
            ],
        },
        {"role": "tool", "tool_call_id": "c", "content": "2"},
        {"role": "tool", "tool_call_id": "d", "content": [{"type": "input_text", "text": "3"}]},
        {"role": "assistant", "content": "done"},
    ]
    (tool,) = prompt["tools"]
    assert tool == {
        "type": "function",
        "function": {"name": "f", "description": "adds", "parameters": PARAMETERS},
    }


async def test_output_of_response_is_input_of_next(client, says):
    reply = (await says(f"[{CALL}, {CALL}]").post(PATH, WITH_TOOL)).json
    outputs = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "2"}
        for item in reply["output"]
    ]
    items = [{"role": "user", "content": "hi"}, *reply["output"], *outputs]
    assert (await client.post(PATH, {**GREEDY, "input": items})).status == 200


@pytest.mark.parametrize("choice", ["none", "auto"])
async def test_a_choice_without_tools_is_allowed(client, choice):
    fields = {**GREEDY, "tools": [], "tool_choice": choice}
    assert (await client.post(PATH, fields)).status == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"input": []}, 400, "input"), ({"input": None}, 400, "input"),
        ({"input": [{"role": 1}]}, 400, "input[0].role"),
        ({"instructions": "x", "input": [{"role": "user", "content": [{"type": "input_image"}]}]}, 400, "input[0].content[0].image_url"),
        ({"max_output_tokens": 0}, 400, "max_output_tokens"),
        ({"max_output_tokens": 513}, 400, "max_output_tokens"),
        ({"input": "x" * 100_000}, 400, "input"), ({"temperature": 3}, 400, "temperature"),
        ({"previous_response_id": "x"}, 404, "previous_response_id"),
        ({"tools": [{}]}, 400, "tools[0].type"),
        ({"tools": [{"type": "web_search"}]}, 400, "tools[0].type"),
        ({"tools": [TOOL, {**TOOL, "name": "a b"}]}, 400, "tools[1].name"),
        ({"tools": [{**TOOL, "parameters": 1}]}, 400, "tools[0].parameters"),
        ({"tools": [TOOL], "tool_choice": "sometimes"}, 400, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "file_search"}}, 400, "tool_choice.type"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, 400, "tool_choice.tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "tools": [3]}}, 400, "tool_choice.tools[0].type"),
        ({"input": [OUTPUT_ITEM]}, 400, "input[0].call_id"),
        ({"input": [CALL_ITEM, {**OUTPUT_ITEM, "output": None}]}, 400, "input[1].output"),
        ({"input": [{**CALL_ITEM, "arguments": {}}]}, 400, "input[0].arguments"),
        ({"input": [{"type": "file_search_call"}]}, 400, "input[0].type"),
        ({"input": [{"type": "web_search_call"}]}, 400, "input"),
        ({"tools": [{"type": "mcp", "server_label": "x"}, {"type": "namespace", "name": "n", "tools": []}]}, 400, "tools[0].type"),
        ({"tools": [{"type": "namespace", "tools": []}]}, 400, "tools[0].name"),
        ({"tools": [TOOL, {"type": "namespace", "name": "n"}]}, 400, "tools[1].tools"),
        ({"tools": [TOOL, {"type": "namespace", "name": "n", "tools": [3]}]}, 400, "tools[1].tools[0].type"),
        ({"tools": [TOOL, {"type": "namespace", "name": "n", "tools": [{"type": "web_search"}]}]}, 400, "tools[1].tools[0].type"),
        ({"tools": [TOOL, {"type": "namespace", "name": "n", "tools": [{**TOOL, "name": "a b"}]}]}, 400, "tools[1].tools[0].name"),
        ({"tools": [{**TOOL, "name": "n__f"}, NAMESPACE]}, 400, "tools[1].tools[0].name"),
        ({"tools": [{"type": "custom"}]}, 400, "tools[0].name"),
        ({"tools": [BAD_TOOL], "tool_choice": "required"}, 400, "tools"),
        ({"tools": [{**CUSTOM, "format": {"type": "grammar", "syntax": "ebnf", "definition": "x"}}]}, 400, "tools[0].format"),
        ({"tools": [{**CUSTOM, "format": {"type": "binary"}}]}, 400, "tools[0].format.type"),
        ({"tools": [TOOL, CUSTOM], "tool_choice": {"type": "custom", "name": "what"}}, 400, "tool_choice"),
        ({"tools": [TOOL, {"type": "web_search"}], "tool_choice": {"type": "web_search"}}, 400, "tool_choice.type"),
        ({"input": [{"type": "local_shell_call", "call_id": "c"}]}, 400, "input[0].action"),
        ({"input": [{"type": "custom_tool_call", "call_id": "c", "name": "patch"}]}, 400, "input[0].input"),
        ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, 400, "input[0].encrypted_content"),
        ({"input": [{"type": 1}]}, 400, "input[0].type"),
        ({"input": [{"type": "reasoning", "content": [{}]}]}, 400, "input[0].content"),
        ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, 400, "input"),
        ({"truncation": "auto"}, 400, "truncation"),
        ({"top_logprobs": 3}, 400, "top_logprobs"),
        ({"top_logprobs": 99, "include": ["message.output_text.logprobs"]}, 400, "top_logprobs"),
        ({"text": {"format": {}}}, 400, "text.format"),
        ({"text": {"format": {"type": "json_schema"}}}, 400, "text.format"),
        ({"model": "x"}, 404, None),
    ],
)  # fmt: skip
async def test_what_is_refused(client, fields, status, param, stream):
    answer = await client.post(PATH, {**GREEDY, **fields, "stream": stream})
    assert (answer.status, answer.error["param"]) == (status, param)


async def test_a_built_in_tool_is_named(client):
    answer = await client.post(PATH, {**GREEDY, "tools": [{"type": "web_search"}]})
    assert "web_search" in answer.error["message"]
    assert answer.error["code"] == "not_supported"
