"""Durable answers of every API: the same events for a client that comes back, in this server and in later ones."""

import json
import random
from contextlib import contextmanager

import anyio
import anyio.lowlevel
import msgspec
import pytest

from trouper.errors import EngineDeadError
from trouper.frontends.dialects.core import AnswerFormat
from trouper.frontends.server.admission.overload import Level
from trouper.frontends.server.durable.journal import Journal
from trouper.frontends.server.durable.segments import Segments
from trouper.frontends.server.durable.streams import (
    DurableStream,
    DurableStreams,
    answer_digest,
    lost,
)
from trouper.frontends.server.generation.durable import (
    Remains,
    StreamRun,
    start_recovered,
    what_remains,
)
from trouper.frontends.server.http.context import RequestContext
from trouper.frontends.server.shared.errors import HTTPError
from trouper.params import SamplingParams

from .lives import lives_on, until
from .test_journal import MODEL, SimulatedDisk

pytestmark = pytest.mark.anyio
SAMPLED = {"stream": True, "temperature": 0.9, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 30, **SAMPLED}
BODIES = {
    "chats": ("/v1/chat/completions", {**CHAT, "stream_options": {"include_usage": True}}),
    "choices": ("/v1/chat/completions", {**CHAT, "n": 3, "logprobs": True, "top_logprobs": 2}),
    "prompts": ("/v1/completions", {"prompt": ["a", "a"], "n": 2, "max_tokens": 20, **SAMPLED}),
    "scores": (
        "/v1/completions",
        {"prompt": "abc", "echo": True, "logprobs": 1, "max_tokens": 12, **SAMPLED},
    ),
    "stops": ("/v1/completions", {"prompt": "go on", "stop": ["e"], "max_tokens": 60, **SAMPLED}),
    "grammar": (
        "/v1/chat/completions",
        {**CHAT, "structured_outputs": {"regex": "[abc]{25}"}, "ignore_eos": False},
    ),
    "messages": ("/v1/messages", {**CHAT, "model": None}),
    "responses": ("/v1/responses", {"input": "hi", "max_output_tokens": 30, **SAMPLED}),
}
KEYED = [("idempotency-key", "one")]
OWNERS = [[("authorization", f"Bearer {key}")] for key in ("one", "two")]


@pytest.fixture
def disk():
    return SimulatedDisk(random.Random(0), full_rate=0, error_rate=0)


@pytest.fixture
def life(engine, disk):
    return lives_on(engine, disk)


def case(name, **changes):
    path, body = BODIES[name]
    return path, {key: value for key, value in (body | changes).items() if value is not None}


def frames_of(body):
    """Return the events of a stream.  Comments come where the disk of a loaded machine takes long."""
    frames = [frame + b"\n\n" for frame in body.split(b"\n\n") if frame]
    return [frame for frame in frames if not frame.startswith(b":")]


def id_of(frame):
    (line,) = [line for line in frame.split(b"\n") if line.startswith(b"id: ")]
    return line[4:].decode()


async def begin(client, path, body, num_events, headers=KEYED):
    """Ask, and leave behind some events.  Returns their bytes."""
    content = json.dumps(body).encode()
    head = [("content-type", "application/json"), *headers]
    async with client.stream("POST", path, content, head) as call:
        await call.wait_for(
            lambda: call.answer.body.count(b"\n\n") >= num_events or call.is_over.is_set()
        )
    return b"".join(frames_of(call.answer.body)[:num_events])


async def rest(client, path, body, had, headers=KEYED):
    last = [("last-event-id", id_of(frames_of(had)[-1]))] if had else []
    answer = await client.post(path, body, [*headers, *last])
    assert answer.status == 200, answer.body
    assert answer.is_complete
    return b"".join(frames_of(answer.body))


@pytest.mark.parametrize("name", BODIES)
async def test_later_server_goes_on_behind_the_cursor(life, name):
    path, body = case(name)
    async with life() as client:
        had = await begin(client, path, body, 6)
    async with life() as client:
        had += await rest(client, path, body, had)
        whole = await rest(client, path, body, b"")
    assert had == whole
    ids = [id_of(frame) for frame in frames_of(whole)]
    assert len(set(ids)) == len(ids)
    async with life() as client:
        assert await rest(client, path, body, b"") == whole


@pytest.mark.parametrize("name", ["chats", "choices", "prompts", "messages", "responses"])
async def test_whole_reply_is_equal_in_later_servers(life, name):
    path, body = case(name, stream=False, stream_options=None)
    async with life() as client:
        async with client.stream(
            "POST", path, json.dumps(body).encode(), [("content-type", "application/json"), *KEYED]
        ):
            streams = client.service.journal.streams
            await until(lambda: [s for s in streams._streams.values() if s.is_admitted])
    async with life() as client:
        first = await client.post(path, body, KEYED)
        assert first.status == 200, first.body
        assert (await client.post(path, body, KEYED)).body == first.body
    async with life() as client:
        assert (await client.post(path, body, KEYED)).body == first.body


async def test_lost_tail_is_sampled_again(life, disk):
    path, body = case("choices")
    async with life() as client:
        had = await begin(client, path, body, 12)
    (file,) = disk.files.values()
    del file.data[-500:]
    async with life() as client:
        text = had + await rest(client, path, body, had)
        whole = await rest(client, path, body, b"")
    assert sorted(map(chunk_of, frames_of(text))) == sorted(map(chunk_of, frames_of(whole)))


def chunk_of(frame):
    return frame.split(b"\n", 1)[1]


async def test_key_belongs_to_one_body_and_owner(life):
    path, body = case("chats")
    async with life(api_keys=("one", "two")) as client:
        first = await client.post(path, body, [*KEYED, *OWNERS[0]])
        again = await client.post(path, body, [*KEYED, *OWNERS[0]])
        assert frames_of(again.body) == frames_of(first.body)
        assert first.headers["x-durable"] == "yes"
        other = await client.post(path, {**body, "seed": 1}, [*KEYED, *OWNERS[0]])
        assert (other.status, other.error["code"]) == (422, "idempotency_mismatch")
        stranger = await client.post(path, body, [*KEYED, *OWNERS[1]])
        assert stranger.headers["x-stream-id"] != first.headers["x-stream-id"]
        place = f"/v1/streams/{first.headers['x-stream-id']}"
        assert (await client.get(place, OWNERS[1])).status == 404
        assert (await client.get(place, OWNERS[0])).body == first.body


async def test_requests_with_one_key_run_once(life):
    path, body = case("chats")
    answers = []

    async def ask(client):
        answers.append((await client.post(path, body, KEYED)).body)

    async with life() as client:
        async with anyio.create_task_group() as tasks:
            for _ in range(4):
                tasks.start_soon(ask, client)
        assert len(client.service.journal.streams) == 1
    assert len(set(answers)) == 1


async def test_failed_request_frees_its_key(life):
    path, body = case("chats", max_tokens=-1)
    async with life() as client:
        assert (await client.post(path, body, KEYED)).status == 400
        assert (await client.post(path, case("chats")[1], KEYED)).status == 200


@pytest.mark.parametrize("key", ["", '""', "x" * 256, "ä"])
async def test_invalid_key_is_refused(life, key):
    path, body = case("chats")
    async with life() as client:
        answer = await client.post(path, body, [("idempotency-key", key)])
        assert (answer.status, answer.error["param"]) == (400, "Idempotency-Key")


async def test_key_is_refused_where_nothing_is_kept(life):
    async with life() as client:
        body = {"model": "", "messages": CHAT["messages"], "stream": False}
        answer = await client.post("/api/chat", body, KEYED)
        assert answer.status == 400
        assert "Idempotency-Key" in answer.json["error"]


async def test_streams_are_listed_and_deleted(life):
    path, body = case("chats")
    async with life() as client:
        await client.post(path, body, KEYED)
        slow = {**body, "max_tokens": 300}
        await begin(client, path, slow, 3, [("idempotency-key", "two")])
        done, running = (await client.get("/v1/streams")).json["data"]
        assert (done["status"], running["status"]) == ("completed", "running")
        assert done["cursor"].startswith("30")
        for each in (done, running):
            place = f"/v1/streams/{each['id']}"
            assert (await client.get(place, method="DELETE")).json["deleted"]
            assert (await client.get(place)).status == 404
    async with life() as client:
        assert (await client.get("/v1/streams")).json["data"] == []


async def test_cursor_of_a_browser_ends_its_stream(life):
    path, body = case("chats")
    async with life() as client:
        first = await client.post(path, body, KEYED)
        place = f"/v1/streams/{first.headers['x-stream-id']}"
        frames = frames_of(first.body)
        for i in (0, 5, len(frames) - 2):
            last = [("last-event-id", id_of(frames[i]))]
            assert (await client.get(place, last)).body == b"".join(frames[i + 1 :])
            query = f"{place}?starting_after={last[0][1]}"
            assert (await client.get(query)).body == b"".join(frames[i + 1 :])
        assert (await client.get(place, [("last-event-id", "end")])).status == 204
        for wrong in ("x", "1.1", "31", "-1"):
            answer = await client.get(place, [("last-event-id", wrong)])
            assert (answer.status, answer.error["code"]) == (400, "cursor_invalid")


async def test_unread_answer_is_given_up(life):
    path, body = case("chats", max_tokens=400)
    async with life(kept={"grace_s": 0.05}) as client:
        async with client.stream(
            "POST", path, json.dumps(body).encode(), [("content-type", "application/json"), *KEYED]
        ) as call:
            await call.wait_for(lambda: call.answer.body.count(b"\n\n") > 3)
            (stream,) = client.service.journal.streams.of(b"")
        await until(lambda: stream.is_over)
        answer = await client.post(path, body, KEYED)
        assert json.loads(answer.body.split(b"data: ")[-2])["error"]["code"] == "stream_expired"


async def test_all_requests_may_be_durable(life):
    path, body = case("chats")
    async with life(kept={"keeps_all": True}) as client:
        first = await client.post(path, body)
        place = f"/v1/streams/{first.headers['x-stream-id']}"
    async with life() as client:
        assert (await client.get(place)).body == first.body
        assert (await client.post(path, body)).headers["x-durable"] == "no"


async def test_full_journal_refuses_only_who_asked(life):
    path, body = case("chats")
    async with life(max_bytes=300, kept={"keeps_all": True}) as client:
        refused = await client.post(path, body, KEYED)
        assert (refused.status, refused.error["code"]) == (503, "journal_unavailable")
        other = await client.post(path, body)
        assert (other.status, other.headers["x-durable"]) == (200, "no")


async def test_another_model_loses_a_stream(life):
    path, body = case("chats")
    async with life() as client:
        had = await begin(client, path, body, 3)
    other = bytes(16) + bytes([1]) * 8 + bytes(8)
    for _ in range(2):
        async with life(other) as client:
            answer = await client.post(path, body, KEYED)
            assert (answer.status, answer.error["code"]) == (410, "stream_lost")
            assert "the tokenizer of the model has changed" in answer.error["message"]
    async with life() as client:
        assert (await rest(client, path, body, b"")).startswith(had)


async def test_events_of_ended_streams_are_made_again(life):
    path, body = case("messages")
    async with life(kept={"max_event_bytes": 0}) as client:
        first = await client.post(path, body, KEYED)
        client.service.journal.streams.tidy(0)
        (stream,) = client.service.journal.streams.of(b"")
        assert stream.is_cold
        assert await rest(client, path, body, b"") == b"".join(frames_of(first.body))


async def test_background_response_has_a_key(life):
    path, body = case("responses", background=True)
    async with life() as client:
        had = await begin(client, path, body, 3)
    async with life() as client:
        had += await rest(client, path, body, had)
        assert had == await rest(client, path, body, b"")
        (stream,) = (await client.get("/v1/streams")).json["data"]
        assert (await client.get(f"/v1/streams/{stream['id']}")).body == had


async def test_durable_response_is_streamed_by_its_id(life):
    path, body = case("responses")
    async with life() as client:
        first = await client.post(path, body, KEYED)
        place = f"{path}/{first.headers['x-stream-id']}"
    async with life() as client:
        answer = await client.get(f"{place}?stream=true&starting_after=4")
        assert answer.body == b"".join(frames_of(first.body)[5:])


async def test_durable_response_keeps_its_conversation(life):
    path, body = case("responses")
    async with life() as client:
        first = await client.post(path, {**body, "stream": False})
        body["previous_response_id"] = first.json["id"]
        had = await begin(client, path, body, 5)
    async with life() as client:
        had += await rest(client, path, body, had)
        assert had == await rest(client, path, body, b"")


async def test_changed_default_loses_a_stream(life, engine, monkeypatch):
    path, body = case("chats", temperature=None)
    async with life() as client:
        had = await begin(client, path, body, 3)
    with monkeypatch.context() as changed:
        changed.setitem(engine.config.model.default_sampling, "temperature", 0.1)
        async with life() as client:
            answer = await client.post(path, body, KEYED)
            assert (answer.status, answer.error["code"]) == (410, "stream_lost")
            assert "other parameters" in answer.error["message"]
            assert client.service.journal.streams.num_lost == {"request": 1}
    async with life() as client:
        assert (await rest(client, path, body, b"")).startswith(had)


async def test_changed_prompt_loses_a_stream(life, disk):
    path, body = case("chats")
    async with life() as client:
        await begin(client, path, body, 3)
    # As a template with the date does on the next day.
    segments = Segments(disk, MODEL, lambda: bytes(16), max_bytes=2**24)
    segments.begin()
    (record,) = segments.streams.values()
    record.tokens[0] = msgspec.structs.replace(record.tokens[0], prompt_token_ids=[1, 2])
    segments.rotate()
    segments.close()
    async with life() as client:
        answer = await client.post(path, body, KEYED)
        assert b"its prompt has changed" in answer.body


async def test_failing_journal_is_told(life, disk, monkeypatch):
    path, body = case("chats", max_tokens=60)
    async with life() as client:
        content = json.dumps(body).encode()
        head = [("content-type", "application/json"), *KEYED]
        async with client.stream("POST", path, content, head) as call:
            await call.wait_for(lambda: call.answer.body.count(b"\n\n") > 3)
            disk.full_rate = 1.0
            await call.wait_for(call.is_over.is_set)
        assert call.answer.is_complete
        assert b": not durable\n\n" in call.answer.body
        again = await client.post(path, body, KEYED)
        assert again.headers["x-durable"] == "no"
        assert b": not durable\n\n" in again.body
        assert (await client.post(path, body, [("idempotency-key", "two")])).status == 503


@pytest.mark.parametrize("is_running", [False, True])
async def test_reader_is_not_refused_for_load(life, is_running):
    """Neither the place nor the tokens of a repeated request are new."""
    path, body = case("chats", max_tokens=200 if is_running else 8)
    async with life() as client:
        had = await begin(client, path, body, 4 if is_running else 100)
        client.service.gate.level = Level.SHED_ALL
        assert (await client.post(path, body, [("idempotency-key", "two")])).status == 503
        other = await client.post(path, {**body, "max_tokens": 9}, KEYED)
        assert (other.status, other.json["error"]["code"]) == (422, "idempotency_mismatch")
        assert (await rest(client, path, body, b"")).startswith(had)


async def test_reader_keeps_an_answer(life):
    path, body = case("chats", max_tokens=200)
    async with life(kept={"grace_s": 0.0}) as client:
        answer = await client.post(path, body, KEYED)
        assert b"stream_expired" not in answer.body
        (stream,) = client.service.journal.streams.of(b"")
        with stream.read():
            client.service.journal.streams.tidy(stream.ended_at + 10_000)
            assert client.service.journal.streams.of(b"") == [stream]
        client.service.journal.streams.tidy(stream.ended_at + 10_000)
        assert client.service.journal.streams.of(b"") == []


# Planted bugs, each with the test that must find it


def owner_is_not_compared(patch):
    patch.setattr(DurableStreams, "find", lambda self, _, id: self._streams.get(id))


def body_is_not_compared(patch):
    right = DurableStreams.repeated

    def repeated(self, owner, key):
        found = right(self, owner, key)
        if found is not None:
            found.digest = AnyDigest()
        return found

    patch.setattr(DurableStreams, "repeated", repeated)


class AnyDigest:
    def __eq__(self, other):
        return True

    __hash__ = None


def cursor_counts_events(patch):
    patch.setattr(DurableStream, "advance", lambda self, choice, num_tokens: None)


def retention_forgets_a_reader(patch):
    def tidy(self, now):
        for stream in list(self._streams.values()):
            self.forget(stream)

    patch.setattr(DurableStreams, "tidy", tidy)


def reader_does_not_stop_the_grace(patch):
    @contextmanager
    def read(self):
        yield

    patch.setattr(DurableStream, "read", read)


def failing_journal_is_not_told(patch):
    patch.setattr(Journal, "is_working", True)


def seed_is_not_kept(patch):
    right = StreamRun.attach

    def attach(self, driver):
        self._saved = msgspec.structs.replace(self._saved, seed=random.randrange(2**60))
        right(self, driver)

    patch.setattr(StreamRun, "attach", attach)


PLANTED = [
    (owner_is_not_compared, test_key_belongs_to_one_body_and_owner, {}),
    (body_is_not_compared, test_key_belongs_to_one_body_and_owner, {}),
    (cursor_counts_events, test_streams_are_listed_and_deleted, {}),
    (retention_forgets_a_reader, test_reader_keeps_an_answer, {}),
    (reader_does_not_stop_the_grace, test_reader_keeps_an_answer, {}),
    (failing_journal_is_not_told, test_failing_journal_is_told, {"disk", "monkeypatch"}),
    (seed_is_not_kept, test_lost_tail_is_sampled_again, {"disk"}),
]


@pytest.mark.parametrize(
    ("bug", "find", "needs"), PLANTED, ids=lambda each: getattr(each, "__name__", "")
)
async def test_planted_bug_of_streams_is_found(life, disk, monkeypatch, bug, find, needs):
    bug(monkeypatch)
    fixtures = {"disk": disk, "monkeypatch": monkeypatch}
    try:
        await find(life, **{name: fixtures[name] for name in needs})
    except (AssertionError, ExceptionGroup):  # of a task, in a group
        return
    pytest.fail("no test finds the bug")


async def test_recovered_streams_wait_for_room(life):
    path, body = case("chats", max_tokens=60)
    async with life() as client:
        for number in range(5):
            await begin(client, path, body, 3, [("idempotency-key", str(number))])
    async with life(max_requests=2) as client:
        streams = client.service.journal.streams.of(b"")
        for stream in streams:
            answer = await client.get(f"/v1/streams/{stream.id}")
            # An answer that has ended already is read again like a new request, behind those that wait for room.
            tries = 5 * 60 + 20
            while answer.status == 503 and tries:
                tries -= 1
                for each in [each for each in streams if not each.is_over][:1]:
                    await each.wait(each.num_shown)
                answer = await client.get(f"/v1/streams/{stream.id}")
            assert answer.status == 200, answer.body
            assert answer.body.endswith(b"[DONE]\n\n")
        # On a slow machine the first answers end in the first life.
        assert client.service.journal.streams.num_resumed >= 1


async def test_newcomers_wait_for_recovered_streams(life):
    path, body = case("chats", max_tokens=60)
    async with life() as client:
        for number in range(4):
            await begin(client, path, body, 3, [("idempotency-key", str(number))])
    async with life(max_requests=1) as client:
        streams = client.service.journal.streams.of(b"")
        other = await client.post(path, {**body, "max_tokens": 1})
        assert (other.status, other.error["code"]) == (503, "overloaded")
        assert "resuming" in other.error["message"]
        # One try for each event of a recovered stream, and some for the end of the last one.
        tries = 4 * 60 + 20
        while other.status == 503 and tries:
            tries -= 1
            for stream in [each for each in streams if not each.is_over][:1]:
                await stream.wait(stream.num_shown)
            other = await client.post(path, {**body, "max_tokens": 1})
        assert other.status == 200
        assert sum(not stream.is_over for stream in streams) <= 1


async def test_readers_of_a_cut_answer_do_not_wait(app):
    service, stream = app.service, DurableStream("one", b"", "/v1/completions", b"", b"", 0.0)
    context = RequestContext.without_client("/v1/completions")
    service.gate.admission.max_sequences = 1
    async with anyio.create_task_group() as tasks:
        await tasks.start(service.background.run_tasks)
        with service.gate.enter("", 1):
            start_recovered(service, context, "one", None, lambda: stream.end(1.0, is_cut=True))
            await anyio.lowlevel.checkpoint()
            service.background.cancel("one")
            with anyio.fail_after(5):
                await stream.wait_head()
            assert stream.is_cut
        with service.gate.enter("", 1):
            tasks.cancel_scope.cancel()


REFUSED, LOST, DEAD = HTTPError(503, "overloaded", ""), lost("x"), EngineDeadError("dead")
ENDS = [
    (None, {}, Remains.END),
    (None, {"is_draining": True}, Remains.END),
    (ValueError(), {"has_begun": True}, Remains.END),
    (ValueError(), {"has_begun": True, "is_draining": True}, Remains.REQUEST),
    (DEAD, {"has_begun": True}, Remains.REQUEST),
    (REFUSED, {}, Remains.NOTHING),
    (REFUSED, {"is_resumed": True}, Remains.REQUEST),
    (LOST, {"is_resumed": True}, Remains.REQUEST),
    (ValueError(), {"is_resumed": True}, Remains.NOTHING),
    (DEAD, {}, Remains.NOTHING_HERE),
    (REFUSED, {"is_draining": True}, Remains.NOTHING_HERE),
]


@pytest.mark.parametrize(("error", "facts", "expected"), ENDS)
def test_only_answers_and_promises_remain(error, facts, expected):
    usual = {"has_begun": False, "is_resumed": False, "is_draining": False}
    assert what_remains(error, **usual | facts) is expected


class LaterParams(SamplingParams):
    one_more: float = 0.0


def test_answers_go_on_in_a_version_with_more_parameters():
    digests = [
        answer_digest(kind(top_k=5), AnswerFormat(), 64) for kind in (SamplingParams, LaterParams)
    ]
    assert digests[0] == digests[1]
    assert answer_digest(SamplingParams(top_k=6), AnswerFormat(), 64) != digests[0]
