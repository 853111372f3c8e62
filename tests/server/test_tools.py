"""Tool calls of chats: what the model wrote, as OpenAI's clients read it."""

import json

import pytest

from trouper.bench.studies.server.parsers import HOSTILE, hostile_text
from trouper.frontends.server.asgi.app import create_app
from trouper.frontends.server.shared.settings import ServerSettings

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


async def test_a_call_is_a_part_of_the_message(says):
    reply = (await says(ANSWER).post(PATH, CHAT)).json
    (choice,) = reply["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert call.pop("id").startswith("chatcmpl-tool-")
    assert call == {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


async def test_streamed_call_has_id_and_name_once_and_then_arguments(says):
    answer = await says(*ANSWER).post(PATH, {**CHAT, "stream": True})
    choices = [choice for event in answer.events[:-1] for choice in event["choices"]]
    deltas = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
    assert [each["index"] for each in deltas] == [0] * len(deltas)
    assert deltas[0]["id"].startswith("chatcmpl-tool-")
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


async def test_call_that_is_cut_off_ends_by_length(says):
    reply = (await says(ANSWER[:-3], finish_reason="length").post(PATH, CHAT)).json
    assert reply["choices"][0]["finish_reason"] == "length"


async def test_calls_and_their_results_go_back_into_conversation(says):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        *CHAT["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "2"},
    ]
    assert (await says("two").post(PATH, {**CHAT, "messages": messages})).status == 200


def closed(name, **properties):
    schema = {"type": "object", "properties": properties, "required": [*properties]}
    schema["additionalProperties"] = False
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS = [closed("f", a={"type": "boolean"}), closed("g", b={"enum": ["x", "y"]})]


def forced(choice, **fields):
    return {**CHAT, "tools": TOOLS, "tool_choice": choice, "max_completion_tokens": 200, **fields}


def calls_of(reply):
    (choice,) = reply["choices"]
    return choice["finish_reason"], [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in choice["message"]["tool_calls"]
    ]


async def test_call_that_is_required_is_made_and_valid(client):
    for seed in range(3):
        reply = (
            await client.post(PATH, forced("required", seed=seed, parallel_tool_calls=False))
        ).json
        reason, ((name, arguments),) = calls_of(reply)
        assert reason == "tool_calls"
        assert name in ("f", "g")
        assert arguments in [{"a": True}, {"a": False}, {"b": "x"}, {"b": "y"}]
        assert reply["choices"][0]["message"]["content"] is None


async def test_the_tool_that_is_named_is_called_once(client):
    named = {"type": "function", "function": {"name": "g"}}
    reply = (await client.post(PATH, forced(named))).json
    reason, calls = calls_of(reply)
    assert reason == "stop"
    assert reply["choices"][0]["message"]["content"] == ""
    assert calls in ([("g", {"b": "x"})], [("g", {"b": "y"})])


async def test_only_tools_that_are_allowed_are_called(client):
    only = [{"type": "function", "function": {"name": "g"}}]
    allowed = {"mode": "required", "tools": only}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    reply = (await client.post(PATH, forced(choice, parallel_tool_calls=False))).json
    assert [name for name, _ in calls_of(reply)[1]] == ["g"]


async def test_a_forced_call_streams(client):
    named = {"type": "function", "function": {"name": "g"}}
    answer = await client.post(PATH, forced(named, stream=True))
    choices = [choice for event in answer.events[:-1] for choice in event["choices"]]
    pieces = [call["function"] for each in choices for call in each["delta"].get("tool_calls", ())]
    assert pieces[0]["name"] == "g"
    assert json.loads("".join(piece["arguments"] for piece in pieces))["b"] in ("x", "y")
    assert choices[-1]["finish_reason"] == "stop"


async def test_calls_are_counted_by_dialect_and_outcome(says):
    client = says(ANSWER)
    await client.post(PATH, CHAT)
    metrics = (await client.get("/metrics")).body.decode()
    assert 'tool_calls_total{dialect="json",outcome="bare"} 1.0' in metrics


async def test_without_parallel_calls_the_first_one_counts(says):
    reply = (
        await says(f"{ANSWER}; {ANSWER}").post(PATH, {**CHAT, "parallel_tool_calls": False})
    ).json
    assert len(reply["choices"][0]["message"]["tool_calls"]) == 1


async def test_forced_call_of_tool_without_parameters_has_no_arguments(client):
    tool = {"type": "function", "function": {"name": "f"}}
    fields = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    (choice,) = (await client.post(PATH, {**CHAT, **fields})).json["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {}


async def test_what_compiler_refuses_is_named_as_tool_s(client):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}
    answer = await client.post(PATH, {**CHAT, "tools": [tool], "tool_choice": "required"})
    assert (answer.status, answer.error["param"]) == (400, "tools")


async def test_strict_tools_get_grammar_where_dialect_marks_calls(engine):
    strict = {**TOOL, "function": {**TOOL["function"], "strict": True}}

    def script(number, params):
        yield output(completion("x", 1, finish_reason="stop"), is_last=True)

    async def grammar_of(tools, **settings):
        scripted = ScriptedEngine(engine, script)
        settings = ServerSettings(tool_call_parser="hermes", **settings)
        await Client(create_app(scripted, settings)).post(PATH, {**CHAT, "tools": tools})
        ((_, params, _),) = scripted.asked
        return params.structured_outputs

    assert await grammar_of([TOOL]) is None
    assert '"integer"' in (await grammar_of([strict])).grammar
    assert '"integer"' not in (await grammar_of([TOOL], tool_strict_level="function")).grammar
    assert '"integer"' in (await grammar_of([TOOL], tool_strict_level="parameter")).grammar


async def test_tools_stay_out_of_prompt_where_server_says_so(engine):
    def script(number, params):
        yield output(completion("x", 1, finish_reason="stop"), is_last=True)

    for excludes in (False, True):
        scripted = ScriptedEngine(engine, script)
        settings = ServerSettings(exclude_tools_when_tool_choice_none=excludes)
        app = create_app(scripted, settings)
        await Client(app).post(PATH, {**CHAT, "tool_choice": "none"})
        ((prompt, _, _),) = scripted.asked
        assert ("tools" in prompt) is not excludes


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": []}}}, "tool_choice"),
        ({"tool_choice": "required", "tools": None}, "tool_choice"),
        ({"tools": [TOOL] * 513}, "tools"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [{**TOOL, "type": "x"}]}, "tools[0].type"),
        ({"tools": [{"function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"function": {"name": "f", "parameters": 1}}]}, "tools[0].function.parameters"),
    ],
)
async def test_what_is_wrong_is_named(says, fields, parameter):
    answer = await says("x").post(PATH, {**CHAT, **fields})
    assert (answer.status, answer.error["param"]) == (400, parameter)


@pytest.mark.parametrize("case", HOSTILE, ids=lambda case: ascii("".join(case))[:48])
async def test_a_hostile_answer_is_an_answer(engine, case):
    dialect, beginning, pattern = case
    text = hostile_text(beginning, pattern, 16_384)
    cut = [text[i : i + 1000] for i in range(0, len(text), 1000)]

    def script(number, params):
        pieces = cut if number else [text]  # first the whole answer
        for i, piece in enumerate(pieces):
            is_last = i == len(pieces) - 1
            reason = "length" if is_last else None
            yield output(completion(piece, i, finish_reason=reason), is_last=is_last)

    settings = ServerSettings(tool_call_parser=dialect)
    client = Client(create_app(ScriptedEngine(engine, script), settings))
    whole = (await client.post(PATH, CHAT)).json["choices"][0]["message"]
    streamed = await client.post(PATH, {**CHAT, "stream": True})
    assert streamed.status == 200
    deltas = [choice["delta"] for event in streamed.events[:-1] for choice in event["choices"]]
    for field in ("content", "reasoning"):
        assert "".join(delta.get(field) or "" for delta in deltas) == (whole.get(field) or "")
    arguments = [
        call["function"].get("arguments") or ""
        for delta in deltas
        for call in delta.get("tool_calls", ())
    ]
    assert "".join(arguments) == "".join(
        call["function"]["arguments"] for call in whole.get("tool_calls") or ()
    )


async def test_tools_are_in_prompt_of_template_without_place_for_them(client):
    fields = {**CHAT, "return_prompt_text": True, "max_tokens": 1}
    reply = (await client.post(PATH, fields)).json
    assert '{"name": "f", "parameters": {"type": "object"' in reply["prompt_text"]
    bare = (await client.post(PATH, {**fields, "tools": None})).json
    assert bare["usage"]["prompt_tokens"] < reply["usage"]["prompt_tokens"]


async def test_whole_loop_of_calls_is_in_such_prompt(client):
    function = {"name": "f", "arguments": ""}
    call = {
        "role": "assistant",
        "tool_calls": [{"id": "c", "type": "function", "function": function}],
    }
    result = {"role": "tool", "tool_call_id": "c", "content": "seven"}
    fields = {**CHAT, "messages": [*CHAT["messages"], call, result], "max_tokens": 1}
    text = (await client.post(PATH, {**fields, "return_prompt_text": True})).json["prompt_text"]
    assert '{"name": "f", "arguments": {}}' in text
    assert "Result of the tool f:\nseven" in text
    function["arguments"] = "[1]"
    answer = await client.post(PATH, fields)
    assert (answer.status, answer.error["param"]) == (
        400,
        "messages[1].tool_calls[0].function.arguments",
    )


CUT = '{"name": "f", "arguments": '


@pytest.mark.parametrize("stream", [False, True])
async def test_forced_call_cut_behind_its_name_has_no_arguments(says, stream):
    fields = {"tool_choice": "required", "stream": stream}
    answer = await says(*CUT, finish_reason="length").post(PATH, {**CHAT, **fields})
    if stream:
        choices = [choice for event in answer.events[:-1] for choice in event["choices"]]
        calls = [call for each in choices for call in each["delta"].get("tool_calls", ())]
    else:
        choices = answer.json["choices"]
        calls = choices[0]["message"]["tool_calls"]
    assert calls[0]["function"]["name"] == "f"
    assert "".join(call["function"]["arguments"] for call in calls) == ""
    assert choices[-1]["finish_reason"] == "length"


async def test_cut_call_of_other_apis_is_cut(says):
    tool = {"name": "f", "input_schema": {"type": "object"}}
    body = {
        "messages": CHAT["messages"],
        "max_tokens": 9,
        "tools": [tool],
        "tool_choice": {"type": "any"},
    }
    reply = (await says(CUT, finish_reason="length").post("/v1/messages", body)).json
    assert reply["stop_reason"] == "max_tokens"
    assert reply["content"][-1]["input"] == {"INVALID_JSON": ""}
    body = {"input": "hi", "tools": [{"type": "function", "name": "f"}], "tool_choice": "required"}
    reply = (await says(CUT, finish_reason="length").post("/v1/responses", body)).json
    assert reply["status"] == reply["output"][-1]["status"] == "incomplete"
    assert reply["output"][-1]["arguments"] == ""


@pytest.mark.parametrize("arguments", ["[1]", '{"a": }', '{}, "arguments": {"a": 1}'])
async def test_arguments_that_are_no_object_are_content(says, arguments):
    text = f'{{"name": "f", "arguments": {arguments}}}'
    (choice,) = (await says(text).post(PATH, CHAT)).json["choices"]
    assert choice["message"]["content"] == text
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"
