"""What a client gets that only looks whether a server is there, or that asks at a wrong place."""

import re

import pytest

from trouper.frontends.server.asgi.app import App
from trouper.frontends.server.service.service import Service
from trouper.frontends.server.shared.settings import ServerSettings

from .client import Client
from .process import started

pytestmark = pytest.mark.anyio

BROWSER = [("accept", "text/html,application/xhtml+xml,*/*;q=0.8"), ("host", "example.org:8000")]


@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_a_program_gets_one_line(client, method):
    answer = await client.get("/", method=method)
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    assert re.fullmatch(
        r"trouper [\w.]+ is running with the model trouper-demo; .*\n", answer.body.decode()
    )


@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_browser_is_sent_to_the_page(make_client, method):
    answer = await make_client(ui=True).get("/", BROWSER, method=method)
    assert (answer.status, answer.headers["location"]) == (307, "/ui/")
    assert answer.headers["vary"] == "accept"


async def test_browser_gets_one_line_without_the_page(make_client):
    answer = await make_client(ui=False).get("/", BROWSER)
    assert answer.status == 200
    assert answer.body.startswith(b"trouper ")


async def test_without_key_line_is_there_and_model_is_not_named(make_client):
    client = make_client(api_keys=("secret",))
    for headers in ([], BROWSER):
        answer = await client.get("/", headers)
        assert answer.status == 200
        assert b"trouper-demo" not in answer.body


async def test_while_model_is_loading_line_is_there():
    client = Client(App(Service(ServerSettings())))
    assert (await client.get("/")).body.startswith(b"trouper ")


async def test_behind_a_proxy_the_page_keeps_its_prefix(engine):
    service = Service(ServerSettings(ui=True))
    service.open(engine.engine)
    client = Client(App(service, root_path="/llm"))
    for path in ("/llm/", "/llm/ui"):
        answer = await client.get(path, [("accept", "text/html"), ("host", "localhost")])
        assert (answer.status, answer.headers["location"]) == (307, "/llm/ui/")


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/V1/Chat/Completions", "/v1/chat/completions"),
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("//v1//models", "/v1/models"),
        ("/v1/health", "/health"),
        ("/v1/tokenize", "/tokenize"),
        ("/embeddings", "/v1/embeddings"),
        ("/completions", "/v1/completions"),
        ("/generate", "/v1/completions"),
        ("/messages", "/v1/messages"),
    ],
)
async def test_path_not_named_with_what_is_near(client, path, near):
    answer = await client.post(path, {})
    assert (answer.status, answer.error["code"]) == (404, "not_found")
    assert answer.error["message"] == f"this server has no path {path!r}; did you mean {near}?"


@pytest.mark.parametrize("path", ["/nothing/of/the/kind", "/paus", "/%2e%2e/x", "/" + "x" * 500])
async def test_what_is_near_nothing_served_is_only_named(client, path):
    message = (await client.post(path, {})).error["message"]
    assert path[:100] in message
    assert "did you mean" not in message
    assert len(message) < 300


async def test_wrong_method_is_named_with_right_one(client):
    answer = await client.get("/v1/chat/completions")
    assert answer.status == 405
    assert answer.error["message"] == "/v1/chat/completions takes POST, not GET"


async def test_unknown_model_is_named_with_those_that_there_are(make_client):
    client = make_client(served_model_names=("a", "b", "c", "d", "e"))
    answer = await client.post("/v1/completions", {"model": "gpt-4o", "prompt": "x"})
    assert answer.status == 404
    assert answer.error["message"] == (
        "The model `gpt-4o` does not exist. This server has `a`, `b`, `c` and 2 more (GET /v1/models)."
    )


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_head_has_no_body_over_a_real_connection(loop):
    import http.client

    with started("--loop", loop) as server:
        for method in ("HEAD", "GET"):  # on one connection: a body behind HEAD would break the next
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
            for _ in range(2):
                connection.request(method, "/")
                answer = connection.getresponse()
                assert answer.status == 200
                assert int(answer.headers["content-length"]) > 10
                assert bool(answer.read()) == (method == "GET")
            connection.close()
