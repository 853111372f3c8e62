"""The examples of docs/examples run as they are printed, with a small model in place of the hub's."""

import runpy
import sys
from pathlib import Path

import pytest

import trouper.config.model

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
SHOWS = {
    "offline_batch": "Generated: '",
    "streaming_loop": "[完成] Request request-1",
    "cancellation": "已取消 3 个请求",
    "priority": "完成: high-priority-urgent",
    "async_concurrency": "\n",
    "prequeue": "2 requests in",
}


@pytest.fixture(autouse=True)
def no_hub(monkeypatch):
    """The hub's model is not to be had; the bundled one stands in for it."""
    monkeypatch.setattr(
        trouper.config.model,
        "_download",
        lambda args, repo_id, revision: trouper.config.model.DEMO_MODEL,
    )


@pytest.mark.parametrize("name", SHOWS)
@pytest.mark.filterwarnings("ignore:dropped without close:ResourceWarning")  # they never close
def test_an_example_runs_as_printed(name, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [name])
    engines = runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert SHOWS[name] in capsys.readouterr().out
    for value in engines.values():
        if hasattr(value, "close") and not isinstance(value, type):
            value.close()


def test_all_six_of_the_priority_example_finish(capsys):
    engines = runpy.run_path(str(EXAMPLES / "priority.py"))
    engines["engine"].close()
    finished = [line for line in capsys.readouterr().out.splitlines() if line.startswith("完成")]
    assert len(finished) == 6
