"""`trouper pull`, `show`, `rm` and `ps` over a cache that is laid out as the hub's."""

import json
import shutil

import pytest

from tests.server.fake import response, serving
from trouper.config.model import DEMO_MODEL
from trouper.frontends.cli.main import run_line

# A commit belongs to one repository.
COMMITS = {"acme/demo": "0" * 40, "org/two-GGUF": "1" * 40}


@pytest.fixture
def cache(tmp_path):
    """A cache with the demo under an id of the hub, and a repository of two GGUF files that are links to blobs."""
    folder = tmp_path / "cache"
    for name, commit in COMMITS.items():
        repo = folder / f"models--{name.replace('/', '--')}"
        (repo / "refs").mkdir(parents=True)
        (repo / "refs" / "main").write_text(commit)
        (repo / "blobs").mkdir()
        (repo / "snapshots").mkdir()
    shutil.copytree(DEMO_MODEL, folder / "models--acme--demo" / "snapshots" / COMMITS["acme/demo"])
    two = folder / "models--org--two-GGUF"
    snapshot = two / "snapshots" / COMMITS["org/two-GGUF"]
    snapshot.mkdir()
    for kind in ("Q4_0", "Q8_0"):
        (two / "blobs" / kind).write_bytes(b"GGUF")
        (snapshot / f"two-{kind}.gguf").symlink_to(two / "blobs" / kind)
    return folder


def run(capsys, *line):
    code = run_line([str(each) for each in line])
    out, err = capsys.readouterr()
    return code, out, err


def test_show_describes_a_model_of_the_cache(cache, capsys):
    code, out, _ = run(capsys, "show", "acme/demo", "--download-dir", cache, "--json")
    facts = json.loads(out)
    assert code == 0
    assert facts["architecture"] == "Qwen3ForCausalLM"
    assert facts["served by"] == "trouper"
    assert facts["parameters"].endswith("M")
    assert facts["context"] > 0
    code, out, _ = run(capsys, "show", DEMO_MODEL)
    assert "parameters" in out
    assert "temperature" in out
    code, out, _ = run(capsys, "show", DEMO_MODEL, "--template")
    assert "{%" in out


def test_show_of_unknown_name_offers_what_there_is(cache, capsys):
    code, _, err = run(capsys, "show", "acme/dem", "--download-dir", cache)
    assert code == 2
    assert "acme/demo" in err
    assert "trouper pull" in err
    code, _, err = run(capsys, "show", "org/two-GGUF", "--download-dir", cache)
    assert code == 2
    assert "two-GGUF:two-Q4_0" in err


def test_rm_deletes_a_repository(cache, capsys):
    code, out, _ = run(capsys, "rm", "acme/demo", "--yes", "--download-dir", cache)
    assert code == 0
    assert "deleted acme/demo" in out
    assert not (cache / "models--acme--demo").exists()
    assert (cache / "models--org--two-GGUF").exists()


def test_rm_deletes_one_gguf_model_of_two(cache, capsys):
    code, _, err = run(capsys, "rm", "org/two-GGUF:Q4_0", "-y", "--download-dir", cache)
    assert code == 0, err
    left = {path.name for path in (cache / "models--org--two-GGUF").rglob("*") if path.is_file()}
    assert left == {"main", "Q8_0", "two-Q8_0.gguf"}


def test_rm_deletes_nothing_outside_the_cache_or_unasked(cache, capsys, tmp_path):
    own = tmp_path / "own"
    shutil.copytree(DEMO_MODEL, own)
    code, _, err = run(capsys, "rm", own, "--yes")
    assert code == 2
    assert "delete its files yourself" in err
    code, _, err = run(capsys, "rm", "acme/demo", "--download-dir", cache)
    assert code == 2
    assert "--yes" in err
    assert own.exists()
    assert (cache / "models--acme--demo").exists()


def test_pull_of_what_is_there_says_how_to_serve_it(capsys):
    code, out, _ = run(capsys, "pull", DEMO_MODEL)
    assert code == 0
    assert f"trouper serve {DEMO_MODEL}" in out
    code, _, err = run(capsys, "pull", "/no/such/folder")
    assert code == 2
    assert "no such" in err


def test_pull_of_what_cannot_be_served_says_why(capsys, tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    code, _, err = run(capsys, "pull", tmp_path)
    assert code == 1
    assert "cannot be served" in err


def test_ps_shows_what_a_server_has_loaded(capsys):
    loaded = {"models": [{"name": "demo:latest", "size": 15_000_000, "context_length": 512}]}
    with serving(b"", response(json.dumps(loaded).encode())) as fake:
        code, out, _ = run(capsys, "ps", "--url", f"{fake.url}/v1")
    assert code == 0
    assert out.splitlines()[1].split() == ["demo:latest", "15.0", "MB", "CPU", "512"]


def test_ps_without_a_server_is_one_line(capsys):
    code, _, err = run(capsys, "ps", "--url", "http://127.0.0.1:9")
    assert code != 0
    assert "no server answers" in err
    with serving(b"", response(b"[]")) as fake:
        code, _, err = run(capsys, "ps", "--url", fake.url)
    assert code != 0
    assert "not an answer" in err
