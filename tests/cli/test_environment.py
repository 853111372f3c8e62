"""What a report of the environment says, and what it keeps to itself.

Variables that nothing reads are named, with the ones that were probably meant.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from trouper.config.args import EngineArgs
from trouper.config.resolve import resolve
from trouper.errors import TrouperValidationError
from trouper.frontends.cli import collect_env
from trouper.frontends.cli.main import known_variables, run_line, unknown_variables


@pytest.fixture
def cgroup(tmp_path):
    """The limits that a tree of files sets: `cgroup(membership, {path: content})`."""

    def cgroup(membership, files):
        root = tmp_path / "root"
        for path, content in files.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(content)
        (tmp_path / "cgroup").write_text(membership)
        return collect_env.cgroup_limits(tmp_path / "cgroup", root)

    return cgroup


def test_no_cgroups_are_no_limits(tmp_path):
    found = collect_env.cgroup_limits(tmp_path / "none", tmp_path)
    assert found == {"cpus": None, "memory_bytes": None}


def test_narrowest_limit_on_way_to_root_counts(cgroup):
    files = {
        "memory.max": "3000\n", "a/memory.max": "1000\n", "a/b/memory.max": "max\n",
        "cpu.max": "max 100000\n", "a/b/cpu.max": "150000 100000\n", "other/memory.max": "1\n",
    }  # fmt: skip
    assert cgroup("0::/a/b\n", files) == {"cpus": 1.5, "memory_bytes": 1000}


def test_version_1_of_cgroups_is_understood(cgroup):
    files = {
        "memory/a/memory.limit_in_bytes": "2000", "memory/memory.limit_in_bytes": str(2**63 - 4096),
        "cpu,cpuacct/cpu.cfs_quota_us": "50000", "cpu,cpuacct/cpu.cfs_period_us": "100000",
        "cpu,cpuacct/b/cpu.cfs_quota_us": "-1", "cpu,cpuacct/b/cpu.cfs_period_us": "100000",
    }  # fmt: skip
    found = cgroup("3:memory:/a\n2:cpu,cpuacct:/b\n1:name=systemd:/\n", files)
    assert found == {"cpus": 0.5, "memory_bytes": 2000}


def test_only_harmless_variables_are_shown(capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("TROUPER_API_KEY", "key_secret")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for arguments in ([], ["--json"]):
        assert run_line(["collect-env", *arguments]) == 0
        out, err = capsys.readouterr()
        assert "secret" not in out
        assert "OMP_NUM_THREADS" in out
        assert err == ""
    assert set(json.loads(out)["environment"]) <= set(collect_env.VARIABLES)


def test_text_and_json_tell_the_same(capsys):
    run_line(["collect-env"])
    text = capsys.readouterr().out
    run_line(["collect-env", "--json"])
    facts = json.loads(capsys.readouterr().out)
    assert f"trouper: {facts['trouper']}\n" in text
    assert f"  usable: {facts['cpu']['usable']}\n" in text
    assert f"  torch: {facts['packages']['torch']}\n" in text
    assert f"  total: {facts['memory']['total_bytes'] / 2**30:.1f} GiB\n" in text
    assert facts["torch"]["threads"] >= 1


def test_a_gpu_has_its_own_lines(capsys, monkeypatch):
    gpu = {"name": "H200", "memory_bytes": 140 * 2**30, "capability": "9.0"}
    monkeypatch.setattr("trouper.actors.executor.device.torch_facts", lambda: {"gpus": [gpu]})
    run_line(["collect-env"])
    lines = "  gpus:\n    0:\n      name: H200\n      memory: 140.0 GiB\n      capability: 9.0\n"
    assert lines in capsys.readouterr().out


def test_it_works_without_torch():
    code = """
import sys
for name in ("torch", "transformers", "tokenizers"):
    sys.modules[name] = None  # as if not installed
from trouper.frontends.cli.main import run_line
assert run_line(["collect-env"]) == 0
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "\ntorch: none\n" in done.stdout
    assert done.stderr == ""


ROOT = Path(__file__).parents[2]


def test_misspelt_variable_is_named_with_likely_one(monkeypatch, capsys):
    monkeypatch.setenv("TROUPER_APIKEY", "x")
    assert run_line(["collect-env"]) == 0
    line = "the environment variable TROUPER_APIKEY has no effect; did you mean TROUPER_API_KEY?"
    assert line in capsys.readouterr().err


def test_known_ones_and_those_of_kubernetes_are_silent():
    names = [*known_variables(), "TROUPER_PORT_8000_TCP", "TROUPER_SERVICE_HOST", "PATH"]
    assert list(unknown_variables(names)) == []
    (line,) = unknown_variables(["TROUPER_ZZZZZZZZ"])
    assert line == "warning: the environment variable TROUPER_ZZZZZZZZ has no effect"


def test_every_variable_that_the_code_reads_is_known():
    known = {*known_variables(), "TROUPER_COMPLETE"}
    for folder in ("trouper/config", "actors", "frontends", "kernels"):
        for file in (ROOT / folder).rglob("*.py"):
            for name in re.findall(r'"(TROUPER_[A-Z0-9_]*[A-Z0-9])"', file.read_text()):
                assert name in known, (file, name)


def test_an_adaptive_threshold_needs_a_threshold():
    with pytest.raises(TrouperValidationError, match="has no effect without long_prefill"):
        resolve(EngineArgs(long_prefill_token_threshold_adaptive=True))
    args = EngineArgs(long_prefill_token_threshold_adaptive=True, long_prefill_token_threshold=512)
    assert resolve(args).scheduler.long_prefill_token_threshold_adaptive
