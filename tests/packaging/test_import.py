"""Imports are cheap and have no side effects, and the public names resolve."""

import re
import subprocess
import sys
import tomllib
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import pytest

import trouper

HEAVY = (
    "llvmlite",
    "numpy",
    "prompt_toolkit",
    "pyarrow",
    "torch",
    "transformers",
    "tokenizers",
    "trio",
    "triton",
)


def loaded_after(code):
    """Return the heavy modules that a fresh interpreter has loaded after `code`."""
    report = f"{code}\nimport sys\nprint(*(set(sys.modules) & set({HEAVY!r})), file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", report], capture_output=True, text=True, check=True
    )
    return done.stderr.split()


def test_import_trouper_loads_nothing_heavy():
    assert loaded_after("import trouper; trouper.SamplingParams, trouper.EngineArgs") == []


def test_help_loads_nothing_heavy():
    commands = ("generate", "chat", "complete", "serve", "run-batch", "collect-env")
    helps = [["--help"], ["bench", "throughput", "--help"]]
    helps += [[command, "--help"] for command in commands]
    run = "from trouper.frontends.cli.main import run_line"
    assert loaded_after(f"{run}\nfor help in {helps!r}: assert run_line(help) == 0") == []


def test_server_application_does_not_load_torch():
    assert "torch" not in loaded_after("import trouper.frontends.server.asgi.app")


def test_the_cpu_path_does_not_load_triton():
    assert "triton" not in loaded_after("import trouper.actors.executor.devices.threaded")


def test_the_cpu_path_does_without_llvmlite():
    absent = "import sys; sys.modules['llvmlite'] = None"
    assert "llvmlite" in loaded_after(
        f"{absent}; import trouper.actors.executor.runners.cpu.runner"
    )  # as None


def canonical(requirement):
    """The normalised name of a requirement or distribution."""
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", requirement)[0]).lower()


def packages_of_extras():
    """The packages that only extras install: no requirement of the base leads to them."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    left, base = list(project["dependencies"]), set()
    while left:
        requirement = left.pop()
        if canonical(requirement) not in base and "extra ==" not in requirement:
            base.add(canonical(requirement))
            with suppress(metadata.PackageNotFoundError):
                left += metadata.requires(canonical(requirement)) or ()
    return {
        package
        for package, owners in metadata.packages_distributions().items()
        if not base.intersection(map(canonical, owners))
    } - {"trouper", "pip", "setuptools", "pkg_resources", "_distutils_hack"}


@pytest.mark.parametrize(
    "job",
    [
        'assert run_line(["generate", "def f(", "--max-tokens", "1"]) == 0',
        "import trouper.frontends.server.asgi.app, trouper.actors.engine.wiring",
    ],
    ids=["generate", "server"],
)
def test_base_install_suffices(job):
    blocked = sorted(packages_of_extras())
    assert "opentelemetry" in blocked
    code = f"import sys\nfor name in {blocked!r}: sys.modules[name] = None\nfrom trouper.frontends.cli.main import run_line\n{job}"
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_all_is_sorted_and_resolves():
    assert trouper.__all__ == sorted(trouper.__all__, key=lambda name: (not name.isupper(), name))
    for name in trouper.__all__:
        assert getattr(trouper, name).__name__ == {"AsyncLLM": "AsyncLLMEngine"}.get(name, name)


def test_lazy_names_are_listed_and_vllm_names_work():
    assert set(trouper.__all__) <= set(dir(trouper))
    assert trouper.AsyncLLM is trouper.AsyncLLMEngine
    assert issubclass(trouper.AsyncEngineArgs, trouper.EngineArgs)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'trouper' has no attribute 'Trooper'"):
        trouper.Trooper  # noqa: B018
