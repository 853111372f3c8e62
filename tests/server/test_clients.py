"""`trouper chat --url` and `trouper complete`: beside a real server, and a bad one."""

import io
import json
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

from trouper.frontends.cli.chat import remote
from trouper.frontends.cli.chat.conversation import AnswerUsage, stats_line
from trouper.frontends.cli.chat.subjects import CUT
from trouper.frontends.cli.main import run_line

from .fake import chunk, error, events, response, serving
from .process import started

GREEDY = ["--temperature", "0", "--ignore-eos"]


@pytest.fixture(scope="module")
def server():
    with started("--api-key", "key") as server:
        yield server


@pytest.fixture(autouse=True)
def terminal(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TROUPER_API_KEY", "key")
    monkeypatch.setattr("sys.stdin", io.StringIO())
    monkeypatch.setattr("warnings.showwarning", None)  # the command line has its own; undone after


@pytest.fixture
def ask(server, capsys):
    """(exit code, stdout, stderr) of a command that asks the server."""

    def ask(command, *arguments, path=""):
        url = f"http://127.0.0.1:{server.port}{path}"
        code = run_line([command, "--url", url, *arguments])
        return code, *capsys.readouterr()

    return ask


def posted(server, path, body):
    headers = [("authorization", "Bearer key"), ("content-type", "application/json")]
    return json.loads(server.request("POST", path, json.dumps(body).encode(), headers)[2])


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/"])
def test_a_text_is_what_the_server_says(server, ask, path):
    body = {"prompt": "def f(", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    expected = posted(server, "/v1/completions", body)["choices"][0]["text"]
    found = ask("complete", "-q", "def f(", "--max-tokens", "8", *GREEDY, path=path)
    assert found == (0, f"{expected}\n", "")


def test_each_line_is_a_prompt(ask, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("def f(\n\nimport os"))
    options = ["--max-tokens", "4", *GREEDY]
    code, both, err = ask("complete", *options)
    assert (code, err) == (0, "")
    one, other = (ask("complete", "-q", prompt, *options)[1] for prompt in ("def f(", "import os"))
    assert both == one + other


LOCAL = ["--max-model-len", "512", "--dtype", "float32"]


@pytest.mark.parametrize(("command", "is_remote"), [("chat", True), ("chat", False), ("complete", True)])  # fmt: skip
def test_statistics_follow_each_answer_on_stderr(ask, capsys, monkeypatch, command, is_remote):
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\nand once again\n"))
    options = ["--stats", "--max-tokens", "6", *GREEDY]
    if is_remote:
        code, out, err = ask(command, *options)
    else:
        code = run_line([command, *options, *LOCAL])
        out, err = capsys.readouterr()
    assert (code, len(out.splitlines()) >= 2) == (0, True)
    wanted = r"(\d+) prompt tokens, 6 tokens in [\d.]+ s, first text after [\d.]+ s, then [\d.]+ tokens/s"
    printed = [line for line in err.splitlines() if not line.startswith("sampling: ")]
    lines = [line for line in printed if line != CUT]
    assert len(lines) == len(printed) - (2 if command == "chat" else 0)
    first, second = (re.fullmatch(wanted, line) for line in lines)
    assert int(first[1]) < int(second[1])


def test_the_line_of_statistics():
    assert stats_line(None, None, 2.5) == "2.50 s"
    assert stats_line(None, 0.5, 2.5) == "2.50 s, first text after 0.50 s"
    assert stats_line(AnswerUsage(3, 0), None, 2.5) == "3 prompt tokens, 0 tokens in 2.50 s"
    line = stats_line(AnswerUsage(3, 5), 0.5, 2.5)
    assert line == "3 prompt tokens, 5 tokens in 2.50 s, first text after 0.50 s, then 2.0 tokens/s"


def test_a_chat_is_the_same_here_and_there(ask, capsys, monkeypatch):
    talk = "hi\nagain\n/reset\nhi\n"
    options = ["--system-prompt", "Be brief.", "--max-tokens", "6", *GREEDY]
    monkeypatch.setattr("sys.stdin", io.StringIO(talk))
    there = ask("chat", *options)
    monkeypatch.setattr("sys.stdin", io.StringIO(talk))
    assert run_line(["chat", *options, *LOCAL]) == 0
    out, err = capsys.readouterr()
    # Only this side knows the model's own sampling.
    sampling, _, err = err.partition("\n")
    assert sampling.startswith("sampling: ")
    assert there == (0, out, err)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model-name", "nope"], "404: The model `nope` does not exist. This server has"),
        (["--temperature", "7"], "400: temperature: must be in [0, 2]"),
        (["--api-key", "wrong"], "401: a valid API key is required"),
        (["--stop", "x", "--max-tokens", "0"], "400: max_tokens"),
    ],
)
@pytest.mark.parametrize("command", ["chat", "complete"])
def test_what_server_refuses_is_mistake_in_one_line(ask, command, arguments, message):
    code, out, err = ask(command, "-q", "hi", *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("trouper: the server answered ")
    assert message in err


def test_a_conversation_goes_on_after_a_refusal(ask, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{'long ' * 600}\nhi\n"))
    code, out, err = ask("chat", "--max-tokens", "4", *GREEDY)
    assert code == 0
    assert out.strip()
    refusal, cut = err.splitlines()
    assert refusal.startswith("trouper: the server answered 400: ")
    assert refusal.endswith(
        "the message is too long: start with a larger --max-model-len for longer conversations"
    )
    assert cut == CUT


def test_ctrl_c_ends_answer_connection_and_nothing_else(server):
    def num_open():
        headers = [("authorization", "Bearer key")]
        return json.loads(server.request("GET", "/load", headers=headers)[2])["server_load"]

    url = f"http://127.0.0.1:{server.port}"
    command = [sys.executable, "-m", "trouper", "chat", "--url", url, "--max-tokens", "450"]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen([*command, "--ignore-eos"], **pipes) as chat:
        chat.stdin.write(b"hi\n")
        chat.stdin.flush()
        assert chat.stdout.read(1)  # the answer has begun
        assert num_open() == 1
        chat.send_signal(signal.SIGINT)
        deadline = time.monotonic() + 30
        while num_open():
            assert time.monotonic() < deadline
        assert chat.poll() is None
        chat.stdin.write(b"/nonsense\n")
        chat.stdin.close()
        assert b"no such command: /nonsense" in chat.stderr.read()
        chat.stdout.read()
    assert chat.returncode == 0


DONE = "[DONE]"
FAILURES = [
    ("429", error("429 Too Many Requests"), 1, "429: not today"),
    ("408", error("408 Request Timeout"), 1, "408: not today"),
    ("500", error("500 Internal Server Error"), 1, "500: not today"),
    ("503", response(b"<html>", "503 Service Unavailable", "text/html"), 1, "503: "),
    ("401", error("401 Unauthorized"), 2, "401: not today"),
    ("403", response(b"[]", "403 Forbidden"), 2, "403: Forbidden"),
    ("redirect", response(b"", "302 Found"), 1, "302: Found"),
    ("control characters", error("400 Bad Request", "a\x1b[31m\nb"), 2, "400: a [31m b"),
    ("endless message", error("400 Bad Request", "a" * 5000), 2, "aaaa"),
    ("no stream", response(b"{}"), 1, "text/event-stream"),
    ("cut in a chunk", events(chunk("a"), is_whole=False), 1, "broke off"),
    ("cut between chunks", events(chunk("a")), 1, "broke off"),
    ("no answer", b"", 1, "broke off"),
    ("no HTTP", b"nonsense\r\n\r\n", 1, "broke off"),
    ("no JSON", events("{", DONE), 1, "an invalid event"),
    ("another JSON", events('{"choices": 5}', DONE), 1, "an invalid event"),
    ("an error event", events(chunk("a"), '{"error": {"message": "oh"}}', DONE), 1, "failed: oh"),
]


@pytest.mark.parametrize(
    ("answer", "code", "message"), [row[1:] for row in FAILURES], ids=[row[0] for row in FAILURES]
)
@pytest.mark.parametrize("command", ["chat", "complete"])
def test_a_failing_server_is_one_line(capsys, command, answer, code, message):
    with serving(answer) as fake:
        assert run_line([command, "--url", fake.url, "-q", "hi"]) == code
    out, err = capsys.readouterr()
    assert out in ("", "a")
    assert err.startswith("trouper: ")
    assert err.count("\n") == 1
    assert message in err
    assert len(err) < 600
    assert "Traceback" not in err


@pytest.mark.filterwarnings("ignore")  # the client library drops its own generator
def test_an_endless_event_is_not_kept(capsys):
    with serving(events("x" * 2**21)) as fake:
        assert run_line(["complete", "--url", fake.url, "-q", "hi"]) == 1
    assert "exceeded the 1048576 byte limit" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("models", "code", "message"),
    [
        (response(b'{"data": []}'), 1, "lists no model"),
        (response(b"<html>"), 1, "lists no model"),
        (response(b"x" * 2**21), 1, "lists no model"),
        (error("404 Not Found"), 2, "404: not today"),
        (error("503 Service Unavailable"), 1, "503: not today"),
    ],
)
def test_a_server_without_models_is_one_line(capsys, models, code, message):
    with serving(b"", models) as fake:
        assert run_line(["complete", "--url", fake.url, "-q", "hi"]) == code
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err


def test_a_refused_connection_is_one_line(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        assert run_line(["chat", "--url", url, "-q", "hi"]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"trouper: cannot connect to {url}/v1/")


def test_a_silent_server_is_given_up(capsys, monkeypatch):
    monkeypatch.setattr(remote, "SILENCE_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert run_line(["chat", "--url", url, "-q", "hi"]) == 1
    assert capsys.readouterr().err == f"trouper: no answer from {url}/v1/ in time\n"


def test_failures_do_not_end_a_conversation(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\nho\n"))
    with serving(error("500 Internal Server Error")) as fake:
        assert run_line(["chat", "--url", fake.url]) == 0
    out, err = capsys.readouterr()
    assert (out, err) == ("", "trouper: the server answered 500: not today\n" * 2)


def test_an_answer_gives_no_orders_to_a_terminal(capsys, monkeypatch):
    with serving(events(chunk("a\x1b[2Jb\n\tc\x9b"), chunk(None, "stop"), DONE)) as fake:
        monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
        assert run_line(["complete", "--url", fake.url, "-q", "hi"]) == 0
    assert capsys.readouterr().out == "a[2Jb\n\tc\n"


def test_client_sends_given_fields_and_reuses_connection(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\nho\n"))
    with serving(events(chunk("a"), chunk(None, "stop"), DONE)) as fake:
        arguments = ["--temperature", "0", "--api-key", "secret"]
        assert run_line(["complete", "--url", f"{fake.url}/base", *arguments]) == 0
    assert capsys.readouterr() == ("a\na\n", "")
    (head, headers, _), (post, _, body), (again, _, _) = fake.asked
    assert head == ["GET", "/base/models"]
    assert headers["authorization"] == "Bearer secret"
    assert post == again == ["POST", "/base/completions"]
    assert json.loads(body) == {
        "model": "fake", "prompt": "hi", "max_tokens": 128, "temperature": 0.0, "stream": True,
    }  # fmt: skip
