"""The measures of prose in `scripts/words.py` see what they should, and their budgets hold."""

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "words.py"


@pytest.fixture(scope="module")
def words():
    spec = importlib.util.spec_from_file_location("words", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def module_file(tmp_path, source):
    path = tmp_path / "module.py"
    path.write_text(source)
    return path


def test_only_public_docstrings_are_measured(words, tmp_path):
    path = module_file(
        tmp_path,
        '"""The module."""\n\n'
        'class Shown:\n    """Shown class."""\n\n'
        '    def method(self):\n        """Shown method."""\n\n'
        '    def _hidden(self):\n        """Hidden method."""\n\n\n'
        'def bare():\n    pass\n\n\ndef _private():\n    """Hidden function."""\n',
    )
    assert sorted(words.public_docstrings(path)) == ["Shown class.", "Shown method."]


def test_units_are_no_glosses(words, tmp_path):
    path = module_file(
        tmp_path,
        "A = 1  # bytes\nB = 2  # [T, E]\nC = 3  # the reason why it is three\n# D\nD = 4\n",
    )
    assert [is_gloss for _, is_gloss, _ in words.comments_of(path)] == [False, False, True, False]


@pytest.mark.parametrize(
    ("has", "finding"),
    [
        ((3.0, 20, 25), None),
        ((3.1, 20, 25), "markers"),
        ((3.0, 21, 25), "glosses"),
        ((3.0, 20, 24), "docstrings"),
    ],
)
def test_worse_measures_are_findings(words, monkeypatch, has, finding):
    monkeypatch.setitem(words.BUDGETS, "folder", words.Budget(3.0, 20, 25))
    found = list(words.over_budget("folder", words.Budget(*has)))
    assert len(found) == (finding is not None)
    assert not found or finding in found[0]


@pytest.mark.parametrize("folder", ["docs", "scripts"])
def test_folder_keeps_its_budget(words, folder):
    assert not list(words.over_budget(folder, words.measure(folder)))
