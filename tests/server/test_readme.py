"""The README's quarter of an hour, command by command, with the demo model in place of the hub's."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from .process import started

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
TOUR = re.findall(r"^```sh\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
# What the README names of the hub, and how the demo model stands in for it.
GENERATES = "Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q4_K_M"
EMBEDS = "-m sentence-transformers/all-MiniLM-L6-v2"
pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")


@pytest.fixture(scope="module")
def server():
    with started() as server:
        yield server


def block(word):
    """The one block of the README with a word in it."""
    (found,) = (text for text in TOUR if word in text)
    return found


def here(text):
    """A block as it runs here: this Python, and the demo model."""
    text = text.replace(f"-m {GENERATES}", "").replace(EMBEDS, "--runner pooling")
    return text.replace(GENERATES, "").replace(".venv/bin/trouper", f"{sys.executable} -m trouper")


def run(text, folder):
    done = subprocess.run(
        ["bash", "-ec", here(text)], cwd=folder, capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def ask(server, word):
    text = block(word).replace("127.0.0.1:8000", f"127.0.0.1:{server.port}")
    # Else the demo model may write blanks in its JSON until it is cut.
    text = text.replace('"max_tokens": 500', '"max_tokens": 500, "temperature": 0')
    done = subprocess.run(
        ["bash", "-ec", text], capture_output=True, text=True, check=True, timeout=50
    )
    (choice,) = json.loads(done.stdout)["choices"]
    return choice


def test_models_of_tour_are_those_that_are_replaced():
    lines = re.findall(r"trouper (?:chat|serve|generate|embed|run-batch) .*", "\n".join(TOUR))
    named = {
        word for line in lines for word in re.findall(r"-m \S+|(?<=chat )\S+|(?<=serve )\S+", line)
    }
    assert named == {GENERATES, f"-m {GENERATES}", EMBEDS}


def test_a_text(tmp_path):
    line = block("pip install -q '.[server]'").splitlines()[1]
    assert run(line, tmp_path).startswith("def quicksort(items):")


@pytest.mark.slow
def test_a_chat(tmp_path):
    line = here(block("trouper chat"))
    done = subprocess.run(
        ["bash", "-ec", line],
        cwd=tmp_path,
        input="hi\n",
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 0
    assert done.stdout.strip()


def test_a_chat_over_http(server):
    assert ask(server, "What is a list?")["message"]["content"]


def test_json_that_fits_the_schema(server):
    person = json.loads(ask(server, "json_schema")["message"]["content"])
    assert person.keys() == {"name", "age"}
    assert 0 <= person["age"] <= 120


@pytest.mark.slow
def test_json_without_a_server(tmp_path):
    out = run(block("person.json"), tmp_path)
    assert 0 <= json.loads(out.removeprefix("A person, as JSON: "))["age"] <= 120


def test_a_tool(server):
    (call,) = ask(server, "get_weather")["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    assert "city" in json.loads(call["function"]["arguments"])


@pytest.mark.slow
def test_embeddings_of_a_csv_file(tmp_path):
    run(block("texts.csv"), tmp_path)
    assert np.load(tmp_path / "vectors.npy").shape[0] == 2


@pytest.mark.slow
def test_a_batch_that_is_stopped_goes_on(tmp_path):
    make, batch = block("run-batch").splitlines()
    run(make, tmp_path)
    lines = (tmp_path / "requests.jsonl").read_text().splitlines()
    assert len({json.loads(line)["custom_id"] for line in lines}) == 100
    words = here(batch).split()
    first = subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    part = next(_appearing(tmp_path, first))
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=50)
    assert first.returncode == 130
    kept = part.read_bytes()[: part.read_bytes().rfind(b"\n") + 1]
    assert kept
    run(batch, tmp_path)
    answers = (tmp_path / "answers.jsonl").read_bytes()
    assert set(kept.splitlines()) <= set(answers.splitlines())
    assert sorted(json.loads(line)["custom_id"] for line in answers.splitlines()) == sorted(
        map(str, range(1, 101))
    )


def _appearing(folder, process):
    """Yield the file of a batch under way as soon as it holds an answer."""
    while process.poll() is None:
        for path in folder.iterdir():
            if path.name.startswith("answers.jsonl") and b"\n" in path.read_bytes():
                yield path
        time.sleep(0.01)
