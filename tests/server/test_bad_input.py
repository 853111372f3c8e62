"""What is refused is refused in words of the contract, and nobody else notices."""

from pathlib import Path

import anyio
import pytest

from trouper.actors.rendering.tokenizer import Tokenizer
from trouper.frontends.server.asgi.app import create_app
from trouper.frontends.server.shared.settings import ServerSettings

from .attack import CANARIES, attack, table
from .bad_input import CASES, JSON, check
from .client import Client

pytestmark = pytest.mark.anyio


async def send(client, case):
    answer = await client.request(case.method, case.path, case.body, case.headers)
    check(case, answer.status, answer.headers, answer.body)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_it_is_refused(client, case):
    await send(client, case)


async def text_of(client, prompt):
    fields = {"prompt": prompt, "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    answer = await client.post("/v1/completions", {**fields, "stream": True})
    return "".join(event["choices"][0]["text"] for event in answer.events[:-1])


async def test_streams_that_run_across_attack_say_what_they_always_say(client, wait_idle):
    calm = [await text_of(client, prompt) for prompt in CANARIES]
    across = {}

    async def sing(prompt):
        across[prompt] = await text_of(client, prompt)

    async with anyio.create_task_group() as tasks:
        for prompt in CANARIES:
            tasks.start_soon(sing, prompt)
        for case in CASES:
            await send(client, case)
    assert [across[prompt] for prompt in CANARIES] == calm
    await wait_idle()


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize(("flags", "stride"), [([], 1), (["-O"], 20)], ids=["default", "optimized"])
def test_server_process_stands_it_all_and_canaries_sing_on(flags, stride):
    suite, heard, different, is_idle = attack(*flags, stride=stride)
    assert not suite.failures
    assert heard >= len(CANARIES)
    assert not different
    assert is_idle
    if stride == 1:
        page = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
        rows = [line.split("|")[1:4] for line in table(suite, heard, different).splitlines()[2:-2]]
        shown = [line.split("|")[1:4] for line in page.splitlines() if line.startswith("| ")]
        assert [row for row in rows if row not in shown] == []


async def test_a_body_that_does_not_end_in_time(make_client):
    client = make_client(body_timeout_s=0.01)
    chunks = Endless()
    answer = await client.request("POST", "/v1/completions", headers=JSON, chunks=chunks)
    assert (answer.status, answer.error["code"]) == (408, "body_timeout")
    assert answer.headers["connection"] == "close"


class Endless(list):
    """A body of which only the first byte ever comes."""

    def __init__(self):
        super().__init__([b"{"])

    def __bool__(self):
        return True

    def pop(self, _):
        return b""


async def test_a_body_too_large_is_refused_unread(make_client):
    client = make_client(max_body=1000)
    told = [*JSON, ("content-length", "1001")]
    answer = await client.request("POST", "/v1/completions", headers=told, chunks=Unreadable())
    assert (answer.status, answer.error["code"]) == (413, "body_too_large")


class Unreadable(list):
    def __bool__(self):
        raise AssertionError("the body was read")


async def test_body_too_large_is_not_read_to_its_end(make_client):
    client = make_client(max_body=1000)
    chunks = [b"x" * 600] * 5
    async with client.stream("POST", "/v1/completions", headers=JSON, chunks=chunks) as call:
        await call.wait_complete()
        assert len(call._chunks) == 3
    assert call.answer.status == 413


@pytest.mark.parametrize("depth", [100, 300, 480, 500, 520, 700, 950, 1000, 1050, 3000])
@pytest.mark.parametrize("where", ["chat_template_kwargs", "messages"])
async def test_however_deep_it_is_nested_it_is_rendered_or_refused(make_client, depth, where):
    deep = "[" * depth + "]" * depth
    client = make_client(trust_request_chat_template=True)
    fields = {
        "messages": '[{"role": "user", "content": "x"}]',
        "max_tokens": "1",
        "chat_template": '"{{ messages[0].content }}{{ deep is defined }}"',
        "chat_template_kwargs": f'{{"deep": {deep}}}',
    }
    if where == "messages":
        fields[where] = f'[{{"role": "user", "content": "x", "name": {deep}}}]'
    body = "{" + ", ".join(f'"{name}": {value}' for name, value in fields.items()) + "}"
    answer = await client.request("POST", "/v1/chat/completions", body.encode(), JSON)
    assert answer.status in ((200,) if depth <= 100 else (400,) if depth > 1000 else (200, 400))


HARD = ["\u200b", "\U0001f469\u200d", "a", "\0"]


@pytest.fixture
def encoded(monkeypatch):
    """The lengths of what is tokenised."""
    lengths = []
    encode = Tokenizer.encode

    def counted(self, text, *arguments, **options):
        lengths.append(len(text))
        return encode(self, text, *arguments, **options)

    monkeypatch.setattr(Tokenizer, "encode", counted)
    return lengths


def asked(path, text):
    chat = {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
    return chat if path.startswith("/v1/chat") else {"prompt": text}


@pytest.mark.parametrize("letter", HARD, ids=ascii)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
async def test_text_that_cannot_fit_is_refused_before_it_is_tokenised(
    client, encoded, path, letter
):
    answer = await client.post(path, asked(path, letter * 200_000))
    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
    assert not encoded
    answer = await client.post(path, asked(path, letter * 10))
    assert answer.status == 200
    assert encoded


@pytest.mark.parametrize("letter", HARD, ids=ascii)
async def test_only_kept_text_is_tokenized(client, encoded, letter):
    work = []
    for length in (100_000, 200_000):
        fields = {"prompt": letter * length, "truncate_prompt_tokens": 10, "max_tokens": 1}
        assert (await client.post("/v1/completions", fields)).status == 200
        work.append(sum(encoded))
        encoded.clear()
    assert 0 < work[0] == work[1] < 10_000


async def test_unknown_fields_are_ignored_and_counted(app, client):
    fields = {"prompt": "x", "max_tokens": 1, "frobnicate": 1, "best_of": None}
    answer = await client.post("/v1/completions", fields)
    assert answer.status == 200
    assert app.service.unknown.num == 1


async def test_null_is_not_given(client):
    fields = {"prompt": "x", "max_tokens": None, "n": None, "stop": None, "temperature": None}
    answer = await client.post("/v1/completions", {**fields, "seed": None, "logit_bias": None})
    assert answer.status == 200
    assert answer.json["usage"]["completion_tokens"] <= 16


@pytest.mark.parametrize(
    ("given", "echoed"),
    [
        ("my-id:1", "my-id:1"),
        ("a\r\nset-cookie: x", "a__set-cookie:_x"),
        ("ü" * 3, "___"),
        ("x" * 10**6, None),
        ("y" * 200, "y" * 128),
    ],
)
async def test_the_clients_request_id_comes_back_sanitised(engine, given, echoed):
    client = Client(create_app(engine, ServerSettings(max_header_bytes=64 * 1024)))
    answer = await client.get("/version", [("x-request-id", given)])
    if echoed is None:
        assert answer.status == 431
    else:
        assert answer.headers["x-request-id"] == echoed


async def test_one_request_id_for_two_requests_at_once(client):
    answers = []

    async def ask():
        fields = {"prompt": "x", "max_tokens": 3}
        answers.append(await client.post("/v1/completions", fields, [("x-request-id", "the-same")]))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        tasks.start_soon(ask)
    assert [answer.status for answer in answers] == [200, 200]
    assert {answer.json["id"] for answer in answers} == {"cmpl-the-same"}


@pytest.mark.parametrize("is_stream", [False, True])
async def test_request_that_forbids_all_it_allows_ends_alone(client, is_stream):
    word = (await client.post("/detokenize", {"tokens": [300]})).json["prompt"]
    fields = {"prompt": "x", "allowed_token_ids": [300], "bad_words": [word], "stream": is_stream}
    answers = {}

    async def ask(name, fields):
        answers[name] = await client.post("/v1/completions", fields)

    greedy = {"prompt": "def f(", "max_tokens": 20, "temperature": 0}
    alone = await client.post("/v1/completions", greedy)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask, "none", fields)
        tasks.start_soon(ask, "greedy", greedy)
    assert (answers["none"].status, answers["none"].error["code"]) == (400, "no_valid_token")
    assert answers["none"].headers["x-should-retry"] == "false"
    assert answers["greedy"].json["choices"] == alone.json["choices"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("fields", "name", "shown"),
    [
        ({"max_tokens": 600}, "max_tokens", "got 600"),
        ({"max_tokens": 2**70}, "max_tokens", "got a huge number"),
        ({"vllm_xargs": {"num_speculative_tokens": 1.5}}, "vllm_xargs.num_speculative_tokens", "got 1.5"),
        ({"vllm_xargs": {"num_speculative_tokens": -1}}, "vllm_xargs.num_speculative_tokens", "got -1"),
        ({"stop": ["x"] * 129}, "stop", "got 129"),
    ],
)  # fmt: skip
async def test_error_names_field_and_shows_its_value(client, path, fields, name, shown):
    prompt = {"messages": [{"role": "user", "content": "x"}], "prompt": "x"}
    answer = await client.post(path, {"max_tokens": 1, **prompt, **fields})
    assert (answer.status, answer.error["param"]) == (400, name)
    assert answer.error["message"].startswith(f"{name}: ")
    assert shown in answer.error["message"]


async def test_a_token_that_is_none_is_shown(client):
    answer = await client.post("/detokenize", {"tokens": [1, 10**6]})
    assert answer.error["param"] == "tokens[1]"
    assert answer.error["message"] == "tokens[1]: must be in [0, 4096), got 1000000"
