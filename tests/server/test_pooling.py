"""The pooling routes over an engine that embeds, and what a generating one says to them."""

import base64
import io
import json

import anyio
import numpy as np
import pytest

from trouper import AsyncLLMEngine, EngineArgs
from trouper.actors.engine.generation import Generation
from trouper.frontends.server.asgi.app import create_app
from trouper.frontends.server.program.batch_files import BatchFile
from trouper.frontends.server.program.batch_records import StreamAnswers

from .client import Client

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
async def pooling_engine(anyio_backend):
    args = EngineArgs(runner="pooling", dtype="float32", max_model_len=128)
    async with AsyncLLMEngine(args) as engine:
        yield engine


@pytest.fixture
def pooling(pooling_engine):
    return Client(create_app(pooling_engine))


async def floats(client, **more):
    answer = await client.post("/v1/embeddings", {"input": ["one", "two words"], **more})
    assert answer.status == 200, answer.body
    return answer


async def test_embeddings_have_openais_form(pooling):
    answer = (await floats(pooling)).json
    assert answer["object"] == "list"
    assert answer["id"].startswith("embd-")
    assert [item["index"] for item in answer["data"]] == [0, 1]
    assert {item["object"] for item in answer["data"]} == {"embedding"}
    rows = np.array([item["embedding"] for item in answer["data"]])
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-6)
    usage = answer["usage"]
    assert usage["prompt_tokens"] == usage["total_tokens"] > 2


async def test_a_prompt_may_fill_the_whole_context(pooling):
    whole = await pooling.post("/v1/embeddings", {"input": [5] * 128})
    assert (whole.status, whole.json["usage"]["prompt_tokens"]) == (200, 128)
    over = await pooling.post("/v1/embeddings", {"input": [5] * 129})
    assert over.status == 400


async def test_texts_may_wait_at_server_that_has_measured_nothing_yet(pooling):
    statuses: list[int] = []

    async def ask() -> None:
        statuses.append((await pooling.post("/v1/embeddings", {"input": "one"})).status)

    async with anyio.create_task_group() as tasks:
        for _ in range(40):
            tasks.start_soon(ask)
    assert statuses == [200] * 40


async def test_every_encoding_says_the_same_numbers(pooling):
    rows = np.float32([item["embedding"] for item in (await floats(pooling)).json["data"]])
    encoded = (await floats(pooling, encoding_format="base64")).json["data"]
    for row, item in zip(rows, encoded, strict=True):
        assert (np.frombuffer(base64.b64decode(item["embedding"]), "<f4") == row).all()
    raw = await floats(pooling, encoding_format="bytes", embed_dtype="float16", endianness="big")
    assert raw.headers["content-type"] == "application/octet-stream"
    for row, item in zip(rows, json.loads(raw.headers["metadata"])["data"], strict=True):
        part = np.frombuffer(raw.body[item["start"] : item["end"]], ">f2")
        assert (part == row.astype(np.float16)).all()
        assert item["shape"] == [len(row)]
    only = await floats(pooling, encoding_format="bytes_only")
    assert "metadata" not in only.headers
    assert only.body == rows.tobytes()


@pytest.mark.parametrize("padding", [False, True, "longest", "do_not_pad"])
async def test_a_padding_that_changes_nothing_is_taken(pooling, padding):
    bare = (await pooling.post("/v1/embeddings", {"input": "a"})).json
    padded = (await pooling.post("/v1/embeddings", {"input": "a", "padding": padding})).json
    assert (padded["data"], padded["usage"]) == (bare["data"], bare["usage"])


@pytest.mark.parametrize(
    ("path", "fields", "sentence"),
    [
        ("/pooling", {"input": "a", "task": "classify"}, "Unsupported task: 'classify'"),
        ("/pooling", {"input": "a", "task": "nonsense"}, "Unsupported task: 'nonsense'"),
        ("/v2/embed", {"texts": ["a"], "input_type": "x"}, "Unsupported input_type 'x'"),
        ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 99999}, "truncate_prompt_tokens value is greater than max_model_len."),
        ("/pooling", {"input": "a", "task": "plugin"}, "No IOProcessor plugin installed."),
        ("/v1/embeddings", {"input": "a", "encoding_format": "x"}, "encoding_format: Input should be 'float', 'base64', 'bytes', 'bytes_only' (literal_error)."),
        ("/v1/embeddings", {"input": "a", "embed_dtype": "x"}, "embed_dtype: Input should be 'float32', 'float16', "),
        ("/score", {"text_1": "a", "text_2": "b", "max_tokens_per_doc": -1}, "max_tokens_per_doc must be a non-negative integer"),
    ],
)  # fmt: skip
async def test_clients_of_vllm_find_its_sentences_in_errors(pooling, path, fields, sentence):
    answer = await pooling.post(path, fields)
    assert answer.status == 400
    assert answer.error["message"].startswith(sentence)


async def test_inputs_come_in_every_form(pooling):
    for given, count in (("a", 1), ([1, 2, 3], 1), ([[1, 2], [3]], 2), (["a"] * 3, 3)):
        answer = await pooling.post("/v1/embeddings", {"input": given})
        assert len(answer.json["data"]) == count
    chat = {"messages": [{"role": "user", "content": "a"}]}
    assert (await pooling.post("/v1/embeddings", chat)).status in (200, 400)  # has it a template?


async def test_pooling_takes_a_task(pooling):
    answer = await pooling.post("/pooling", {"input": [1, 2, 3], "task": "token_embed"})
    assert answer.json["data"][0]["object"] == "pooling"
    assert len(answer.json["data"][0]["data"]) == 3
    whole = await pooling.post("/pooling", {"input": "a", "task": "embed"})
    assert whole.status == 200
    without = await pooling.post("/pooling", {"input": "a"})  # what the model is for
    assert without.json["data"] == whole.json["data"]


async def test_option_of_task_decides_what_pooling_without_one_is(anyio_backend):
    args = EngineArgs(runner="pooling", pooler_config={"task": "token_embed"}, dtype="float32")
    async with AsyncLLMEngine(args) as engine:
        client = Client(create_app(engine))
        found = (await client.post("/pooling", {"input": [1, 2, 3]})).json["data"][0]["data"]
        named = await client.post("/pooling", {"input": [1, 2, 3], "task": "token_embed"})
    assert found == named.json["data"][0]["data"]
    assert len(found) == 3


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
async def test_scores_are_cosines_of_embeddings(pooling, path):
    body = {"text_1": "one", "text_2": ["one", "two words"]}
    data = (await pooling.post(path, body)).json["data"]
    assert [item["object"] for item in data] == ["score", "score"]
    assert data[0]["score"] == pytest.approx(1, abs=1e-5)
    other = (await pooling.post(path, {"queries": ["one"], "documents": ["two words"]})).json
    assert other["data"][0]["score"] == pytest.approx(data[1]["score"], abs=1e-5)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": ["one"] * 9}),
        ("/score", {"data_1": "query", "data_2": [f"text {i}" for i in range(9)]}),
    ],
)
async def test_abort_while_texts_are_being_opened_ends_them_all(
    pooling_engine, path, body, monkeypatch
):
    app, opened, right = create_app(pooling_engine), [], Generation.open

    def open_and_abort(self):
        opened.append(self)
        slot = right(self)
        if len(opened) == 3:
            assert app.service.abort(None) >= 3
        return slot

    monkeypatch.setattr(Generation, "open", open_and_abort)
    answer = await Client(app).post(path, body)
    assert (answer.status, answer.error["code"], len(opened)) == (503, "aborted", 3)
    assert app.service.abort(None) == 0
    assert not pooling_engine.engine.requests.slots


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_reranking_sorts_and_keeps_the_indices(pooling, path):
    texts = ["something else", "one", {"text": "one two"}]
    answer = (await pooling.post(path, {"query": "one", "documents": texts})).json
    scores = [item["relevance_score"] for item in answer["results"]]
    assert scores == sorted(scores, reverse=True)
    assert answer["results"][0]["index"] == 1
    assert answer["results"][0]["document"] == {"text": "one", "multi_modal": None}
    best = await pooling.post(path, {"query": "one", "documents": texts, "top_n": 2})
    assert len(best.json["results"]) == 2


async def test_late_interaction_scores_and_reranks(anyio_backend):
    args = EngineArgs(runner="pooling", pooler_config={"task": "token_embed"}, dtype="float32")
    texts = ["something else", "one two", "two words"]
    async with AsyncLLMEngine(args) as engine:
        client = Client(create_app(engine))
        ranked = (await client.post("/rerank", {"query": "one two", "documents": texts})).json
        body = {"queries": "one two", "documents": texts}
        scores = [item["score"] for item in (await client.post("/score", body)).json["data"]]
    assert [item["index"] for item in ranked["results"]] == sorted(
        range(3), key=lambda i: -scores[i]
    )
    num_tokens = ranked["results"][0]["relevance_score"]  # each of them has found itself
    assert ranked["results"][0]["index"] == 1
    assert num_tokens == pytest.approx(round(num_tokens), abs=1e-4)


async def test_cohere_embeds_texts(pooling):
    answer = (
        await pooling.post("/v2/embed", {"texts": ["a", "b"], "embedding_types": ["float"]})
    ).json
    assert len(answer["embeddings"]["float"]) == 2
    assert answer["meta"]["billed_units"]["input_tokens"] >= 2


TYPES = ["uint8", "float", "binary", "int8", "ubinary", "base64"]


async def test_cohere_embeds_in_every_type(pooling):
    body = {"texts": ["one", "two words"], "embedding_types": TYPES}
    found = (await pooling.post("/v2/embed", body)).json["embeddings"]
    assert list(found) == TYPES
    rows = np.float32(found["float"])
    assert (np.float32(found["int8"]) == np.float32(found["uint8"]) - 128).all()
    assert (np.abs(found["int8"]).max(axis=1) == 127).all()
    np.testing.assert_allclose(
        np.float32(found["int8"]) / 127 * np.abs(rows).max(axis=1, keepdims=True),
        rows,
        atol=np.abs(rows).max() / 254 + 1e-6,
    )
    bits = np.unpackbits(np.uint8(found["ubinary"]), axis=1)
    assert (bits == (rows > 0)).all()
    assert (np.int16(found["binary"]) == np.int16(found["ubinary"]) - 128).all()
    decoded = [np.frombuffer(base64.b64decode(text), "<f4") for text in found["base64"]]
    assert (np.stack(decoded) == rows).all()


async def first_words(client, text, num):
    """The text of its first tokens."""
    ids = (await client.post("/tokenize", {"prompt": text})).json["tokens"][:num]
    part = (await client.post("/detokenize", {"tokens": ids})).json["prompt"]
    assert (await client.post("/tokenize", {"prompt": part})).json["tokens"] == ids
    return part


@pytest.mark.parametrize("task", ["embed", "token_embed"])
async def test_texts_that_are_compared_may_be_cut(anyio_backend, task):
    args = EngineArgs(runner="pooling", pooler_config={"task": task}, dtype="float32")
    query, long = "def f(x):", ["def f(x): return x", "import os, sys, re"]
    async with AsyncLLMEngine(args) as engine:
        client = Client(create_app(engine))

        async def score(first, second, **more):
            reply = (await client.post("/score", {"text_1": first, "text_2": second, **more})).json
            return [each["score"] for each in reply["data"]], reply["usage"]["prompt_tokens"]

        async def rank(first, second, **more):
            body = {"query": first, "documents": second, **more}
            reply = (await client.post("/rerank", body)).json
            found = {each["index"]: each["relevance_score"] for each in reply["results"]}
            return [found[0], found[1]], reply["usage"]["prompt_tokens"]

        short = [await first_words(client, text, 3) for text in long]
        start = await first_words(client, query, 2)
        for ask in (score, rank):
            plain = await ask(query, long)
            assert await ask(query, long, max_tokens_per_doc=3) == await ask(query, short) != plain
            assert await ask(query, long, max_tokens_per_query=2) == await ask(start, long) != plain
            for all_of_it in (0, 99, None, 2**70):
                assert await ask(query, long, max_tokens_per_doc=all_of_it) == plain
        if task == "embed":  # the others are always cut
            for body, name in (
                ({"query": query, "documents": [*long, "x y " * 4000]}, "documents[2]"),
                ({"query": "x y " * 4000, "documents": long}, "query"),
            ):
                answer = await client.post("/rerank", body)
                assert (answer.status, answer.error["param"]) == (400, name)
                assert answer.error["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/v1/embeddings", {}, 400, "input"),
        ("/v1/embeddings", {"input": []}, 400, "input"),
        ("/v1/embeddings", {"input": ["a", ""]}, 400, "input[1]"),
        ("/v1/embeddings", {"input": ["a", [1]]}, 400, "input[1]"),
        ("/v1/embeddings", {"input": ["a", "word " * 999]}, 400, "input[1]"),
        ("/v1/embeddings", {"input": "a", "dimensions": 8}, 400, "dimensions"),
        ("/v1/embeddings", {"input": "a", "normalize": True}, 400, "normalize"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, 400, "encoding_format"),
        (
            "/v1/embeddings",
            {"input": "a", "truncate_prompt_tokens": 0},
            400,
            "truncate_prompt_tokens",
        ),
        ("/v1/embeddings", {"input": "a", "model": "other"}, 404, None),
        ("/v1/embeddings", {"input": "a", "padding": "max_length"}, 400, "padding"),
        ("/pooling", {"input": "a", "task": "score"}, 400, "task"),
        ("/classify", {"input": "a"}, 400, "task"),
        ("/score", {"text_1": "a"}, 400, "data_1"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, 400, "text_2"),
        ("/rerank", {"query": "a", "documents": []}, 400, "documents"),
        ("/rerank", {"query": "a", "documents": ["a"], "top_n": -1}, 400, "top_n"),
        ("/v2/embed", {"texts": []}, 400, "texts"),
        ("/v2/embed", {"texts": ["a"], "embedding_types": ["int4"]}, 400, "embedding_types"),
        ("/v2/embed", {"texts": ["a"], "max_tokens": 0}, 400, "max_tokens"),
        ("/v2/embed", {"texts": ["a"], "output_dimension": 0}, 400, "output_dimension"),
        (
            "/rerank",
            {"query": "a", "documents": ["a"], "max_tokens_per_doc": -1},
            400,
            "max_tokens_per_doc",
        ),
        (
            "/score",
            {"text_1": "a", "text_2": "a", "max_tokens_per_query": -1},
            400,
            "max_tokens_per_query",
        ),
        ("/rerank", {"query": "a", "documents": ["a", "word " * 999]}, 400, "documents[1]"),
        ("/rerank", {"query": "word " * 999, "documents": ["a"]}, 400, "query"),
        ("/score", {"text_1": "a", "text_2": ["word " * 999]}, 400, "text_2[0]"),
        ("/score", {"queries": ["a", ""], "items": ["a", "b"]}, 400, "queries[1]"),
        ("/score", {"data_1": "a", "data_2": "word " * 999}, 400, "data_2"),
        ("/score", {"text_1": "a", "text_2": ["a"] * 2049}, 400, "text_2"),
        ("/v1/completions", {"prompt": "a"}, 400, "model"),
    ],
)
async def test_what_cannot_be_is_refused_by_name(pooling, path, body, status, param):
    answer = await pooling.post(path, body)
    assert (answer.status, answer.error["param"]) == (status, param), answer.body


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/infill"]
)
async def test_pooling_model_names_routes_instead_of_generating(pooling, path):
    answer = await pooling.post(path, {"messages": [{"role": "user", "content": "hi"}]})
    assert answer.status == 400
    message = answer.error["message"]
    assert (
        message
        == f"{path}: the model 'trouper-demo' makes embeddings and does not generate text; use /v1/embeddings"
    )


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling", "/classify"])
async def test_a_generating_model_does_not_pool(client, path):
    answer = await client.post(path, {"input": "a"})
    assert (answer.status, answer.error["param"]) == (400, "model")


async def test_a_batch_file_may_embed_and_rerank(pooling_engine):
    bodies = {
        "/v1/embeddings": {"input": "a"},
        "/v1/rerank": {"query": "a", "documents": ["a", "b"]},
        "/pooling": {"input": "a", "task": "embed", "encoding_format": "bytes_only"},
    }
    lines = [
        json.dumps({"custom_id": url, "method": "POST", "url": url, "body": body})
        for url, body in bodies.items()
    ]
    sink = io.BytesIO()
    await BatchFile(create_app(pooling_engine), 4).answer_all(
        io.BytesIO("\n".join(lines).encode()), StreamAnswers(sink)
    )
    answers = [json.loads(line)["response"] for line in sink.getvalue().splitlines()]
    assert [answer["status_code"] for answer in answers] == [200, 200, 200]
    floats = answers[0]["body"]["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(answers[2]["body"]), "<f4") == pytest.approx(floats)
    assert len(answers[1]["body"]["results"]) == 2


async def test_sentence_about_too_much_truncation_is_vllms_to_letter(pooling):
    answer = await pooling.post("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 10**6})
    assert answer.error["message"] == (
        "truncate_prompt_tokens value is greater than max_model_len. Please request a smaller truncation size."
    )
