"""A client that stops reading, on a real server process and a real socket."""

import json
import socket
from pathlib import Path

import pytest

from .client import parse_events
from .process import started, stop

# About 8 MB of frames, and no socket has room for so many.
MUCH = {
    "prompt": "def f(",
    "max_tokens": 400,
    "ignore_eos": True,
    "n": 4,
    "logprobs": 20,
    "seed": 1,
}
JSON = [("content-type", "application/json")]
MAX_GROWTH = 48 * 2**20  # its outputs once, and KV blocks that nobody had touched before
NUM_OTHERS = 20


def asking(server, fields):
    """A connection whose answer is not read, and which has little room for it."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", server.port))
    body = json.dumps({**fields, "stream": True})
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    client.sendall((head + body).encode())
    return client


def ask(server, **fields):
    body = json.dumps({**MUCH, **fields}).encode()
    status, _, answer = server.request("POST", "/v1/completions", body, JSON)
    assert status == 200
    return answer


def read_on(client):
    """The events, without the frames of HTTP's chunks."""
    answer = b"".join(iter(lambda: client.recv(2**20), b""))
    _, _, rest = answer.partition(b"\r\n\r\n")
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return parse_events(body)


def resident(server):
    return 4096 * int(Path(f"/proc/{server.pid}/statm").read_text().split()[1])


def texts(events):
    found = [""] * MUCH["n"]
    for event in events[:-1]:
        for choice in event["choices"]:
            found[choice["index"]] += choice["text"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_slow_reader_delays_nothing_and_gets_all(loop):
    with started("--loop", loop) as server:
        whole = [choice["text"] for choice in json.loads(ask(server))["choices"]]
        quick = parse_events(ask(server, stream=True))
        before = resident(server)
        with asking(server, MUCH) as client:
            for _ in range(NUM_OTHERS):
                ask(server, max_tokens=5, n=1)
            while b"\ntrouper:num_requests_running 0.0" not in _metrics(server):
                pass  # the engine is done with it though nobody has read it
            assert json.loads(server.request("GET", "/load")[2])["server_load"] == 1
            assert resident(server) - before < MAX_GROWTH
            slow = read_on(client)
        assert slow[-1] == "[DONE]"
        assert texts(slow) == whole
        assert len(slow) < len(quick)  # what was not read has merged
        assert stop(server) == 0


def _metrics(server):
    lines = server.request("GET", "/metrics")[2].splitlines()
    return b"\n".join([b"", *(line.split(b"{")[0] + b" " + line.split()[-1] for line in lines)])
