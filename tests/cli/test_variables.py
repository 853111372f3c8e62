"""Variables that nothing reads are named, with the ones that were probably meant."""

import re
from pathlib import Path

import pytest

from trouper.config.args import EngineArgs
from trouper.config.resolve import resolve
from trouper.errors import TrouperValidationError
from trouper.frontends.cli.main import run_line
from trouper.frontends.cli.variables import known_variables, unknown_variables

ROOT = Path(__file__).parents[2]


def test_a_misspelt_variable_is_named_with_the_likely_one(monkeypatch, capsys):
    monkeypatch.setenv("TROUPER_APIKEY", "x")
    assert run_line(["collect-env"]) == 0
    line = "nothing reads the variable TROUPER_APIKEY; did you mean TROUPER_API_KEY?"
    assert line in capsys.readouterr().err


def test_known_ones_and_those_of_kubernetes_are_silent():
    names = [*known_variables(), "TROUPER_PORT_8000_TCP", "TROUPER_SERVICE_HOST", "PATH"]
    assert list(unknown_variables(names)) == []
    (line,) = unknown_variables(["TROUPER_ZZZZZZZZ"])
    assert line == "warning: nothing reads the variable TROUPER_ZZZZZZZZ"


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
