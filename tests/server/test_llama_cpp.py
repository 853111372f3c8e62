"""llama.cpp's /completion and /infill, and filling in the middle by `suffix` of completions."""

import json

import pytest

from tests.support.infill import MARKS, save_demo
from trouper import AsyncLLMEngine, EngineArgs, SamplingParams
from trouper.frontends.server.asgi.app import App, create_app

from .client import Client
from .conftest import SMALL

pytestmark = pytest.mark.anyio

COMPLETIONS, INFILL = "/v1/completions", "/infill"
GAP = {"input_prefix": "def f(", "input_suffix": "return x", "n_predict": 6, "temperature": 0}


@pytest.fixture(scope="module")
async def filling(anyio_backend, tmp_path_factory):
    folder = tmp_path_factory.mktemp("fim")
    ids = save_demo(folder)
    async with AsyncLLMEngine.from_engine_args(EngineArgs(model=str(folder), **SMALL)) as engine:
        client = Client(create_app(engine))
        client.ids, client.engine = ids, engine
        yield client


async def marked(client, prefix, suffix, middle=""):
    """The prompt's tokens, written out."""
    parts = [
        (await client.post("/tokenize", {"prompt": text})).json["tokens"] if text else []
        for text in (prefix, suffix, middle)
    ]
    return [
        id for mark, part in zip(MARKS[:3], parts, strict=True) for id in (client.ids[mark], *part)
    ]


async def completed(client, prompt, **fields):
    body = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "return_token_ids": True, **fields}
    answer = await client.post(COMPLETIONS, body)
    assert answer.status == 200, answer.body
    return answer.json["choices"]


async def test_a_completion_with_a_suffix_fills_the_gap(filling):
    ids = await marked(filling, "def f(", "return x")
    assert await completed(filling, "def f(", suffix="return x") == await completed(filling, ids)
    both = await completed(filling, ["def f(", "import"], suffix="return x")
    assert [c["prompt_token_ids"] for c in both] == [
        ids,
        await marked(filling, "import", "return x"),
    ]
    assert await completed(filling, "def f(", suffix="") == await completed(filling, "def f(")


async def test_a_stream_with_a_suffix_says_the_same(filling):
    (whole,) = await completed(filling, "def f(", suffix="return x")
    body = {"prompt": "def f(", "suffix": "return x", "max_tokens": 6, "temperature": 0}
    answer = await filling.post(COMPLETIONS, {**body, "stream": True})
    text = "".join(event["choices"][0]["text"] for event in answer.events[:-1])
    assert text == whole["text"]


async def test_infill_has_llamas_form(filling):
    ids = await marked(filling, "def f(", "return x", "a, b")
    (same,) = await completed(filling, ids)
    reply = (await filling.post(INFILL, {**GAP, "prompt": "a, b"})).json
    assert (reply["content"], reply["tokens"]) == (same["text"], same["token_ids"])
    assert (reply["stop"], reply["stop_type"], reply["stopping_word"]) == (True, "limit", "")
    assert (reply["tokens_evaluated"], reply["tokens_predicted"]) == (len(ids), 6)
    assert reply["timings"]["predicted_n"] == 6
    assert reply["model"] == (await filling.get("/v1/models")).json["data"][0]["id"]


async def test_stream_of_infill_ends_with_why_it_has(filling):
    whole = (await filling.post(INFILL, GAP)).json
    answer = await filling.post(INFILL, {**GAP, "stream": True})
    events = [json.loads(frame[6:]) for frame in answer.body.decode().split("\n\n")[:-1]]
    assert "".join(event["content"] for event in events) == whole["content"]
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
    assert events[-1]["stop_type"] == "limit"
    assert [id for event in events for id in event["tokens"]] == whole["tokens"]
    assert "stop_type" not in events[0]


async def test_a_stop_string_is_named(filling):
    whole = (await filling.post(INFILL, GAP)).json["content"]
    word = whole.split()[0]
    reply = (await filling.post(INFILL, {**GAP, "stop": [word]})).json
    assert (reply["content"], reply["stop_type"]) == (whole[: whole.index(word)], "word")
    assert reply["stopping_word"] == word


async def test_zero_output_tokens_cache_the_prompt(filling):
    body = {**GAP, "input_prefix": "x = 1\n" * 60, "n_predict": 0}
    reply = (await filling.post(INFILL, body)).json
    assert (reply["content"], reply["tokens_predicted"]) == ("", 0)
    again = (await filling.post(INFILL, {**body, "n_predict": 1})).json
    assert again["tokens_cached"] > 0


async def test_long_prompt_keeps_what_is_near_gap(filling):
    files = [{"filename": "a.py", "text": "x = 1\n" * 9}, {"text": "y = 2\n" * 9999}]
    body = {**GAP, "input_prefix": "a = 1\n" * 9999, "input_suffix": "b = 2\n" * 9999}
    reply = (await filling.post(INFILL, {**body, "input_extra": files})).json
    assert reply["tokens_evaluated"] == 512 - 6
    del body["n_predict"]
    endless = (await filling.post(INFILL, {**body, "ignore_eos": True})).json
    assert endless["tokens_evaluated"] == 384
    assert (endless["tokens_predicted"], endless["stop_type"]) == (128, "limit")
    plain = (await filling.post(INFILL, GAP)).json["tokens_evaluated"]
    more = (await filling.post(INFILL, {**GAP, "input_extra": files[:1]})).json["tokens_evaluated"]
    assert more > plain + 20


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (INFILL, {"input_prefix": "", "input_suffix": ""}, "input_prefix"),
        (INFILL, {"n_predict": -2}, "n_predict"),
        (INFILL, {"n_predict": 513}, "n_predict"),
        (INFILL, {"prompt": "x " * 600}, "prompt"),
        (INFILL, {"input_extra": [{"text": "x"}] * 257}, "input_extra"),
        (INFILL, {"input_extra": [{"filename": "x"}]}, "input_extra[0].text"),
        (INFILL, {"temperature": -1}, "temperature"),
        (INFILL, {"repeat_penalty": 0}, "repeat_penalty"),
        (INFILL, {"n_probs": 2}, "n_probs"),
        (INFILL, {"grammar": 'root ::= "a"'}, "grammar"),
        (COMPLETIONS, {"prompt": [1, 2]}, "prompt"),
        (COMPLETIONS, {"prompt": ""}, "prompt"),
        (COMPLETIONS, {"echo": True}, "echo"),
        (COMPLETIONS, {"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        (COMPLETIONS, {"use_beam_search": True}, "suffix"),
        (COMPLETIONS, {"prompt": "x " * 99_999}, "prompt"),
    ],
)  # fmt: skip
async def test_a_bad_gap_is_refused_by_name(filling, path, fields, param):
    base = GAP if path == INFILL else {"prompt": "a", "suffix": "b"}
    answer = await filling.post(path, {**base, **fields})
    assert (answer.status, answer.error["param"]) == (400, param), answer.body


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (INFILL, GAP, "input_suffix"),
        (COMPLETIONS, {"prompt": "a", "suffix": "b"}, "suffix"),
        (COMPLETIONS, {"prompt": "a", "suffix": "b", "stream": True}, "suffix"),
    ],
)
async def test_a_model_without_marks_says_so(client, path, body, param):
    answer = await client.post(path, body)
    assert (answer.status, answer.error["param"]) == (400, param)
    assert "no tokens for filling in the middle" in answer.error["message"]


SAMPLED = {"n_predict": 6, "temperature": 0}


async def test_completion_says_the_same_as_openai_s(client):
    asked = {"prompt": "Hello", "max_tokens": 6, "temperature": 0, "return_token_ids": True}
    (theirs,) = (await client.post(COMPLETIONS, asked)).json["choices"]
    body = {"prompt": "Hello", **SAMPLED, "return_tokens": True, "cache_prompt": True}
    mine = (await client.post("/completion", body)).json
    assert (mine["content"], mine["tokens"]) == (theirs["text"], theirs["token_ids"])
    assert mine["stop_type"] == "limit"
    assert mine["prompt"] == "Hello"
    assert mine["generation_settings"]["n_predict"] == 6
    ids = (await client.post("/tokenize", {"prompt": "Hello"})).json["tokens"]
    assert (await client.post("/completion", {"prompt": ids, **SAMPLED})).json["content"]
    streamed = (await client.post("/completion", {**body, "stream": True})).events
    assert "".join(part["content"] for part in streamed) == mine["content"]
    assert [part["stop"] for part in streamed] == [False] * (len(streamed) - 1) + [True]


async def test_completion_of_several_prompts_is_a_list(client):
    found = (await client.post("/completion", {"prompt": ["Hello", "Good"], **SAMPLED})).json
    assert [each["index"] for each in found] == [0, 1]
    (one,) = (await client.post("/completion", {"prompt": ["Hello"], **SAMPLED})).json
    assert one["content"] == found[0]["content"]


async def test_completion_shows_probabilities_and_only_fields_asked_for(client):
    fields = ["content", "completion_probabilities", "generation_settings/n_probs"]
    body = {"prompt": "Hello", **SAMPLED, "n_probs": 2, "response_fields": fields}
    found = (await client.post("/completion", body)).json
    assert found.keys() == {"content", "completion_probabilities", "n_probs"}
    assert len(found["completion_probabilities"]) == 6
    first = found["completion_probabilities"][0]
    assert isinstance(first["id"], int)
    assert len(first["top_logprobs"]) == 2


async def test_completion_keeps_to_closed_schema_and_bias(client):
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    body = {"prompt": "JSON: ", "temperature": 0, "n_predict": 200, "json_schema": schema}
    found = (await client.post("/completion", body)).json
    assert json.loads(found["content"]).keys() == {"ok"}
    whole = (
        await client.post("/completion", {"prompt": "Hello", **SAMPLED, "return_tokens": True})
    ).json
    first = whole["tokens"][0]
    for bias in ([[first, False]], {str(first): -100}):
        body = {"prompt": "Hello", **SAMPLED, "return_tokens": True, "logit_bias": bias}
        other = (await client.post("/completion", body)).json
        assert first not in other["tokens"]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"grammar": "root ::= x"}, "grammar"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [5, "x"]}, "prompt"),
        ({"prompt": ["x", ""]}, "prompt[1]"),
        ({"n_predict": -3}, "n_predict"),
        ({"n_probs": 10**6}, "n_probs"),
        ({"logit_bias": [["word", 1]]}, "logit_bias"),
        ({"logit_bias": [[1, True]]}, "logit_bias"),
        ({"mirostat": 2}, "mirostat"),
        ({"temperature": -1}, "temperature"),
    ],
)
async def test_completion_refuses_by_name(client, fields, named):
    answer = await client.post("/completion", {"prompt": "x", **SAMPLED, **fields})
    assert answer.status == 400
    assert answer.error["param"] == named


async def test_tokenize_in_llama_cpps_form(client):
    own = (await client.post("/tokenize", {"prompt": "Hello é", "add_special_tokens": False})).json
    found = (await client.post("/tokenize", {"content": "Hello é"})).json
    assert found == {"tokens": own["tokens"]}
    pieces = (await client.post("/tokenize", {"content": "Hello é", "with_pieces": True})).json
    assert [each["id"] for each in pieces["tokens"]] == own["tokens"]
    raw = [each["piece"] for each in pieces["tokens"]]
    assert (
        b"".join(x.encode() if isinstance(x, str) else bytes(x) for x in raw) == "Hello é".encode()
    )
    back = (await client.post("/detokenize", {"tokens": own["tokens"]})).json
    assert back["content"] == back["prompt"] == "Hello é"


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({"content": "x", "prompt": "x"}, "prompt"),
        ({"content": "x", "return_token_strs": True}, "return_token_strs"),
        ({"prompt": "x", "with_pieces": True}, "with_pieces"),
        ({"content": "x", "parse_special": False}, "parse_special"),
        ({"content": "x" * 200_000}, "content"),
    ],
)
async def test_forms_of_tokenize_do_not_mix(client, fields, parameter):
    answer = await client.post("/tokenize", fields)
    assert (answer.status, answer.json["error"]["param"]) == (400, parameter)


async def test_apply_template_gives_the_prompt(client):
    body = {"messages": [{"role": "user", "content": "Hello"}]}
    prompt = (await client.post("/apply-template", body)).json["prompt"]
    assert "Hello" in prompt
    ids = (await client.post("/tokenize", {**body})).json["tokens"]
    own = {"content": prompt}
    assert (await client.post("/tokenize", own)).json["tokens"] == ids
    answer = await client.post("/apply-template", {"messages": []})
    assert (answer.status, answer.json["error"]["param"]) == (400, "messages")


async def test_props_describe_the_server(client):
    props = (await client.get("/props")).json
    (card,) = (await client.get("/v1/models")).json["data"]
    assert props["default_generation_settings"]["n_ctx"] == card["max_model_len"]
    assert props["model_path"] == card["id"]
    assert props["modalities"] == {"vision": False, "audio": False}
    assert "messages" in props["chat_template"]


async def test_slots_show_running_sequences_without_texts(engine, app):
    admin = Client(App(app.service, is_admin_listener=True))
    total = (await Client(app).get("/props")).json["total_slots"]
    idle = (await admin.get("/slots")).json
    assert [(slot["id"], slot["is_processing"]) for slot in idle] == [
        (i, False) for i in range(total)
    ]
    assert (await admin.get("/slots?fail_on_no_slot=1")).status == 200
    params = SamplingParams(n=total, max_tokens=400, ignore_eos=True)
    answers = engine.generate("secret", params)
    await anext(answers)
    busy = await admin.get("/slots")
    assert [slot["is_processing"] for slot in busy.json] == [True] * total
    assert b"secret" not in busy.body
    assert (await admin.get("/slots?fail_on_no_slot=1")).status == 503
    await answers.aclose()
    assert (await admin.post("/slots/0?action=save", {"filename": "x"})).status == 501
    assert (await admin.post("/props", {})).status == 501
