"""The page at /ui/: its files and headers, who may open it, and the stream of states behind it."""

import gzip
import json
import subprocess
import sys
import tomllib
from hashlib import sha256

import anyio
import pytest

from trouper.actors.observability.observer import RecentEvents
from trouper.frontends.server.asgi.app import App
from trouper.frontends.server.http.context import RequestContext
from trouper.frontends.server.http.headers import HostNames
from trouper.frontends.server.ops.operations import SAFETY
from trouper.frontends.server.page.feed import KINDS, MAX_VIEWERS, STATIC
from trouper.frontends.server.page.frames import MAX_REQUESTS, describe
from trouper.frontends.server.service.service import Service
from trouper.frontends.server.shared.settings import ServerSettings

from .client import Client

pytestmark = pytest.mark.anyio

MAX_PACKED = 48 * 2**10
LOCAL = [("host", "127.0.0.1:8000")]


@pytest.fixture
def page(make_client):
    return make_client(*LOCAL, ui=True)


async def frames(client, num, *headers, path="/ui/state"):
    """Read this many frames, then leave."""
    async with client.stream("GET", path, headers=headers) as call:
        await call.wait_for(lambda: call.answer.body.count(b"\n\n") >= num)
    parts = call.answer.body.decode().split("\n\n")[:num]
    return [json.loads(part.removeprefix("data: ")) for part in parts]


async def test_each_file_is_served_by_its_kind(page):
    for name, kind in KINDS.items():
        answer = await page.get(f"/ui/{name}")
        assert (answer.status, answer.headers["content-type"]) == (200, kind.decode())
        assert answer.body == (STATIC / name).read_bytes()
        packed = await page.get(f"/ui/{name}", [("accept-encoding", "gzip")])
        assert gzip.decompress(packed.body) == answer.body
    assert (await page.get("/ui/")).body == (STATIC / "index.html").read_bytes()


async def test_all_files_of_the_folder_are_in_the_table():
    found = {path.relative_to(STATIC).as_posix() for path in STATIC.rglob("*") if path.is_file()}
    assert found == set(KINDS)


async def test_whole_page_is_small(page):
    sizes = [
        len(gzip.compress((STATIC / name).read_bytes(), 9))
        for name in KINDS
        if "LICENSES" not in name
    ]
    assert sum(sizes) <= MAX_PACKED


async def test_vendored_file_is_that_of_its_package():
    for name, entry in tomllib.loads((STATIC / "vendor" / "table.toml").read_text()).items():
        assert sha256((STATIC / "vendor" / name).read_bytes()).hexdigest() == entry["sha256"]


@pytest.mark.parametrize(
    "path",
    [
        "/ui",
        "/ui/",
        "/ui/app.js",
        "/ui/nothing",
        "/ui/../pyproject.toml",
        "/ui/state?hz=9",
        "/ui/%2e%2e",
    ],
)
async def test_every_answer_has_the_headers_of_safety(page, path):
    for method in ("GET", "POST"):
        answer = await page.request(method, path)
        for name, value in SAFETY:
            assert answer.headers[name.decode()] == value.decode(), (method, answer.status)


async def test_known_version_of_a_file_is_not_sent_again(page):
    tag = (await page.get("/ui/app.js")).headers["etag"]
    answer = await page.get("/ui/app.js", [("if-none-match", tag)])
    assert (answer.status, answer.body) == (304, b"")
    assert "content-security-policy" in answer.headers
    assert (await page.get("/ui/app.js", [("if-none-match", '"other"')])).status == 200


async def test_source_never_makes_markup_from_text():
    for name in KINDS:
        if name.endswith(".js") and "vendor" not in name:
            source = (STATIC / name).read_text()
            for word in (
                "innerHTML",
                "outerHTML",
                "insertAdjacent",
                "document.write",
                "eval(",
                "Function(",
            ):
                assert word not in source, (name, word)
    assert "style=" not in (STATIC / "index.html").read_text()


@pytest.mark.parametrize(
    ("host", "is_accepted"),
    [
        ("127.0.0.1:8000", True), ("localhost", True), ("[::1]:80", True), ("LOCALHOST.:9", True),
        ("my.name:8000", True), ("evil.example", False), ("127.0.0.1.evil.example", False),
        ("localhost.evil.example:8000", False), ("10.0.0.7", False), ("", False), ("[::1", False),
    ],
)  # fmt: skip
def test_host_must_be_a_name_of_the_listener(host, is_accepted):
    assert HostNames.of(("My.Name",), is_loopback=True).accept(host) == is_accepted


def test_open_listener_accepts_addresses_and_no_names():
    names = HostNames.of((), is_loopback=False)
    assert names.accept("10.0.0.7:8000")
    assert not names.accept("evil.example")


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ([("host", "evil.example")], "forbidden_host"),
        ([*LOCAL, ("origin", "http://evil.example")], "forbidden_origin"),
        ([*LOCAL, ("origin", "null")], "forbidden_origin"),
        ([*LOCAL, ("origin", "http://127.0.0.1:9000")], "forbidden_origin"),
        ([*LOCAL, ("sec-fetch-site", "cross-site")], "forbidden_origin"),
    ],
)
async def test_foreign_page_gets_nothing(make_client, headers, code):
    client = make_client(ui=True)
    for path in ("/ui/", "/ui/app.js", "/ui/state"):
        answer = await client.get(path, headers)
        assert (answer.status, answer.error["code"]) == (403, code)


async def test_own_origin_and_own_name_may_read_states(make_client):
    client = make_client(ui=True, ui_hosts=("llm.example.org",))
    headers = [("host", "llm.example.org"), ("origin", "https://llm.example.org")]
    assert len(await frames(client, 1, *headers)) == 1


@pytest.mark.parametrize("path", ["/is_sleeping", "/api/tags"])
async def test_open_routes_of_a_loopback_listener_check_the_host(engine, path):
    service = Service(ServerSettings(is_dev_mode=True))
    service.open(engine.engine)
    for is_loopback, status in ((True, 403), (False, 200)):
        client = Client(App(service, is_loopback=is_loopback))
        assert (await client.get(path, [("host", "evil.example")])).status == status
        assert (await client.get(path, LOCAL)).status == 200


@pytest.mark.parametrize(
    ("ui", "is_loopback", "status"),
    [(None, True, 200), (None, False, 404), (True, False, 200), (False, True, 404)],
)
async def test_page_is_on_by_default_on_loopback_only(engine, ui, is_loopback, status):
    service = Service(ServerSettings(ui=ui))
    service.open(engine.engine)
    client = Client(App(service, is_loopback=is_loopback), LOCAL)
    assert (await client.get("/ui/")).status == status
    assert ("/ui/" in (await client.get("/openapi.json")).json["paths"]) == (status == 200)


async def test_frame_has_the_engine_and_no_text(page):
    prompt, secret = "a secret prompt", "sk-secret"
    async with page.stream("POST", "/v1/completions", json.dumps({"prompt": prompt, "max_tokens": 400, "n": 8, "ignore_eos": True, "stream": True}).encode(), [("content-type", "application/json"), ("authorization", f"Bearer {secret}")]) as call:  # fmt: skip
        await call.wait_for(lambda: call.num_chunks > 1)
        (frame,) = await frames(page, 1)
    (model,) = frame["models"]
    assert (model["name"], model["state"], model["num_open"]) == ("trouper-demo", "awake", 1)
    assert model["blocks"][0] > 0
    (request,) = frame["requests"]
    assert (request["route"], request["is_stream"]) == ("/v1/completions", True)
    text = json.dumps(frame)
    assert secret not in text
    assert prompt not in text
    assert len(text) < 8192


async def test_a_period_has_one_frame_for_all_viewers(page):
    async with anyio.create_task_group() as tasks:
        for _ in range(10):
            tasks.start_soon(frames, page, 3)
    feed = page._app.service.feed
    assert feed.num_viewers == 0
    # The first frames of viewers that arrive within two ticks are two.
    assert 3 <= feed.num_made < 10


async def test_events_are_told_once_to_each_viewer(engine, page):
    engine.engine.events.note("loss", "signal", step=3, sequences=2)
    first, second = await frames(page, 2, path="/ui/state?hz=4")
    assert [e["text"] for e in first["events"]][-1] == (
        "the worker died in step 3 (signal); 2 sequences will go on"
    )
    assert second["events"] == []


async def test_user_sees_own_requests_and_admin_all(make_client):
    client = make_client(*LOCAL, ui=True, api_keys=("one", "two"), admin_key="root")
    keys = {name: ("authorization", f"Bearer {name}") for name in ("one", "two", "root")}
    body = json.dumps({"prompt": "x", "max_tokens": 400, "stream": True}).encode()
    async with client.stream("POST", "/v1/completions", body, [("content-type", "application/json"), keys["one"]]) as call:  # fmt: skip
        await call.wait_for(lambda: call.num_chunks > 1)
        seen = {name: (await frames(client, 1, key))[0] for name, key in keys.items()}
    assert {name: len(frame["requests"]) for name, frame in seen.items()} == {
        "one": 1,
        "two": 0,
        "root": 1,
    }
    assert {name: frame["may_control"] for name, frame in seen.items()} == {
        "one": False,
        "two": False,
        "root": True,
    }
    assert (await client.get("/ui/state")).status == 401
    assert (await client.get("/ui/app.js")).status == 200


async def test_without_control_routes_nobody_may_control(page):
    (frame,) = await frames(page, 1)
    assert (frame["has_control"], frame["may_control"]) == (False, False)


async def test_viewers_are_bounded(page):
    (_,) = await frames(page, 1)
    feed = page._app.service.feed
    feed.num_viewers += MAX_VIEWERS
    answer = await page.get("/ui/state")
    assert (answer.status, answer.error["code"]) == (503, "too_many_viewers")


async def test_draining_server_ends_the_stream(page):
    async with page.stream("GET", "/ui/state?hz=4") as call:
        await call.wait_for(lambda: call.num_chunks > 0)
        page._app.service.drain()
        await call.wait_complete()
    assert call.answer.is_complete


async def test_wrong_rate_is_refused_by_name(page):
    answer = await page.get("/ui/state?hz=100")
    assert (answer.status, answer.error["param"]) == (400, "hz")


async def test_while_model_is_loading_the_frame_says_so():
    client = Client(App(Service(ServerSettings(ui=True, served_model_names=("m",)))), LOCAL)
    (frame,) = await frames(client, 1)
    assert [(model["name"], model["state"]) for model in frame["models"]] == [("m", "loading")]


def test_every_kind_of_event_has_a_sentence():
    log = RecentEvents()
    for kind in (
        "loss",
        "return",
        "failure",
        "recompute",
        "preemption",
        "refusal",
        "state",
        "overload",
    ):
        log.note(kind, "some_word")
    texts = [describe(event, 2) for event in log.since(0)]
    assert len(set(texts)) == len(texts)
    assert all(text.startswith("replica 0: ") for text in texts)


def test_server_imports_the_page_only_when_asked():
    code = "import sys; import trouper.frontends.server.asgi.app; print([m for m in sys.modules if 'server.page' in m])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


async def test_many_requests_are_cut_to_the_size_of_a_frame(page):
    service = page._app.service
    for number in range(MAX_REQUESTS + 4):
        scope = {"path": "/v1/chat/completions", "method": "POST", "headers": []}
        service._open[str(number)] = RequestContext(scope, None, None)
    (frame,) = await frames(page, 1)
    assert (len(frame["requests"]), frame["more"]) == (MAX_REQUESTS, 4)
    assert len(json.dumps(frame, separators=(",", ":"))) <= 10 * 1024
