"""What answers say of their first token, and deadlines that it cannot meet."""

import pytest

from trouper.actors.output.slot import ExpectedToken
from trouper.frontends.server.asgi.app import create_app
from trouper.frontends.server.shared.settings import ServerSettings

from .client import Client
from .scripted import ScriptedEngine, completion, output

pytestmark = pytest.mark.anyio

MESSAGES = [{"role": "user", "content": "hi"}]
ASKS = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"model": "x", "messages": MESSAGES, "max_tokens": 4},
}
SOON = ExpectedToken(0.05, False, None)
LATE = ExpectedToken(8.0, False, 0.25)  # 6.4 s at the earliest


@pytest.fixture
def predicting(engine):
    """A client of a server whose first tokens are predicted."""

    def predicting(expected, **settings):
        scripted = ScriptedEngine(engine, script)
        scripted.expected = expected
        client = Client(create_app(scripted, ServerSettings(**settings)))
        client.model = engine.config.model.name
        return client

    return predicting


def script(number, params):
    yield output(completion("a", 1, finish_reason="stop"), is_last=True)


def body(client, path, **fields):
    fields = {**ASKS[path], **fields}
    return fields | {"model": client.model} if "model" in fields else fields


@pytest.mark.parametrize("path", ASKS)
@pytest.mark.parametrize("stream", [False, True])
async def test_every_answer_says_when_its_first_token_was_expected(predicting, path, stream):
    client = predicting(SOON)
    answer = await client.post(path, body(client, path, stream=stream))
    assert answer.status == 200
    assert answer.headers["server-timing"] == 'first-token;dur=50;desc="expected"'


@pytest.mark.parametrize("path", ASKS)
async def test_stream_whose_head_comes_before_its_first_token_is_same(predicting, path):
    streams = []
    for expected in (SOON, LATE):
        client = predicting(expected)
        answer = await client.post(path, body(client, path, stream=True))
        assert answer.status == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        streams.append(answer.body.count(b"data: "))
    assert streams[0] == streams[1] > 1


async def test_a_long_prompt_has_a_lower_bound(predicting):
    client = predicting(ExpectedToken(20.0, True, None))
    answer = await client.post("/v1/completions", ASKS["/v1/completions"])
    assert answer.headers["server-timing"] == 'first-token;dur=20000;desc="at least"'


@pytest.mark.parametrize("expected", [None, SOON])
async def test_nothing_is_said_where_nothing_is_known_or_wanted(predicting, expected):
    client = predicting(expected, disable_server_timing=expected is not None)
    answer = await client.post("/v1/completions", ASKS["/v1/completions"])
    assert answer.status == 200
    assert "server-timing" not in answer.headers


@pytest.mark.parametrize("path", ASKS)
async def test_deadline_that_cannot_be_met_is_refused_at_once(predicting, path):
    client = predicting(LATE)
    headers = [("x-request-timeout-ms", "5000")]
    answer = await client.post(path, body(client, path), headers=headers)
    assert answer.status == 503
    assert b"8.0 s" in answer.body
    assert int(answer.headers["retry-after"]) in (3, 4)
    text = (await client.get("/metrics")).body.decode()
    assert 'rejected_total{reason="deadline_unmeetable"} 1.0' in text


@pytest.mark.parametrize(
    ("expected", "timeout_ms"),
    [(LATE, "7000"), (LATE, None), (ExpectedToken(8.0, False, None), "5000")],
    ids=["within its error", "the server's own", "nothing compared yet"],
)
async def test_deadline_that_may_be_met_is_not_refused(predicting, expected, timeout_ms):
    client = predicting(expected, request_timeout_s=5.0 if timeout_ms is None else 600.0)
    headers = [] if timeout_ms is None else [("x-request-timeout-ms", timeout_ms)]
    answer = await client.post("/v1/completions", ASKS["/v1/completions"], headers=headers)
    assert answer.status == 200
