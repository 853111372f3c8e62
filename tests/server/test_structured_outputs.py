"""Structured outputs over HTTP: each way to ask for one, whole and streamed."""

import json
import re
import sys

import pytest

from trouper import AsyncLLMEngine, EngineArgs
from trouper.frontends.server.asgi.app import create_app
from trouper.frontends.server.shared.settings import ServerSettings

from .client import Client

pytestmark = pytest.mark.anyio

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES = [{"role": "user", "content": "hi"}]
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["x", "y"]}, "big": {"type": "boolean"}},
    "required": ["kind", "big"],
    "additionalProperties": False,
}
WAYS = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
    {"structured_outputs": {"json": SCHEMA}},
    {"guided_json": SCHEMA, "guided_decoding_backend": "xgrammar"},
    {"guided_json": json.dumps(SCHEMA), "guided_whitespace_pattern": "[ ]?"},
]


def is_answer(text):
    value = json.loads(text)
    return value.keys() == {"kind", "big"} and value["kind"] in ("x", "y")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("way", WAYS[:3], ids=lambda way: next(iter(way)))
async def test_what_cannot_be_compiled_is_named_as_client_gave_it(client, path, way):
    bad = json.loads(json.dumps(way).replace(json.dumps(SCHEMA), '{"not": {}}'))
    answer = await client.post(path, {"messages": MESSAGES, "prompt": "x", **bad})
    assert (answer.status, answer.error["param"]) == (400, next(iter(way)))
    assert answer.error["message"].startswith(next(iter(way)))


@pytest.mark.parametrize("way", WAYS, ids=lambda way: next(iter(way)))
async def test_a_schema_is_asked_for_in_each_way(client, way):
    fields = {"max_tokens": 200, "seed": 3, **way}
    reply = (await client.post(CHAT, {"messages": MESSAGES, **fields})).json
    assert is_answer(reply["choices"][0]["message"]["content"])
    assert reply["choices"][0]["finish_reason"] == "stop"
    reply = (await client.post(COMPLETIONS, {"prompt": ["a", "b"], **fields})).json
    assert all(is_answer(choice["text"]) for choice in reply["choices"])


async def test_a_stream_adds_up_to_the_whole_answer(client):
    fields = {"messages": MESSAGES, "max_tokens": 200, "seed": 3, **WAYS[0]}
    whole = (await client.post(CHAT, fields)).json["choices"][0]["message"]["content"]
    *events, done = (await client.post(CHAT, {**fields, "stream": True})).events
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == whole
    assert done == "[DONE]"


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_regex": "[0-9]{4}"}, "[0-9]{4}"),
        ({"guided_choice": ["red", "blue"]}, "red|blue"),
        ({"guided_grammar": 'root ::= "a" "b" [0-9]'}, "ab[0-9]"),
        ({"structured_outputs": {"grammar": "start: /[a-c]{3}/"}}, "[a-c]{3}"),
        ({"response_format": {"type": "text"}, "guided_regex": "x"}, "x"),
    ],
)
async def test_other_kinds(client, fields, pattern):
    reply = (await client.post(COMPLETIONS, {"prompt": "x", "n": 3, "seed": 1, **fields})).json
    assert all(re.fullmatch(pattern, choice["text"]) for choice in reply["choices"])


async def test_responses_have_a_format(client):
    given = {"type": "json_schema", "name": "n", "schema": SCHEMA}
    fields = {"input": "hi", "max_output_tokens": 200, "seed": 3, "text": {"format": given}}
    reply = (await client.post(RESPONSES, fields)).json
    assert is_answer(reply["output"][0]["content"][0]["text"])
    bad = {**fields, "text": {"format": {"type": "json_schema", "schema": {"type": "objec"}}}}
    answer = await client.post(RESPONSES, bad)
    assert (answer.status, answer.json["error"]["code"]) == (400, "invalid_schema")
    assert answer.json["error"]["param"] == "text.format"


TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, WAYS[0], "response_format"),
        (CHAT, {"tools": [TOOL], "tool_choice": "required"}, "tools"),
        (COMPLETIONS, {"structured_outputs": {"regex": "x"}}, "structured_outputs"),
        (RESPONSES, {"text": {"format": {"type": "json_object"}}}, "text.format"),
    ],
)
async def test_client_reads_what_server_cannot_do_without_its_extra(
    client, monkeypatch, path, fields, param
):
    monkeypatch.setitem(sys.modules, "llguidance", None)  # importing it raises ImportError
    asked = {CHAT: {"messages": MESSAGES}, COMPLETIONS: {"prompt": "x"}, RESPONSES: {"input": "x"}}
    answer = await client.post(path, {**asked[path], **fields})
    assert (answer.status, answer.error["code"]) == (400, "not_supported")
    assert answer.error["param"] == param
    assert answer.error["message"].startswith(f"{param}: this server cannot")
    assert "pip" not in answer.error["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_bad_grammar_is_400_and_next_request_is_answered(client, stream, wait_idle):
    fields = {"prompt": "x", "max_tokens": 8, "stream": stream}
    for grammar, code in (
        ({"regex": "("}, "invalid_grammar"),
        ({"json": {"not": {}}}, "invalid_schema"),
        ({"json": "[" * 1000}, "schema_too_complex"),
    ):
        answer = await client.post(COMPLETIONS, {**fields, "structured_outputs": grammar})
        assert (answer.status, answer.json["error"]["code"]) == (400, code)
    fields |= {"stream": False, "structured_outputs": {"regex": "[0-9]{2}"}}
    text = (await client.post(COMPLETIONS, fields)).json["choices"][0]["text"]
    assert re.fullmatch("[0-9]{2}", text)
    await wait_idle()


FORMATS = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}  # fmt: skip


async def test_a_json_object_may_have_a_schema(client):
    given = {"type": "json_object", "schema": FORMATS}
    fields = {"seed": 3, "max_tokens": 100}
    reply = (
        await client.post(CHAT, {"messages": MESSAGES, **fields, "response_format": given})
    ).json
    assert json.loads(reply["choices"][0]["message"]["content"]) == {"a": 1}
    body = {"input": "hi", "max_output_tokens": 100, "text": {"format": given}}
    reply = (await client.post(RESPONSES, body)).json
    assert json.loads(reply["output"][0]["content"][0]["text"]) == {"a": 1}


@pytest.mark.parametrize(
    "given",
    [
        {"type": "json_object", "schemas": FORMATS},
        {"type": "json_object", "json_schema": {"schema": FORMATS}},
        {"type": "json_schema", "schema": FORMATS},
        {"type": "json_schema", "json_schema": {"schema": FORMATS, "stric": True}},
        {"type": "text", "schema": FORMATS},
        {"type": "json"},
        {"type": "structural_tag", "structures": [], "schema": {}},
    ],
)
async def test_members_of_format_that_mean_nothing_are_refused(client, given):
    answer = await client.post(CHAT, {"messages": MESSAGES, "response_format": given})
    assert answer.status == 400
    assert answer.error["param"].startswith("response_format")


async def test_so_are_those_of_the_other_apis(client):
    for given in (
        {"type": "text", "schema": FORMATS},
        {"type": "json_schema", "schema": FORMATS, "x": 1},
    ):
        answer = await client.post(RESPONSES, {"input": "hi", "text": {"format": given}})
        assert (answer.status, answer.error["param"]) == (400, "text.format")
    config = {"format": {"type": "json_schema", "schema": FORMATS, "x": 1}}
    body = {"messages": MESSAGES, "max_tokens": 9, "output_config": config}
    answer = await client.post("/v1/messages", body)
    assert answer.status == 400
    assert "output_config.format" in answer.json["error"]["message"]


async def test_grammar_that_begins_with_answer_leaves_no_reasoning(anyio_backend):
    options = {
        "max_model_len": 256,
        "max_num_seqs": 4,
        "num_gpu_blocks_override": 32,
        "dtype": "float32",
    }
    template = "{% for m in messages %}{{ m.content }}{% endfor %}<think>\n"
    args = EngineArgs(
        **options, chat_template=template, structured_outputs_config={"enable_in_reasoning": True}
    )
    tool = {"type": "function", "function": {"name": "f", "parameters": FORMATS}}
    async with AsyncLLMEngine.from_engine_args(args) as engine:
        client = Client(create_app(engine, ServerSettings(reasoning_parser="qwen3")))
        asked = {"messages": MESSAGES, "max_tokens": 100, "seed": 1}
        schema = {"type": "json_schema", "json_schema": {"schema": FORMATS}}
        reply = (await client.post(CHAT, {**asked, "response_format": schema})).json
        message = reply["choices"][0]["message"]
        assert json.loads(message["content"]) == {"a": 1}
        assert not message.get("reasoning")
        forced = {
            **asked,
            "tools": [tool],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
        }
        message = (await client.post(CHAT, forced)).json["choices"][0]["message"]
        assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"a": 1}
        message = (await client.post(CHAT, {**asked, "max_tokens": 8})).json["choices"][0][
            "message"
        ]
        assert message["reasoning"]
