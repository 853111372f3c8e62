"""`trouper serve` as a process: loops, sockets, signals, mistakes."""

import http.client
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from trouper.extras import install_hint

from .client import parse_events
from .process import Process, started, stop

LONG = {"prompt": "def f(", "max_tokens": 500, "ignore_eos": True, "stream": True}
JSON = [("content-type", "application/json")]


def streaming(server, **fields):
    """A connection on which a stream has begun."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request("POST", "/v1/completions", json.dumps({**LONG, **fields}), dict(JSON))
    answer = connection.getresponse()
    assert answer.status == 200
    first = answer.read1(1)
    return connection, answer, first


@pytest.mark.parametrize("loop", [pytest.param("trio", marks=pytest.mark.slow), "asyncio"])
def test_hangup_cuts_no_stream_and_sigterm_ends_all_in_order(loop):
    with started("--loop", loop) as server:
        connection, answer, first = streaming(server, max_tokens=50)
        server.signal(signal.SIGHUP)
        server.wait_for("SIGHUP is ignored")
        events = parse_events(first + answer.read())
        connection.close()
        assert events[-2]["choices"][0]["finish_reason"] == "length"
        assert server.request("GET", "/health/ready")[0] == 200

        connection, answer, first = streaming(server)
        server.signal(signal.SIGTERM)
        server.wait_for("shutting down")
        events = parse_events(first + answer.read())
        connection.close()
        assert events[-1] == "[DONE]"
        assert events[-2]["choices"][0]["finish_reason"] == "abort"
        assert server.wait() == 0


@pytest.mark.slow
def test_sigint_lets_requests_finish_within_the_timeout():
    with started("--shutdown-timeout", "30") as server:
        connection, answer, first = streaming(server, max_tokens=100)
        server.signal(signal.SIGINT)
        events = parse_events(first + answer.read())
        connection.close()
        assert events[-2]["choices"][0]["finish_reason"] == "length"
        assert server.wait() == 0
        with pytest.raises(ConnectionRefusedError):
            server.request("GET", "/health")


@pytest.mark.slow
def test_a_second_signal_ends_it_at_once():
    with started("--shutdown-timeout", "60") as server:
        connection, *_ = streaming(server, max_tokens=400, n=8)
        server.signal(signal.SIGTERM)
        server.wait_for("shutting down")
        server.signal(signal.SIGTERM)
        assert server.wait() == 128 + signal.SIGTERM
        connection.close()


def test_what_the_flags_and_key_of_vllm_say():
    template = "{{ word }}{{ reasoning_effort }}"
    with started(
        "--root-path", "/llm", "--h11-max-header-count", "6", "--uvicorn-log-level", "debug",
        "--access-log", "--disable-uvicorn-access-log", "--chat-template", template,
        "--default-chat-template-kwargs", '{"word": "def", "reasoning_effort": "low"}',
        VLLM_API_KEY="sesame",
    ) as server:  # fmt: skip
        assert server.request("GET", "/v1/models")[0] == 401
        server.headers = [("authorization", "Bearer sesame")]
        assert server.request("GET", "/v1/models")[0] == 200
        for path in ("/llm/version", "/version"):
            assert server.request("GET", path)[0] == 200
        assert server.request("GET", "/version", headers=[("x", "y")] * 6)[0] == 431
        server.wait_for("431 headers_too_large")
        fields = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
        for more, text in (
            ({}, "deflow"),
            ({"reasoning_effort": "high"}, "defhigh"),
            ({"chat_template_kwargs": {"word": "if"}, "reasoning_effort": "high"}, "ifhigh"),
        ):
            body = json.dumps({**fields, **more, "return_token_ids": True}).encode()
            ids = json.loads(server.request("POST", "/v1/chat/completions", body, JSON)[2])
            body = json.dumps({"tokens": ids["prompt_token_ids"]}).encode()
            assert (
                json.loads(server.request("POST", "/detokenize", body, JSON)[2])["prompt"] == text
            )
        assert stop(server) == 0
        assert not server._find("GET")  # no access log: the later flag wins


@pytest.mark.slow
def test_while_the_model_loads_the_port_answers():
    server = Process("--port", "0")
    try:
        server.wait_for("listening")
        status, headers, body = server.request("GET", "/health/ready")
        if status == 503:  # it may have been quick
            assert json.loads(body)["error"]["code"] == "starting"
            assert headers["retry-after"] == "1"
        server.wait_for("serving")
        assert server.request("GET", "/health/ready")[0] == 200
        assert stop(server) == 0
    finally:
        server.close()


@pytest.mark.slow
def test_sigterm_while_the_model_loads():
    server = Process("--port", "0")
    try:
        server.wait_for("listening")
        assert stop(server) == 0
    finally:
        server.close()


@pytest.mark.slow
def test_a_socket_file_and_the_admin_listener(tmp_path):
    public, admin = str(tmp_path / "public"), str(tmp_path / "admin")
    with started("--admin-uds", admin) as server:
        assert server.request("GET", "/is_paused")[0] == 404
        assert json.loads(over_unix(admin, "/is_paused")) == {"is_paused": False}
        assert os.stat(admin).st_mode & 0o777 == 0o600
        assert stop(server) == 0
        assert not os.path.exists(admin)
    server = Process("--uds", public)
    try:
        server.wait_for("serving")
        assert json.loads(over_unix(public, "/v1/models"))["data"]
        assert stop(server) == 0
    finally:
        server.close()


def over_unix(path, target, method="GET"):
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
        client.sendall(
            f"{method} {target} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode()
        )
        answer = b""
        while piece := client.recv(2**16):
            answer += piece
    return answer.partition(b"\r\n\r\n")[2]


def test_mistakes_are_one_line(capsys):
    from trouper.frontends.cli.main import run_line

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for arguments, text in (
            (["--port", port], "cannot listen on 127.0.0.1"),
            (["nowhere/at/all"], "no such model folder"),
            (["--loop", "uvloop"], "--loop"),
            (["a", "--model", "b"], "give only one of them"),
        ):
            assert run_line(["serve", *arguments]) in (1, 2)
            (line,) = capsys.readouterr().err.splitlines()
            assert text in line
    # This one is found when the model is loaded.
    arguments = ["--num-gpu-blocks-override", "1", "--max-model-len", "512", "--port", "0"]
    assert run_line(["serve", *arguments]) in (1, 2)
    error = capsys.readouterr().err
    assert "blocks" in error.splitlines()[-1], error
    assert "Traceback" not in error


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_without_the_extra_it_says_so(capsys, monkeypatch, loop):
    from trouper.frontends.cli import serve as command
    from trouper.frontends.cli.main import run_line

    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    assert run_line(["serve", "--loop", loop]) == 2
    assert install_hint("server") in capsys.readouterr().err


@pytest.mark.parametrize("name", ["api_key", "admin_key"])
@pytest.mark.parametrize("key", ["", "  "])
@pytest.mark.parametrize("is_in_environment", [False, True])
def test_empty_key_ends_start_with_2_and_says_so(name, key, is_in_environment, monkeypatch, capsys):
    from trouper.frontends.cli.main import run_line

    variable, flag = f"TROUPER_{name.upper()}", f"--{name.replace('_', '-')}"
    if is_in_environment:
        monkeypatch.setenv(variable, key)
        assert run_line(["serve"]) == 2
    else:
        assert run_line(["serve", flag, key]) == 2
    message = capsys.readouterr().err
    assert name in message
    assert "empty" in message


def test_empty_key_of_vllm_ends_start_too(monkeypatch, capsys):
    from trouper.frontends.cli.main import run_line

    monkeypatch.setenv("VLLM_API_KEY", "")
    assert run_line(["serve"]) == 2
    assert "api_key" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_client_that_never_reads_does_not_delay_end(loop):
    large = {"prompt": [5] * 500, "n": 32, "max_tokens": 1, "echo": True, "logprobs": 20}
    body = json.dumps(large).encode()  # to an answer of 10 MB, more than a socket's buffers
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    with started("--loop", loop) as server, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", server.port))
        client.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        assert client.recv(12) == b"HTTP/1.1 200"
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        assert "closing the remaining connections" in server.lines[-1]


LOADS_FOR_EVER = """
import anyio, sys, threading
from trouper.frontends.server.http.listeners import Listener, OpenListeners, bind_tcp
from trouper.frontends.server.program.server import Server
from trouper.frontends.server.service.service import Service
from trouper.frontends.server.shared.settings import ServerSettings

class Engine:
    async def __aenter__(self):
        with anyio.CancelScope(shield=True):  # a native call: nothing can cancel it
            await anyio.to_thread.run_sync(threading.Event().wait)
    async def __aexit__(self, *error):
        pass

async def main():
    server = Server(Service(ServerSettings()), shutdown_timeout_s=0.0, report=lambda line: print(line, file=sys.stderr, flush=True))
    with OpenListeners({}) as listeners:
        listeners.public.append(Listener(bind_tcp("127.0.0.1", 0)))
        await server.run(Engine(), listeners, sys.argv[1])

anyio.run(main, backend=sys.argv[1])
"""


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_sigterm_while_weights_load_that_never_come(loop):
    process = subprocess.Popen(
        [sys.executable, "-c", LOADS_FOR_EVER, loop], stderr=subprocess.PIPE, text=True
    )
    with process:
        port = int(process.stderr.readline().split(":")[2].split(",")[0])
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(b"GET /health/ready HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            answer = client.recv(2**16)
        assert answer.startswith(b"HTTP/1.1 503")
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["idle", "queued", "prefilling", "streaming", "asleep"])
@pytest.mark.parametrize("loop", ["trio", "asyncio"])
def test_sigterm_in_every_phase_drains_and_leaves_nobody_behind(phase, loop, tmp_path):
    admin = str(tmp_path / "admin")
    with started("--loop", loop, "--admin-uds", admin, "--max-num-seqs", "1") as server:
        with ExitStack() as stack:
            if phase == "queued":
                for _ in range(3):  # one runs, one waits in the engine, one at the door
                    stack.callback(streaming_nothing(server).close)
            elif phase == "prefilling":
                stack.callback(streaming_nothing(server, prompt=[5] * 500).close)
            elif phase == "streaming":
                stack.callback(streaming(server)[0].close)
            elif phase == "asleep":
                over_unix(admin, "/sleep?level=2", "POST")
            children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
            assert stop(server) == 0, server.lines
            with pytest.raises(ConnectionRefusedError):
                server.request("GET", "/health")
            assert not [child for child in children if os.path.exists(f"/proc/{child}")]


def streaming_nothing(server, **fields):
    """Send a request and return the connection, before its answer is read."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request("POST", "/v1/completions", json.dumps({**LONG, **fields}), dict(JSON))
    return connection


@pytest.fixture(scope="session")
def certificate(tmp_path_factory):
    """(certificate, key, file with both) that no authority has signed."""
    folder = tmp_path_factory.mktemp("tls")
    paths = [str(folder / name) for name in ("certificate.pem", "key.pem", "both.pem")]
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "2", "-subj", "/CN=localhost", "-out", paths[0], "-keyout", paths[1]]  # fmt: skip
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make a certificate with")
    subprocess.run(command, check=True, capture_output=True)
    Path(paths[2]).write_text(Path(paths[0]).read_text() + Path(paths[1]).read_text())
    return paths


def test_half_of_a_certificate_is_a_mistake(certificate, capsys):
    from trouper.frontends.cli.main import run_line

    public, key, _ = certificate
    for arguments, text in (
        (["--ssl-certfile", public], "--ssl-keyfile"),
        (["--ssl-keyfile", key], "--ssl-certfile"),
        (["--ssl-certfile", key, "--ssl-keyfile", public], "cannot load"),
        (["--ssl-certfile", "nowhere.pem", "--ssl-keyfile", key], "cannot load"),
    ):
        assert run_line(["serve", "--port", "0", *arguments]) == 2
        error = capsys.readouterr().err
        assert text in error.splitlines()[-1]
        assert "listening" not in error


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["asyncio", "trio"])
@pytest.mark.parametrize("has_one_file", [False, True])
def test_tls_is_served_from_two_files_or_one(certificate, loop, has_one_file):
    public, key, both = certificate
    files = ["--ssl-certfile", both] if has_one_file else ["--ssl-certfile", public, "--ssl-keyfile", key]  # fmt: skip
    context = ssl.create_default_context(cafile=public)
    with started("--loop", loop, *files) as server:
        assert "https://" in server.wait_for("serving")
        connection = http.client.HTTPSConnection("localhost", server.port, context=context)
        connection.sock = context.wrap_socket(
            socket.create_connection(("127.0.0.1", server.port)), server_hostname="localhost"
        )
        connection.request("GET", "/version")
        assert connection.getresponse().status == 200
        connection.close()
        with pytest.raises((http.client.HTTPException, OSError)):
            server.request("GET", "/version")  # plain HTTP
        assert stop(server) == 0


def test_ollamas_port_in_use_is_explained(capsys):
    from trouper.frontends.cli.main import run_line

    with ExitStack() as stack:
        try:
            stack.enter_context(socket.create_server(("127.0.0.1", 11434)))
        except OSError:
            pass  # another program has it
        assert run_line(["serve", "--port", "0", "--ollama"]) == 2
    error = capsys.readouterr().err
    assert "127.0.0.1:11434" in error
    assert "perhaps Ollama itself is running" in error


@pytest.mark.slow
def test_ollamas_port_serves_the_same_model():
    with started("--ollama") as server:
        status, _, here = server.request("GET", "/api/tags")
        assert status == 200
        other = http.client.HTTPConnection("127.0.0.1", 11434, timeout=30)
        other.request("GET", "/api/tags", headers=dict(server.headers))
        assert json.loads(other.getresponse().read()) == json.loads(here)
        other.close()
