"""What a server says of itself while its worker is started again."""

import json
import os
import signal
import time

import pytest

from tests.robustness.test_orphans import workers_of
from tests.server.process import started

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def test_a_server_is_alive_but_not_ready_while_its_worker_is_started_again():
    with started() as server:
        (worker,) = workers_of(server.pid)
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
