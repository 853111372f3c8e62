"""`/v1/completions`: answers that OpenAI's clients understand, whole and streamed."""

import pytest

from trouper import SamplingParams

pytestmark = pytest.mark.anyio

PATH = "/v1/completions"
GREEDY = {"prompt": "def f(", "temperature": 0, "max_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module", params=["asyncio", "trio"])
def anyio_backend(request):
    return request.param


async def expected(engine, prompt="def f(", **params):
    params = SamplingParams(**{"temperature": 0, "max_tokens": 8, "ignore_eos": True, **params})
    async for output in engine.generate(prompt, params):
        last = output
    return last


def joined(events, field="text"):
    """What the chunks of each choice say together."""
    texts = {}
    for event in events[:-1]:
        for choice in event["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice[field]
    return texts


async def test_a_whole_answer(engine, client):
    answer = await client.post(PATH, GREEDY)
    wanted = await expected(engine)
    assert answer.status == 200
    reply = answer.json
    assert reply["object"] == "text_completion"
    assert reply["id"].startswith("cmpl-")
    assert reply["model"] == "trouper-demo"
    assert reply["choices"] == [
        {
            "index": 0, "text": wanted.outputs[0].text, "logprobs": None,
            "finish_reason": "length", "stop_reason": None, "token_ids": None,
            "prompt_token_ids": None, "prompt_logprobs": None,
        }
    ]  # fmt: skip
    assert reply["usage"] == {
        "prompt_tokens": 3, "completion_tokens": 8, "total_tokens": 11,
        "prompt_tokens_details": None, "completion_tokens_details": None,
    }  # fmt: skip


async def test_the_engines_answer_in_frames(client):
    answer = await client.post(PATH, {**GREEDY, "stream": True})
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.body.startswith(b'data: {"id":"cmpl-')
    assert answer.body.endswith(b"}\n\ndata: [DONE]\n\n")
    assert answer.body.count(b"\n\n") == len(answer.events) == answer.body.count(b"data: ")
    whole = (await client.post(PATH, GREEDY)).json["choices"][0]
    assert joined(answer.events) == {0: whole["text"]}
    *parts, last, done = answer.events
    assert done == "[DONE]"
    assert {part["choices"][0]["finish_reason"] for part in parts} <= {None}
    assert last["choices"][0]["finish_reason"] == "length"
    assert len({event["id"] for event in answer.events[:-1]}) == 1
    assert all("usage" not in event for event in answer.events[:-1])


async def test_usage_comes_after_the_end_when_asked_for(client):
    fields = {**GREEDY, "stream": True, "stream_options": {"include_usage": True}}
    *parts, last, _ = (await client.post(PATH, fields)).events
    assert last["choices"] == []
    assert last["usage"] == {"prompt_tokens": 3, "completion_tokens": 8, "total_tokens": 11}
    assert all("usage" not in part for part in parts)
    fields["stream_options"]["continuous_usage_stats"] = True
    *parts, _ = (await client.post(PATH, fields)).events
    counts = [part["usage"]["completion_tokens"] for part in parts]
    assert counts == sorted(counts)
    assert counts[-1] == 8


async def test_usage_can_be_forced_and_tell_cached_tokens(make_client):
    client = make_client(force_include_usage=True, enable_prompt_tokens_details=True)
    *_, last, _ = (await client.post(PATH, {**GREEDY, "stream": True})).events
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_prompts_times_n_choices(engine, client, stream):
    prompts = ["def f(", "import os", "class A"]
    fields = {"prompt": prompts, "n": 2, "seed": 5, "max_tokens": 6, "stream": stream}
    answer = await client.post(PATH, fields)
    if stream:
        texts = joined(answer.events)
    else:
        choices = answer.json["choices"]
        assert [choice["index"] for choice in choices] == list(range(6))
        texts = {choice["index"]: choice["text"] for choice in choices}
        assert answer.json["usage"]["completion_tokens"] <= 36
    for i, prompt in enumerate(prompts):
        wanted = await expected(
            engine,
            prompt,
            n=2,
            seed=5,
            max_tokens=6,
            ignore_eos=False,
            **{"temperature": 1, **engine.model_config.default_sampling},
        )
        for completion in wanted.outputs:
            assert texts[2 * i + completion.index] == completion.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("as_ids", [False, True])
async def test_echo_and_logprobs(engine, client, stream, as_ids):
    prompt = engine.tokenizer.encode("def f(") if as_ids else "def f("
    fields = {**GREEDY, "prompt": prompt, "echo": True, "logprobs": 2, "stream": stream}
    answer = await client.post(PATH, fields)
    wanted = await expected(engine, logprobs=2, prompt_logprobs=2)
    choices = [e["choices"][0] for e in answer.events[:-1]] if stream else answer.json["choices"]
    text = "".join(choice["text"] for choice in choices)
    tokens, offsets, logprobs, tops = [], [], [], []
    for choice in choices:
        tokens += choice["logprobs"]["tokens"]
        offsets += choice["logprobs"]["text_offset"]
        logprobs += choice["logprobs"]["token_logprobs"]
        tops += choice["logprobs"]["top_logprobs"]
    assert text == "".join(tokens) == "def f(" + wanted.outputs[0].text
    assert offsets == [len("".join(tokens[:i])) for i in range(len(tokens))]
    assert (logprobs[0], tops[0]) == (None, None)
    ids, positions = wanted.outputs[0].token_ids, wanted.outputs[0].logprobs
    assert logprobs[3:] == pytest.approx(
        [p[t].logprob for p, t in zip(positions, ids, strict=True)], abs=1e-3
    )
    assert all(
        2 <= len(top) <= 3 and token in top for token, top in zip(tokens[1:], tops[1:], strict=True)
    )


async def test_the_prompt_alone(client):
    fields = {**GREEDY, "max_tokens": 0, "echo": True, "logprobs": 0}
    for stream in (False, True):
        answer = await client.post(PATH, {**fields, "stream": stream})
        (choice,) = answer.events[0]["choices"] if stream else answer.json["choices"]
        assert choice["text"] == "def f("
        assert len(choice["logprobs"]["tokens"]) == 3
        tokens, tops = (choice["logprobs"][name] for name in ("tokens", "top_logprobs"))
        assert list(tops[1]) == [tokens[1]]
    assert (await client.post(PATH, fields)).json["usage"]["completion_tokens"] == 0


async def test_token_ids_and_prompt_logprobs(engine, client):
    fields = {**GREEDY, "return_token_ids": True, "prompt_logprobs": 1, "logprobs": 0}
    fields["return_tokens_as_token_ids"] = True
    (choice,) = (await client.post(PATH, fields)).json["choices"]
    wanted = await expected(engine)
    assert choice["token_ids"] == wanted.outputs[0].token_ids
    assert choice["prompt_token_ids"] == wanted.prompt_token_ids
    first, second, _ = choice["prompt_logprobs"]
    assert first is None
    assert set(second[str(wanted.prompt_token_ids[1])]) == {"logprob", "rank", "decoded_token"}
    assert choice["logprobs"]["tokens"] == [f"token_id:{id}" for id in choice["token_ids"]]


async def test_stops(engine, client):
    text = (await expected(engine, max_tokens=30)).outputs[0].text
    stop = text[8:11]
    fields = {**GREEDY, "max_tokens": 30, "stop": stop}
    (choice,) = (await client.post(PATH, fields)).json["choices"]
    assert choice["text"] == text[: text.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    streamed = (await client.post(PATH, {**fields, "stream": True})).events
    assert joined(streamed) == {0: choice["text"]}
    assert streamed[-2]["choices"][0]["stop_reason"] == stop
    ids = (await expected(engine)).outputs[0].token_ids
    (choice,) = (await client.post(PATH, {**GREEDY, "stop_token_ids": [ids[3]]})).json["choices"]
    assert choice["stop_reason"] == ids[3]


async def test_fields_reach_the_sampler(engine, client):
    banned = (await expected(engine)).outputs[0].token_ids[0]
    for fields in ({"logit_bias": {str(banned): -100}}, {"allowed_token_ids": [banned + 1]}):
        ids = {**GREEDY, **fields, "max_tokens": 1, "return_token_ids": True}
        (choice,) = (await client.post(PATH, ids)).json["choices"]
        assert choice["token_ids"] != [banned]
    fields = {"prompt": "x", "seed": 3, "max_tokens": 12, "temperature": 1.5, "top_p": 0.9}
    fields |= {"top_k": 50, "min_p": 0.01, "presence_penalty": 0.5, "frequency_penalty": 0.5}
    fields |= {"repetition_penalty": 1.1, "min_tokens": 2, "priority": -3, "cache_salt": "a"}
    texts = {(await client.post(PATH, fields)).json["choices"][0]["text"] for _ in range(2)}
    assert len(texts) == 1
    cold = await client.post(PATH, {"prompt": "x", "temperature": 0.005, "max_tokens": 1})
    assert cold.status == 200


async def test_sixteen_tokens_where_nothing_is_said(client):
    reply = (await client.post(PATH, {"prompt": "x", "ignore_eos": True})).json
    assert reply["usage"]["completion_tokens"] == 16


async def test_more_than_room_left_ends_with_length(client):
    fields = {"prompt": [5] * 500, "max_tokens": 512, "ignore_eos": True}
    reply = (await client.post(PATH, fields)).json
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["usage"]["total_tokens"] == 512


async def test_truncation(client):
    fields = {"prompt": [5] * 600, "max_tokens": 1, "truncate_prompt_tokens": 7}
    assert (await client.post(PATH, fields)).json["usage"]["prompt_tokens"] == 7


async def test_served_names(make_client):
    client = make_client(served_model_names=("a", "b"))
    for name in ("a", "b"):
        answer = await client.post(PATH, {**GREEDY, "model": name})
        assert answer.json["model"] == name
    assert (await client.post(PATH, GREEDY)).json["model"] == "a"
    assert (await client.post(PATH, {**GREEDY, "model": "trouper-demo"})).status == 404
    cards = (await client.get("/v1/models")).json["data"]
    assert [(card["id"], card["object"]) for card in cards] == [("a", "model"), ("b", "model")]


async def test_smaller_priorities_may_be_first(make_client, engine, monkeypatch):
    seen = []
    generate = engine.engine.generate
    monkeypatch.setattr(
        engine.engine, "generate", lambda *a, **k: seen.append(a[3].priority) or generate(*a, **k)
    )
    for order in ("trouper", "vllm"):
        client = make_client(priority_order=order)
        for priority in (1, 2, -(2**63)):
            await client.post(PATH, {**GREEDY, "max_tokens": 1, "priority": priority})
    assert seen == [1, 2, -(2**63), -2, -3, 2**63 - 1]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"logit_bias": {"99999": 1}}, ("logit_bias", "99999", "out of vocabulary")),
        ({"logit_bias": {"x7": 1}}, ("logit_bias", "'x7'")),
        ({"allowed_token_ids": [1, 99999]}, ("allowed_token_ids", "99999", "out of vocabulary")),
        ({"stop_token_ids": [88888]}, ("stop_token_ids", "88888", "out of vocabulary")),
        ({"prompt": [1, 77777]}, ("77777", "out of vocabulary")),
        ({"prompt": [1] * 600}, ("600", "512", "reduce the length of the input prompt")),
        ({"prompt": "x" * 100_000}, ("100000", "512", "reduce the length of the input prompt")),
    ],
)
async def test_a_refusal_names_what_is_wrong(client, fields, words):
    answer = await client.post("/v1/completions", {"prompt": "a", "max_tokens": 1, **fields})
    assert answer.status == 400
    assert all(word in answer.error["message"] for word in words), answer.error
