"""Routes and fields that vLLM has beside OpenAI's."""

import json

import pytest

from .client import Client  # noqa: F401  # the fixtures' type

pytestmark = pytest.mark.anyio

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
GREEDY = {"temperature": 0, "ignore_eos": True, "max_tokens": 4}
HI = [{"role": "user", "content": "hi"}]
HO = [{"role": "user", "content": "What is a list?"}]


async def test_invocations_are_for_route_whose_fields_they_have(client):
    fields = {**GREEDY, "prompt": "def f("}
    invoked = (await client.post("/invocations", fields)).json
    assert invoked["choices"] == (await client.post(COMPLETIONS, fields)).json["choices"]
    fields = {**GREEDY, "messages": HI}
    invoked = (await client.post("/invocations", fields)).json
    assert invoked["choices"] == (await client.post(CHAT, fields)).json["choices"]
    stream = await client.post("/invocations", {**fields, "stream": True})
    assert stream.events[-1] == "[DONE]"


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"nonsense": 1}, 400, "prompt"),
        ({"messages": []}, 400, "messages"),
        ({"prompt": "a", "temperature": 9}, 400, "temperature"),
        ({"prompt": "a", "model": "nope"}, 404, None),
    ],
)
async def test_wrong_invocation_is_answered_as_by_its_route(client, fields, status, param):
    answer = await client.post("/invocations", fields)
    assert (answer.status, answer.error["param"]) == (status, param)


async def test_a_batch_has_a_choice_for_each_conversation(client):
    alone = [(await client.post(CHAT, {**GREEDY, "messages": each})).json for each in (HI, HO)]
    both = (await client.post(f"{CHAT}/batch", {**GREEDY, "messages": [HI, HO]})).json
    wanted = [reply["choices"][0] for reply in alone]
    assert both["choices"] == [{**each, "index": i} for i, each in enumerate(wanted)]
    assert both["usage"]["total_tokens"] == sum(each["usage"]["total_tokens"] for each in alone)


async def test_long_text_in_batch_is_read_as_in_chat(client):
    long = [{"role": "user", "content": "x" * 2**17}]
    of_chat = await client.post(CHAT, {**GREEDY, "messages": long})
    answer = await client.post(f"{CHAT}/batch", {**GREEDY, "messages": [HI, long]})
    assert (answer.status, answer.error["code"]) == (400, of_chat.error["code"])
    assert answer.error["param"] == "messages[1]"
    answer = await client.post(f"{CHAT}/batch", {**GREEDY, "messages": [HI], "zz": "x" * 2**16})
    assert (answer.status, answer.error["param"]) == (400, "zz")  # the route's own words


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [HI, []]}, "messages"),
        ({"messages": HI}, "messages[0]"),
        ({"messages": [HI], "stream": True}, "stream"),
        ({"messages": [HI], "n": 2}, "n"),
        ({"messages": [HI] * 1025}, "messages"),
        ({"messages": [HI], "top_p": 7}, "top_p"),
        ({"messages": [HI, [{"role": "user", "content": "a " * 2000}]]}, "messages[1]"),
    ],
)
async def test_a_wrong_batch_names_its_fault(client, fields, param):
    answer = await client.post(f"{CHAT}/batch", {**GREEDY, **fields})
    assert (answer.status, answer.error["param"]) == (400, param)


async def test_tokenizer_is_shown_where_server_is_told_to(make_client):
    refused = await make_client().get("/tokenizer_info")
    assert refused.status == 404
    info = (await make_client(shows_tokenizer_info=True).get("/tokenizer_info")).json
    assert info["eos_token"] == "<|endoftext|>"
    assert "{% for m in messages %}" in info["chat_template"]
    assert info["tokenizer_class"] == "PreTrainedTokenizerFast"


async def test_strings_of_tokens_are_the_vocabularys_own(client):
    fields = {"prompt": "What is it?\n", "return_token_strs": True}
    strings = (await client.post("/tokenize", fields)).json["token_strs"]
    assert strings == ["W", "h", "at", "Ġis", "Ġit", "?Ċ"]


@pytest.mark.parametrize(
    ("path", "fields", "task"),
    [
        ("/v1/embeddings", {"input": "a"}, "embed"),
        ("/pooling", {"input": "a", "task": "token_embed"}, "token_embed"),
        ("/classify", {"input": "a"}, "classify"),
        ("/score", {"text_1": "a", "text_2": "b"}, "score"),
        ("/rerank", {"query": "a", "documents": ["b"]}, "score"),
    ],
)
async def test_task_of_another_kind_of_model_is_named(client, path, fields, task):
    answer = await client.post(path, fields)
    assert answer.status == 400
    assert answer.error["message"] == f"Unsupported task: {task!r}. This model can generate."


@pytest.mark.parametrize(("path", "prompt"), [(COMPLETIONS, {"prompt": "def f("}), (CHAT, {"messages": HI})])  # fmt: skip
async def test_times_of_request_come_with_its_one_choice(client, make_client, path, prompt):
    fields = {**GREEDY, **prompt}
    assert (await client.post(path, fields)).json["metrics"] is None
    client = make_client(shows_metrics=True)
    whole = (await client.post(path, fields)).json["metrics"]
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    *_, last, _ = (await client.post(path, {**fields, **usage})).events
    for metrics in (whole, last["metrics"]):
        assert metrics.pop("speculative_decoding") is None
        assert all(value > 0 for value in metrics.values()), metrics
    several = (await client.post(path, {**fields, "n": 2, "temperature": 1})).json
    assert several["metrics"] is None


@pytest.mark.parametrize(("path", "prompt"), [(COMPLETIONS, {"prompt": "def f("}), (CHAT, {"messages": HI})])  # fmt: skip
async def test_a_balancer_reads_the_load_in_a_header(client, path, prompt):
    async def report(*headers):
        answer = await client.post(path, {**GREEDY, **prompt}, list(headers))
        assert answer.status == 200
        return answer.headers.get("endpoint-load-metrics")

    name = "endpoint-load-metrics-format"
    kind, text = (await report((name, "JSON"))).split(" ", 1)
    named = json.loads(text)["named_metrics"]
    assert (kind, named.keys()) == ("JSON", {"kv_cache_usage_perc", "num_requests_waiting"})
    text = await report((name, "text"))
    assert text.startswith("TEXT named_metrics.kv_cache_usage_perc=")
    assert await report((name, "xml")) is await report() is None


LONG = {"prompt": [1] * 600}


@pytest.mark.parametrize(
    ("path", "fields", "sentence"),
    [
        (COMPLETIONS, {}, "Either prompt or prompt_embeds must be provided and non-empty."),
        (COMPLETIONS, {"prompt": ""}, "Either prompt or prompt_embeds must be provided and non-empty."),
        (COMPLETIONS, {"prompt": [], "prompt_embeds": []}, "Either prompt or prompt_embeds must be provided and non-empty."),
        (COMPLETIONS, LONG, "This model's maximum context length is 512 tokens. However, your prompt contains 600 input tokens"),
        (COMPLETIONS, LONG, "Please reduce the length of the input prompt."),
        (COMPLETIONS, {"prompt": "x" * 10**5}, "Please reduce the length of the input prompt."),
        (COMPLETIONS, {"prompt": "x", "truncate_prompt_tokens": 999}, "truncate_prompt_tokens value is greater than max_model_len. Please request a smaller truncation size."),
        (COMPLETIONS, {"prompt": "x", "thinking_token_budget": -2}, "must be a non-negative integer or -1 for unlimited"),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {"bad1": 1, "5": 1, "bad2": 2}}, "'bad1', 'bad2'"),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {"88888": 1, "5": 1, "99999": 2}}, "token ids 88888, 99999 are out of vocabulary"),
        (COMPLETIONS, {"prompt": "x", "stop_token_ids": [77777, 88888]}, "token ids 77777, 88888 are out of vocabulary"),
        (COMPLETIONS, {"prompt": "x", "seed": 2**63}, "less_than_equal"),
        (COMPLETIONS, {"prompt": "x", "seed": -(2**63) - 1}, "greater_than_equal"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": "many"}, "Input should be a valid integer"),
        (COMPLETIONS, {"prompt": "x", "echo": "perhaps"}, "Input should be a valid boolean"),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {"1": "x"}}, "Input should be a valid number"),
        (CHAT, {}, "Field required"),
        ("/v1/responses", {"input": "x", "background": True, "store": False}, "background can only be used when `store` is true"),
        ("/v1/responses", {"input": "x", "previous_response_id": "resp_no"}, "Response with id 'resp_no' not found."),
        ("/v1/responses/resp_no/cancel", {}, "Response with id 'resp_no' not found."),
    ],
)  # fmt: skip
async def test_clients_of_vllm_find_its_sentences_in_errors(client, path, fields, sentence):
    answer = await client.post(path, fields)
    assert answer.status in (400, 404)
    assert sentence in answer.error["message"]


async def test_many_wrong_ids_are_not_all_named(client):
    bias = {str(90_000 + i): 1 for i in range(1000)}
    answer = await client.post(COMPLETIONS, {"prompt": "x", "logit_bias": bias})
    assert (answer.status, answer.error["param"]) == (400, "logit_bias")
    assert "90007, …" in answer.error["message"]


async def test_only_a_response_in_background_can_be_cancelled(client):
    name = (await client.post("/v1/responses", {"input": "hi", "max_output_tokens": 2})).json["id"]
    answer = await client.post(f"/v1/responses/{name}/cancel")
    assert answer.status == 400
    assert answer.error["message"].startswith("Cannot cancel a synchronous response.")


async def test_an_echo_of_ids_shows_special_tokens(client):
    fields = {**GREEDY, "prompt": [0, 5, 0], "echo": True}
    echoed = (await client.post(COMPLETIONS, fields)).json["choices"][0]["text"]
    text = (await client.post("/detokenize", {"tokens": [0, 5, 0]})).json["prompt"]
    assert "<|endoftext|>" in text
    assert echoed.startswith(text)


async def test_chosen_token_is_first_of_its_position(client):
    fields = {
        **GREEDY,
        "prompt": "def f(",
        "temperature": 2,
        "seed": 1,
        "logprobs": 3,
        "max_tokens": 20,
    }
    found = (await client.post(COMPLETIONS, fields)).json["choices"][0]["logprobs"]
    assert [next(iter(top)) for top in found["top_logprobs"]] == found["tokens"]
    assert all(3 <= len(top) <= 4 for top in found["top_logprobs"])


@pytest.mark.parametrize("stream", [False, True])
async def test_ids_that_stage_before_has_made_take_place_of_messages(client, stream):
    fields = {**GREEDY, "return_token_ids": True}
    first = (await client.post(CHAT, {**fields, "messages": HI})).json
    forwarded = {"prompt_token_ids": first["prompt_token_ids"], "do_remote_prefill": True}
    again = {**fields, "messages": HO, "kv_transfer_params": forwarded, "stream": stream}
    answer = await client.post(CHAT, again)
    reply = answer.events[0] if stream else answer.json
    assert reply["prompt_token_ids"] == first["prompt_token_ids"]
    if not stream:
        assert reply["choices"][0]["message"] == first["choices"][0]["message"]
    without = {**again, "kv_transfer_params": {"do_remote_prefill": True}, "stream": False}
    assert (await client.post(CHAT, without)).json["prompt_token_ids"] != first["prompt_token_ids"]


@pytest.mark.parametrize("ids", [[], "x", [99999], [-1], [True]])
async def test_wrong_forwarded_ids_are_named(client, ids):
    fields = {**GREEDY, "messages": HI, "kv_transfer_params": {"prompt_token_ids": ids}}
    answer = await client.post(CHAT, fields)
    assert (answer.status, answer.error["param"]) == (400, "kv_transfer_params.prompt_token_ids")
