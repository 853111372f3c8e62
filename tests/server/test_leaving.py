"""Clients that leave, read slowly or run out of time; a server that is full, asleep or going down."""

import json

import anyio
import pytest

from trouper.frontends.server.asgi.app import App, create_app
from trouper.frontends.server.service.service import Service
from trouper.frontends.server.shared.errors import HTTPError
from trouper.frontends.server.shared.settings import ServerSettings

from .client import JSON, Client

pytestmark = pytest.mark.anyio

PATH = "/v1/completions"
LONG = {"prompt": "def f(", "max_tokens": 500, "ignore_eos": True}
MANY = {**LONG, "prompt": ["def f(", "import"], "n": 2}


@pytest.fixture(scope="module", params=["asyncio", "trio"])
def anyio_backend(request):
    return request.param


def body(**fields):
    return json.dumps({**LONG, **fields}).encode()


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"n": 3}, {"prompt": ["a", "b"]}, {"prompt": ["a", "b"], "stream": True}])  # fmt: skip
@pytest.mark.parametrize("num_steps", [0, 1, 20])
async def test_a_client_that_leaves_aborts_its_request(
    engine, client, wait_idle, wait_until, fields, num_steps
):
    async with client.stream("POST", PATH, body(**fields), [JSON]) as call:
        before = engine.statistics().scheduler.num_generation_tokens
        await wait_until(
            lambda: engine.statistics().scheduler.num_generation_tokens >= before + num_steps
        )
    assert call.is_over.is_set()
    assert not call.answer.is_complete
    await wait_idle()


async def test_answered_request_frees_its_admission(app, client, wait_until):
    async with client.stream("POST", PATH, body(max_tokens=2), [JSON]) as call:
        call.stop_reading()
        await wait_until(lambda: app.service.gate.admission.num_requests == 1)
        await wait_until(lambda: app.service.gate.admission.num_requests == 0)
        assert not call.is_over.is_set()
        call.read_on()
        await call.wait_complete()
    assert call.answer.status == 200


@pytest.mark.parametrize("fields", [{}, {"stream": True}])
@pytest.mark.parametrize("num_steps", [0, 10])
async def test_what_is_left_costs_one_step_more(
    engine, client, wait_idle, wait_until, fields, num_steps
):
    def num_tokens():
        return engine.statistics().scheduler.num_generation_tokens

    await wait_idle()
    async with client.stream("POST", PATH, body(**fields), [JSON]) as call:
        begin = num_tokens()
        await wait_until(lambda: engine.statistics().scheduler.num_running)
        await wait_until(lambda: num_tokens() >= begin + num_steps)
        call.leave()
        at_leaving = num_tokens()
    await wait_idle()
    in_flight = engine.config.scheduler.max_steps_in_flight
    assert num_tokens() - at_leaving <= in_flight + 1


async def test_leaving_while_a_stream_is_read(client, wait_idle):
    async with client.stream("POST", PATH, body(stream=True), [JSON]) as call:
        await call.wait_for(lambda: call.num_chunks >= 3)
    await wait_idle()


async def test_leaving_before_the_body_is_complete(app, client, wait_until):
    async with client.stream("POST", PATH, headers=[JSON], chunks=Stalled()) as call:
        await wait_until(lambda: app.service.bodies.num_bodies)
    assert call.is_over.is_set()
    assert call.answer.status == 0
    assert app.service.bodies.num_bodies == 0


class Stalled(list):
    """Nothing comes."""


async def test_slow_reader_gets_same_text_and_delays_nobody(client, wait_idle):
    fields = {"max_tokens": 60, "temperature": 0, "stream": True}
    calm = (await client.post(PATH, {**LONG, **fields})).events
    async with client.stream("POST", PATH, body(**fields), [JSON]) as call:
        await call.wait_for(lambda: call.num_chunks >= 1)
        call.stop_reading()
        other = await client.post(PATH, {**LONG, "max_tokens": 100})
        assert other.status == 200
        call.read_on()
        await call.wait_complete()
    texts = ["".join(e["choices"][0]["text"] for e in events[:-1]) for events in (calm, call.answer.events)]  # fmt: skip
    assert texts[0] == texts[1]
    assert len(call.answer.events) < len(calm)  # what was not read has merged
    await wait_idle()


async def test_answers_that_nobody_reads_take_nobodys_turn(app, client, wait_idle):
    app.service.gate.admission.max_started = 1
    async with client.stream("POST", PATH, body(stream=True, max_tokens=50), [JSON]) as call:
        await call.wait_for(lambda: call.num_chunks >= 1)
        call.stop_reading()
        with anyio.fail_after(20):
            async with anyio.create_task_group() as others:
                others.start_soon(client.post, PATH, {**LONG, "max_tokens": 1})
                while app.service.gate.admission.num_requests:
                    await anyio.sleep(0.01)
                    app.service.look(0.0)
        assert not call.answer.is_complete
        call.read_on()
        await call.wait_complete()
    await wait_idle()


async def test_two_hundred_that_leave_and_one_that_stays(client, wait_idle):
    async def leave():
        async with client.stream("POST", PATH, body(stream=True), [JSON]) as call:
            await call.wait_for(lambda: call.num_chunks >= 1 or call.answer.status == 503)

    async with anyio.create_task_group() as tasks:
        for _ in range(200):
            tasks.start_soon(leave)
    with anyio.fail_after(10):
        assert (await client.post(PATH, {**LONG, "max_tokens": 4})).status == 200
    await wait_idle()


@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"prompt": ["a", "b"]}])
async def test_a_deadline_is_a_status(client, wait_idle, fields):
    answer = await client.post(PATH, {**LONG, **fields}, [("x-request-timeout-ms", "1")])
    assert answer.status == 504
    assert answer.error["code"] == "deadline_exceeded"
    assert answer.error["type"] == "DeadlineExceededError"
    await wait_idle()


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"n": 2}])
async def test_end_of_deadline_says_how_far_it_came(client, wait_idle, fields):
    timeout = [("x-request-timeout-ms", "150")]
    answer = await client.post(PATH, {**LONG, **fields}, timeout)
    content = answer.events[-2] if answer.status == 200 else answer.json
    assert content["error"]["param"] == "decode"
    usage = content["usage"]
    assert usage["prompt_tokens"] == 3
    assert usage["completion_tokens"] > 0
    assert usage["total_tokens"] == 3 + usage["completion_tokens"]
    await wait_idle()


async def test_a_deadline_in_the_queue_says_so(engine, app, client, wait_idle):
    async with engine.paused():
        answer = await client.post(PATH, LONG, [("x-request-timeout-ms", "100")])
        assert (answer.status, answer.error["param"]) == (504, "prefill")
        app.service.gate.admission.max_started = 0
        answer = await client.post(PATH, LONG, [("x-request-timeout-ms", "100")])
        assert (answer.status, answer.error["param"]) == (504, "queue")
        assert answer.json["usage"]["total_tokens"] == 0
    await wait_idle()


async def test_a_deadline_of_a_stream_is_an_event(make_client, wait_idle):
    client = make_client(request_timeout_s=0.15)
    async with client.stream("POST", PATH, body(stream=True), [JSON]) as call:
        await call.wait_for(lambda: call.num_chunks >= 1)
        call.stop_reading()
        await anyio.sleep(0.2)
        call.read_on()
        await call.wait_complete()
    *parts, error, done = call.answer.events
    assert error["error"]["code"] == "deadline_exceeded"
    assert done == "[DONE]"
    assert {part["choices"][0]["finish_reason"] for part in parts} == {None}
    await wait_idle()


async def test_the_servers_deadline_wins_over_a_later_one(make_client):
    client = make_client(request_timeout_s=0.001)
    answer = await client.post(PATH, LONG, [("x-request-timeout-ms", "60000")])
    assert answer.status == 504


async def test_a_full_server_says_so(make_client, wait_idle):
    client = make_client(max_requests=2)
    async with client.stream("POST", PATH, body(stream=True, n=2), [JSON]) as call:
        await call.wait_for(lambda: call.num_chunks >= 1)
        refused = await client.post(PATH, LONG)
        assert (refused.status, refused.error["code"]) == (503, "overloaded")
        assert refused.headers["retry-after"] == "1"
        assert refused.headers["retry-after-ms"] == "1000"
        assert (await client.get("/load")).json == {"server_load": 1}
    assert (await client.get("/load")).json == {"server_load": 0}
    await wait_idle()
    assert (await client.post(PATH, {**LONG, "max_tokens": 1})).status == 200


async def test_places_are_counted_by_sequences_all_or_nothing(make_client, wait_idle):
    client = make_client(max_requests=3)
    async with client.stream("POST", PATH, body(stream=True), [JSON]) as call:
        await call.wait_for(lambda: call.num_chunks >= 1)
        assert (await client.post(PATH, {**MANY, "max_tokens": 1})).status == 503
        assert (await client.post(PATH, {**LONG, "n": 2, "max_tokens": 1})).status == 200
    alone = await client.post(PATH, {**MANY, "max_tokens": 1})
    assert alone.status == 200  # larger than the house, and nobody else is in


async def test_a_bad_request_gives_its_place_back(make_client):
    client = make_client(max_requests=1)
    for _ in range(3):
        assert (await client.post(PATH, {"prompt": ""})).status == 400
    assert (await client.post(PATH, {**LONG, "max_tokens": 1})).status == 200


async def test_before_the_model_is_there():
    client = Client(App(Service(ServerSettings())))
    for path in ("/health", "/health/ready", "/ping", "/health/step", "/metrics", "/v1/models"):
        answer = await client.get(path)
        assert (answer.status, answer.error["code"]) == (503, "starting"), path
        assert answer.headers["retry-after"] == "1"
    assert (await client.post(PATH, LONG)).error["code"] == "starting"
    assert (await client.get("/health/live")).status == 200
    assert (await client.get("/version")).status == 200


async def test_while_it_drains(app, client):
    async with client.stream("POST", PATH, body(stream=True, max_tokens=30), [JSON]) as call:
        await call.wait_for(lambda: call.num_chunks >= 1)
        app.service.drain()
        for answer in (await client.get("/health/ready"), await client.post(PATH, LONG)):
            assert (answer.status, answer.error["code"]) == (503, "draining")
        assert (await client.get("/health/live")).status == 200
        await call.wait_complete()
    assert call.answer.events[-1] == "[DONE]"


async def test_stream_that_fails_says_so_in_event(client, monkeypatch):
    def break_later(self, *args, **options):
        raise HTTPError(500, "internal_error", "told")

    async with client.stream("POST", PATH, body(stream=True), [JSON]) as call:
        await call.wait_for(lambda: call.num_chunks >= 2)
        monkeypatch.setattr(
            "trouper.frontends.server.apis.openai.completions.CompletionAdapter.render", break_later
        )
        await call.wait_complete()
    *_, error, done = call.answer.events
    assert error == {
        "error": {
            "message": "told", "type": "InternalServerError", "param": None,
            "code": "internal_error",
        }
    }  # fmt: skip
    assert done == "[DONE]"


async def test_stream_is_kept_awake_while_its_device_is_started_again(engine, monkeypatch):
    monkeypatch.setattr("trouper.frontends.server.asgi.app.LOST_INTERVAL_S", 0.02)
    app = create_app(engine, ServerSettings())
    async with Client(app).stream("POST", PATH, body(stream=True, max_tokens=20), [JSON]) as call:
        await call.wait_for(lambda: call.num_chunks >= 1)
        async with engine.paused():
            await anyio.sleep(0.1)
            assert b": keep-alive" not in call.answer.body
            monkeypatch.setattr(Service, "is_device_lost", True)
            await call.wait_for(lambda: b": keep-alive\n\n" in call.answer.body)
        await call.wait_complete()
    assert call.answer.events[-1] == "[DONE]"


async def test_a_silent_stream_is_kept_awake(engine, wait_idle):
    client = Client(create_app(engine, ServerSettings(sse_keep_alive_interval_s=0.02)))
    async with client.stream("POST", PATH, body(stream=True, max_tokens=20), [JSON]) as call:
        await call.wait_for(lambda: call.num_chunks >= 1)
        async with engine.paused():
            await call.wait_for(lambda: b": keep-alive\n\n" in call.answer.body)
        await call.wait_complete()
    assert call.answer.events[-1] == "[DONE]"
    await wait_idle()
