"""Engines in processes of their own, in turn: with real ones, and with ones that misbehave."""

import json
import os
import signal
import sys

import pytest

from trouper import __version__
from trouper.bench import peers
from trouper.bench.cli.options import terminable
from trouper.frontends.cli import output

WORKS = [peers.Workload(2, 3, 2), peers.Workload(1, 4, 1)]
VOCABULARY = range(10, 20)
FAKE = """#!{python}
import json, os, sys, time
print("noise", file=sys.stderr)
with open({log!r}, "a") as log:
    for number, line in enumerate(iter(sys.stdin.readline, "")):
        work = json.loads(line)
        print(os.getpid(), "prompts" in work and len(work["prompts"]), file=log, flush=True)
        if number == 0:
            version = " ".join(filter(None, ("1.2", work["quantization"])))
            print(json.dumps({{"version": version}}), flush=True)
            continue
        {misbehave}
        made = len(work["prompts"]) * work["output_len"]
        print(json.dumps({{"seconds": 0.25, "num_output_tokens": made}}), flush=True)
"""


def program(tmp_path, text, name="python"):
    path = tmp_path / name
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def fake(tmp_path):
    """The path of a Python that is no Python but plays a peer."""

    def fake(misbehave="pass", name="python"):
        log = str(tmp_path / f"{name}.log")
        text = FAKE.format(python=sys.executable, log=log, misbehave=misbehave)
        return program(tmp_path, text, name)

    return fake


@pytest.fixture
def settings(fake, monkeypatch):
    """trouper is played by a fake too."""

    def settings(**options):
        own = fake(name="trouper")
        monkeypatch.setattr("trouper.bench.peers.sys.executable", own)
        return peers.Settings(model="x", dtype="float32", **options)

    return settings


def compared(settings, repeats=2):
    return peers.compare(settings, WORKS, repeats, VOCABULARY)


def test_everybody_runs_every_workload_in_every_round(settings, fake, tmp_path):
    found = compared(settings(peers=("vllm",), pythons={"vllm": fake(name="vllm")}))
    assert found["engines"] == {"trouper": "1.2", "vllm": "1.2"}
    assert [(r["engine"], r["requests"], r["output_len"]) for r in found["results"]] == [
        ("trouper", 2, 2), ("vllm", 2, 2), ("trouper", 1, 1), ("vllm", 1, 1),
    ]  # fmt: skip
    for record in found["results"]:
        assert record["all_s"] == [0.25, 0.25]
        assert record["trouper_is"] == 1.0
    assert [r["output_tok_s"] for r in found["results"]] == [16, 16, 4, 4]
    for name in ("trouper", "vllm"):
        lines = [line.split() for line in (tmp_path / f"{name}.log").read_text().splitlines()]
        (pid,) = {pid for pid, _ in lines}
        assert [num for _, num in lines] == ["False", "1", "2", "1", "2", "1"]
        with pytest.raises(ProcessLookupError):
            os.killpg(int(pid), 0)


def test_nobody_but_trouper_rounds_its_weights(settings, fake):
    options = {"peers": ("vllm",), "pythons": {"vllm": fake(name="vllm")}, "quantization": "int4"}
    found = compared(settings(**options), repeats=1)
    assert found["engines"] == {"trouper": "1.2 int4", "vllm": "1.2"}


def test_who_is_not_measured_is_stopped(settings, fake):
    options = settings(peers=("vllm",), pythons={"vllm": fake(name="vllm")})
    with peers.started("vllm", options, WORKS) as peer:
        _, status = os.waitpid(peer._process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        assert os.WSTOPSIG(status) == signal.SIGSTOP
        assert peer.measure([[1]], 3) == (0.25, 3)


def test_sigterm_leaves_no_stopped_process_behind(settings):
    with pytest.raises(output.Interrupted):
        with terminable(), peers.started("trouper", settings()) as peer:
            os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(ProcessLookupError):
        os.killpg(peer._process.pid, 0)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.parametrize(
    ("misbehave", "message"),
    [
        ("raise SystemExit('ValueError: too large')", "exited with code 1: ValueError: too large"),
        ("work['output_len'] = 0", r"vllm generated only 0 tokens of 1 × \(32 in, 8 out\)"),
        ("sys.exit(3)", "vllm exited with code 3: noise"),
        ("print('nonsense', flush=True)", "vllm answered 'nonsense"),
    ],
)
def test_a_peer_that_fails_ends_the_comparison(settings, fake, misbehave, message):
    options = settings(peers=("vllm",), pythons={"vllm": fake(misbehave, "vllm")})
    with pytest.raises(peers.PeerError, match=message):
        compared(options)


LLAMA = """#!{python}
import json, sys
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
print("llama_model_load: error loading model" if options["-m"] == "bad" else "", file=sys.stderr)
if options["-m"] == "bad":
    sys.exit(1)
print("noise")
assert options["--output-format"] == "jsonl", options
print(json.dumps({{"pp": int(options["-npp"]), "t_pp": 0.5, "t_tg": 0.25 * int(options["-ntg"])}}))
"""


def test_llama_cpps_own_program_is_asked_for_same_lengths(tmp_path):
    path = program(tmp_path, LLAMA.format(python=sys.executable), "llama-batched-bench")
    peer = peers.LlamaBinary(path, {"model": "x.gguf", "threads": 2})
    assert peer.measure([[1, 2], [3, 4]], 5) == (0.5 + 4 * 0.25, 10)
    assert peer.measure([[1, 2]], 1) == (0.5, 1)  # the prompt's logits give the only token
    broken = peers.LlamaBinary(path, {"model": "bad", "threads": 2})
    with pytest.raises(peers.PeerError, match="llama_model_load: error loading model"):
        broken.measure([[1]], 1)


def test_missing_optional_peers_are_left_out():
    settings = peers.Settings(model="x", dtype="float32")
    assert settings.engines() == ["trouper", "transformers"]
    assert peers.Settings(model="x", dtype="float32", peers=()).engines() == ["trouper"]


@pytest.mark.slow
def test_trouper_and_transformers_make_same_number_of_tokens(bench, tmp_path):
    path = tmp_path / "report.json"
    options = ["--dtype", "float32", "--workload", "2x5x3", "--repeat", "1", "--output-json", path]
    out = bench("peers", "--peer", "transformers", *options).out
    assert "2 × (5 in, 3 out)" in out
    found = json.loads(path.read_text())
    ours, theirs = found["results"]
    assert (ours["trouper_is"], ours["engine"], theirs["engine"]) == (1, "trouper", "transformers")
    assert found["engines"].keys() == found["ready_s"].keys() == {"trouper", "transformers"}


def test_trouper_may_run_alone(report):
    options = ["--alone", "--dtype", "float32", "--workload", "2x5x3", "--repeat", "1"]
    found = report("peers", *options)
    assert found["engines"] == {"trouper": __version__}
    assert [record["engine"] for record in found["results"]] == ["trouper"]
