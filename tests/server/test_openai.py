"""A real server process, driven by OpenAI's own clients, the plain one and the async one."""

import re
import time
from contextlib import contextmanager
from operator import attrgetter
from types import SimpleNamespace

import anyio
import anyio.from_thread
import openai
import pydantic
import pytest

from .process import started, stop, wait_until

MESSAGES = [{"role": "user", "content": "hi"}]
COMPLETIONS, CHATS, RESPONSES = "completions", "chat.completions", "responses"
DEFAULTS = {
    COMPLETIONS: {"prompt": "def f(", "max_tokens": 8, "temperature": 0},
    CHATS: {"messages": MESSAGES, "max_tokens": 8, "temperature": 0},
    RESPONSES: {"input": "hi", "max_output_tokens": 8, "temperature": 0},
}
LONG = {"max_tokens": 500, "extra_body": {"ignore_eos": True}}
MAX_REQUESTS = 16


@pytest.fixture(scope="module")
def server():
    keys = ("--api-key", "sesame", "--api-key", "open", "--admin-key", "root")
    store = ("--responses-store-bytes", "1000000")
    with started(*keys, *store, "--max-requests", str(MAX_REQUESTS)) as server:
        server.headers = [("authorization", "Bearer root")]
        yield server
        assert stop(server) == 0


@pytest.fixture
def options(server):
    url = f"http://127.0.0.1:{server.port}/v1"
    return {"base_url": url, "api_key": "sesame", "max_retries": 0, "timeout": 30}


@pytest.fixture
def client(options):
    with openai.OpenAI(**options) as client:
        yield client


@pytest.fixture
def another(options):
    """Somebody with another key."""
    with openai.OpenAI(**{**options, "api_key": "open"}) as client:
        yield client


@pytest.fixture(params=["plain", "async"])
def ask(request, client, options):
    """`ask(COMPLETIONS, …)` is the reply, of a stream the list of its parts; `given` is for the client."""

    def ask(resource, given=(), **fields):
        create = attrgetter(resource)(client.with_options(**dict(given))).create
        reply = create(model="trouper-demo", **{**DEFAULTS[resource], **fields})
        return list(reply) if fields.get("stream") else reply

    async def ask_async(resource, given=(), **fields):
        async with openai.AsyncOpenAI(**{**options, **dict(given)}) as client:
            create = attrgetter(resource)(client).create
            reply = await create(model="trouper-demo", **{**DEFAULTS[resource], **fields})
            return [part async for part in reply] if fields.get("stream") else reply

    if request.param == "plain":
        yield ask
    else:
        with anyio.from_thread.start_blocking_portal("asyncio") as portal:
            yield lambda *args, **fields: portal.call(lambda: ask_async(*args, **fields))


def test_completions(ask):
    whole = ask(COMPLETIONS, logprobs=2)
    text = whole.choices[0].text
    logprobs = whole.choices[0].logprobs
    assert whole.usage.completion_tokens == len(logprobs.tokens) == 8
    assert "".join(logprobs.tokens) == text
    assert all(len(top) == 2 for top in logprobs.top_logprobs)
    parts = ask(COMPLETIONS, logprobs=2, stream=True, stream_options={"include_usage": True})
    choices = [part.choices[0] for part in parts if part.choices]
    assert "".join(choice.text for choice in choices) == text
    told = [logprob for c in choices if c.logprobs for logprob in c.logprobs.token_logprobs]
    assert told == logprobs.token_logprobs
    assert parts[-1].usage == whole.usage
    assert choices[-1].finish_reason == "length"
    for stream in (False, True):
        stopped = ask(COMPLETIONS, stop=[text[4:6]], stream=stream)
        *_, last = stopped if stream else [stopped]
        assert last.choices[0].finish_reason == "stop"
        said = [part.choices[0].text for part in (stopped if stream else [stopped])]
        assert "".join(said) == text[: text.index(text[4:6])]


def test_several_choices_of_several_prompts(ask):
    fields = {"n": 3, "temperature": 1, "seed": 1, "prompt": ["a", "b"]}
    whole = ask(COMPLETIONS, **fields)
    assert [choice.index for choice in whole.choices] == list(range(6))
    texts = [""] * 6
    for part in ask(COMPLETIONS, **fields, stream=True):
        texts[part.choices[0].index] += part.choices[0].text
    assert texts == [choice.text for choice in whole.choices]
    assert len(set(texts)) > 2


def test_chats(ask):
    whole = ask(CHATS, logprobs=True, top_logprobs=2)
    message, content = whole.choices[0].message, whole.choices[0].logprobs.content
    assert "".join(entry.token for entry in content) == message.content
    assert all(len(entry.top_logprobs) == 2 for entry in content)
    parts = ask(CHATS, stream=True, logprobs=True)
    assert parts[0].choices[0].delta.role == "assistant"
    assert "".join(part.choices[0].delta.content or "" for part in parts) == message.content
    told = [e for p in parts if (found := p.choices[0].logprobs) for e in found.content]
    assert [entry.logprob for entry in told] == [entry.logprob for entry in content]
    assert parts[-1].choices[0].finish_reason == "length"
    assert len(ask(CHATS, n=2, temperature=1).choices) == 2
    stopped = ask(CHATS, stop=message.content[4:6])
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].message.content == message.content.partition(message.content[4:6])[0]


def test_responses(ask):
    whole = ask(RESPONSES)
    events = ask(RESPONSES, stream=True)
    assert "".join(e.delta for e in events if e.type.endswith("delta")) == whole.output_text
    assert events[-1].response.output_text == whole.output_text
    assert whole.usage.output_tokens == 8


FUNCTION = {
    "type": "function", "name": "switch", "description": "turns the light on or off", "strict": True,
    "parameters": {
        "type": "object", "properties": {"is_on": {"type": "boolean"}}, "required": ["is_on"],
        "additionalProperties": False,
    },
}  # fmt: skip
FORCED = {
    "tools": [FUNCTION], "tool_choice": "required", "parallel_tool_calls": False,
    "max_output_tokens": 60,
}  # fmt: skip


class Light(pydantic.BaseModel):
    is_on: bool


def test_responses_with_a_call_and_its_result(ask):
    first = ask(RESPONSES, **FORCED)
    call = first.output[-1]
    assert (call.type, call.name, first.status) == ("function_call", "switch", "completed")
    assert Light.model_validate_json(call.arguments)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
    history = {"previous_response_id": first.id, "tools": [FUNCTION]}
    follow_up = ask(RESPONSES, input=[result], **history)
    assert (follow_up.previous_response_id, follow_up.output[0].type) == (first.id, "message")
    assert follow_up.usage.input_tokens > first.usage.input_tokens
    events = ask(RESPONSES, **FORCED, stream=True)
    pieces = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert "".join(pieces) == events[-1].response.output[-1].arguments == call.arguments


def test_responses_through_the_clients_helpers(client):
    fields = {"model": "trouper-demo", **DEFAULTS[RESPONSES], "max_output_tokens": 60}
    parsed = client.responses.parse(**fields, text_format=Light)
    assert isinstance(parsed.output_parsed, Light)
    tool = {"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "switch"}}
    with client.responses.stream(**fields, **tool) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds.count("response.output_item.done") == len(final.output)
    assert (
        final.output[-1].parsed_arguments
        == Light.model_validate_json(final.output[-1].arguments).model_dump()
    )


def test_response_in_background_streams_again_from_any_event(client):
    fields = {"model": "trouper-demo", "input": "hi", "max_output_tokens": 6}
    events = list(client.responses.create(**fields, background=True, stream=True))
    name = events[0].response.id
    assert events[-1].response == client.responses.retrieve(name)
    again = list(client.responses.retrieve(name, stream=True, starting_after=2))
    assert again == events[3:]


def test_responses_are_kept_for_their_key(client, another):
    fields = {"model": "trouper-demo", **DEFAULTS[RESPONSES]}
    response = client.responses.create(**fields)
    assert client.responses.retrieve(response.id) == response
    with pytest.raises(openai.NotFoundError):
        another.responses.retrieve(response.id)
    with pytest.raises(openai.NotFoundError):
        another.responses.create(**fields, previous_response_id=response.id)
    client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


def test_responses_in_background(client):
    fields = {"model": "trouper-demo", **DEFAULTS[RESPONSES], "background": True}
    response = client.responses.create(**fields)
    assert response.status == "queued"
    deadline = time.monotonic() + 30
    while response.status in ("queued", "in_progress") and time.monotonic() < deadline:
        response = client.responses.retrieve(response.id)
    assert (response.status, response.usage.output_tokens) == ("incomplete", 8)
    fields |= {"max_output_tokens": 480}
    cancelled = client.responses.cancel(client.responses.create(**fields).id)
    assert cancelled.status == "cancelled"
    assert client.responses.retrieve(cancelled.id).status == "cancelled"


def test_models(client):
    assert [model.id for model in client.models.list()] == ["trouper-demo"]


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.anyio
async def test_many_at_once_through_one_async_client(anyio_backend, options):
    texts = {}
    async with openai.AsyncOpenAI(**options) as client:

        async def ask(seed):
            fields = {**DEFAULTS[CHATS], "temperature": 1, "seed": seed}
            stream = await client.chat.completions.create(
                model="trouper-demo", stream=True, **fields
            )
            texts[seed] = [chunk.choices[0].delta.content async for chunk in stream]

        async with anyio.create_task_group() as tasks:
            for seed in range(8):
                tasks.start_soon(ask, seed)
        fields = {**DEFAULTS[CHATS], "temperature": 1, "seed": 3}
        whole = await client.chat.completions.create(model="trouper-demo", **fields)
    assert len(texts) == 8
    assert "".join(filter(None, texts[3])) == whole.choices[0].message.content


def test_errors_become_the_clients_classes(ask):
    with pytest.raises(openai.BadRequestError) as bad:
        ask(COMPLETIONS, temperature=3)
    assert (bad.value.param, bad.value.code) == ("temperature", "invalid_value")
    with pytest.raises(openai.BadRequestError) as long:
        ask(CHATS, stream=True, max_tokens=10_000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as missing:
        ask(RESPONSES, extra_body={"model": "gpt-4"})
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError):
        ask(COMPLETIONS, {"api_key": "wrong"})
    with pytest.raises(openai.InternalServerError) as late:
        ask(COMPLETIONS, **LONG, extra_headers={"x-request-timeout-ms": "1"})
    assert (late.value.status_code, late.value.code) == (504, "deadline_exceeded")
    assert late.value.request_id


def num_answers(server, status, handler="/v1/completions"):
    """How often the server has answered so; 0 is an answer to nobody."""
    text = server.request("GET", "/metrics")[2].decode()
    name = f'trouper:http_requests_total{{handler="{handler}",status="{status}"}}'
    found = re.search(re.escape(name) + r" (\d+)", text)
    return int(found.group(1)) if found else 0


def order(server, path):
    status, _, body = server.request("POST", path)
    assert status == 200, body


def wait_load(server, load):
    wait_until(lambda: server.request("GET", "/load")[2] == b'{"server_load":%d}' % load)


@contextmanager
def frozen(server):
    """Requests come in, and nothing is computed."""
    order(server, "/sleep?level=0&mode=keep")
    try:
        yield
    finally:
        order(server, "/wake_up")


@pytest.mark.parametrize("resource", [COMPLETIONS, CHATS])
@pytest.mark.parametrize("stream", [False, True])
def test_the_clients_own_timeout_aborts_the_request(server, ask, resource, stream):
    handler = "/v1/" + resource.replace(".", "/")
    before = num_answers(server, 0, handler)
    with frozen(server):
        with pytest.raises(openai.APITimeoutError):
            ask(resource, {"timeout": openai.Timeout(30, read=0.2)}, stream=stream)
        wait_until(lambda: num_answers(server, 0, handler) == before + 1)
        wait_load(server, 0)
        metrics = server.request("GET", "/metrics")[2].decode()
        queued = [line for line in metrics.splitlines() if "num_requests_waiting{" in line]
        assert [line.rsplit(" ")[-1] for line in queued] == ["0.0"]
    assert ask(resource)


def test_stream_that_is_closed_early_frees_its_place(client, server):
    for _ in range(3):
        fields = {**DEFAULTS[COMPLETIONS], **LONG, "stream": True}
        stream = client.completions.create(model="trouper-demo", **fields)
        next(iter(stream))
        stream.close()
    wait_load(server, 0)


# Trying again.  The clients' pause before it is ours: what they would wait is noted, and the cause removed.


@pytest.fixture
def pauses(monkeypatch):
    """`pauses.act` is called in place of each pause; `pauses.seconds` is how long they would have been."""

    class Pauses:
        def __init__(self):
            self.seconds = []
            self.act = lambda: None

        def take(self, seconds):
            self.seconds.append(seconds)
            self.act()

        async def take_async(self, seconds):
            await anyio.to_thread.run_sync(self.take, seconds)

    pauses = Pauses()
    theirs = SimpleNamespace(**{**vars(time), "sleep": pauses.take})  # the tests' own waits go on
    monkeypatch.setattr("openai._base_client.time", theirs)
    monkeypatch.setattr("openai._base_client.anyio.sleep", pauses.take_async)
    return pauses


TWICE = {"max_retries": 2}


@pytest.mark.parametrize("stream", [False, True])
def test_request_to_paused_engine_is_repeated_until_it_is_taken(server, ask, pauses, stream):
    before = [num_answers(server, status) for status in (200, 503)]
    order(server, "/pause?mode=wait")
    pauses.act = lambda: len(pauses.seconds) == 2 and order(server, "/resume")
    assert ask(COMPLETIONS, TWICE, stream=stream)
    assert pauses.seconds == [1.0, 1.0]  # the server's word, not the client's own half a second
    after = [num_answers(server, status) for status in (200, 503)]
    assert after == [before[0] + 1, before[1] + 2]


def test_key_enters_again_after_finishing_requests(server, client, another, ask, pauses):
    before = num_answers(server, 429)
    fields = {**DEFAULTS[COMPLETIONS], **LONG, "temperature": 1, "stream": True}
    fields["model"] = "trouper-demo"
    with (
        another.completions.create(**fields),
        client.completions.create(**fields, n=MAX_REQUESTS - 1) as mine,
    ):

        def make_room():
            mine.close()
            wait_load(server, 1)
            order(server, "/wake_up")

        pauses.act = make_room
        order(server, "/sleep?level=0&mode=keep")
        assert ask(COMPLETIONS, TWICE)
    assert len(pauses.seconds) == 1
    assert 1 <= pauses.seconds[0] <= 75
    wait_load(server, 0)
    assert num_answers(server, 429) == before + 1


def test_what_would_come_again_is_not_repeated(server, client, ask, pauses):
    before = num_answers(server, 400)
    word = client.post("/../detokenize", body={"tokens": [300]}, cast_to=dict)["prompt"]
    with pytest.raises(openai.BadRequestError) as failed:
        ask(COMPLETIONS, TWICE, extra_body={"allowed_token_ids": [300], "bad_words": [word]})
    assert failed.value.code == "no_valid_token"
    assert (num_answers(server, 400), pauses.seconds) == (before + 1, [])
