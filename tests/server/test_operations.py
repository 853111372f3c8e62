"""Health, metrics, control routes, and who may ask."""

import logging
import re

import anyio
import pytest

from trouper import AsyncLLMEngine, EngineArgs, __version__
from trouper.errors import DeviceStartError, EngineDeadError, RetryableRequestError
from trouper.frontends.server.admission.overload import StepClock
from trouper.frontends.server.asgi.app import App, create_app
from trouper.frontends.server.asgi.routes import ROUTES
from trouper.frontends.server.http.context import RequestContext
from trouper.frontends.server.http.logs import access_line, log_lines
from trouper.frontends.server.service.metrics import expose
from trouper.frontends.server.shared.settings import ServerSettings

from .client import JSON, Client
from .conftest import SMALL

pytestmark = pytest.mark.anyio

PATH = "/v1/completions"
FIELDS = {"prompt": "x", "max_tokens": 1}
PUBLIC = {
    "/",
    "/health",
    "/api/version",
    "/health/live",
    "/health/ready",
    "/health/step",
    "/ping",
    "/version",
    "/metrics",
}


def bearer(key):
    return ("authorization", f"Bearer {key}")


async def test_health_of_an_idle_server(client):
    for path in ("/health", "/health/live", "/health/ready", "/ping"):
        answer = await client.get(path)
        assert (answer.status, answer.body) == (200, b""), path
    assert (await client.get("/health/step")).json["age_s"] == 0
    assert (await client.get("/version")).json == {"version": __version__}
    assert (await client.get("/load")).json == {"server_load": 0}


async def test_looking_at_engine_being_closed_finds_nothing_dead(anyio_backend):
    engine = AsyncLLMEngine.from_engine_args(EngineArgs(**SMALL))
    async with engine:
        app = create_app(engine)
        app.service.look(0.0)
        app.service.drain()
    app.service.look(0.0)
    assert not app.service.died.is_set()


async def test_readiness_is_a_round_trip_through_the_device(engine, app, client, monkeypatch):
    async def never():
        await anyio.sleep_forever()

    assert (await client.get("/health/ready")).status == 200
    monkeypatch.setattr(engine.engine.controls, "probe", never)
    assert (await client.get("/health/ready")).status == 200  # proved a moment ago
    monkeypatch.setattr("trouper.frontends.server.service.service.PROOF_S", 0.0)
    monkeypatch.setattr("trouper.frontends.server.service.service.PROBE_S", 0.01)
    answer = await client.get("/health/ready")
    assert (answer.status, answer.error["code"]) == (503, "no_progress")


async def test_proof_is_void_when_device_is_lost(engine, client, monkeypatch):
    async def refuse():
        raise RetryableRequestError("the device is being started again", "device_restarting")

    assert (await client.get("/health/ready")).status == 200
    monkeypatch.setattr(engine.engine.controls, "probe", refuse)
    monkeypatch.setattr(engine.engine._parts.scheduler.policy, "is_device_lost", True)
    answer = await client.get("/health/ready")
    assert (answer.status, answer.error["code"]) == (503, "device_restarting")


async def test_metrics(client):
    await client.post(PATH, FIELDS)
    answer = await client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    ended = [line for line in answer.body.splitlines() if b'finished_reason="length"' in line]
    assert [line.rsplit(b" ")[-1] for line in ended] == [b"1.0"]  # already
    assert b'trouper:http_requests_total{handler="/v1/completions",status="200"}' in answer.body


async def test_scrape_gives_others_turn_after_each_family(app):
    turns = 0

    async def beat():
        nonlocal turns
        while True:
            turns += 1
            await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(beat)
        text = await expose((app.service.engine.metrics, app.service.metrics))
        tasks.cancel_scope.cancel()
    num_families = text.count(b"# TYPE")
    assert num_families > 30
    assert turns >= num_families - 1
    assert text.endswith(b"\n")


def test_age_of_step_grows_only_while_one_is_awaited(engine):
    clock, stats = StepClock(), engine.statistics().scheduler
    busy = type(stats)(**{**{n: getattr(stats, n) for n in stats.__struct_fields__}, "num_steps_in_flight": 1})  # fmt: skip
    assert clock.age_s(stats, 5.0) == 0
    assert clock.age_s(busy, 7.0) == 2
    assert clock.age_s(busy, 9.0) == 4
    assert clock.age_s(stats, 10.0) == 0


test_age_of_step_grows_only_while_one_is_awaited.pytestmark = [pytest.mark.anyio]


async def test_models(client):
    (card,) = (await client.get("/v1/models")).json["data"]
    assert card["id"] == card["root"] == "trouper-demo"
    assert card["max_model_len"] == 512


async def test_a_dead_engine(anyio_backend):
    died = None
    try:
        async with AsyncLLMEngine.from_engine_args(EngineArgs(**SMALL)) as engine:
            app = create_app(engine)
            client = Client(app)
            engine.engine.die(RuntimeError("in /secret/place"))
            for path in ("/health", "/health/live", "/health/step", "/ping"):
                answer = await client.get(path)
                assert (answer.status, answer.error["code"]) == (503, "engine_failed")
            answer = await client.post(PATH, FIELDS)
            assert (answer.status, answer.error["code"]) == (500, "engine_failed")
            assert answer.headers["x-should-retry"] == "false"
            assert "secret" not in answer.error["message"]
            answer = await client.get("/metrics")  # what it counted while it lived
            assert answer.status == 200
            assert b"trouper:request_success_total" in answer.body
            assert app.service.died.is_set()
            app.service.died = anyio.Event()
            app.service.look(0.0)
            assert app.service.died.is_set()  # also when nobody asks
    except EngineDeadError as error:
        died = error
    assert died is not None


@pytest.mark.parametrize(
    ("error", "has_traceback"),
    [(DeviceStartError("worker 0 died of SIGKILL"), False), (RuntimeError("a bug"), True)],
    ids=["known", "unknown"],
)
async def test_dead_engine_logs_traceback_of_unknown_causes(
    error, has_traceback, anyio_backend, caplog
):
    with pytest.raises(EngineDeadError):
        async with AsyncLLMEngine.from_engine_args(EngineArgs(**SMALL)) as engine:
            client = Client(create_app(engine))
            engine.engine.die(error)
            for _ in range(2):
                await client.post(PATH, FIELDS)
    lines = [record for record in caplog.records if record.name == "trouper.server"]
    assert [record.exc_info is not None for record in lines] == [has_traceback] * 2
    if not has_traceback:
        text = f"failed: the engine died: DeviceStartError: {error}"
        assert all(record.getMessage().endswith(text) for record in lines)


# Keys


async def test_every_route_but_public_ones_needs_key(make_client):
    client = make_client(api_keys=("sesame", "open"), admin_key="root")
    for route in ROUTES:
        answer = await client.request(route.method, route.path, headers=[JSON])
        if route.path in PUBLIC:
            assert answer.status == 200, route.path
        else:
            assert answer.status == 401, route.path
            if route.path.startswith("/api/"):
                assert "API key" in answer.error
                continue
            code = "authentication_error" if "messages" in route.path else "invalid_api_key"
            assert code in answer.error.values()
            assert answer.headers["www-authenticate"] == "Bearer"


async def test_what_does_not_exist_needs_a_key_too(make_client):
    client = make_client(api_keys=("sesame",))
    for path in ("//v1/models", "/v1/nothing", "/health/x", "/v1/../health", "/sleep"):
        assert (await client.get(path)).status == 401, path
        assert (await client.get(path, [bearer("sesame")])).status == 404, path


@pytest.mark.parametrize(
    "headers",
    [
        [bearer("sesame2")], [bearer("sesam")], [bearer("sesamE")], [bearer("")],
        [("authorization", "bearer sesame")], [("authorization", "sesame")],
        [("authorization", "Basic sesame")], [bearer("ses\u00e4me")],
        [bearer("sesame"), bearer("sesame")], [("x-api-key", "sesame2")],
        [bearer("sesame"), ("x-api-key", "sesame")],
    ],
)  # fmt: skip
async def test_wrong_keys(make_client, headers):
    client = make_client(api_keys=("sesame",))
    assert (await client.get("/v1/models", headers)).status == 401


async def test_right_keys(make_client):
    client = make_client(api_keys=("sesame", "open"), admin_key="root")
    for key in ("sesame", "open", "root"):
        assert (await client.get("/v1/models", [bearer(key)])).status == 200
    assert (await client.get("/is_paused", [bearer("open")])).status == 401
    assert (await client.get("/is_paused", [bearer("root")])).json == {"is_paused": False}


async def test_options_are_free_and_metrics_may_be_protected(make_client):
    client = make_client(api_keys=("sesame",), protect_metrics=True)
    assert (await client.get("/v1/models", method="OPTIONS")).status == 204
    assert (await client.get("/metrics")).status == 401
    assert (await client.get("/metrics", [bearer("sesame")])).status == 200


async def test_405_names_what_is_allowed(client):
    answer = await client.get(PATH)
    assert (answer.status, answer.headers["allow"]) == (405, "POST")


# Browsers and logs


ORIGIN = ("origin", "https://page.example")


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({}, None),
        ({"allowed_origins": ("https://other.example",)}, None),
        ({"allowed_origins": ("https://page.example",)}, "https://page.example"),
        ({"allowed_origins": ("*",)}, "*"),
        ({"allowed_origins": ("*",), "allow_credentials": True}, "https://page.example"),
    ],
)
async def test_pages_of_other_origins_are_let_in_by_name(make_client, settings, named):
    client = make_client(**settings)
    for path in ("/version", "/nowhere"):
        answer = await client.get(path, [ORIGIN])
        assert answer.headers.get("access-control-allow-origin") == named
        credentials = answer.headers.get("access-control-allow-credentials")
        assert credentials == ("true" if settings.get("allow_credentials") else None)
    assert "access-control-allow-origin" not in (await client.get("/version")).headers


async def test_a_browser_asks_before_it_posts(make_client):
    wanted = [ORIGIN, ("access-control-request-method", "POST")]
    wanted.append(("access-control-request-headers", "authorization,content-type"))
    client = make_client(api_keys=("sesame",), allowed_origins=("*",))
    answer = await client.get(PATH, wanted, method="OPTIONS")
    assert answer.status == 204
    assert answer.headers["access-control-allow-methods"] == "POST"
    assert answer.headers["access-control-allow-headers"] == "authorization,content-type"
    client = make_client(allowed_origins=("*",), allowed_methods=("GET", "POST"))
    answer = await client.get(PATH, wanted, method="OPTIONS")
    assert answer.headers["access-control-allow-methods"] == "GET, POST"


async def test_access_log_has_line_for_each_answer_but_named(make_client, capsys):
    client = make_client(logs_access=True, unlogged_paths=("/version",))
    with log_lines("trouper.access", "info"):
        await client.get("/load", [("x-request-id", "mine")])
        await client.get("/version")
        await client.post(PATH, {"prompt": [1, 2, 3], "max_tokens": 5, "ignore_eos": True})
        await client.get("/v1/\n2026 forged\x1b[2J", method="G\nT")
    load, tokens, unknown = capsys.readouterr().err.splitlines()
    line = r"[\d-]+ [\d:,]+ (\S+) {} \d+\.\d{{3}} s {} [0-9a-f]{{32}}"
    assert re.fullmatch(line.format("GET /load 200", "-") + " mine", load)
    assert re.fullmatch(line.format("POST /v1/completions 200", r"3\+5 tokens"), tokens)
    assert re.fullmatch(line.format(r"G_T /v1/_2026_forged__2J 404", "-"), unknown)


@pytest.mark.parametrize(
    ("client", "shown"),
    [(("127.0.0.1", 4), "127.0.0.1:4"), (("::1", 4), "[::1]:4"), (None, "-"), (("", None), "-")],
)
def test_access_log_names_address_of_client(client, shown):
    scope = {"path": "/", "method": "GET", "headers": [], "client": client}
    context = RequestContext(scope, None, None)
    context.status = 200
    assert access_line(context, "/").startswith(f"{shown} GET / 200 ")
    context.status = 0
    assert " GET / left " in access_line(context, "/")


async def test_what_is_refused_is_reported_from_level_of_debug_on(client, capsys):
    for level, num_lines in (("debug", 1), ("info", 0)):
        with log_lines("trouper", level):
            await client.post(PATH, {"prompt": ""})
        lines = [line for line in capsys.readouterr().err.splitlines() if "400 invalid" in line]
        assert len(lines) == num_lines


def test_lines_that_nobody_reads_are_dropped(capsys, monkeypatch):
    monkeypatch.setattr("trouper.frontends.server.http.logs.MAX_LINES", 1)
    monkeypatch.setattr("trouper.frontends.server.http.logs.QueueListener.start", lambda self: None)
    monkeypatch.setattr("trouper.frontends.server.http.logs.QueueListener.stop", lambda self: None)
    with log_lines("trouper.access", "info"):
        for _ in range(3):
            logging.getLogger("trouper.access").info("line")
    assert not capsys.readouterr().err


# Control


@pytest.fixture
def admin(engine):
    return Client(create_app(engine, ServerSettings(is_dev_mode=True)))


async def test_the_admin_listener_has_the_control_routes(engine, app, client):
    admin = Client(App(app.service, is_admin_listener=True))
    assert (await admin.get("/is_sleeping")).json == {"is_sleeping": False}
    assert (await client.get("/is_sleeping")).status == 404
    keyed = create_app(engine, ServerSettings(admin_key="root"))
    admin = Client(App(keyed.service, is_admin_listener=True))
    for path in ("/is_sleeping", "/load"):
        assert (await admin.get(path)).status == 401
        assert (await admin.get(path, [bearer("root")])).status == 200


async def test_pause_and_resume(admin):
    for _ in range(2):
        assert (await admin.post("/pause?mode=wait")).json == {"status": "paused"}
    assert (await admin.get("/is_paused")).json == {"is_paused": True}
    for answer in (await admin.post(PATH, FIELDS), await admin.get("/health/ready")):
        assert (answer.status, answer.error["code"]) == (503, "engine_paused")
        assert answer.headers["retry-after"] == "1"
    for _ in range(2):
        assert (await admin.post("/resume")).json == {"status": "resumed"}
    assert (await admin.post(PATH, FIELDS)).status == 200


async def test_sleep_and_wake(admin):
    answer = await admin.post("/sleep?level=1&mode=abort")
    assert answer.json == {"status": "sleeping", "level": 1}
    assert (await admin.get("/is_sleeping")).json == {"is_sleeping": True}
    assert (await admin.post("/resume")).status == 409
    assert (await admin.post(PATH, FIELDS)).status == 503
    answer = await admin.post("/wake_up?tags=weights")
    assert answer.json == {"status": "sleeping", "tags": ["weights"]}
    assert (await admin.post("/wake_up")).json == {"status": "awake", "tags": None}
    assert (await admin.post(PATH, FIELDS)).status == 200


async def test_level_0_queues(engine, admin, wait_idle, wait_until):
    await admin.post("/sleep?level=0")
    answers = []

    async def ask():
        answers.append(await admin.post(PATH, FIELDS))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await wait_until(lambda: engine.statistics().num_open_requests)
        assert not answers
        await admin.post("/wake_up?tags=scheduling")
    assert answers[0].status == 200
    await wait_idle()


async def test_server_info(admin):
    info = (await admin.get("/server_info")).json
    assert info["version"] == __version__
    assert info["config"]["max_model_len"] == 512
    assert info["device"]["block_size"] > 0
    assert [replica["num_running"] for replica in info["replicas"]] == [0]


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("/sleep?level=3", "query.level"), ("/sleep?level=x", "query.level"),
        ("/sleep?mode=nap", "query.mode"), ("/pause?mode=nap", "query.mode"),
        ("/pause?clear_cache=maybe", "query.clear_cache"), ("/wake_up?tags=all", "query.tags"),
        ("/sleep?" + "&".join("level=1" for _ in range(100)), "query"),
    ],
)  # fmt: skip
async def test_bad_orders_change_nothing(admin, path, param):
    answer = await admin.post(path)
    assert (answer.status, answer.error["param"]) == (400, param)
    assert (await admin.get("/is_sleeping")).json == {"is_sleeping": False}


async def test_requests_are_aborted_by_the_clients_ids(engine, admin, wait_idle, wait_until):
    answers = {}

    async def ask(name):
        fields = {"prompt": ["x", "y"], "max_tokens": 500, "ignore_eos": True}
        answers[name] = await admin.post(PATH, fields, [("x-request-id", name)])

    async with anyio.create_task_group() as tasks:
        for name in "ab":
            tasks.start_soon(ask, name)
        await wait_until(lambda: engine.statistics().num_open_requests == 4)
        answer = await admin.post("/abort_requests", {"request_ids": ["a", "nobody"]})
        assert answer.json == {"status": "aborted", "aborted": 2}
        answer = await admin.post("/abort_requests")
        assert answer.json["aborted"] >= 2
    for answer in answers.values():
        assert {choice["finish_reason"] for choice in answer.json["choices"]} == {"abort"}
    await wait_idle()


async def test_the_prefix_cache_is_reset(admin):
    assert (await admin.post("/reset_prefix_cache")).json == {"success": True}
    answer = await admin.post("/reset_prefix_cache?reset_running_requests=true")
    assert answer.json == {"success": True}


async def test_profile_is_started_once_and_leaves_trace(anyio_backend, tmp_path):
    config = {"torch_profiler_dir": str(tmp_path)}
    args = EngineArgs(**SMALL, profiler_config=config)
    async with AsyncLLMEngine.from_engine_args(args) as engine:
        admin = Client(create_app(engine, ServerSettings(admin_key="root")), [bearer("root")])
        answer = await admin.post("/start_profile")
        assert (answer.status, answer.body) == (200, b"")
        again = await admin.post("/start_profile")
        assert (again.status, again.error["code"]) == (409, "conflict")
        assert (await admin.post(PATH, FIELDS)).status == 200
        assert not list(tmp_path.iterdir())
        assert (await admin.post("/stop_profile")).status == 200
        assert len(list(tmp_path.iterdir())) == 1
        with pytest.warns(UserWarning, match="without start"):
            assert (await admin.post("/stop_profile")).status == 200


@pytest.mark.parametrize("path", ["/start_profile", "/stop_profile"])
async def test_profile_needs_folder_that_operator_chose(admin, path):
    answer = await admin.post(path)
    assert (answer.status, answer.error["code"]) == (400, "invalid_value")
    assert answer.error["param"] == "profiler_config"


# Other kinds of scope


async def test_lifespan_and_websockets(app):
    sent = []
    messages = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]

    async def receive():
        await anyio.lowlevel.checkpoint()
        return messages.pop(0)

    async def send(message):
        await anyio.lowlevel.checkpoint()
        sent.append(message)

    await app({"type": "lifespan"}, receive, send)
    assert [m["type"] for m in sent] == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    messages.append({"type": "websocket.connect"})
    await app({"type": "websocket"}, receive, send)
    assert sent[-1] == {"type": "websocket.close", "code": 1008}


async def test_mounted_under_a_prefix(app):
    sent = []

    async def receive():
        await anyio.sleep_forever()

    async def send(message):
        await anyio.lowlevel.checkpoint()
        sent.append(message)

    scope = {
        "type": "http", "method": "GET", "path": "/llm/version", "root_path": "/llm",
        "query_string": b"", "headers": [],
    }  # fmt: skip
    await app(scope, receive, send)
    assert sent[0]["status"] == 200
