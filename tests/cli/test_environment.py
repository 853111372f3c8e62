"""What a report of the environment says, and what it keeps to itself."""

import json
import subprocess
import sys

import pytest

from trouper.frontends import environment
from trouper.frontends.cli.main import run_line


@pytest.fixture
def cgroup(tmp_path):
    """The limits that a tree of files sets: `cgroup(membership, {path: content})`."""

    def cgroup(membership, files):
        root = tmp_path / "root"
        for path, content in files.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(content)
        (tmp_path / "cgroup").write_text(membership)
        return environment.cgroup_limits(tmp_path / "cgroup", root)

    return cgroup


def test_no_cgroups_are_no_limits(tmp_path):
    found = environment.cgroup_limits(tmp_path / "none", tmp_path)
    assert found == {"cpus": None, "memory_bytes": None}


def test_the_narrowest_limit_on_the_way_to_the_root_counts(cgroup):
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
    assert set(json.loads(out)["environment"]) <= set(environment.VARIABLES)


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
    monkeypatch.setattr(environment, "torch_facts", lambda: {"gpus": [gpu]})
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
