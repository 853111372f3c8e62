"""`trouper run-batch`: files in and out, standard streams, and what happens when it is ended."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.adapters import random_tensors, write_adapter
from trouper.frontends.cli.main import run_line

ENGINE = ["--max-model-len", "512", "--num-gpu-blocks-override", "64", "--dtype", "float32"]


def requests(*custom_ids, **body):
    return "".join(
        json.dumps(
            {
                "custom_id": custom_id, "method": "POST", "url": "/v1/completions",
                "body": {"prompt": "def f(", "max_tokens": 3, "temperature": 0, "ignore_eos": True, **body},
            }
        ) + "\n"
        for custom_id in custom_ids
    )  # fmt: skip


@pytest.fixture(autouse=True)
def own_warnings(monkeypatch):
    monkeypatch.setattr("warnings.showwarning", None)  # the command line has its own; undone after


@pytest.fixture
def files(tmp_path):
    source, sink = tmp_path / "requests.jsonl", tmp_path / "answers.jsonl"
    source.write_text(requests("a", "b", "a"))
    return source, sink


def run_batch(source, sink, *arguments):
    return run_line(["run-batch", "-i", str(source), "-o", str(sink), *ENGINE, *arguments])


def test_a_file_becomes_a_file(files, capsys):
    source, sink = files
    sink.write_text("old")
    assert run_batch(source, sink, "--served-model-name", "m") == 0
    out, err = capsys.readouterr()
    assert (out, err) == ("", "3 requests, 1 of them failed\n")
    first, second, third = (json.loads(line) for line in sink.read_text().splitlines())
    assert [first["custom_id"], second["custom_id"]] == ["a", "b"]
    assert first["response"]["body"]["choices"] == second["response"]["body"]["choices"]
    assert first["response"]["body"]["model"] == "m"
    assert third["error"]["code"] == "duplicate_custom_id"
    assert [path.name for path in sink.parent.iterdir()].count("answers.jsonl.part") == 0


def test_requests_name_adapters_of_which_not_all_are_loaded_at_once(tmp_path, capsys):
    names, source = ("one", "two", "three"), tmp_path / "requests.jsonl"
    given = [
        f"--lora-modules={name}={write_adapter(tmp_path / name, random_tensors(seed=seed))}"
        for seed, name in enumerate(names, 1)
    ]
    models = [*names, *names, "unknown"]
    lines = [requests(str(i), model=model, max_tokens=8) for i, model in enumerate(models)]
    source.write_text("".join(lines))
    sink = tmp_path / "answers.jsonl"
    assert run_batch(source, sink, *given, "--max-cpu-loras", "1") == 0
    assert capsys.readouterr().err == "7 requests, 1 of them failed\n"
    answers = [json.loads(line) for line in sink.read_text().splitlines()]
    *good, bad = (each["response"] for each in sorted(answers, key=lambda each: each["custom_id"]))
    assert bad["status_code"] == 404
    assert [each["body"]["model"] for each in good] == models[:-1]
    texts = [each["body"]["choices"][0]["text"] for each in good]
    assert texts[:3] == texts[3:]
    assert len(set(texts)) == 3


def test_the_input_is_not_overwritten(files, capsys):
    source, sink = files
    sink.symlink_to(source)
    for name in (source, sink, source.parent / "." / source.name):
        assert run_batch(source, name) == 2
        assert "is the input file" in capsys.readouterr().err
    assert source.read_text() == requests("a", "b", "a")


def test_an_output_of_before_stays_until_there_is_another(files, capsys):
    source, sink = files
    sink.write_text("old")
    assert run_batch(source, sink, "-m", "/no/such/folder") == 2
    assert run_batch("/no/such/file", sink) == 2
    assert sink.read_text() == "old"
    assert sorted(path.name for path in sink.parent.iterdir()) == [sink.name, source.name]


def test_what_is_no_plain_file_is_written_as_it_is(files, capsys):
    source, _ = files
    assert run_batch(source, "/dev/null") == 0
    assert os.path.exists("/dev/null")
    assert not os.path.isfile("/dev/null")
    assert run_batch(source, "/dev/full") == 1
    assert "No space left on device" in capsys.readouterr().err


@pytest.mark.filterwarnings("default")
def test_limits_of_the_queue_are_not_the_batchs(files, capsys):
    source, sink = files
    assert run_batch(source, sink, "--max-num-queued-reqs", "1", "--max-inflight", "3") == 0
    err = capsys.readouterr().err
    assert err.startswith("trouper: warning: ")
    assert err.endswith("3 requests, 1 of them failed\n")


def process(*arguments, **streams):
    command = [sys.executable, "-m", "trouper", "run-batch", *arguments, *ENGINE]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen(command, **{**pipes, **streams})


def test_standard_streams():
    with process("-i", "-", "-o", "-") as batch:
        out, err = batch.communicate(requests("a", "b").encode())
    assert [json.loads(line)["custom_id"] for line in out.splitlines()] == ["a", "b"]
    assert (batch.returncode, err) == (0, b"2 requests, 0 of them failed\n")


def test_nobody_reading_the_answers_is_no_error():
    with process("-i", "-", "-o", "-") as batch:
        batch.stdout.close()
        batch.stdin.write(requests(*"abcdefgh", n=1).encode())
        batch.stdin.close()
        assert batch.stderr.read() == b""
    assert batch.returncode == 141


def test_ctrl_c_ends_a_batch_and_keeps_its_answers(tmp_path):
    sink = tmp_path / "answers.jsonl"
    part = tmp_path / "answers.jsonl.part"
    with process("-i", "-", "-o", str(sink), "--max-inflight", "1") as batch:
        batch.stdin.write((requests("a") + requests("b", max_tokens=480)).encode())
        batch.stdin.flush()  # and the pipe stays open
        while not (part.exists() and part.stat().st_size):
            assert batch.poll() is None
            time.sleep(0.01)  # for what gives no sign when it happens
        batch.send_signal(signal.SIGINT)
        err = batch.stderr.read().decode()
    assert batch.returncode == 130
    assert not sink.exists()
    (first,) = part.read_text().splitlines()
    assert json.loads(first)["custom_id"] == "a"
    assert err == f"trouper: the answers so far are in {sink}.part\ntrouper: interrupted\n"
