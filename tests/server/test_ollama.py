"""Ollama's API in the application: what its clients send, and the lines that they read."""

import json
from datetime import datetime

import pytest

pytestmark = pytest.mark.anyio

GREEDY = {"temperature": 0, "num_predict": 8}
HELLO = [{"role": "user", "content": "Hello"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
PARSERS = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'


def lines(answer):
    assert answer.status == 200, answer.body
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.body.splitlines()]


def text_of(found):
    return "".join(line["message"]["content"] for line in found)


async def test_chat_streams_lines_and_ends_once(client):
    found = lines(await client.post("/api/chat", {"messages": HELLO, "options": GREEDY}))
    assert [line["done"] for line in found] == [False] * (len(found) - 1) + [True]
    assert all(line["message"]["role"] == "assistant" for line in found)
    assert all(datetime.fromisoformat(line["created_at"]).tzinfo for line in found)
    last = found[-1]
    assert last["done_reason"] == "length"
    assert last["eval_count"] == 8
    assert last["prompt_eval_count"] > 0
    assert last["total_duration"] >= last["eval_duration"] > 0


async def test_a_chat_says_the_same_as_openai_s(client):
    streamed = text_of(
        lines(await client.post("/api/chat", {"messages": HELLO, "options": GREEDY}))
    )
    whole = await client.post("/api/chat", {"messages": HELLO, "options": GREEDY, "stream": False})
    openai = await client.post(
        "/v1/chat/completions", {"messages": HELLO, "temperature": 0, "max_tokens": 8}
    )
    expected = openai.json["choices"][0]["message"]["content"]
    assert streamed == whole.json["message"]["content"] == expected
    assert whole.json["done"]
    assert whole.json["eval_count"] == 8


async def test_generate_uses_the_template_unless_raw(client):
    asked = {"prompt": "Hello", "options": GREEDY, "stream": False}
    chat = await client.post("/api/chat", {"messages": HELLO, "options": GREEDY, "stream": False})
    templated = await client.post("/api/generate", asked)
    assert templated.json["response"] == chat.json["message"]["content"]
    raw = await client.post("/api/generate", {**asked, "raw": True})
    openai = await client.post(
        "/v1/completions", {"prompt": "Hello", "temperature": 0, "max_tokens": 8}
    )
    assert raw.json["response"] == openai.json["choices"][0]["text"]


async def test_tool_call_is_one_line_with_object(says):
    client = says(*CALL, **PARSERS)
    found = lines(await client.post("/api/chat", {"messages": HELLO, "tools": [WEATHER]}))
    calls = [line["message"]["tool_calls"] for line in found if "tool_calls" in line["message"]]
    assert calls == [[{"function": {"index": 0, "name": "weather", "arguments": {"city": "Bern"}}}]]
    assert found[-1]["done_reason"] == "stop"


async def test_a_call_that_is_cut_is_not_sent(says):
    client = says(CALL[:40], finish_reason="length", **PARSERS)
    answer = await client.post(
        "/api/chat", {"messages": HELLO, "tools": [WEATHER], "stream": False}
    )
    assert "tool_calls" not in answer.json["message"]
    assert answer.json["done_reason"] == "length"


async def test_tools_need_a_model_that_calls_them(make_client):
    client = make_client(tool_call_parser="none")
    answer = await client.post("/api/chat", {"messages": HELLO, "tools": [WEATHER]})
    assert answer.status == 400
    assert "does not support tools" in answer.json["error"]


async def test_results_of_tools_name_their_calls(make_client):
    client = make_client(**PARSERS)
    messages = [
        *HELLO,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"function": {"name": "weather", "arguments": {"city": name}}}
                for name in ("Bern", "Rome")
            ],
        },
        {"role": "tool", "content": "rain", "tool_name": "weather"},
        {"role": "tool", "content": "sun"},
    ]
    answer = await client.post(
        "/api/chat", {"messages": messages, "tools": [WEATHER], "options": GREEDY, "stream": False}
    )
    assert answer.status == 200, answer.body


async def test_thinking_is_apart(says):
    client = says("<think>\nhm\n</think>\n\n", "Yes", **PARSERS)
    found = lines(await client.post("/api/chat", {"messages": HELLO, "think": True}))
    assert "hm" in "".join(line["message"].get("thinking", "") for line in found)
    assert text_of(found).strip() == "Yes"
    silent = says("<think>\nhm\n</think>\n\n", "Yes", **PARSERS)
    whole = await silent.post("/api/chat", {"messages": HELLO, "think": False, "stream": False})
    assert "thinking" not in whole.json["message"]


async def test_a_schema_is_closed(client):
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    body = {"messages": HELLO, "format": schema, "options": GREEDY | {"num_predict": 40}}
    answer = await client.post("/api/chat", {**body, "stream": False})
    assert json.loads(answer.json["message"]["content"]).keys() == {"ok"}
    answer = await client.post("/api/chat", {**body, "format": "yaml"})
    assert answer.status == 400
    assert "format" in answer.json["error"]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"options": {"temperature": -1}}, "options.temperature"),
        ({"options": {"temperature": "hot"}}, "options.temperature"),
        ({"options": {"mirostat": 1}}, "mirostat"),
        ({"keep_alive": "soon"}, "keep_alive"),
        ({"think": "very"}, "think"),
        ({"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "images"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"shift": True}, "shift"),
        ({"think": True}, "does not support thinking"),
        ({"model": "other"}, "other"),
    ],
)
async def test_bad_input_is_refused_in_a_text(client, fields, named):
    answer = await client.post("/api/chat", {"messages": HELLO, **fields})
    assert answer.status in (400, 404)
    assert named in answer.json["error"]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"context": [1]}, "context"),
        ({"template": "{{ .Prompt }}"}, "template"),
        ({"images": ["aGk="]}, "images"),
        ({"raw": True, "system": "x"}, "system"),
        ({"raw": True, "think": True}, "think"),
    ],
)
async def test_generate_refuses_by_name(client, fields, named):
    answer = await client.post("/api/generate", {"prompt": "x", **fields})
    assert answer.status == 400
    assert named in answer.json["error"]


async def test_harmless_options_and_fields_are_taken(client):
    options = GREEDY | {"num_thread": 4, "num_ctx": 32768, "mirostat": 0, "seed": -1, "wish": 1}
    body = {"messages": HELLO, "options": options, "keep_alive": -1, "tools": [], "think": None}
    answer = await client.post("/api/chat", {**body, "stream": False})
    assert answer.status == 200, answer.body
    headers = answer.headers
    assert headers["x-trouper-context"] == "512"
    assert headers["x-trouper-ignored-fields"] == "options.wish"


async def test_an_empty_conversation_loads(client):
    for path, body in (
        ("/api/chat", {"messages": []}), ("/api/generate", {"keep_alive": "5m"}),
        ("/api/generate", {"prompt": None}),
    ):  # fmt: skip
        answer = await client.post(path, body)
        assert answer.json["done_reason"] == "load"
        assert answer.json["done"]


async def test_old_turns_give_way(client):
    turn = [{"role": "user", "content": "word " * 60}, {"role": "assistant", "content": "ok"}]
    long = [{"role": "system", "content": "Be short."}, *turn * 12, *HELLO]
    body = {"messages": long, "options": GREEDY, "stream": False}
    answer = await client.post("/api/chat", body)
    assert answer.status == 200
    assert answer.json["prompt_eval_count"] < 512 - 8
    assert answer.json["prompt_eval_count"] > 200
    refused = await client.post("/api/chat", {**body, "truncate": False})
    assert refused.status == 400


async def test_logprobs_are_on_each_line(client):
    body = {"messages": HELLO, "options": GREEDY, "logprobs": True, "top_logprobs": 2}
    found = lines(await client.post("/api/chat", body))
    shown = [each for line in found for each in line.get("logprobs", ())]
    assert len(shown) == 8
    assert all(len(each["top_logprobs"]) == 2 for each in shown)


async def test_models_are_described_without_a_null(client):
    tags = (await client.get("/api/tags")).json["models"]
    assert tags[0]["name"].endswith(":latest")
    assert len(tags[0]["digest"]) == 64
    assert tags[0]["size"] > 0
    assert tags[0]["details"]["parameter_size"].endswith("M")
    (loaded,) = (await client.get("/api/ps")).json["models"]
    assert loaded["context_length"] == 512
    assert datetime.fromisoformat(loaded["expires_at"])
    for name in ("model", "name"):
        shown = (await client.post("/api/show", {name: tags[0]["name"]})).json
        assert "completion" in shown["capabilities"]
        assert shown["template"]
        assert all(shown["parameters"].splitlines())
        assert shown["model_info"]
    assert "null" not in json.dumps([tags, loaded, shown])
    assert (await client.get("/api/version")).json["version"]
    found = await client.post("/api/chat", {"model": tags[0]["name"], "messages": []})
    assert found.json["model"] == tags[0]["name"]


async def test_routes_that_change_models_say_why_not(client):
    for path in ("/api/create", "/api/copy", "/api/push"):
        answer = await client.post(path, {"model": "x"})
        assert answer.status == 501
        assert "trouper serve" in answer.json["error"]
    assert (await client.post("/api/pull", {"model": "other"})).status == 404


async def test_curl_content_type_is_accepted_without_origin(client):
    body = json.dumps({"messages": [], "stream": False}).encode()
    form = ("content-type", "application/x-www-form-urlencoded")
    assert (await client.request("POST", "/api/chat", body, headers=(form,))).status == 200
    page = (form, ("origin", "https://example.com"))
    answer = await client.request("POST", "/api/chat", body, headers=page)
    assert answer.status == 400
    assert isinstance(answer.json["error"], str)
