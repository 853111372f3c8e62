"""While a killed worker is restarted, the server reports that it is not ready, and a stream with a schema continues."""

import http.client
import json
import os
import signal
import time

import pytest

from tests.robustness.test_orphans import workers_of
from tests.server.client import parse_events
from tests.server.process import started

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
ITEMS = {"type": "array", "items": {"type": "integer"}, "minItems": 60}
BODY = {
    "prompt": "x =", "max_tokens": 200, "temperature": 1.0, "seed": 5, "stream": True,
    "response_format": {"type": "json_schema", "json_schema": {"name": "items", "schema": ITEMS}},
}  # fmt: skip


def stream(server):
    """Return a connection with a started stream, and the data received so far."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(BODY), headers)
    answer = connection.getresponse()
    assert answer.status == 200
    return connection, answer, answer.read1(64)


def text_of(connection, answer, first):
    events = parse_events(first + answer.read())
    connection.close()
    assert events[-1] == "[DONE]"
    return "".join(event["choices"][0]["text"] for event in events[:-1])


def test_server_is_alive_but_not_ready_during_restart():
    with started() as server:
        assert "in a worker process" in server.wait_for("device: ")
        expected = text_of(*stream(server))
        (worker,) = workers_of(server.pid)
        under_way = stream(server)
        os.kill(worker, signal.SIGKILL)
        seen = set()
        deadline = time.monotonic() + 60
        while (200 not in seen or 503 not in seen) and time.monotonic() < deadline:
            status, _, body = server.request("GET", "/health/ready")
            seen.add(status)
            if status == 503:
                assert json.loads(body)["error"]["code"] == "device_restarting"
                assert server.request("GET", "/health/live")[0] == 200
                assert workers_of(server.pid) != [worker]
            elif 503 in seen:
                break
        assert seen == {200, 503}
        assert len(workers_of(server.pid)) == 1
        assert text_of(*under_way) == expected
        assert expected.startswith("[")
