"""Each field that another server knows is honoured, refused or harmless, in every API; none is silent."""

import json
from pathlib import Path

import pytest

from trouper.errors import UnsupportedFeatureError
from trouper.frontends.server.apis.anthropic.conversation import CountTokensRequest, MessagesRequest
from trouper.frontends.server.apis.openai import requests
from trouper.frontends.server.apis.pooling import formats as pooling
from trouper.frontends.server.apis.responses.conversation import ResponsesRequest
from trouper.frontends.server.generation.request_fields import SamplingFields
from trouper.frontends.server.ops.control import LoadAdapterRequest, UnloadAdapterRequest
from trouper.frontends.server.shared import fields
from trouper.frontends.server.shared.errors import describe

from .fields_page import PAGE, rendered

KNOWN = json.loads(Path(__file__).with_name("known_fields.json").read_text())
KINDS = {
    "chat": requests.ChatRequest,
    "batch": requests.ChatBatchRequest,
    "completions": requests.CompletionRequest,
    "responses": ResponsesRequest,
    "messages": MessagesRequest,
    "count_tokens": CountTokensRequest,
    "embeddings": pooling.EmbeddingRequest,
    "pooling": pooling.PoolingRequest,
    "classify": pooling.ClassifyRequest,
    "score": pooling.ScoreRequest,
    "rerank": pooling.RerankRequest,
    "cohere_embed": pooling.CohereEmbedRequest,
    "tokenize": requests.TokenizeRequest,
    "detokenize": requests.DetokenizeRequest,
    "load_adapter": LoadAdapterRequest,
    "unload_adapter": UnloadAdapterRequest,
}
FOUR = ("chat", "completions", "responses", "messages")
PATHS = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}),
    "completions": ("/v1/completions", {"prompt": "hi", "max_tokens": 2}),
    "responses": ("/v1/responses", {"input": "hi", "max_output_tokens": 2}),
    "messages": ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}),
}  # fmt: skip


@pytest.mark.parametrize(("peer", "api"), [(peer, api) for peer in KNOWN for api in KNOWN[peer]])
def test_no_field_that_another_server_knows_is_silent(peer, api):
    silent = [name for name in KNOWN[peer][api] if fields.verdict(KINDS[api], name) == "unknown"]
    assert not silent


@pytest.mark.parametrize("api", FOUR)
def test_what_one_api_honours_no_other_passes_over(api):
    """Where a body has both `prompt` and `messages` its route says which is meant; the answer names the other."""
    honoured = {name for each in FOUR for name in KINDS[each].__struct_encode_fields__}
    silent = {name for name in honoured if fields.verdict(KINDS[api], name) == "unknown"}
    assert silent <= {"prompt", "messages"}


def test_the_page_has_the_table_of_the_code():
    page = PAGE.read_text()
    assert rendered(page) == page, "python -m tests.server.fields_page writes it"


@pytest.mark.parametrize("api", FOUR)
def test_reason_is_either_for_refusal_or_for_passing_over(api):
    table = KINDS[api].OTHERS
    assert not table.refused.keys() & table.harmless.keys()


@pytest.mark.parametrize("name", sorted(fields.COMPLETION.refused))
def test_refusal_is_400_that_names_field_and_what_to_use(name):
    with pytest.raises(UnsupportedFeatureError) as raised:
        fields.check_others({name: {"a": 1}}, fields.COMPLETION)
    problem = describe(raised.value)
    assert (problem.status, problem.code, problem.param) == (400, "not_supported", name)
    assert problem.message == f"{name} is not supported: {fields.COMPLETION.refused[name]}"


def test_a_refusal_names_the_value():
    with pytest.raises(UnsupportedFeatureError) as raised:
        fields.check_others({"mirostat": 2}, fields.CHAT)
    assert describe(raised.value).message.endswith(", got 2")


def test_the_first_field_in_the_body_is_named():
    with pytest.raises(UnsupportedFeatureError) as raised:
        fields.check_others({"grammar": "x", "audio": {"a": 1}}, fields.CHAT)
    assert raised.value.parameter == "grammar"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for name in ("grammar", "best_of") for value in (None, False, "", [], {})),
        ("best_of", 1), ("modalities", ["text"]), ("function_call", "none"), ("early_stopping", False),
        *((name, value) for name, values in fields.NEUTRAL.items() for value in values),
        *((name, value) for name in sorted(fields.ON_BY_DEFAULT) for value in (None, True)),
    ],
)  # fmt: skip
def test_a_value_that_asks_for_nothing_is_allowed(name, value):
    for table in (fields.CHAT, fields.RESPONSES, fields.MESSAGES, fields.POOLING):
        fields.check_others({name: value}, table)


@pytest.mark.parametrize("name", sorted(fields.ON_BY_DEFAULT))
def test_defaults_are_not_disabled_silently(name):
    with pytest.raises(UnsupportedFeatureError, match=name):
        fields.check_others({name: False}, fields.CHAT)


@pytest.mark.anyio
@pytest.mark.parametrize("api", FOUR)
@pytest.mark.parametrize("value", [1, "x" * 20_000, {"a": [1]}], ids=["number", "text", "object"])
async def test_field_that_may_be_passed_over_never_ends_request(client, api, value):
    path, body = PATHS[api]
    kind = KINDS[api]
    names = [name for name in kind.OTHERS.harmless if fields.verdict(kind, name) == "harmless"]
    harmless = dict.fromkeys(names, value)
    answer = await client.post(path, {**harmless, **body})
    assert answer.status == 200
    assert "x-trouper-ignored-fields" not in answer.headers


SHARED = {
    "min_tokens": 2, "temperature": 0.5, "top_p": 0.5, "top_k": 7, "min_p": 0.25, "repetition_penalty": 1.5,
    "presence_penalty": 0.5, "frequency_penalty": 0.25, "seed": 3, "stop_token_ids": [5], "ignore_eos": True,
    "include_stop_str_in_output": True, "skip_special_tokens": False, "spaces_between_special_tokens": False,
    "logit_bias": {"5": 1.0}, "allowed_token_ids": [5, 6], "bad_words": ["zz"], "stream_interval": 2,
    "thinking_token_budget": 5, "repetition_detection": {"max_pattern_size": 3, "min_count": 4},
    "vllm_xargs": {"a": 1}, "structured_outputs": {"regex": "a+"},
}  # fmt: skip
ELSEWHERE = {
    "model", "stream", "priority", "request_id", "session_id", "data_parallel_rank", "cache_salt",
    "add_special_tokens", "truncate_prompt_tokens", "truncation_side",
}  # fmt: skip


def test_the_shared_fields_are_all_tested():
    assert SHARED.keys() | ELSEWHERE == set(SamplingFields.__struct_fields__)


@pytest.mark.anyio
@pytest.mark.parametrize("api", FOUR)
async def test_sampling_is_asked_for_in_same_words_in_every_api(says, api):
    client = says("a")
    path, body = PATHS[api]
    stop = {"stop_sequences": ["q"]} if api == "messages" else {"stop": ["q"]}
    assert (await client.post(path, {**body, **SHARED, **stop})).status == 200
    ((_, params, _),) = client.engine.asked
    for name, value in SHARED.items():
        if (api, name) == ("messages", "thinking_token_budget"):
            continue  # a model that does not reason keeps within any budget
        found = getattr(params, {"vllm_xargs": "extra_args"}.get(name, name))
        if name == "logit_bias":
            value = {5: 1.0}
        elif name == "repetition_detection":
            found = {each: getattr(found, each) for each in value}
        elif name == "structured_outputs":
            found = {"regex": found.regex}
        assert found == value, name
    assert params.stop == ["q"]


@pytest.mark.anyio
@pytest.mark.parametrize("api", FOUR)
async def test_prefix_of_one_salt_is_not_read_by_another(make_client, api):
    path, body = PATHS[api]
    long = "one two three four five six " * 20
    text = {"prompt": long} if api == "completions" else {"input": long} if api == "responses" else {
        "messages": [{"role": "user", "content": long}]
    }  # fmt: skip
    client = make_client(enable_prompt_tokens_details=True)

    async def num_cached(salt):
        answer = (await client.post(path, {**body, **text, "cache_salt": salt})).json["usage"]
        if api == "messages":
            return answer["cache_read_input_tokens"]
        details = answer.get("prompt_tokens_details") or answer.get("input_tokens_details")
        return details["cached_tokens"]

    assert await num_cached(f"a {api}") == 0
    assert await num_cached(f"a {api}") > 0
    assert await num_cached(f"b {api}") == 0


@pytest.mark.anyio
@pytest.mark.parametrize("api", FOUR)
@pytest.mark.parametrize(
    ("scope", "keys", "shares"),
    [("auto", 2, False), ("auto", 1, True), ("key", 1, False), ("shared", 2, True)],
)
async def test_keys_share_prefixes_as_the_scope_says(make_client, api, scope, keys, shares):
    path, body = PATHS[api]
    long = f"{scope} {keys} one two three four five six " * 20
    text = {"prompt": long} if api == "completions" else {"input": long} if api == "responses" else {
        "messages": [{"role": "user", "content": long}]
    }  # fmt: skip
    client = make_client(
        api_keys=("alice", "bob")[:keys], admin_key="root", cache_scope=scope,
        enable_prompt_tokens_details=True,
    )  # fmt: skip

    async def num_cached(key, salt=None):
        headers = [("authorization", f"Bearer {key}")]
        salted = {**body, **text} | ({} if salt is None else {"cache_salt": salt})
        answer = (await client.post(path, salted, headers)).json["usage"]
        if api == "messages":
            return answer["cache_read_input_tokens"]
        details = answer.get("prompt_tokens_details") or answer.get("input_tokens_details")
        return details["cached_tokens"]

    other = "bob" if keys == 2 else "root"
    salt = f"{api} {scope} {keys}"
    assert await num_cached("alice", salt) == 0
    assert await num_cached("alice", salt) > 0
    assert (await num_cached(other, salt) > 0) == shares


@pytest.mark.anyio
async def test_unknown_field_is_named_in_answer_and_once_in_log(client, caplog):
    path, body = PATHS["chat"]
    for _ in range(2):
        answer = await client.post(path, {**body, "frobnicate": 1, "ünknown\n": 2})
        assert answer.status == 200
        assert answer.headers["x-trouper-ignored-fields"] == "?nknown , frobnicate"
    lines = [
        record.getMessage() for record in caplog.records if "unknown field" in record.getMessage()
    ]
    assert len(lines) == 2
    assert lines[1] == "/v1/chat/completions: ignored the unknown field 'frobnicate'"


@pytest.mark.anyio
async def test_many_unknown_fields_are_not_a_large_header(client):
    path, body = PATHS["completions"]
    many = {f"{i:03}{'x' * 100}": 1 for i in range(1000)}
    answer = await client.post(path, {**body, **many})
    assert answer.status == 200
    assert len(answer.headers["x-trouper-ignored-fields"]) < 1200
