"""BatchFile files: the answers of the HTTP routes, in the order of the lines, whatever a line holds."""

import io
import json

import anyio
import pytest

from trouper.errors import EngineDeadError
from trouper.frontends.server.asgi.app import create_app
from trouper.frontends.server.program.batch_files import URLS, BatchFile
from trouper.frontends.server.program.batch_records import StreamAnswers
from trouper.frontends.server.shared.settings import ServerSettings

pytestmark = pytest.mark.anyio

GREEDY = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}


def line(custom_id, url="/v1/completions", method="POST", **body):
    fields = {"custom_id": custom_id, "method": method, "url": url, "body": {**GREEDY, **body}}
    return json.dumps(fields)


class Sink(io.BytesIO):
    @property
    def replies(self):
        return [json.loads(text) for text in self.getvalue().splitlines()]


class Source(io.BytesIO):
    """Counts what has been taken from it."""

    num_lines = 0

    def readline(self, limit=-1):
        found = super().readline(limit)
        self.num_lines += found.endswith(b"\n")
        return found


@pytest.fixture
def answer(engine):
    """The replies to these lines."""

    async def answer(*lines, max_inflight=8, **settings):
        sink = Sink()
        batch = BatchFile(create_app(engine, ServerSettings(**settings)), max_inflight)
        await batch.answer_all(Source("\n".join(lines).encode()), StreamAnswers(sink))
        assert batch.num_lines == len(sink.replies)
        assert batch.num_failed == sum(
            not reply["response"] or reply["response"]["status_code"] >= 400
            for reply in sink.replies
        )
        return sink.replies

    return answer


@pytest.mark.parametrize(
    ("url", "body"),
    [
        ("/v1/completions", {"prompt": ["def f(", "class A"], "logprobs": 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 4}),
        ("/tokenize", {"prompt": "def f("}),
        ("/v1/completions", {"prompt": ""}),
        ("/v1/completions", {"prompt": "x", "temperature": -1}),
        ("/v1/completions", {"prompt": "x", "model": "another"}),
        ("/v1/completions", {"prompt": "x " * 1000}),
    ],
)
async def test_a_line_is_answered_as_over_http(client, answer, url, body):
    over_http = await client.post(url, {**GREEDY, **body})
    (reply,) = await answer(line("a", url, **body))
    response = reply["response"]
    assert (reply["custom_id"], reply["error"]) == ("a", None)
    assert response["status_code"] == over_http.status
    assert response["request_id"]
    expected = over_http.json
    for name in ("id", "created", "created_at", "completed_at"):
        assert (name in expected) == (name in response["body"])
        expected[name] = response["body"].get(name)
    if output := expected.get("output"):
        output[0]["id"] = response["body"]["output"][0]["id"]
    assert json.dumps(expected, sort_keys=True) == json.dumps(
        {**dict.fromkeys(("id", "created", "created_at", "completed_at")), **response["body"]},
        sort_keys=True,
    )


async def test_answers_stand_in_the_order_of_the_lines(answer):
    lines = [line(str(i), prompt="x", max_tokens=40 if i % 5 == 0 else 1) for i in range(20)]
    replies = await answer(*lines)
    assert [reply["custom_id"] for reply in replies] == [str(i) for i in range(20)]
    for i, reply in enumerate(replies):
        usage = reply["response"]["body"]["usage"]
        assert usage["completion_tokens"] == (40 if i % 5 == 0 else 1)


MALFORMED = [
    ("nonsense", None, "invalid_json", "line 2: "),
    ("5", None, "invalid_schema", "Expected object"),
    ("[]", None, "invalid_schema", "Expected object"),
    ('{"custom_id": "z"}', "z", "invalid_schema", "line 2: method: Field required. Object missing"),
    ('{"custom_id": 1, "method": "POST"}', None, "invalid_schema", "custom_id"),
    (line("z", method="GET", prompt="x"), "z", "invalid_schema", "method"),
    (line("z", "/sleep"), "z", "invalid_url", "/v1/completions"),
    (line("z", "/metrics"), "z", "invalid_url", "/v1/completions"),
    (line("z", prompt="x", stream=True), "z", "invalid_value", "body.stream"),
    (line("a", prompt="x"), "a", "duplicate_custom_id", "line 2: custom_id"),
    ('{"custom_id": "z", "custom_id": "y"}', "y", "invalid_schema", "method"),
    (line("z", prompt="x")[:-1] + ', "custom_id": "y"}', "y", "invalid_json", "twice"),
    (line("z", prompt="x" * 500), None, "line_too_large", "400 bytes"),
    ('{"custom_id": "z", ', None, "invalid_json", "line 2: "),
    ('{"custom_id": "\\ud800"}', None, "invalid_json", ""),
]


@pytest.mark.parametrize(
    ("text", "custom_id", "code", "message"), MALFORMED, ids=[row[0][:40] for row in MALFORMED]
)
async def test_line_no_request_is_reported_in_its_place(answer, text, custom_id, code, message):
    before, reply, after = await answer(
        line("a", prompt="x"), text, line("b", prompt="x"), max_body=400
    )
    for good in (before, after):
        assert good["response"]["status_code"] == 200
    assert reply["response"] is None
    assert reply["custom_id"] == custom_id
    assert reply["error"]["code"] == code
    assert message in reply["error"]["message"]


async def test_refused_line_frees_its_custom_id(answer):
    replies = await answer(line("a", "/nowhere"), line("b", prompt="x"), line("b", prompt="x"))
    assert [reply["custom_id"] for reply in replies] == ["a", "b", "b"]
    assert [bool(reply["error"]) for reply in replies] == [True, False, True]


async def test_empty_lines_have_no_answers(answer):
    replies = await answer("", line("a", prompt="x"), " \r", "oops", "")
    assert [reply["custom_id"] for reply in replies] == ["a", None]
    assert replies[1]["error"]["message"].startswith("line 4: ")
    assert await answer("") == []


async def test_every_route_for_users_is_there():
    assert {"/v1/completions", "/v1/chat/completions", "/v1/responses"} <= set(URLS)
    assert "/sleep" not in URLS


@pytest.mark.parametrize("max_inflight", [1, 3])
async def test_no_more_lines_are_held_than_allowed(engine, max_inflight):
    source = Source("\n".join(line(str(i), prompt="x") for i in range(12)).encode() + b"\n")
    seen = []

    class Watching(Sink):
        def write(self, reply):
            seen.append(source.num_lines - len(self.replies))
            return super().write(reply)

    await BatchFile(create_app(engine), max_inflight).answer_all(source, StreamAnswers(Watching()))
    assert len(seen) == 12
    # One more is read, and waits for its place.
    assert max(seen) <= max_inflight + 1


async def test_a_sink_that_fails_ends_the_batch(engine, wait_idle):
    class Full(Sink):
        def write(self, reply):
            raise OSError(28, "No space left on device")

    lines = "\n".join(line(str(i), prompt="x", max_tokens=1 + 100 * i) for i in range(4))
    with pytest.raises(OSError, match="No space left"):
        batch = BatchFile(create_app(engine), 8)
        await batch.answer_all(Source(lines.encode()), StreamAnswers(Full()))
    await wait_idle()


async def test_leaving_a_batch_aborts_its_requests(engine, wait_idle):
    lines = "\n".join(line(str(i), prompt="x", max_tokens=400) for i in range(8))
    app = create_app(engine)
    async with anyio.create_task_group() as tasks:
        answers = StreamAnswers(Sink())
        tasks.start_soon(BatchFile(app, 8).answer_all, Source(lines.encode()), answers)
        while engine.statistics().num_open_requests < 8:  # noqa: ASYNC110
            await anyio.sleep(0.001)
        tasks.cancel_scope.cancel()
    await wait_idle()


async def test_the_death_of_the_engine_ends_the_batch(engine, monkeypatch):
    def die(*_, **__):
        raise EngineDeadError("gone")

    app = create_app(engine)
    monkeypatch.setattr(engine.engine, "generate", die)
    monkeypatch.setattr(engine.engine, "check_alive", die)
    with pytest.raises(EngineDeadError, match="gone"):
        source = Source(line("a", prompt="x").encode())
        await BatchFile(app, 4).answer_all(source, StreamAnswers(Sink()))
