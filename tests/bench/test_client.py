"""The load generator against servers in memory: what is counted, and that no failure is hidden."""

import json
import math

import anyio
import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trouper.bench import serve
from trouper.bench.datasets import SampleRequest
from trouper.bench.serve import EventCutter, Outcome, ask
from trouper.errors import TrouperValidationError

pytestmark = pytest.mark.anyio

LOAD = serve.RequestLoad(url="http://server/v1", model="m")
REQUEST = SampleRequest((1, 2, 3), 4)


def event(**fields):
    return f"data: {json.dumps(fields)}\n\n".encode()


def text(text, reason=None):
    return event(choices=[{"index": 0, "text": text, "finish_reason": reason}])


USAGE = event(choices=[], usage={"prompt_tokens": 3, "completion_tokens": 4})
DONE = b"data: [DONE]\n\n"
WHOLE = [text("a"), text(""), text("bc"), text("d", "length"), USAGE, DONE]


class Pieces(httpx2.AsyncByteStream):
    """A body in pieces; an exception among them is raised."""

    def __init__(self, pieces):
        self._pieces = list(pieces)

    def __aiter__(self):
        return self

    async def __anext__(self):
        await anyio.lowlevel.checkpoint()
        if not self._pieces:
            raise StopAsyncIteration
        piece = self._pieces.pop(0)
        if isinstance(piece, Exception):
            raise piece
        return piece


def client_of(handler):
    transport = httpx2.MockTransport(handler)
    return httpx2.AsyncClient(base_url="http://server/v1/", transport=transport)


async def asked(*pieces, status=200):
    outcome = Outcome(due=0.0)
    async with client_of(lambda _: httpx2.Response(status, stream=Pieces(pieces))) as client:
        await ask(client, "completions", b"{}", outcome)
    return outcome


async def test_whole_answer_is_counted_as_server_counts():
    outcome = await asked(*WHOLE)
    assert outcome.error is None
    assert (outcome.num_prompt_tokens, outcome.num_output_tokens) == (3, 4)
    assert len(outcome.gaps) == 2
    assert outcome.sent <= outcome.first <= outcome.last <= outcome.ended
    assert sum(outcome.gaps) == pytest.approx(outcome.last - outcome.first)


async def test_chats_deltas_are_texts_and_its_role_is_none():
    chunks = [
        event(choices=[{"delta": delta, "finish_reason": reason}])
        for delta, reason in (
            ({"role": "assistant", "content": ""}, None),
            ({"content": "a"}, None),
            ({"content": "b"}, None),
            ({}, "stop"),
        )
    ]
    outcome = await asked(b": hello\n\n", *chunks, USAGE, DONE)
    assert (outcome.error, len(outcome.gaps)) == (None, 1)


FAILURES = [
    ([b"no"], 503, "HTTP 503"),
    (WHOLE[:3], 200, "the stream was cut"),
    ([text("a"), USAGE, DONE], 200, "no finish_reason"),
    ([text("a"), event(error={"message": "out of luck"}), DONE], 200, "out of luck"),
    ([text("a", "abort"), DONE], 200, "finish_reason abort"),
    ([b"data: {\n\n"], 200, "bad event"),
    ([text("a"), httpx2.ReadError("gone")], 200, "ReadError"),
    ([httpx2.ReadTimeout("late")], 200, "ReadTimeout"),
]


@pytest.mark.parametrize(("pieces", "status", "message"), FAILURES, ids=[m for *_, m in FAILURES])
async def test_every_failure_has_a_name(pieces, status, message):
    outcome = await asked(*pieces, status=status)
    assert message in outcome.error


@given(st.data())
def test_events_may_come_in_any_pieces(data):
    lines = [b"data: {}", b"", b": comment", b"event: x", b"data:[DONE]", b""]
    raw = b"\r\n".join([*lines, b""]) if data.draw(st.booleans()) else b"\n".join([*lines, b""])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=8)))
    cutter = EventCutter()
    pieces = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    found = [payload for piece in pieces for payload in cutter.feed(piece)]
    assert found == [b"{}", b"[DONE]"]


async def test_failures_are_counted_beside_what_was_completed():
    answers = iter([(200, WHOLE), (503, [b""]), (200, WHOLE), (503, [b""]), (200, WHOLE[:1])])
    steps = []

    def handler(request):
        status, pieces = next(answers)
        return httpx2.Response(status, stream=Pieces(pieces))

    async with client_of(handler) as client:
        record = await serve.measure(client, LOAD, [REQUEST] * 5, lambda: steps.append(1))
    assert (record["completed"], record["failed"], len(steps)) == (2, 3, 5)
    assert record["errors"] == {"HTTP 503": 2, "the stream was cut": 1}
    assert (record["total_input_tokens"], record["total_output_tokens"]) == (6, 8)
    assert record["request_throughput"] == pytest.approx(2 / record["duration"])
    assert record["median_ttft_ms"] > 0


async def test_no_more_requests_are_open_than_allowed():
    num_open = most = 0

    class Slow(Pieces):
        async def __anext__(self):
            nonlocal num_open, most
            if len(self._pieces) == len(WHOLE):
                num_open += 1
                most = max(most, num_open)
                await anyio.wait_all_tasks_blocked()
            num_open -= not self._pieces
            return await super().__anext__()

    async with client_of(lambda _: httpx2.Response(200, stream=Slow(WHOLE))) as client:
        limited = serve.RequestLoad(url=LOAD.url, max_concurrency=3)
        record = await serve.measure(client, limited, [REQUEST] * 9)
    assert (record["completed"], most) == (9, 3)
    assert record["max_concurrent_requests"] <= 3


async def test_requests_say_what_they_want():
    seen = []

    def handler(request):
        seen.append((request.url.path, json.loads(request.content)))
        return httpx2.Response(200, stream=Pieces(WHOLE))

    async with client_of(handler) as client:
        load = serve.RequestLoad(url=LOAD.url, model="m", extra_body={"temperature": 0})
        await serve.send_all(client, load, [REQUEST])
        chat = serve.RequestLoad(url=LOAD.url, model="m", endpoint="chat")
        await serve.send_all(
            client, chat, [SampleRequest((1,), 2, "hello", schema={"type": "object"})]
        )
    (completions, body), (chats, chat_body) = seen
    assert (completions, chats) == ("/v1/completions", "/v1/chat/completions")
    assert body.items() >= {"prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0}.items()
    assert body["stream_options"] == {"include_usage": True}
    assert chat_body["messages"] == [{"role": "user", "content": "hello"}]
    assert chat_body["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert "response_format" not in body


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (httpx2.Response(401), "401"),
        (httpx2.Response(200, json={"data": []}), "lists no models"),
        (httpx2.Response(200, text="hello"), "lists no models"),
    ],
)
async def test_server_without_model_is_told_in_one_line(answer, message):
    async with client_of(lambda _: answer) as client:
        with pytest.raises(serve.ServerError, match=message) as raised:
            await serve.first_model(client)
    assert "\n" not in str(raised.value)


def figures(sent, first, last, ended, tokens):
    outcome = Outcome(due=0, sent=sent, first=first, last=last, ended=ended)
    outcome.num_output_tokens = tokens
    return outcome


def test_goodput_counts_requests_that_keep_every_limit():
    outcomes = [figures(0, 0.1, 0.3, 0.4, 3), figures(0, 0.3, 0.5, 0.6, 3)]
    outcomes += [figures(0, 0.1, 0.9, 1.0, 3), Outcome(due=0, error="HTTP 500")]
    load = serve.RequestLoad(goodput={"ttft": 200, "tpot": 150})
    record = serve.evaluate(outcomes, 2.0, load)
    assert record["request_goodput"] == 0.5
    assert record["median_tpot_ms"] == pytest.approx(100)
    assert (record["completed"], record["failed"]) == (3, 1)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9)), max_size=12))
def test_most_open_at_once_by_brute_force(spans):
    outcomes = [Outcome(due=0, sent=begin, ended=begin + length) for begin, length in spans]
    expected = max(
        (sum(o.sent <= moment < o.ended for o in outcomes) for moment in range(30)), default=0
    )
    assert serve.most_at_once(outcomes) == expected


def test_a_goodput_that_makes_no_sense_is_named():
    assert serve.parse_goodput(["ttft:200", "e2el:1e3"]) == {"ttft": 200, "e2el": 1000}
    for bad in ("ttft", "ttft:", "ttft:-1", "ttft:nan", "itl:3", ""):
        with pytest.raises(TrouperValidationError, match="goodput"):
            serve.parse_goodput([bad])


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"request_rate": 0.0}, "request_rate"),
        ({"request_rate": math.nan}, "request_rate"),
        ({"burstiness": -1.0}, "burstiness"),
        ({"url": "server:8000/v1"}, "url"),
        ({"percentiles": (101.0,)}, "metric_percentiles"),
    ],
)
def test_a_load_that_makes_no_sense_is_named(options, name):
    with pytest.raises(TrouperValidationError, match=name):
        serve.RequestLoad(**options).check()
