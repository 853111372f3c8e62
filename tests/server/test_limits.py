"""What clients can hold: memory by bodies that do not come, places, and readiness."""

import json

import anyio
import pytest

from trouper.errors import TrouperValidationError
from trouper.frontends.server.admission.gate import LOOK_S
from trouper.frontends.server.asgi.app import create_app
from trouper.frontends.server.shared.settings import ServerSettings

from .client import JSON, Client

pytestmark = pytest.mark.anyio

PATH = "/v1/completions"
SHORT = {"prompt": "x", "max_tokens": 1}
LONG = {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True}


@pytest.fixture
def hold():
    """Send a body that does not end, and hold the request until cancelled; its answer is noted."""

    async def hold(client, body, path=PATH, answers=None):
        async with client.stream("POST", path, headers=[JSON], chunks=[body], ends=False) as call:
            await call.wait_complete()
            if answers is not None:
                answers.append((call.answer.status, call.answer.error["code"]))

    return hold


@pytest.mark.parametrize("path", [PATH, "/tokenize"])
async def test_bodies_that_do_not_come_hold_no_places(app, client, hold, path):
    async with anyio.create_task_group() as tasks:
        for _ in range(512):
            tasks.start_soon(hold, client, b"{", path)
        await anyio.wait_all_tasks_blocked()
        assert app.service.bodies.num_bytes == 512
        assert app.service.gate.admission.num_requests == 0
        assert (await client.post(PATH, SHORT)).status == 200
        assert (await client.get("/health/ready")).status == 200
        tasks.cancel_scope.cancel()
    assert app.service.bodies.num_bytes == 0


async def test_unfinished_bodies_stay_within_budget_and_smaller_one_comes_in(engine, hold):
    app = create_app(engine, ServerSettings(max_body=1000, max_body_memory=5000))
    client, answers = Client(app), []
    async with anyio.create_task_group() as tasks:
        for _ in range(60):
            tasks.start_soon(hold, client, b"x" * 900, PATH, answers)
        await anyio.wait_all_tasks_blocked()
        assert app.service.bodies.num_bytes <= 5000
        assert answers == [(503, "body_memory_full")] * 55
        answer = await client.post(PATH, {**SHORT, "user": "x" * 600})
        assert answer.status == 200
        tasks.cancel_scope.cancel()
    assert app.service.bodies.num_bytes == 0
    assert b'reason="body_memory_full"' in (await client.get("/metrics")).body


async def test_refused_body_is_told_when_to_come_back(make_client):
    client = make_client(max_body=100, max_body_memory=100)
    body = json.dumps(SHORT).encode()
    async with client.stream("POST", PATH, headers=[JSON], chunks=[b"{" * 90], ends=False):
        await anyio.wait_all_tasks_blocked()
        headers = [JSON, ("x-request-id", "second")]
        answer = await client.request("POST", PATH, headers=headers, chunks=[b" " * 95, body])
    assert (answer.status, answer.error["code"]) == (503, "body_memory_full")
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.headers["connection"] == "close"


async def test_bytes_of_body_count_until_it_is_decoded(app, client):
    seen = []
    async with client.stream("POST", PATH, json.dumps(LONG).encode(), [JSON]) as call:
        await call.wait_for(lambda: call.num_chunks >= 1)
        seen.append(app.service.bodies.num_bytes)
    assert seen == [0]


def test_budget_without_room_for_one_body_is_refused():
    with pytest.raises(TrouperValidationError, match="max_body_memory"):
        ServerSettings(max_body=100, max_body_memory=99)


async def test_a_full_server_refuses_before_the_body_comes(make_client, wait_idle):
    client = make_client(max_requests=1)
    async with client.stream("POST", PATH, json.dumps(LONG).encode(), [JSON]) as call:
        await call.wait_for(lambda: call.num_chunks >= 1)
        for path in (PATH, "/tokenize", "/detokenize"):
            async with client.stream(
                "POST", path, headers=[JSON], chunks=[b"{"], ends=False
            ) as other:
                await other.wait_complete()
                assert (other.answer.status, other.answer.error["code"]) == (503, "overloaded")
    await wait_idle()


async def test_text_is_tokenised_within_the_places(app, client, monkeypatch):
    """A place is held while a thread works on the text, and one over the limit is refused."""
    gate, held = app.service.gate, []
    enter = gate.enter

    def enter_and_look(*arguments):
        ticket = enter(*arguments)
        held.append(gate.admission.num_requests)
        return ticket

    monkeypatch.setattr(gate, "enter", enter_and_look)
    assert (await client.post("/tokenize", {"prompt": "x"})).status == 200
    assert (await client.post("/detokenize", {"tokens": [1]})).status == 200
    assert held == [1, 1]
    assert gate.admission.num_requests == 0


async def test_paused_engine_does_not_keep_text_from_being_tokenised(engine, client):
    async with engine.paused():
        assert (await client.post("/tokenize", {"prompt": "x"})).status == 200


# Readiness


class Clock:
    """The time of a gate."""

    def __init__(self, app):
        self.time_s = 1000.0
        app.service.gate.now = lambda: self.time_s


async def test_readiness_fails_during_overload(engine, wait_idle):
    app = create_app(engine, ServerSettings(max_requests=1))
    client, clock = Client(app), Clock(app)
    async with client.stream("POST", PATH, json.dumps(LONG).encode(), [JSON]) as call:
        await call.wait_for(lambda: call.num_chunks >= 1)
        assert (await client.post(PATH, SHORT)).status == 503
        clock.time_s += 4.0
        assert (await client.get("/health/ready")).status == 200
        clock.time_s += 2.0
        answer = await client.get("/health/ready")
        assert (answer.status, answer.error["code"]) == (503, "overloaded")
        assert (await client.get("/health/live")).status == 200
    await wait_idle()
    assert (await client.get("/health/ready")).status == 200


async def test_readiness_stays_on_while_full_server_is_not_asked(engine, wait_idle):
    app = create_app(engine, ServerSettings(max_requests=1))
    client, clock = Client(app), Clock(app)
    async with client.stream("POST", PATH, json.dumps(LONG).encode(), [JSON]) as call:
        await call.wait_for(lambda: call.num_chunks >= 1)
        clock.time_s += 60.0
        assert (await client.get("/health/ready")).status == 200
    await wait_idle()


async def test_an_admission_in_between_is_progress(engine, wait_idle):
    app = create_app(engine, ServerSettings(max_requests=2))
    client, clock = Client(app), Clock(app)
    body = json.dumps(LONG).encode()
    async with client.stream("POST", PATH, body, [JSON]) as first:
        async with client.stream("POST", PATH, body, [JSON]) as second:
            for call in (first, second):
                await call.wait_for(lambda call=call: call.num_chunks >= 1)
            assert (await client.post(PATH, SHORT)).status == 503
            clock.time_s += 4.0
        await wait_until_left(second)
        assert (await client.post(PATH, SHORT)).status == 200
        clock.time_s += 4.0
        assert (await client.get("/health/ready")).status == 200
    await wait_idle()


async def wait_until_left(call):
    with anyio.fail_after(30):
        await call.is_over.wait()


async def test_places_of_request_done_not_read_are_free_again(engine, wait_until, wait_idle):
    app = create_app(engine, ServerSettings(max_requests=4))
    client, clock = Client(app), Clock(app)
    fields = {**LONG, "prompt": ["x"] * 8, "max_tokens": 4}
    async with client.stream("POST", PATH, json.dumps(fields).encode(), [JSON]) as call:
        call.stop_reading()
        await wait_until(lambda: app.service.gate._tickets)
        (ticket,) = app.service.gate._tickets.values()
        await wait_until(lambda: ticket.is_over)
        clock.time_s += LOOK_S
        assert (await client.post(PATH, SHORT)).status == 200
        call.read_on()
    await wait_idle()
