"""Long work shows progress bars only on a terminal's stderr, never in the results."""

import io
import json
import re
import sys
from functools import partialmethod

import pytest
from tqdm import tqdm

from trouper.actors.executor.weights import decoder
from trouper.frontends.cli import output
from trouper.frontends.cli.batch import prompt_run
from trouper.frontends.cli.main import run_line

PROMPTS = "a = 1\nb = 2\nc = 3\n"
SHORT = ["--max-tokens", "2", "--temperature", "0"]


@pytest.fixture
def terminal(monkeypatch):
    """Make stderr a terminal, and stdout and stdin pipes; bars draw each step."""
    monkeypatch.setattr(output, "is_terminal", lambda stream: stream is sys.stderr)
    monkeypatch.setattr("sys.stdin", io.StringIO(PROMPTS))
    at_once = partialmethod(tqdm.__init__, mininterval=0, miniters=1)
    monkeypatch.setattr(tqdm, "__init__", at_once)
    monkeypatch.setattr("warnings.showwarning", None)  # the command line has its own; undone after


def run(capsys, *arguments):
    assert run_line([str(argument) for argument in arguments]) == 0
    return capsys.readouterr()


@pytest.mark.usefixtures("terminal")
def test_prompts_are_counted_and_stdout_holds_results_alone(capsys):
    out, err = run(capsys, "generate", "--prompt-file", "-", "--json", *SHORT)
    assert "3/3" in err
    assert [json.loads(line)["prompt"] for line in out.splitlines()] == PROMPTS.split("\n")[:-1]


@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize("command", ["generate", "embed"])
def test_a_bar_moves_in_tokens(capsys, monkeypatch, tmp_path, command):
    monkeypatch.setattr(prompt_run, "TICK_S", 0)
    file = tmp_path / "prompts.txt"
    file.write_text(PROMPTS)
    options = ["--max-tokens", "40"] if command == "generate" else ["--runner", "pooling"]
    out, err = run(capsys, command, "--prompt-file", file, *options)
    assert out
    assert len(set(re.findall(r"([\d,]+) tokens, [\d,]+/s", err))) >= 2


@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize(("total", "is_shown"), [(1, False), (2, True), (None, True)])
def test_one_thing_has_no_bar(capsys, total, is_shown):
    with output.progress(total, "prompts") as bar:
        bar.update()
    assert ("prompts" in capsys.readouterr().err) == is_shown


@pytest.mark.usefixtures("terminal")
def test_texts_to_embed_are_counted(capsys):
    out, err = run(capsys, "embed", "--prompt-file", "-", "--runner", "pooling")
    assert "3/3" in err
    assert len(out.splitlines()) == 3


@pytest.mark.usefixtures("terminal")
def test_batch_of_file_has_its_number_of_requests(capsys, tmp_path):
    body = {"prompt": "a", "max_tokens": 1}
    request = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": body}
    lines = [json.dumps({**request, "custom_id": name}) for name in "abc"]
    (tmp_path / "in.jsonl").write_text("\n\n".join(lines))
    _, err = run(capsys, "run-batch", "-i", tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl")
    assert "3/3" in err
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 3


def test_a_pipe_has_no_bar(capsys):
    with output.progress(3, "prompts") as bar, output.printing_beside(bar):
        bar.update()
    assert capsys.readouterr().err == ""


def test_weights_that_take_moment_have_bar_on_terminal(capsys, monkeypatch):
    monkeypatch.setattr(decoder, "BAR_DELAY_S", 0.0)
    assert list(decoder.indices_shown(3)) == [0, 1, 2]
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert isinstance(bar := decoder.indices_shown(3), tqdm)
    assert list(bar) == [0, 1, 2]
    assert "loading weights" in capsys.readouterr().err
