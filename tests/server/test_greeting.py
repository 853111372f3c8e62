"""What a full house says before there is a task for the request: the same, and nothing else."""

import json

import pytest

from trouper.frontends.server.admission.overload import Level
from trouper.frontends.server.app import create_app
from trouper.frontends.server.http.exchange import TICKET, Exchange
from trouper.frontends.server.settings import ServerSettings

from .client import JSON, Call, Client

pytestmark = pytest.mark.anyio

PATH = "/v1/completions"
LONG = {"prompt": "def f(", "max_tokens": 500, "ignore_eos": True, "stream": True}
OPENAI = ("authorization", "Bearer a")


def asked(path=PATH, *headers, method="POST", num_bytes=80):
    all_headers = [JSON, ("content-length", str(num_bytes)), *headers]
    return {
        "type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b"",
        "root_path": "", "extensions": {}, "headers": [(n.encode(), v.encode()) for n, v in all_headers],
    }  # fmt: skip


@pytest.fixture
async def full(engine):
    """A house for one request, and it is in."""
    app = create_app(engine, ServerSettings(max_requests=1, api_keys=("a", "b")))
    async with Client(app).stream("POST", PATH, json.dumps(LONG).encode(), [JSON, OPENAI]) as call:
        await call.wait_for(lambda: call.num_chunks >= 1)
        yield app


def num_refused(app):
    [rejected, *_] = app.service.metrics.collect()
    return {s.labels["reason"]: s.value for s in rejected.samples}.get("overloaded", 0)


async def test_a_house_with_room_says_nothing(app):
    for scope in (asked(), asked("/nowhere"), asked("/metrics", method="GET")):
        assert app.greet(scope) is None


async def test_a_full_house_says_what_it_would_say_later(full):
    answer = full.greet(asked(PATH, OPENAI, ("x-request-id", "mine")))
    later = await Client(full).post(PATH, LONG, [OPENAI, ("x-request-id", "mine")])
    assert answer.status == later.status == 503
    assert json.loads(answer.body) == later.json
    headers = {name.decode(): value.decode() for name, value in answer.headers}
    assert headers["x-request-id"] == "mine"
    assert headers["retry-after"] == "1"
    assert headers.keys() == later.headers.keys() - {"content-length"}


async def test_who_is_refused_is_counted_and_takes_nothing(full):
    before = num_refused(full), full.service.door.admission.num_requests
    for i in range(3):
        refused = full.greet(asked(PATH, OPENAI))
        assert refused.status == 503
        assert num_refused(full) == before[0] + i + 1
    assert full.service.door.admission.num_requests == before[1]
    answers = list(full.service.metrics.collect())[1]
    found = {s.labels["status"]: s.value for s in answers.samples if s.labels["handler"] == PATH}
    assert found["503"] == 3


@pytest.mark.parametrize(
    ("scope", "status"),
    [
        (asked(), 401),
        (asked(PATH, ("authorization", "Bearer c")), 401),
        (asked("/nowhere"), 401),
        (asked("/nowhere", OPENAI), 404),
        (asked(PATH, OPENAI, method="GET"), 405),
        (asked(PATH, OPENAI, ("x-request-timeout-ms", "soon")), 400),
        (asked(PATH, OPENAI, ("x-much", "x" * 2**17)), 431),
    ],
)
async def test_whoever_may_not_ask_hears_that_first(full, scope, status):
    before = num_refused(full)
    assert full.greet(scope).status == status
    assert num_refused(full) == before


@pytest.mark.parametrize(
    "scope",
    [
        asked("/health", method="GET"),
        asked("/v1/models", OPENAI, method="GET"),
        asked("/tokenize", OPENAI),
        asked(PATH, method="OPTIONS"),
    ],
)
async def test_what_takes_no_place_is_not_refused(full, scope):
    assert full.greet(scope) is None


async def test_whoever_may_take_anothers_place_comes_in(make_client, engine, wait_until):
    app = create_app(engine, ServerSettings(max_requests=3, api_keys=("a", "b")))
    app.service.door.admission.max_started = 1
    client, body = Client(app), json.dumps(LONG).encode()
    async with (
        client.stream("POST", PATH, body, [JSON, OPENAI]),
        client.stream("POST", PATH, body, [JSON, OPENAI]),
        client.stream("POST", PATH, body, [JSON, OPENAI]) as youngest,
    ):
        await wait_until(lambda: len(app.service.door.admission.waiting()) == 2)
        assert app.greet(asked(PATH, OPENAI)).status == 503
        scope = asked(PATH, ("authorization", "Bearer b"))
        assert app.greet(scope) is None
        await youngest.wait_complete()
        assert youngest.answer.status == 429
        scope["extensions"][TICKET].leave()


async def test_the_last_place_is_given_once(engine):
    app = create_app(engine, ServerSettings(max_requests=2))
    admission = app.service.door.admission
    admission.max_started = 1
    async with Client(app).stream("POST", PATH, json.dumps(LONG).encode(), [JSON]) as call:
        await call.wait_for(lambda: call.num_chunks >= 1)
        scope = asked()
        assert app.greet(scope) is None
        assert app.greet(asked()).status == 503  # though the first has no handler yet
        assert admission.num_requests == 2
        scope["path"] = "/nowhere"  # whatever becomes of it
        call_later = Call([])
        await app(scope, call_later._receive, call_later._send)
        assert call_later.answer.status == 404
        assert admission.num_requests == 1


async def test_while_others_are_refused_a_frame_has_two_tokens(engine):
    app = create_app(engine, ServerSettings(max_requests=1))
    body = {**LONG, "max_tokens": 100, "return_token_ids": True}
    async with Client(app).stream("POST", PATH, json.dumps(body).encode(), [JSON]) as call:
        await call.wait_for(lambda: call.num_chunks >= 1)
        assert app.greet(asked()).status == 503
        app.service.look(0.0)
        begin = call.num_chunks + 1  # one may be under way
        await call.wait_for(lambda: call.num_chunks >= begin + 8)
        app.service.look(0.0)  # nobody was refused since
        await call.wait_complete()
    *events, done = call.answer.events
    assert done == "[DONE]"
    sizes = [len(event["choices"][0]["token_ids"]) for event in events]
    assert min(sizes[begin : begin + 8]) >= 2
    assert 1 in sizes[begin + 8 :]
    assert sum(sizes) == 100


async def test_at_a_level_that_takes_nobody_nobody_is_taken(app):
    app.service.door.level = Level.SHED_ALL
    answer = app.greet(asked())
    assert answer.status == 503
    assert (b"connection", b"close") in answer.headers


async def test_an_exchange_that_nobody_has_met_is_not_sent_from(full, monkeypatch):
    async def put(self, message):
        raise AssertionError("a greeting is an answer, and no message")

    monkeypatch.setattr(Exchange, "_put", put)
    assert full.greet(asked(PATH, OPENAI)).status == 503
