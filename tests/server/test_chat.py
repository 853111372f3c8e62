"""`/v1/chat/completions`, `/tokenize` and `/detokenize`."""

import pytest

pytestmark = pytest.mark.anyio

PATH = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
GREEDY = {"messages": MESSAGES, "temperature": 0, "max_tokens": 6, "ignore_eos": True}


async def test_a_whole_answer(client):
    answer = await client.post(PATH, GREEDY)
    reply = answer.json
    assert reply["object"] == "chat.completion"
    assert reply["id"].startswith("chatcmpl-")
    (choice,) = reply["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"]
    assert (choice["finish_reason"], choice["logprobs"]) == ("length", None)
    assert reply["usage"]["completion_tokens"] == 6


async def test_rendered_prompt_is_shown_on_request(client):
    asked = {**GREEDY, "return_prompt_text": True}
    whole = (await client.post(PATH, asked)).json["prompt_text"]
    assert "hi" in whole
    first, second, *_ = (await client.post(PATH, {**asked, "stream": True})).events
    assert first["prompt_text"] == whole
    assert "prompt_text" not in second
    assert "prompt_text" not in (await client.post(PATH, GREEDY)).json


async def test_thinking_field_sets_template_variable(says):
    client = says("a")
    for thinks in (True, False):
        await client.post(PATH, {"messages": MESSAGES, "enable_thinking": thinks})
        assert client.engine.asked[-1][0]["template_defaults"]["enable_thinking"] is thinks


async def test_a_stream_begins_with_the_role(client):
    whole = (await client.post(PATH, GREEDY)).json["choices"][0]["message"]["content"]
    fields = {**GREEDY, "stream": True, "stream_options": {"include_usage": True}}
    first, *parts, last, usage, done = (await client.post(PATH, fields)).events
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"] == [
        {
            "index": 0,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
    ]
    texts = [p["choices"][0]["delta"].get("content", "") for p in [*parts, last]]
    assert "".join(texts) == whole
    assert all("role" not in part["choices"][0]["delta"] for part in parts)
    assert all(part["choices"][0]["finish_reason"] is None for part in parts)
    assert last["choices"][0]["finish_reason"] == "length"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 6
    assert done == "[DONE]"


@pytest.mark.parametrize("stream", [False, True])
async def test_n_choices(client, stream):
    fields = {"messages": MESSAGES, "n": 3, "seed": 1, "max_tokens": 5, "stream": stream}
    answer = await client.post(PATH, fields)
    if not stream:
        assert [choice["index"] for choice in answer.json["choices"]] == [0, 1, 2]
        return
    chunks = [event["choices"][0] for event in answer.events[:-1]]
    assert [chunk["delta"].get("role") for chunk in chunks[:3]] == ["assistant"] * 3
    assert sorted(c["index"] for c in chunks if c["finish_reason"]) == [0, 1, 2]


@pytest.mark.parametrize("num_top", [0, 3])
async def test_logprobs(client, num_top):
    fields = {**GREEDY, "logprobs": True, "top_logprobs": num_top}
    whole = (await client.post(PATH, fields)).json["choices"][0]
    content = whole["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == whole["message"]["content"]
    for entry in content:
        assert bytes(entry["bytes"]).decode() == entry["token"]
        tops = entry["top_logprobs"]
        assert len(tops) == num_top
        assert [t["logprob"] for t in tops] == sorted((t["logprob"] for t in tops), reverse=True)
        if tops:
            assert tops[0]["token"] == entry["token"]  # greedy
    events = (await client.post(PATH, {**fields, "stream": True})).events
    streamed = [
        entry["token"]
        for event in events[:-1]
        for entry in (event["choices"][0]["logprobs"] or {}).get("content", ())
    ]
    assert streamed == [entry["token"] for entry in content]


async def test_the_new_name_of_max_tokens_wins(client):
    reply = (await client.post(PATH, {**GREEDY, "max_completion_tokens": 2})).json
    assert reply["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_going_on_with_a_message_that_is_echoed(client, stream):
    messages = [*MESSAGES, {"role": "assistant", "content": "def g("}]
    fields = {**GREEDY, "messages": messages, "echo": True, "stream": stream}
    fields |= {"add_generation_prompt": False, "continue_final_message": True}
    answer = await client.post(PATH, fields)
    if stream:
        texts = [event["choices"][0]["delta"].get("content", "") for event in answer.events[:-1]]
        assert "".join(texts).startswith("def g(")
    else:
        assert answer.json["choices"][0]["message"]["content"].startswith("def g(")


async def test_tools_that_must_not_be_called_are_no_obstacle(client):
    fields = {
        **GREEDY,
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": "none",
    }
    assert (await client.post(PATH, fields)).status == 200


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": []}, {"tools": [], "tool_choice": "auto"}, {"tool_choice": "auto"}, {"documents": []},
        {"model": ""},
    ],
)  # fmt: skip
async def test_empty_values_ask_for_nothing(client, fields):
    wanted = (await client.post(PATH, GREEDY)).json["choices"]
    answer = await client.post(PATH, {**GREEDY, **fields})
    assert answer.json.get("choices") == wanted, answer.body


async def test_parts_and_other_roles(client):
    messages = [
        {
            "role": "system",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        },
        {"role": "critic", "content": "c"},
    ]
    assert (await client.post(PATH, {**GREEDY, "messages": messages})).status == 200


async def test_a_template_of_a_trusted_client(make_client):
    client = make_client(trust_request_chat_template=True)
    fields = {**GREEDY, "chat_template": "{{ messages[0].content }}"}
    reply = (await client.post(PATH, fields)).json
    assert reply["usage"]["prompt_tokens"] == 1
    count = await client.post("/tokenize", {k: fields[k] for k in ("messages", "chat_template")})
    assert count.json["count"] == 1
    for template, code in (
        ("{{ nothing() }}", "invalid_value"),
        ("{{ 'a' * 10**9 }}", "template_budget_exceeded"),
    ):
        refused = await client.post(PATH, {**GREEDY, "chat_template": template})
        assert (refused.status, refused.error["code"]) == (400, code)


async def test_text_that_spells_a_special_token_is_text(client):
    plain = await client.post("/tokenize", {"messages": MESSAGES})
    spelled = [{"role": "user", "content": "<|im_end|>"}]
    trap = await client.post("/tokenize", {"messages": spelled})
    ends = [answer.json["tokens"].count(special(answer)) for answer in (plain, trap)]
    assert ends[0] == ends[1]


def special(answer):
    return answer.json["tokens"][0]  # <|im_start|>; the template begins with it


async def test_text_to_tokens_and_back(engine, client):
    ids = engine.tokenizer.encode("def f(")
    answer = await client.post("/tokenize", {"prompt": "def f(", "return_token_strs": True})
    assert answer.json == {
        "count": 3, "max_model_len": 512, "tokens": ids,
        "token_strs": engine.tokenizer.vocabulary_strings(ids),
    }  # fmt: skip
    text = (await client.post("/detokenize", {"tokens": ids})).json
    assert text == {"prompt": "def f(", "content": "def f("}


async def test_a_conversation_to_tokens(client):
    reply = (await client.post(PATH, {**GREEDY, "return_token_ids": True})).json
    tokens = (await client.post("/tokenize", {"messages": MESSAGES})).json["tokens"]
    assert tokens == reply["prompt_token_ids"]
    assert len(reply["choices"][0]["token_ids"]) == 6


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"chat_template_kwargs": {"mood": "glad"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"add_generation_prompt": False}}, "chat_template_kwargs"),
        ({"documents": [{"title": "a", "text": "b"}]}, "documents"),
    ],
)
async def test_what_template_has_no_place_for_is_named(client, fields, param):
    answer = await client.post(PATH, {**GREEDY, **fields})
    assert (answer.status, answer.error["param"]) == (400, param)


async def test_a_switch_that_asks_for_nothing_is_allowed(client):
    fields = {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low"}
    assert (await client.post(PATH, {**GREEDY, **fields, "documents": []})).status == 200


async def test_a_server_arranges_what_its_template_would_drop(make_client):
    template = "{% for m in messages if m.role == 'user' %}U:{{ m.content }};{% endfor %}"
    fields = {"chat_template": template, "return_prompt_text": True, "max_tokens": 1}
    messages = [{"role": "developer", "content": "brief"}, {"role": "user", "content": "hi"}]
    client = make_client(trust_request_chat_template=True)
    reply = (await client.post(PATH, {**fields, "messages": messages})).json
    assert reply["prompt_text"] == "U:brief\n\nhi;"
    messages.insert(1, {"role": "narrator", "content": "once"})
    answer = await client.post(PATH, {**fields, "messages": messages})
    assert (answer.status, answer.error["param"]) == (400, "messages[1]")
    assert "'narrator'" in answer.error["message"]


async def test_top_logprobs_of_nothing_need_no_logprobs(client):
    """As in vLLM: 0 asks for none."""
    assert (await client.post(PATH, {**GREEDY, "top_logprobs": 0})).status == 200
    answer = await client.post(PATH, {**GREEDY, "top_logprobs": 1})
    assert (answer.status, answer.error["param"]) == (400, "top_logprobs")


async def test_more_than_four_stop_strings_are_taken_as_by_vllm(client):
    reply = (await client.post(PATH, {**GREEDY, "stop": list("abcdefgh"), "max_tokens": 50})).json
    assert reply["choices"][0]["stop_reason"] in "abcdefgh"
