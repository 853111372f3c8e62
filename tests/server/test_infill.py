"""Filling in the middle over HTTP: `suffix` of completions, and llama.cpp's /infill."""

import json

import pytest

from tests.support.infill import MARKS, save_demo
from trouper import AsyncLLMEngine, EngineArgs
from trouper.frontends.server.asgi.app import create_app

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


async def test_a_stream_of_infill_ends_with_why_it_has(filling):
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


async def test_no_token_may_be_asked_for_so_that_the_prompt_is_kept(filling):
    body = {**GAP, "input_prefix": "x = 1\n" * 60, "n_predict": 0}
    reply = (await filling.post(INFILL, body)).json
    assert (reply["content"], reply["tokens_predicted"]) == ("", 0)
    again = (await filling.post(INFILL, {**body, "n_predict": 1})).json
    assert again["tokens_cached"] > 0


async def test_a_long_prompt_keeps_what_is_near_the_gap(filling):
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
