"""`trouper run-batch`: files in and out, standard streams, and what happens when it is ended."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.support.adapters import random_tensors, write_adapter
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
    assert run_batch(source, sink, "--served-model-name", "m") == 0
    out, err = capsys.readouterr()
    _, reason, count = err.splitlines()
    assert reason.startswith("trouper: 1 × duplicate_custom_id: line 3: custom_id")
    assert (out, count) == ("", "3 requests, 1 of them failed")
    first, second, third = (json.loads(line) for line in sink.read_text().splitlines())
    assert [first["custom_id"], second["custom_id"]] == ["a", "b"]
    assert first["response"]["body"]["choices"] == second["response"]["body"]["choices"]
    assert first["response"]["body"]["model"] == "m"
    assert third["error"]["code"] == "duplicate_custom_id"
    assert [path.name for path in sink.parent.iterdir()].count("answers.jsonl.part") == 0


def test_requests_may_name_unloaded_adapters(tmp_path, capsys):
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
    assert capsys.readouterr().err.endswith("\n7 requests, 1 of them failed\n")
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


def test_output_of_before_stays_until_there_is_another(files, capsys):
    source, sink = files
    sink.write_text("old")
    assert run_batch(source, sink, "-m", "/no/such/folder") == 2
    assert run_batch("/no/such/file", sink) == 2
    assert sink.read_text() == "old"
    assert sorted(path.name for path in sink.parent.iterdir()) == [sink.name, source.name]


def test_what_is_no_plain_file_is_written_unchanged(files, capsys):
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


def test_batch_larger_than_kv_cache_is_served(tmp_path, capsys):
    source, sink = tmp_path / "requests.jsonl", tmp_path / "answers.jsonl"
    source.write_text(
        requests(*map(str, range(70)), prompt="x y z " * 60, max_tokens=200, stop=[" "])
    )
    assert run_batch(source, sink, "--max-num-seqs", "2", "--num-gpu-blocks-override", "16") == 0
    assert capsys.readouterr().err.endswith("\n70 requests, 0 of them failed\n")


def process(*arguments, **streams):
    command = [sys.executable, "-m", "trouper", "run-batch", *arguments, *ENGINE]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen(command, **{**pipes, **streams})


def test_standard_streams():
    with process("-i", "-", "-o", "-") as batch:
        out, err = batch.communicate(requests("a", "b").encode())
    assert [json.loads(line)["custom_id"] for line in out.splitlines()] == ["a", "b"]
    sampling, closing = err.splitlines()
    assert sampling.startswith(b"sampling: ")
    assert (batch.returncode, closing) == (0, b"2 requests, 0 of them failed")


def test_nobody_reading_the_answers_is_no_error():
    with process("-i", "-", "-o", "-") as batch:
        batch.stdout.close()
        batch.stdin.write(requests(*"abcdefgh", n=1).encode())
        batch.stdin.close()
        (line,) = batch.stderr.read().splitlines()
        assert line.startswith(b"sampling: ")
    assert batch.returncode == 141


def test_ctrl_c_ends_batch_and_keeps_its_answers(tmp_path):
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
    goes_on = "run the same command again to continue"
    told = f"trouper: the answers so far are in {sink}.part; {goes_on}\ntrouper: interrupted\n"
    assert err.endswith(told)


def replies(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_failures_of_one_kind_are_one_line_that_helps(tmp_path, capsys):
    source, sink = tmp_path / "requests.jsonl", tmp_path / "answers.jsonl"
    source.write_text(requests(*map(str, range(200)), model="gpt-4o-mini"))
    assert run_batch(source, sink) == 1
    _, reason, count = capsys.readouterr().err.splitlines()
    assert reason.startswith("trouper: 200 × 404 model_not_found: ")
    assert reason.endswith("--served-model-name gpt-4o-mini")
    assert count == "200 requests, 200 of them failed"
    assert (
        run_batch(source, sink, "--served-model-name", "gpt-4o-mini", "--max-model-len", "64") == 0
    )
    assert [reply["response"]["status_code"] for reply in replies(sink)] == [200] * 200
    assert len(replies(tmp_path / "answers.jsonl.1")) == 200


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The lines of the answers to `requests(*"abcde")`."""
    folder = tmp_path_factory.mktemp("whole")
    source, sink = folder / "requests.jsonl", folder / "answers.jsonl"
    source.write_text(requests(*"abcde"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.showwarning", None)
        assert run_batch(source, sink) == 0
    return sink.read_bytes().splitlines(keepends=True)


@pytest.fixture
def half(tmp_path, whole):
    """The files of a batch of five, two of which are answered; half a line follows their answers."""
    source, sink = tmp_path / "requests.jsonl", tmp_path / "answers.jsonl"
    part = tmp_path / "answers.jsonl.part"
    source.write_text(requests(*"abcde"))
    part.write_bytes(whole[3] + whole[1] + whole[0][:40])
    return source, sink, part


def answered(line):
    return {name: json.loads(line)[name] for name in ("id", "custom_id", "error")}


def test_a_batch_goes_on_by_custom_id(half, whole, capsys):
    source, sink, part = half
    assert run_batch(source, sink) == 0
    assert capsys.readouterr().err.endswith(
        "5 requests, 2 of them answered by earlier runs, 0 of them failed\n"
    )
    found = sink.read_bytes().splitlines(keepends=True)
    assert list(map(answered, found)) == list(map(answered, whole))
    assert (found[1], found[3]) == (whole[1], whole[3])
    assert not part.exists()


def test_a_complete_batch_is_not_run_again(half, whole, capsys, monkeypatch):
    source, sink, part = half
    part.unlink()
    sink.write_bytes(b"".join(whole))
    monkeypatch.setattr("trouper.frontends.cli.batch.run_batch.run_engine", lambda *_: 1 / 0)
    assert run_batch(source, sink) == 0
    assert capsys.readouterr().err == "5 requests, all answered by earlier runs\n"
    assert sink.read_bytes() == b"".join(whole)
    part.write_bytes(b"".join(reversed(whole)))
    sink.unlink()
    assert run_batch(source, sink) == 0
    assert sink.read_bytes() == b"".join(whole)
    assert not part.exists()


@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        (lambda text: text.replace("def f", "def g"), (), "answers another request"),
        (lambda text: text, ("--seed", "1"), "with another model, seed or option"),
        (lambda text: text.replace('"d"', '"x"'), (), "answers 'd', which is not in the input"),
    ],
)
def test_answers_to_something_else_are_left_alone(half, whole, capsys, change, arguments, message):
    source, sink, part = half
    saved = whole[3] + whole[1]
    source.write_text(change(source.read_text()))
    assert run_batch(source, sink, *arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith("trouper: output_file: line ")
    assert err.count("\n") == 1
    assert message in err
    assert "--restart" in err
    assert part.read_bytes() == saved
    assert not sink.exists()


def test_restart_keeps_what_was_saved_under_another_name(half, whole, capsys):
    source, sink, part = half
    saved = part.read_bytes()
    sink.write_bytes(whole[2])
    assert run_batch(source, sink, "--restart") == 0
    assert "5 requests, 0 of them failed" in capsys.readouterr().err
    assert (sink.parent / "answers.jsonl.part.1").read_bytes() == saved
    assert (sink.parent / "answers.jsonl.1").read_bytes() == whole[2]
    assert len(replies(sink)) == 5


def test_a_shorter_complete_output_is_gone_on_from(half, whole, capsys):
    source, sink, _ = half
    sink.write_bytes(whole[0] + whole[4])
    assert run_batch(source, sink) == 0
    assert "5 requests, 4 of them answered by earlier runs" in capsys.readouterr().err
    found = sink.read_bytes().splitlines(keepends=True)
    assert [found[i] for i in (0, 1, 3, 4)] == [whole[i] for i in (0, 1, 3, 4)]
    assert (sink.parent / "answers.jsonl.1").read_bytes() == whole[0] + whole[4]


def test_answers_of_another_program_are_matched_by_custom_id(half, whole, monkeypatch):
    source, sink, part = half
    foreign = [line.replace(b"batch_req_", b"resp-") for line in whole]
    part.write_bytes(b"".join(foreign))
    monkeypatch.setattr("trouper.frontends.cli.batch.run_batch.run_engine", lambda *_: 1 / 0)
    assert run_batch(source, sink) == 0
    assert sink.read_bytes() == b"".join(foreign)


@pytest.mark.parametrize("name", ["answers.jsonl", "answers.jsonl.part"])
def test_a_file_of_another_kind_is_left_alone(tmp_path, capsys, name):
    source, kept = tmp_path / "requests.jsonl", tmp_path / name
    source.write_text(requests("a"))
    kept.write_text('{"a": "recipe"}\n')
    assert run_batch(source, tmp_path / "answers.jsonl") == 2
    assert f"line 1 of {kept} is not an answer of a batch" in capsys.readouterr().err
    assert kept.read_text() == '{"a": "recipe"}\n'
    assert not list(tmp_path.glob("*.1"))


def test_a_second_process_is_kept_out(tmp_path, capsys):
    sink = tmp_path / "answers.jsonl"
    source = tmp_path / "requests.jsonl"
    source.write_text(requests("a"))
    with process("-i", "-", "-o", str(sink)) as batch:
        batch.stdin.write(requests("a").encode())
        batch.stdin.flush()
        part = tmp_path / "answers.jsonl.part"
        while not (part.exists() and part.stat().st_size):
            assert batch.poll() is None
            time.sleep(0.01)
        for more in ((), ("--restart",)):
            assert run_batch(source, sink, *more) == 2
            assert "another process is writing" in capsys.readouterr().err
        batch.stdin.close()
        batch.stderr.read()
    assert batch.returncode == 0
    assert [reply["custom_id"] for reply in replies(sink)] == ["a"]


def test_answer_is_saved_before_those_that_take_longer(tmp_path):
    sink, part = tmp_path / "answers.jsonl", tmp_path / "answers.jsonl.part"
    with process("-i", "-", "-o", str(sink)) as batch:
        batch.stdin.write((requests("slow", max_tokens=480) + requests("quick")).encode())
        batch.stdin.flush()
        while not (part.exists() and part.stat().st_size):
            assert batch.poll() is None
            time.sleep(0.01)
        batch.kill()
        batch.stderr.read()
    assert [reply["custom_id"] for reply in replies(part)] == ["quick"]


def test_a_restart_needs_a_file(capsys):
    assert run_batch("/dev/null", "-", "--restart") == 2
    assert "needs a file as the output" in capsys.readouterr().err
