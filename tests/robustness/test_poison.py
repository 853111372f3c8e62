"""A request kills the worker of a real server while other requests stream."""

import json
import re
import threading
import time
from pathlib import Path

import pytest

from tests.robustness.faulty_worker import POISON
from tests.server.process import started

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
JSON = [("content-type", "application/json")]
NUM_STREAMS = 16
NUM_TOKENS = 400


def complete(server, **options):
    body = {"model": "trouper-demo", "max_tokens": NUM_TOKENS, "ignore_eos": True, **options}
    return server.request("POST", "/v1/completions", json.dumps(body).encode(), JSON)


def streamed_texts(server, beside=lambda: None):
    """Stream this many texts at once, and call `beside` while they run."""
    found = {}

    def stream(number):
        options = {"prompt": f"def f{number}(", "temperature": number % 2, "seed": number}
        status, _, body = complete(server, stream=True, **options)
        events = [line[6:] for line in body.decode().splitlines() if line.startswith("data: {")]
        texts = [json.loads(event)["choices"][0]["text"] for event in events]
        found[number] = status, len(texts), "".join(texts)

    threads = [threading.Thread(target=stream, args=(number,)) for number in range(NUM_STREAMS)]
    for thread in threads:
        thread.start()
    beside()
    for thread in threads:
        thread.join()
    return {number: (status, text) for number, (status, _, text) in found.items()}


def total(server, name):
    """Return the sum of a metric's series."""
    text = server.request("GET", "/metrics")[2].decode()
    series = re.findall(rf"^trouper:{name}\{{.*\}} (\S+)$", text, re.MULTILINE)
    return sum(map(float, series))


def test_poisonous_request_is_refused_and_streams_continue():
    answers = []

    def send_poison():
        """Send the poisonous request after the other requests have finished some steps."""
        before = NUM_STREAMS * NUM_TOKENS
        while total(server, "generation_tokens_total") < before + 20 * NUM_STREAMS:
            time.sleep(0.1)
        answers.append(complete(server, prompt=[POISON, 8, 9]))

    with started(
        "--device-worker", "process", "--max-num-seqs", "17",
        program="tests.robustness.faulty_server", PYTHONPATH=str(Path(__file__).parents[2]),
    ) as server:  # fmt: skip
        expected = streamed_texts(server)
        assert total(server, "worker_restarts_total") == 0
        assert streamed_texts(server, beside=send_poison) == expected
        ((status, headers, body),) = answers
        assert total(server, "worker_restarts_total") == 2
        recomputed = server.request("GET", "/metrics")[2].decode()
    assert all(status == 200 for status, _ in expected.values())
    assert status == 500
    assert headers["x-should-retry"] == "false"
    assert json.loads(body)["error"]["code"] == "poisoned_request"
    assert 'trouper:worker_up{engine="0",model_name="trouper-demo",rank="0"} 1.0' in recomputed
    assert (
        'trouper:worker_pause_seconds_count{engine="0",model_name="trouper-demo"} 2.0' in recomputed
    )
