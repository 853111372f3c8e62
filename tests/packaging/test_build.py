"""A build contains the current modules of the checkout, and a container image gets only the files that a build reads."""

import fnmatch
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
BUILD = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"


def build(checkout, wheels):
    """Build a wheel like pip. Returns the names of its files."""
    subprocess.run(
        [sys.executable, "-c", BUILD, wheels], cwd=checkout, check=True, capture_output=True
    )
    (wheel,) = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if name.endswith(".py")}


def test_build_after_update_omits_deleted_modules(tmp_path):
    checkout, wheels = tmp_path / "checkout", tmp_path / "wheels"
    (checkout / "trouper").mkdir(parents=True)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "trouper/__init__.py"):
        shutil.copy(ROOT / name, checkout / name)
    deleted = checkout / "trouper" / "deleted.py"
    deleted.touch()
    assert build(checkout, wheels) == {"trouper/__init__.py", "trouper/deleted.py"}
    deleted.unlink()
    assert not (checkout / "build").exists()
    left_by_an_older_version = checkout / "build" / "lib" / "trouper" / "deleted.py"
    left_by_an_older_version.parent.mkdir(parents=True)
    left_by_an_older_version.touch()
    assert build(checkout, wheels) == {"trouper/__init__.py"}


def in_an_image(path):
    """Return whether a path of the checkout is sent to docker: the last matching rule decides."""
    sent = True
    for rule in (ROOT / ".dockerignore").read_text().splitlines():
        if rule and not rule.startswith("#"):
            pattern = rule.lstrip("!").removeprefix("**/")
            parts = path.split("/")
            heads = ["/".join(parts[: i + 1]) for i in range(len(parts))]
            if any(
                fnmatch.fnmatch(p, pattern) for p in ([*heads, *parts] if "**" in rule else heads)
            ):
                sent = rule.startswith("!")
    return sent


def test_image_has_what_build_reads_and_nothing_else():
    project = PYPROJECT["project"]
    read = {"pyproject.toml", "setup.py", project["readme"], *project["license-files"]}
    read |= {link.readlink().name for link in (ROOT / "trouper").iterdir() if link.is_symlink()}
    read.add("trouper")
    assert {path.name for path in ROOT.iterdir() if in_an_image(path.name)} == read
    assert in_an_image("trouper/demo/model.safetensors")
    assert in_an_image("trouper/actors")
    assert not in_an_image("bench/results/cpu-offline.json")
    assert not in_an_image("actors/engine/__pycache__/wiring.cpython-312.pyc")
    assert not in_an_image(".venv/bin/python")
    assert not in_an_image(".git/config")
