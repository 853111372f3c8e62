"""When one of two pooling replicas is killed, clients get the same vectors and notice nothing."""

import json
import os
import re
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.robustness.test_orphans import workers_of
from tests.server.process import started, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
OPTIONS = ("--runner", "pooling", "--data-parallel-size", "2")
TEXTS = [[f"a text of client {c}, number {i} " * (1 + i % 9) for i in range(8)] for c in range(6)]


def vectors(server, texts):
    body = json.dumps({"input": texts}).encode()
    headers = [("Content-Type", "application/json")]
    status, _, answer = server.request("POST", "/v1/embeddings", body, headers)
    assert status == 200, answer
    return [item["embedding"] for item in json.loads(answer)["data"]]


def num_computed(server):
    """Return the number of prompt tokens by replica."""
    text = server.request("GET", "/metrics")[2].decode()
    found = re.findall(r'^trouper:prompt_tokens_total\{engine="(\d)".*\} ([\d.]+)', text, re.M)
    return {int(replica): float(value) for replica, value in found}


def test_killed_pooling_replica_loses_no_text_and_returns():
    with started(*OPTIONS) as server, ThreadPoolExecutor(len(TEXTS)) as clients:
        assert "in 2 worker processes, a replica each" in server.wait_for("device: ")
        wanted = list(clients.map(lambda texts: vectors(server, texts), TEXTS))
        before = num_computed(server)
        assert set(before) == {0, 1}
        assert all(before.values())
        victim = workers_of(server.pid)[0]

        def embed_on(client):
            """Send requests until the server has noticed the loss, and then one more."""
            is_last = False
            while not is_last:
                is_last = lost.is_set()
                assert vectors(server, TEXTS[client]) == wanted[client]

        lost = threading.Event()
        asked = [clients.submit(embed_on, client) for client in range(len(TEXTS))]
        os.kill(victim, signal.SIGKILL)
        try:
            server.wait_for("died of SIGKILL")
        finally:
            lost.set()
        for future in asked:
            future.result()
        wait_until(lambda: state_of(server) == "2/2")
        assert victim not in workers_of(server.pid)
        assert list(clients.map(lambda texts: vectors(server, texts), TEXTS)) == wanted
        after = num_computed(server)
        assert all(after[replica] > before[replica] for replica in (0, 1))


def state_of(server):
    """Return how many replicas accept requests; there is always one."""
    status, headers, _ = server.request("GET", "/health/ready")
    assert status == 200
    return headers["x-replicas-ready"]
