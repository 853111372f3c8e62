"""Commands as a user types them."""

import io
import json

import pytest

from trouper.bench.studies.command import run_study
from trouper.frontends.cli.main import run_line


@pytest.fixture(autouse=True)
def plain_terminal(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO())
    monkeypatch.setattr("warnings.showwarning", None)  # the command line has its own; undone after


@pytest.fixture
def bench(capsys):
    """`bench("latency", …)`: what it printed; `code` is what it is to end with."""

    def bench(*arguments, code=0):
        found = run_line(["bench", *map(str, arguments)])
        printed = capsys.readouterr()
        assert found == code, printed.err
        return printed

    return bench


@pytest.fixture
def report(bench):
    """The report of a command, as `--json` prints it."""
    return lambda *arguments: json.loads(bench(*arguments, "--json").out)


@pytest.fixture
def study(capsys):
    """Run a study's command with some arguments and return its report."""

    def study(command, *arguments):
        found = run_study(command, [*map(str, arguments), "--json"])
        printed = capsys.readouterr()
        assert found == 0, printed.err
        return json.loads(printed.out)

    return study
