"""Which replica and which session a request names, in its headers or its body."""

import pytest

from trouper import AsyncLLMEngine, EngineArgs
from trouper.errors import TrouperValidationError
from trouper.frontends.server.asgi.app import create_app
from trouper.frontends.server.http.context import RequestContext
from trouper.frontends.server.http.headers import read_placement

from .client import Client

PATH = "/v1/completions"
BODY = {"prompt": "a", "max_tokens": 1}
pytestmark = pytest.mark.anyio


@pytest.fixture
async def pooling():
    args = EngineArgs(runner="pooling", dtype="float32", max_model_len=64)
    async with AsyncLLMEngine(args) as engine:
        yield Client(create_app(engine))


def context(*headers):
    return RequestContext({"path": "/", "method": "POST", "headers": headers}, None, None)


@pytest.mark.parametrize(
    ("headers", "fields", "found"),
    [
        ((), (), (None, None)),
        ((), (2, "body"), (2, "body")),
        ([(b"X-Session-ID", b"head")], (2, "body"), (2, "head")),
        ([(b"x-session-id", b"")], (None, "body"), (None, "")),
        ([(b"X-data-parallel-rank", b"3")], (2, "body"), (3, "body")),
    ],
)
def test_headers_go_before_the_body(headers, fields, found):
    assert read_placement(context(*headers), *fields) == found


@pytest.mark.parametrize("text", [b"", b"one", b"-1", b"1.5", b"9" * 20])
def test_a_rank_that_is_no_number_is_refused(text):
    with pytest.raises(TrouperValidationError, match="X-data-parallel-rank"):
        read_placement(context((b"x-data-parallel-rank", text)))


async def test_replica_that_does_not_exist_is_400_that_names_it(client):
    for value in ("1", "x"):
        answer = await client.post(PATH, BODY, [("x-data-parallel-rank", value)])
        assert answer.status == 400
        assert "data" in answer.json["error"]["param"]
    for rank in (1, -1, 2**70, "1", True, 0.5, []):
        answer = await client.post(PATH, {**BODY, "data_parallel_rank": rank})
        assert (answer.status, answer.error["param"]) == (400, "data_parallel_rank"), rank


async def test_name_that_is_none_of_session_is_400(client):
    for name in ("", "x" * 257):
        in_body = await client.post(PATH, {**BODY, "session_id": name})
        in_head = await client.post(PATH, BODY, [("x-session-id", name)])
        for answer in (in_body, in_head):
            assert (answer.status, answer.error["param"]) == (400, "session_id")


async def test_replica_and_session_that_exist_are_taken(client):
    headers = [("x-data-parallel-rank", "0"), ("x-session-id", "mine")]
    assert (await client.post(PATH, BODY, headers)).status == 200
    fields = {"data_parallel_rank": 0, "session_id": "mine"}
    assert (await client.post(PATH, {**BODY, **fields})).status == 200
    wrong = {"data_parallel_rank": 7, "session_id": ""}  # headers go before them
    assert (await client.post(PATH, {**BODY, **wrong}, headers)).status == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/embeddings", {"input": "a"}), ("/score", {"text_1": "a", "text_2": "b"})],
)
async def test_text_that_is_pooled_names_its_replica_too(pooling, path, body):
    answer = await pooling.post(path, body, [("x-data-parallel-rank", "1")])
    assert (answer.status, answer.json["error"]["param"]) == (400, "data_parallel_rank")
    assert (await pooling.post(path, body, [("x-data-parallel-rank", "0")])).status == 200
    answer = await pooling.post(path, {**body, "data_parallel_rank": 1})
    assert (answer.status, answer.error["param"]) == (400, "data_parallel_rank")
    assert (await pooling.post(path, {**body, "data_parallel_rank": 0})).status == 200
