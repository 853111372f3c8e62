"""A real server process, driven by OpenAI's own client."""

import anyio
import openai
import pytest

from .bad_input import CASES, check
from .process import started, stop

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server():
    with started("--api-key", "sesame", "--api-key", "open") as server:
        yield server
        assert stop(server) == 0


@pytest.fixture
def client(server):
    url = f"http://127.0.0.1:{server.port}/v1"
    with openai.OpenAI(base_url=url, api_key="sesame", max_retries=0, timeout=30) as client:
        yield client


@pytest.fixture
def model(client):
    return client.models.list().data[0].id


def complete(client, model, **fields):
    fields = {"prompt": "def f(", "max_tokens": 8, "temperature": 0, **fields}
    return client.completions.create(model=model, **fields)


def chat(client, model, **fields):
    fields = {"messages": MESSAGES, "max_tokens": 8, "temperature": 0, **fields}
    return client.chat.completions.create(model=model, **fields)


def test_completions(client, model):
    whole = complete(client, model, logprobs=2)
    text = whole.choices[0].text
    assert whole.usage.completion_tokens == len(whole.choices[0].logprobs.tokens) == 8
    parts = list(complete(client, model, stream=True, stream_options={"include_usage": True}))
    assert "".join(p.choices[0].text for p in parts if p.choices) == text
    assert parts[-1].usage == whole.usage
    assert parts[-2].choices[0].finish_reason == "length"
    stopped = complete(client, model, stop=[text[4:6]])
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].text == text[: text.index(text[4:6])]
    several = complete(client, model, n=3, temperature=1, seed=1, prompt=["a", "b"])
    assert [choice.index for choice in several.choices] == list(range(6))


def test_chats(client, model):
    whole = chat(client, model, logprobs=True, top_logprobs=2)
    content = whole.choices[0].logprobs.content
    assert "".join(entry.token for entry in content) == whole.choices[0].message.content
    assert all(len(entry.top_logprobs) == 2 for entry in content)
    parts = list(chat(client, model, stream=True, logprobs=True))
    assert parts[0].choices[0].delta.role == "assistant"
    texts = [part.choices[0].delta.content or "" for part in parts]
    assert "".join(texts) == whole.choices[0].message.content
    assert parts[-1].choices[0].finish_reason == "length"
    several = chat(client, model, n=2, temperature=1)
    assert len(several.choices) == 2


def test_responses(client, model):
    fields = {"model": model, "input": "hi", "temperature": 0, "max_output_tokens": 8}
    whole = client.responses.create(**fields)
    events = list(client.responses.create(**fields, stream=True))
    assert "".join(e.delta for e in events if e.type.endswith("delta")) == whole.output_text
    assert events[-1].response.output_text == whole.output_text
    assert whole.usage.output_tokens == 8


@pytest.mark.anyio
async def test_the_async_client(server):
    url = f"http://127.0.0.1:{server.port}/v1"
    texts = {}
    async with openai.AsyncOpenAI(base_url=url, api_key="open", max_retries=0) as client:

        async def ask(seed):
            stream = await chat(client, "trouper-demo", stream=True, temperature=1, seed=seed)
            texts[seed] = [chunk.choices[0].delta.content async for chunk in stream]

        async with anyio.create_task_group() as tasks:
            for seed in range(8):
                tasks.start_soon(ask, seed)
        whole = await chat(client, "trouper-demo", temperature=1, seed=3)
    assert len(texts) == 8
    assert "".join(filter(None, texts[3])) == whole.choices[0].message.content


test_the_async_client = pytest.mark.parametrize("anyio_backend", ["asyncio"])(test_the_async_client)


def test_errors_become_the_clients_classes(client, model, server):
    with pytest.raises(openai.BadRequestError) as bad:
        complete(client, model, temperature=3)
    assert (bad.value.param, bad.value.code) == ("temperature", "invalid_value")
    with pytest.raises(openai.NotFoundError) as missing:
        chat(client, "gpt-4")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    with pytest.raises(openai.InternalServerError) as late:
        complete(client, model, max_tokens=400, extra_headers={"x-request-timeout-ms": "1"})
    assert late.value.status_code == 504
    assert late.value.request_id


def test_a_stream_that_is_closed_early_frees_its_place(client, model, server):
    for _ in range(3):
        stream = complete(client, model, stream=True, max_tokens=500)
        next(iter(stream))
        stream.close()
    for _ in range(300):
        if client.get("/../load", cast_to=dict)["server_load"] == 0:
            break
    else:
        pytest.fail("the abandoned requests are still running")


@pytest.mark.slow
def test_the_bad_inputs_over_a_wire_without_asserts():
    """Nothing depends on `assert`, which -O switches off."""
    with started(flags=["-O"]) as server:
        for case in CASES:
            status, headers, body = server.request(case.method, case.path, case.body, case.headers)
            check(case, status, headers, body)
            assert server.request("GET", "/health/live")[0] == 200
        assert stop(server) == 0
