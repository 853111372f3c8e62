"""Nothing large that comes or goes over HTTP keeps the event loop: beats are counted against work."""

import json
import threading
import time

import anyio
import numpy as np
import pybase64
import pytest
import trio

from tests.support.heartbeat import BEATS, Heartbeat, Pace
from trouper import AsyncLLMEngine, EngineArgs
from trouper.actors.engine.generation import Generation
from trouper.actors.rendering.prompts.embeds import decode_base64, decode_embeds, digests
from trouper.actors.runtime.event_loop import ITEMS_PER_TURN
from trouper.frontends.server.apis.openai.requests import ChatRequest, CompletionRequest
from trouper.frontends.server.apis.pooling import routes
from trouper.frontends.server.apis.pooling.formats import numbers
from trouper.frontends.server.asgi.app import create_app
from trouper.frontends.server.http import decoding
from trouper.frontends.server.http.decoding import decode_now

from .client import Client

LONG = "word " * 20_000
WIDTH, MAX_ROWS = 4096, 4096
NUM_BYTES = 16 * 2**20
NUM_TURNS = 5


@pytest.fixture
async def beating():
    """An engine that embeds, its client, and a heart on the same loop."""
    heart = Heartbeat()
    args = EngineArgs(runner="pooling", dtype="float32", max_model_len=128)
    async with anyio.create_task_group() as tasks:
        async with AsyncLLMEngine(args) as engine:
            await tasks.start(heart.run)
            yield Client(create_app(engine)), heart
        tasks.cancel_scope.cancel()


ANSWERS = {
    "floats": ("/v1/embeddings", "build_encoded", {"input": ["one"] * 20}),
    "base64": ("/v1/embeddings", "build_encoded", {"input": ["one"] * 20, "encoding_format": "base64"}),
    "bytes": ("/pooling", "build_encoded", {"input": ["one"] * 20, "encoding_format": "bytes", "task": "token_embed"}),
    "cohere": ("/v2/embed", "build_cohere", {"texts": ["one"] * 20}),
    "scores": ("/score", "build_scores", {"data_1": "a", "data_2": ["b"] * 20}),
    "ranking": ("/rerank", "build_ranking", {"query": "a", "documents": ["b"] * 20}),
}  # fmt: skip


@pytest.mark.trio
@pytest.mark.parametrize("kind", ANSWERS)
async def test_the_loop_beats_while_an_answer_is_built(kind, beating, monkeypatch):
    client, heart = beating
    path, name, body = ANSWERS[kind]
    monkeypatch.setattr(routes, "QUICK_BASE64", routes.QUICK)  # that many numbers are a long body
    module = routes
    monkeypatch.setattr(module, name, heart.hold_up(getattr(module, name)))
    answer = await client.post(path, body)
    assert answer.status == 200, answer.body
    assert heart.count > BEATS


MANY = [f"text {i}" for i in range(5 * ITEMS_PER_TURN)]
LISTS = {
    "embeddings": ("embed", "/v1/embeddings", {"input": MANY}),
    "cosines": ("embed", "/score", {"data_1": MANY, "data_2": MANY[::-1]}),
    "late interaction": ("token_embed", "/score", {"data_1": MANY, "data_2": MANY[::-1]}),
    "ranking": ("token_embed", "/rerank", {"query": "one", "documents": MANY}),
    "completions": (None, "/v1/completions", {"prompt": MANY, "max_tokens": 1}),
    "a stream": (None, "/v1/completions", {"prompt": MANY, "max_tokens": 1, "stream": True}),
}


@pytest.mark.trio
@pytest.mark.parametrize("kind", LISTS)
async def test_loop_has_its_turns_while_many_inputs_begin_and_end(kind, monkeypatch):
    task, path, body = LISTS[kind]
    given = {} if task is None else {"runner": "pooling", "pooler_config": {"task": task}}
    pace, names = Pace(), ("__init__", "open", "_note")
    for name in names:
        monkeypatch.setattr(Generation, name, pace.counted(getattr(Generation, name)))
    async with AsyncLLMEngine(EngineArgs(max_model_len=32, **given)) as engine:
        client = Client(create_app(engine))
        trio.lowlevel.add_instrument(pace)
        answer = await client.post(path, body)
        trio.lowlevel.remove_instrument(pace)
    assert answer.status == 200, answer.body
    for name in names:
        assert sum(pace.of(name)) >= len(MANY)
        assert (
            max(pace.of(name)) <= 2 * ITEMS_PER_TURN
        )  # the end of one loop and the beginning of the next


@pytest.mark.trio
async def test_loop_beats_while_large_body_is_parsed(beating, monkeypatch):
    client, heart = beating
    monkeypatch.setattr(decoding, "decode_now", heart.hold_up(decoding.decode_now))
    answer = await client.post("/v1/embeddings", {"input": LONG, "truncate_prompt_tokens": 5})
    assert answer.status == 200, answer.body
    assert heart.count > BEATS


@pytest.mark.trio
async def test_a_large_answer_is_sent_in_parts(beating, monkeypatch):
    client, _ = beating
    whole = await client.post("/v1/embeddings", {"input": ["one"] * 5})
    monkeypatch.setattr("trouper.frontends.server.http.context.MAX_FRAME", 1000)
    parts = await client.post("/v1/embeddings", {"input": ["one"] * 5})
    assert parts.json["data"] == whole.json["data"]
    assert int(parts.headers["content-length"]) == len(parts.body) > 1000


# What one thread computes while another counts; a call that keeps the interpreter lets it count to 1.


def beats_beside(work, given):
    """How often another thread gets its turn from the beginning of the work to its end."""
    count, found = 0, []

    def run():
        before = count
        work(given)
        found.append(count - before)

    thread = threading.Thread(target=run)
    thread.start()
    while not found:
        count += 1
        time.sleep(0)
    thread.join()
    return found[0]


def payload():
    head = b'{"x":{"dtype":"BF16","shape":[2048,4096],"data_offsets":[0,16777216]}}'
    return len(head).to_bytes(8, "little") + head + bytes(NUM_BYTES)


def as_text():
    return pybase64.b64encode(payload()).decode()


def as_body():
    return json.dumps({"model": "x", "prompt_embeds": as_text()}).encode()


def as_chat():
    part = {"type": "prompt_embeds", "data": as_text()}
    return json.dumps({"messages": [{"role": "user", "content": [part]}]}).encode()


WORK = {
    "embeddings in a body": (as_body, lambda body: decode_now(body, CompletionRequest)),
    "embeddings in a chat": (as_chat, lambda body: decode_now(body, ChatRequest)),
    "base64 of embeddings": (as_text, lambda text: decode_base64(text, WIDTH, MAX_ROWS)),
    "digests of embeddings": (
        payload,
        lambda it: digests([decode_embeds(it, WIDTH, MAX_ROWS)], 128),
    ),
    "floats of an answer": (lambda: np.zeros((64, 4096), np.float32), numbers),
}


@pytest.mark.parametrize("kind", WORK)
def test_large_work_in_thread_leaves_interpreter_to_others(kind):
    make, work = WORK[kind]
    assert beats_beside(work, make()) > NUM_TURNS


def test_a_parser_does_not():
    """What is avoided above: the measure tells the difference."""
    assert min(beats_beside(json.loads, as_body()) for _ in range(3)) < NUM_TURNS
