"""`trouper bench serve` over real sockets: against our server, and against one that fails now and then."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from trouper.frontends.cli.main import run_line

from .process import started

REQUESTS = ["--num-prompts", "6", "--input-len", "8", "--output-len", "5"]


@pytest.fixture
def bench(capsys):
    """`bench(port, …)` -> (exit code, what was printed)."""

    def bench(port, *arguments):
        url = f"http://127.0.0.1:{port}/v1"
        code = run_line(["bench", "serve", "--url", url, *REQUESTS, *map(str, arguments)])
        return code, capsys.readouterr()

    return bench


class Moody(BaseHTTPRequestHandler):
    """Every third answer is a 503, every other third is cut."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self._send(json.dumps({"data": [{"id": "moody"}]}).encode())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        assert body["model"] == "moody"
        with self.server.lock:
            self.server.num += 1
            number = self.server.num
        choice = {"index": 0, "text": "x", "finish_reason": "length"}
        events = [{"choices": [choice]}, {"choices": [], "usage": {"completion_tokens": 5}}]
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
        if number % 3 == 1:
            self.send_error(503)
        else:
            self._send((text + ("data: [DONE]\n\n" if number % 3 == 2 else "")).encode())

    def _send(self, body):
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@contextmanager
def moody():
    with ThreadingHTTPServer(("127.0.0.1", 0), Moody) as server:
        server.num, server.lock = 0, threading.Lock()
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.slow
def test_our_server_is_measured_over_several_concurrencies(bench, tmp_path):
    picture, path = tmp_path / "serve.png", tmp_path / "report.json"
    options = ["--max-concurrency", "1,3", "--goodput", "e2el:1e6", "--num-warmups", "1"]
    with started() as server:
        code, printed = bench(server.port, *options, "--plot", picture, "--output-json", path)
        assert code == 0, printed.err
        code, chat = bench(server.port, "--endpoint", "chat", "--request-rate", "200", "--json")
        assert code == 0, chat.err
    one, three = json.loads(path.read_text())["results"]
    assert (one["max_concurrent_requests"], three["max_concurrent_requests"]) == (1, 3)
    (chats,) = json.loads(chat.out)["results"]
    for record in (one, three, chats):
        assert (record["completed"], record["failed"], record["total_output_tokens"]) == (6, 0, 30)
        assert 0 < record["p50_ttft_ms"] <= record["p50_e2el_ms"] <= record["duration"] * 1000
    assert (one["total_input_tokens"], one["request_goodput"]) == (48, one["request_throughput"])
    assert printed.out.count("6 requests completed, 0 failed") == 2
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_what_fails_is_counted_and_shown(bench):
    with moody() as port:
        code, printed = bench(port, "--max-concurrency", "1")
    assert code == 0
    lines = printed.out.splitlines()
    assert lines[0].startswith("2 requests completed, 4 failed")
    assert {"  failed: 2 × HTTP 503", "  failed: 2 × the stream was cut"} <= set(lines)


def test_server_that_does_nothing_right_is_error(bench, monkeypatch):
    monkeypatch.setattr(Moody, "do_POST", lambda self: self.send_error(500))
    with moody() as port:
        code, printed = bench(port)
    assert code == 1
    assert "failed: 6 × HTTP 500" in printed.out
    assert printed.err == "trouper: ServerError: no request completed (--debug shows where)\n"


def test_no_server_is_one_line(bench):
    with moody() as port:
        pass
    code, printed = bench(port)
    assert (code, printed.out, printed.err.count("\n")) == (1, "", 1)
    assert f"no answer from http://127.0.0.1:{port}/v1/models" in printed.err
