"""Responses that stream in background, and their events by the id of the response."""

from contextlib import asynccontextmanager

import anyio
import pytest

from trouper.errors import GenerationError
from trouper.frontends.server.asgi.app import create_app
from trouper.frontends.server.shared.settings import ServerSettings

from .client import Client
from .scripted import ScriptedEngine, completion, output
from .test_responses import kinds_of, named_events

pytestmark = pytest.mark.anyio

PATH = "/v1/responses"
STREAM = {"input": "hi", "background": True, "stream": True}
GREEDY = {**STREAM, "temperature": 0, "max_output_tokens": 6}
LONG = {**STREAM, "seed": 1, "max_output_tokens": 400}
KEYS = [[("authorization", f"Bearer {key}")] for key in ("one", "two")]


@pytest.fixture
def served(engine):
    """`async with served() as client`: a server that runs background work."""

    @asynccontextmanager
    async def served(engine=engine, **settings):
        settings = {"responses_store_bytes": 2**20, **settings}
        app = create_app(engine, ServerSettings(**settings))
        client = Client(app)
        client.service = app.service
        async with anyio.create_task_group() as tasks:
            await tasks.start(app.service.background.run_tasks)
            yield client
            tasks.cancel_scope.cancel()
        assert app.service.background.num_running == 0
        assert app.service.gate.admission.num_requests == 0

    return served


@pytest.fixture
def failing(engine):
    """An engine that says one word and fails."""

    def script(number, params):
        yield output(completion("x"))
        yield GenerationError("it failed")

    return ScriptedEngine(engine, script)


async def events_of(client, name, query="", headers=()):
    answer = await client.get(f"{PATH}/{name}?stream=true{query}", headers)
    assert answer.status == 200, answer.body
    return answer.body


async def test_stream_in_background_tells_its_id_before_it_begins(served):
    async with served() as client:
        answer = await client.request(
            "POST", PATH, b'{"input": "hi"}', [("content-type", "application/json")]
        )
        wanted = answer.json
        events = named_events((await client.post(PATH, GREEDY)).body)
        assert kinds_of(events)[:3] == [
            "response.created", "response.queued", "response.in_progress",
        ]  # fmt: skip
        assert events[0]["response"]["status"] == "queued"
        last = events[-1]
        assert last["type"] == "response.incomplete"
        assert last["response"]["usage"]["input_tokens"] == wanted["usage"]["input_tokens"]
        name = last["response"]["id"]
        assert (await client.get(f"{PATH}/{name}")).json == last["response"]


async def test_events_are_there_again_and_from_any_of_them(served):
    async with served() as client:
        body = (await client.post(PATH, GREEDY)).body
        name = named_events(body)[0]["response"]["id"]
        assert await events_of(client, name) == body
        frames = body.split(b"\n\n")
        for after in (0, 3, len(frames) - 3):
            rest = b"\n\n".join(frames[after + 1 :])
            assert await events_of(client, name, f"&starting_after={after}") == rest
        assert await events_of(client, name, "&starting_after=999999") == b""
        assert (await client.get(f"{PATH}/{name}?stream=false")).json["id"] == name


async def test_background_response_survives_its_client(served, wait_until):
    async with served() as client:
        headers = [("content-type", "application/json")]
        body = b'{"input": "hi", "background": true, "stream": true, "seed": 1, "max_output_tokens": 40}'
        async with client.stream("POST", PATH, body, headers) as call:
            await call.wait_for(lambda: call.answer.body.count(b"\n\n") >= 1)
            seen = call.answer.body
        name = named_events(seen[: seen.index(b"\n\n") + 2])[0]["response"]["id"]
        found = []

        async def follow():
            found.append(await events_of(client, name))

        async with anyio.create_task_group() as tasks:
            for _ in range(2):
                tasks.start_soon(follow)
        assert found[0] == found[1]
        assert found[0].startswith(seen)
        assert named_events(found[0])[-1]["type"].split(".")[1] in ("completed", "incomplete")


async def test_a_failure_is_its_last_event(served, failing):
    async with served(failing) as client:
        events = named_events((await client.post(PATH, STREAM)).body)
        last = events[-1]
        assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
        assert last["response"]["error"]["code"] == "server_error"
        name = last["response"]["id"]
        assert (await client.get(f"{PATH}/{name}")).json == last["response"]


@pytest.mark.parametrize("how", ["cancel", "delete"])
async def test_a_stream_that_is_cancelled_ends(served, how):
    async with served() as client:
        headers = [("content-type", "application/json")]
        body = b'{"input": "hi", "background": true, "stream": true, "seed": 1, "max_output_tokens": 400}'
        async with client.stream("POST", PATH, body, headers) as call:
            await call.wait_for(lambda: call.answer.body.count(b"\n\n") >= 4)
            text = call.answer.body
            name = named_events(text[: text.index(b"\n\n") + 2])[0]["response"]["id"]
            if how == "cancel":
                await client.post(f"{PATH}/{name}/cancel")
            else:
                await client.request("DELETE", f"{PATH}/{name}")
            await call.wait_complete()
            frames = call.answer.body.decode().split("\n\n")
        wanted = "event: response.cancelled" if how == "cancel" else "event: error"
        assert frames[-2].startswith(wanted)
        assert (await client.get(f"{PATH}/{name}")).status == (200 if how == "cancel" else 404)


async def test_events_count_against_store_and_go_when_no_room(served):
    async with served(responses_store_bytes=16_000) as client:
        first = named_events((await client.post(PATH, GREEDY)).body)[0]["response"]["id"]
        store = client.service.responses
        assert 0 < store.num_bytes <= store.max_bytes
        answer = await client.post(PATH, {**LONG, "max_output_tokens": 200})
        assert store.num_bytes <= store.max_bytes
        *_, last, _ = answer.body.decode().split("\n\n")
        assert last.startswith("event: error")
        assert (await client.get(f"{PATH}/{first}")).status == 404


async def test_the_events_of_another_key_are_not_there(served):
    async with served(api_keys=("one", "two")) as client:
        body = (await client.post(PATH, GREEDY, KEYS[0])).body
        name = named_events(body)[0]["response"]["id"]
        answer = await client.get(f"{PATH}/{name}?stream=true", KEYS[1])
        assert (answer.status, answer.error["code"]) == (404, "response_not_found")
        assert await events_of(client, name, headers=KEYS[0]) == body


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("stream=yes", "stream"), ("stream=", "stream"), ("starting_after=1", "starting_after"),
        ("stream=true&starting_after=-1", "starting_after"),
        ("stream=true&starting_after=x", "starting_after"),
        ("stream=true&starting_after=", "starting_after"),
        ("stream=true&starting_after=" + "9" * 5000, "starting_after"),
        ("stream=true", "stream"),
    ],
)  # fmt: skip
async def test_what_is_refused(served, query, param):
    async with served() as client:
        name = (await client.post(PATH, {"input": "hi", "max_output_tokens": 1})).json["id"]
        answer = await client.get(f"{PATH}/{name}?{query}")
        assert (answer.status, answer.error["param"]) == (400, param)
