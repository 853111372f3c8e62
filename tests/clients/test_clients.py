"""Each client's script succeeds with a server process. A client without its package is skipped.

`CLIENTS_PYTHON` names the interpreter of another environment that has the packages of the extra `clients`, and the
demo model's answers make no sense, so the scripts check forms only.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.process import started

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PYTHON = os.environ.get("CLIENTS_PYTHON", sys.executable)
SCRIPTS = {
    "openai": "openai_client.py",
    "anthropic": "anthropic_client.py",
    "litellm": "litellm_client.py",
    "langchain_openai": "langchain_client.py",
    "instructor": "instructor_client.py",
    "ollama": "ollama_client.py",
}
COMPLETIONS = "http://127.0.0.1:{port}/v1/completions"
LM_EVAL = [
    "-m", "lm_eval", "--model", "local-completions", "--tasks", "trouper_votes",
    "--include_path", "tests/clients/lm_eval_task", "--model_args",
]  # fmt: skip
# Clients send nothing elsewhere, and litellm reads the prices that it brings.
QUIET = {"HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "DO_NOT_TRACK": "1"}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clients") / "journal"
    with started("--served-model-name", "demo", "--journal", str(folder)) as process:
        yield process


@pytest.fixture(scope="module")
def pooling_server():
    with started("--runner", "pooling") as process:
        yield process


def run_client(package, *arguments):
    """Run a client's script and return its stdout; skip the test if the package is missing."""
    search = (
        f"import importlib.util; raise SystemExit(importlib.util.find_spec({package!r}) is None)"
    )
    if subprocess.run([PYTHON, "-c", search], check=False).returncode:
        pytest.skip(f"{package} is not installed")
    done = subprocess.run(
        [PYTHON, *arguments], capture_output=True, text=True, env={**os.environ, **QUIET}, cwd=ROOT,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("package", "script"), SCRIPTS.items(), ids=SCRIPTS)
def test_a_client_gets_what_it_asks_for(server, pooling_server, package, script):
    urls = [f"http://127.0.0.1:{each.port}" for each in (server, pooling_server)]
    run_client(package, str(HERE / script), *urls)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("package", ["ollama", "eventsource"])
def test_unmodified_javascript_client(server, pooling_server, package):
    folder = os.environ.get("AGENTS")
    if folder is None or not (Path(folder) / "node_modules" / package).is_dir():
        pytest.skip(f"AGENTS names no folder that has the npm package {package}")
    urls = [f"http://127.0.0.1:{each.port}" for each in (server, pooling_server)]
    script = str(HERE / f"{package}_client.mjs")
    done = subprocess.run(
        ["node", script, folder, *urls], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.timeout(300)
def test_lm_eval_scores_choices_by_echoed_logprobs(server):
    url = COMPLETIONS.format(port=server.port)
    model = f"model=demo,base_url={url},tokenizer=trouper/demo,max_length=512"
    assert "trouper_votes" in run_client("lm_eval", *LM_EVAL, model)
