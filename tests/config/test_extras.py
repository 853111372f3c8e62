"""The command that installs what is missing."""

import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from trouper import extras

REQUIRED = [
    "anyio>=4.16",
    'llguidance<2,>=1.9; extra == "grammar"',
    "hypercorn[trio]>=0.18; extra == 'server'",
    'uvloop>=0.22; sys_platform != "win32" and extra == "server"',
]


@pytest.mark.parametrize(
    ("extra", "command"),
    [
        ("grammar", "pip install 'llguidance<2,>=1.9'"),
        ("server", "pip install 'hypercorn[trio]>=0.18' 'uvloop>=0.22'"),
        ("gram", "install trouper with its extra `gram`"),
    ],
)
def test_the_hint_names_the_packages_of_the_extra(monkeypatch, extra, command):
    monkeypatch.setattr(metadata, "requires", lambda _: REQUIRED)
    assert extras.install_hint(extra) == command


def test_feature_of_requests_whose_package_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(extras, "REQUEST_EXTRAS", {"a": ("json", "grammar"), "b": ("no_such", "b")})
    assert extras.missing_features() == {"b": "install trouper with its extra `b`"}


def test_the_server_brings_every_package_that_requests_need():
    pyproject = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    brought = pyproject["project"]["optional-dependencies"]
    for _, extra in extras.REQUEST_EXTRAS.values():
        assert set(brought[extra]) <= set(brought["server"])


def test_sources_that_are_not_installed_still_have_hint(monkeypatch):
    def missing(_):
        raise metadata.PackageNotFoundError

    monkeypatch.setattr(metadata, "requires", missing)
    assert extras.install_hint("grammar") == "install trouper with its extra `grammar`"
