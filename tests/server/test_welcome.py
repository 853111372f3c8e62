"""What a client gets that only looks whether a server is there, or that asks at a wrong place."""

import re
import shlex
from base64 import b64encode
from hashlib import sha256
from html.parser import HTMLParser

import pytest

from trouper.frontends.server.asgi.app import App
from trouper.frontends.server.asgi.routes import ROUTES
from trouper.frontends.server.service.service import Service
from trouper.frontends.server.shared.settings import ServerSettings

from .client import Client
from .process import started

pytestmark = pytest.mark.anyio

BROWSER = [("accept", "text/html,application/xhtml+xml,*/*;q=0.8"), ("host", "example.org:8000")]


class Page(HTMLParser):
    """The texts and attributes of a page."""

    def __init__(self, text):
        super().__init__()
        self.texts, self.links, self.tags = [], [], set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.links += [value for name, value in attrs if name == "href"]

    def handle_data(self, data):
        self.texts.append(data)


@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_a_program_gets_one_line(client, method):
    answer = await client.get("/", method=method)
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    assert re.fullmatch(
        r"trouper [\w.]+ is running with the model trouper-demo; .*\n", answer.body.decode()
    )


async def test_browser_gets_page_that_runs_and_loads_nothing(client):
    answer = await client.get("/", BROWSER)
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; ")
    text = answer.body.decode()
    (style,) = re.findall(r"<style>(.*?)</style>", text)
    assert f"'sha256-{b64encode(sha256(style.encode()).digest()).decode()}'" in policy
    page = Page(text)
    assert not page.tags & {"script", "img", "link", "iframe", "form"}
    paths = {route.path for route in ROUTES if route.method == "GET"}
    assert set(page.links) <= paths
    (command,) = (text for text in page.texts if text.startswith("curl "))
    words = shlex.split(command)
    assert words[1] == "http://example.org:8000/v1/chat/completions"
    asked = await client.request(
        "POST", "/v1/chat/completions", words[-1].encode(), [("content-type", "application/json")]
    )
    assert asked.status == 200


@pytest.mark.parametrize(
    "host", ["a'; rm -rf /; '", '"><script>', "a b", "$(id)", "x" * 300, "", "[::1", "a:99999999"]
)
async def test_host_that_is_no_address_is_not_repeated(client, host):
    answer = await client.get("/", [("accept", "text/html"), ("host", host)])
    (command,) = (text for text in Page(answer.body.decode()).texts if text.startswith("curl "))
    assert command.startswith("curl http://127.0.0.1:8000/v1/")


async def test_the_name_of_a_model_is_text(make_client):
    name = "<script>alert('x')</script>&amp;"
    client = make_client(served_model_names=(name,))
    answer = await client.get("/", BROWSER)
    page = Page(answer.body.decode())
    assert "script" not in page.tags
    assert name in page.texts


async def test_without_key_page_is_there_and_model_is_not_named(make_client):
    client = make_client(api_keys=("secret",))
    for headers in ([], BROWSER):
        answer = await client.get("/", headers)
        assert answer.status == 200
        assert b"trouper-demo" not in answer.body
    assert b"Authorization: Bearer YOUR-KEY" in answer.body


async def test_while_model_is_loading_page_says_so():
    client = Client(App(Service(ServerSettings())))
    assert (await client.get("/")).status == 200
    assert b"is loading its model" in (await client.get("/", BROWSER)).body


async def test_behind_a_proxy_links_keep_its_prefix(engine):
    service = Service(ServerSettings())
    service.open(engine.engine)
    answer = await Client(App(service, root_path="/llm")).get("/llm/", BROWSER)
    page = Page(answer.body.decode())
    assert "/llm/v1/models" in page.links
    assert any("http://example.org:8000/llm/v1/chat" in text for text in page.texts)


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/V1/Chat/Completions", "/v1/chat/completions"),
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("//v1//models", "/v1/models"),
        ("/models", "/v1/models"),
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
