"""Background responses that go on in a later server: the same events, for the same client, whatever the disk has lost."""

import random

import anyio
import anyio.lowlevel
import msgspec
import pytest

from trouper.frontends.server.admission.overload import Level
from trouper.frontends.server.apis.responses import routes
from trouper.frontends.server.durable import journal

from .lives import lives_on, until
from .test_journal import SimulatedDisk
from .test_response_streams import GREEDY, KEYS, PATH
from .test_responses import named_events

pytestmark = pytest.mark.anyio
RUNNING = "queued", "in_progress"
SAMPLED = {**GREEDY, "temperature": 0.9, "max_output_tokens": 40, "ignore_eos": True}


@pytest.fixture
def disk():
    return SimulatedDisk(random.Random(0), full_rate=0, error_rate=0)


@pytest.fixture
def life(engine, disk):
    return lives_on(engine, disk)


async def ended(client, name):
    """Ask for a response until it has ended."""
    with anyio.fail_after(30):
        while True:
            found = (await client.get(f"{PATH}/{name}")).json
            if found["status"] not in RUNNING:
                return found


async def begin(client, body, num_events=0, headers=()):
    """Ask for a response and leave once it has so many events.  Returns its id and the bytes of its events so far."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(client.post, PATH, body, headers)
        await until(lambda: client.service.responses._logs)
        (name,) = client.service.responses._logs
        log = client.service.responses.log(name)
        await until(lambda: len(log._frames) >= num_events or log._is_over)
        tasks.cancel_scope.cancel()
    return name, b"".join(b"id: %d\n%b" % pair for pair in enumerate(log._frames))


async def events_of(client, name, query="", headers=()):
    answer = await client.get(f"{PATH}/{name}?stream=true{query}", headers)
    assert answer.status == 200, answer.body
    return answer.body


def texts_of(body):
    events = named_events(body)
    numbers = [event["sequence_number"] for event in events]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    return "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")


@pytest.mark.parametrize("num_events", [2, 5, 20])
async def test_later_server_sends_the_same_events(life, num_events):
    async with life() as client:
        name, first = await begin(client, SAMPLED, num_events)
    async with life() as client:
        whole = await events_of(client, name)
        response = await ended(client, name)
    assert whole.startswith(first)
    assert response["status"] == "incomplete"
    assert texts_of(whole) == response["output"][0]["content"][0]["text"]
    async with life() as client:
        assert await events_of(client, name) == whole
        rest = await events_of(client, name, f"&starting_after={num_events - 1}")
        assert whole.endswith(rest)
        assert whole.count(b"\n\n") - rest.count(b"\n\n") == num_events


async def test_lost_tail_is_sampled_again(life, disk):
    async with life() as client:
        name, first = await begin(client, SAMPLED, 25)
    (file,) = disk.files.values()
    del file.data[-400:]
    async with life() as client:
        assert (await events_of(client, name)).startswith(first)


async def test_whole_response_is_found_again(life):
    body = {**SAMPLED, "stream": False}
    async with life() as client:
        name = (await client.post(PATH, body)).json["id"]
    async with life() as client:
        found = await ended(client, name)
    assert found["status"] == "incomplete"
    async with life() as client:
        assert await ended(client, name) == found
        follow_up = await client.post(PATH, {**body, "previous_response_id": name})
        assert follow_up.status == 200


async def test_only_the_owner_finds_a_response(life):
    async with life(api_keys=("one", "two")) as client:
        name, first = await begin(client, GREEDY, 4, KEYS[0])
    # The keys have other places now.
    async with life(api_keys=("three", "two", "one")) as client:
        assert (await client.get(f"{PATH}/{name}", KEYS[1])).status == 404
        assert (await events_of(client, name, "", KEYS[0])).startswith(first)
    async with life(api_keys=("two", "three")) as client:
        assert (await client.get(f"{PATH}/{name}", KEYS[1])).status == 404


async def test_deleted_and_cancelled_stay_so(life):
    async with life() as client:
        gone, _ = await begin(client, {**SAMPLED, "max_output_tokens": 300}, 4)
        assert (await client.get(f"{PATH}/{gone}", method="DELETE")).status == 200
    async with life() as client:
        assert (await client.get(f"{PATH}/{gone}")).status == 404
        over, _ = await begin(client, {**SAMPLED, "max_output_tokens": 300}, 4)
        await client.post(f"{PATH}/{over}/cancel")
    async with life() as client:
        assert (await client.get(f"{PATH}/{over}")).json["status"] == "cancelled"


async def test_another_model_ends_a_response(life):
    async with life() as client:
        name, _ = await begin(client, SAMPLED, 5)
    async with life(bytes([1]) * 32) as client:
        response = (await client.get(f"{PATH}/{name}")).json
    assert response["status"] == "failed"
    assert response["error"]["message"].startswith("stream_lost")


async def test_full_journal_refuses_only_background_work(life):
    async with life(max_bytes=500) as client:
        refused = await client.post(PATH, GREEDY)
        assert (refused.status, refused.error["code"]) == (503, "journal_unavailable")
        assert (await client.post(PATH, {"input": "hi", "max_output_tokens": 2})).status == 200
        assert not client.service.responses._logs


async def test_broken_disk_refuses_and_is_tried_again(life, disk, monkeypatch):
    async with life() as client:
        disk.full_rate = 1.0
        assert (await client.post(PATH, GREEDY)).status == 503
        disk.full_rate = 0.0
        assert (await client.post(PATH, GREEDY)).status == 503
        monkeypatch.setattr(journal, "RETRY_S", 0.0)
        await client.service.journal.write()
        assert (await client.post(PATH, GREEDY)).status == 200


async def test_seed_is_kept_with_the_request(life, disk):
    async with life() as client:
        name, _ = await begin(client, SAMPLED, 3)
        await until(lambda: name in client.service.journal._segments.streams)
        request = client.service.journal._segments.streams[name].admitted.request
    saved = msgspec.msgpack.decode(request)
    assert isinstance(msgspec.json.decode(saved["body"])["seed"], int)


async def test_shutdown_does_not_cancel_for_readers(life):
    body = {**SAMPLED, "max_output_tokens": 200}
    async with life() as client:
        content = msgspec.json.encode(body)
        headers = [("content-type", "application/json")]
        async with client.stream("POST", PATH, content, headers) as call:
            await until(lambda: call.num_chunks > 4)
            (name,) = client.service.responses._logs
            client.service.drain()
            client.service.background.cancel(name)
            await call.is_over.wait()
        assert b"response.in_progress" in call.answer.body
        assert b"response.cancelled" not in call.answer.body
    async with life() as client:
        assert (await ended(client, name))["status"] == "incomplete"


async def test_server_that_was_taken_over_keeps_no_answer(life):
    body = {**GREEDY, "stream": False, "background": False}
    async with life() as client:
        client.service.is_leaving = True
        await client.service.journal.lend()
        assert client.service.journal.give() == []
        plain = await client.post(PATH, body)
        assert (plain.status, plain.headers["connection"]) == (200, "close")
        asked = await client.post(PATH, body, [("idempotency-key", "a")])
        listed = await client.get("/v1/streams")
        polled = await client.get(f"{PATH}/resp_1")
        for answer, code in (
            (asked, "journal_unavailable"),
            (listed, "draining"),
            (polled, "draining"),
        ):
            assert (answer.status, answer.error["code"]) == (503, code)
            assert answer.headers["connection"] == "close"
            assert "retry-after" in answer.headers


async def test_background_responses_with_one_key_run_once(life):
    body, names = {**SAMPLED, "stream": False}, []
    key = [("idempotency-key", "one")]

    async def ask(client):
        answer = await client.post(PATH, body, key)
        assert answer.status == 200, answer.body
        names.append(answer.json["id"])

    async with life() as client:
        async with anyio.create_task_group() as tasks:
            for _ in range(4):
                tasks.start_soon(ask, client)
        assert len(set(names)) == 1
        assert len(client.service.journal.streams) == 1


async def test_retry_is_not_refused_for_load(life):
    """It computes nothing new, so it needs no place."""
    async with life() as client:
        answers = []
        for level, key in (
            (Level.CALM, "one"),
            (Level.SHED_ALL, "one"),
            (Level.SHED_ALL, "two"),
        ):
            client.service.gate.level = level
            answers.append(
                await client.post(PATH, SAMPLED | {"stream": False}, [("idempotency-key", key)])
            )
        assert [answer.status for answer in answers] == [200, 200, 503]
        assert answers[0].json["id"] == answers[1].json["id"]


async def test_other_body_with_same_key_is_refused_meanwhile(life, monkeypatch):
    found, key, has_begun = {}, [("idempotency-key", "one")], anyio.Event()
    recall = routes.recall

    async def recall_slowly(service, context, request):
        if request.input == "first":
            has_begun.set()
            await until(lambda: "second" in found)
        return await recall(service, context, request)

    monkeypatch.setattr(routes, "recall", recall_slowly)

    async def ask(client, text):
        body = {**SAMPLED, "input": text, "stream": False}
        found[text] = (await client.post(PATH, body, key)).status

    async with life() as client, anyio.create_task_group() as tasks:
        tasks.start_soon(ask, client, "first")
        await has_begun.wait()
        await ask(client, "second")
    assert found == {"second": 200, "first": 422}


async def test_refused_background_response_is_not_kept(life, monkeypatch):
    async with life() as client:
        monkeypatch.setattr(client.service.responses, "put", lambda *_: False)
        key = [("idempotency-key", "one")]
        assert (await client.post(PATH, GREEDY, key)).status == 503
        monkeypatch.undo()
        assert (await client.post(PATH, GREEDY, key)).status == 200
    async with life() as client:
        assert len(client.service.journal.streams) == 1


async def test_recovered_responses_wait_for_room(life):
    body = {**SAMPLED, "stream": False, "max_output_tokens": 60}
    async with life() as client:
        names = [(await client.post(PATH, body)).json["id"] for _ in range(4)]
    async with life(max_requests=1) as client:
        for name in names:
            assert (await ended(client, name))["status"] == "incomplete"
