"""The examples of docs/examples run as they are printed."""

import json
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import anyio
import pytest

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
SHOWS = {
    "offline_batch": "Generated: '",
    "streaming_loop": "[finished] request-1",
    "cancellation": "aborted 3 requests",
    "priority": "finished: high-priority-urgent",
    "async_concurrency": "The capital of France is",
    "prequeue": "2 requests in",
}


@pytest.mark.parametrize("name", SHOWS)
@pytest.mark.filterwarnings("ignore:not closed before deletion:ResourceWarning")  # they never close
def test_an_example_runs_as_printed(name, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [name])
    engines = runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert SHOWS[name] in capsys.readouterr().out
    for value in engines.values():
        if hasattr(value, "close") and not isinstance(value, type):
            value.close()


def test_all_six_of_the_priority_example_finish(capsys):
    engines = runpy.run_path(str(EXAMPLES / "priority.py"))
    engines["engine"].close()
    finished = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith("finished")
    ]
    assert len(finished) == 6


class Serve:
    """The decorators of Ray Serve, which is not installed here: they keep what they are given."""

    def deployment(self, **options):
        self.options = options
        return lambda cls: SimpleNamespace(bind=lambda: cls)

    def ingress(self, app):
        self.app = app
        return lambda cls: cls


@pytest.mark.anyio
async def test_application_for_ray_serve_opens_its_engine_and_answers(monkeypatch):
    serve = Serve()
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(serve=serve))
    runpy.run_path(str(EXAMPLES / "ray_serve.py"))
    app = serve.app
    app._options |= {"model": None, "max_model_len": 64, "device_worker": "inline"}
    assert serve.options["ray_actor_options"] == {"num_cpus": 8}
    ask, asked = anyio.create_memory_object_stream(1)
    tell, told = anyio.create_memory_object_stream(1)
    with ask, asked, tell, told:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(app, {"type": "lifespan"}, asked.receive, tell.send)
            await ask.send({"type": "lifespan.startup"})
            assert await told.receive() == {"type": "lifespan.startup.complete"}
            status, body = await answer(app, "/v1/completions", {"prompt": "x", "max_tokens": 2})
            assert (status, body["usage"]["completion_tokens"]) == (200, 2)
            assert body["model"] == "my-model"
            await ask.send({"type": "lifespan.shutdown"})
            assert await told.receive() == {"type": "lifespan.shutdown.complete"}


async def answer(app, path, fields):
    """The status and the JSON of an application's answer to a POST."""
    sent = []
    body = {"type": "http.request", "body": json.dumps(fields).encode(), "more_body": False}

    async def receive():
        if not given:
            await anyio.sleep_forever()  # the client stays
        return given.pop()

    async def send(message):
        sent.append(message)

    given = [body]
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body["body"])),
    ]
    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(),
             "query_string": b"", "headers": headers, "http_version": "1.1",
             "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2), "scheme": "http", "root_path": ""}  # fmt: skip
    await app(scope, receive, send)
    whole = b"".join(m.get("body", b"") for m in sent if m["type"] == "http.response.body")
    return sent[0]["status"], json.loads(whole)
