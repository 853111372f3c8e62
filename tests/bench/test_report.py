"""A report says what it was made with, and nothing about who made it."""

import getpass
import json
import re
import socket
from pathlib import Path

import pytest

from trouper import __version__
from trouper.bench import report
from trouper.errors import TrouperValidationError

RESULTS = Path(__file__).parents[2] / "bench" / "results"


def test_a_report_names_versions_processor_and_arguments():
    about = report.about(["bench", "latency"])
    assert about["versions"]["trouper"] == __version__
    assert "torch" in about["versions"]
    assert about["cpu"]
    assert about["cores"] >= 1
    assert about["arguments"] == ["bench", "latency"]


def test_a_report_names_neither_host_nor_user_nor_folders():
    text = json.dumps(report.about(["bench"]))
    for secret in (socket.gethostname(), str(Path.home()), str(Path.cwd()), getpass.getuser()):
        assert secret not in re.findall(r"[\w/.-]+", text)


def test_keys_are_not_written_down():
    typed = ["--api-key", "sk-1", "--hf-token=sk-2", "--seed", "3"]
    assert report.without_secrets(typed) == ["--api-key", "***", "--hf-token=***", "--seed", "3"]


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(TrouperValidationError, match=r"Is a directory.*parameter=plot"):
        report.check_writable("plot", str(tmp_path))
    with pytest.raises(TrouperValidationError, match="parameter=output_json"):
        report.write(str(tmp_path / "none" / "x.json"), {})


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_the_results_in_the_repository_are_reports(path):
    found = json.loads(path.read_text())
    assert found.pop("about")["versions"]["trouper"]
    assert found
