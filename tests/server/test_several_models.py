"""A server process with several models: names, states, metrics, failures; and streams that survive swaps and killed workers."""

import json
import shutil
from pathlib import Path

import pytest

from trouper.config.context import read_text

from .process import started

DEMO = Path(__file__).parents[2] / "trouper" / "demo"
JSON = [("content-type", "application/json")]
PROMPTS = ["def f(", "import os\n", "class A:\n    def", "for x in"]


def post(server, path, body, wanted=200):
    status, _, answer = server.request("POST", path, json.dumps(body).encode(), JSON)
    assert status == wanted, answer
    return json.loads(answer)


def get(server, path):
    status, _, answer = server.request("GET", path)
    assert status == 200, answer
    return answer if path == "/metrics" else json.loads(answer or b"null")


def completion(server, model, prompt, seed=0, num=12):
    body = {"model": model, "prompt": prompt, "max_tokens": num, "seed": seed}
    return post(server, "/v1/completions", body)["choices"][0]["text"]


def workers(pid):
    """The process ids of the workers of a server."""
    folder = Path(f"/proc/{pid}/task")
    return [int(c) for task in folder.iterdir() for c in read_text(task / "children").split()]


def resident(pids):
    texts = [read_text(Path(f"/proc/{pid}/smaps_rollup")) for pid in pids]
    lines = [line.split() for text in texts for line in text.splitlines()]
    return sum(int(words[1]) * 1024 for words in lines if words[0] == "Pss:")


@pytest.fixture(scope="module")
def damaged(tmp_path_factory):
    folder = tmp_path_factory.mktemp("damaged") / "model"
    shutil.copytree(DEMO, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    return folder


@pytest.fixture(scope="module")
def server(damaged, tmp_path_factory):
    file = tmp_path_factory.mktemp("models") / "models.toml"
    file.write_text(
        f"""
        memory-budget = "420MiB"
        turn = "0.3s"

        [chat]
        model = "{DEMO}"
        alias = ["assistant"]

        [code]
        model = "{DEMO}"

        [broken]
        model = "{damaged}"
        """
    )
    with started("--models", str(file), "--dev-mode", "--max-worker-restarts", "100") as found:
        yield found


@pytest.mark.slow
def test_models_answer_under_their_names(server):
    text = completion(server, "chat", PROMPTS[0])
    for name in ("assistant", "chat:latest", "code"):
        assert completion(server, name, PROMPTS[0]) == text
    cards = {card["id"]: card for card in get(server, "/v1/models")["data"]}
    assert list(cards) == ["chat", "assistant", "code", "broken"]
    assert cards["code"]["max_model_len"] == 512
    assert cards["code"]["state"] == "awake"
    assert cards["chat"]["state"] in ("cold", "dozing", "asleep")
    assert cards["broken"]["status"] == {"value": "unloaded"}
    assert get(server, "/v1/models/code")["id"] == "code"
    assert (
        post(server, "/v1/completions", {"prompt": "a"}, 400)["error"]["code"] == "model_required"
    )
    error = post(server, "/v1/completions", {"model": "none", "prompt": "a"}, 404)["error"]
    assert error["code"] == "model_not_found"
    assert "code" in error["message"]


@pytest.mark.slow
def test_broken_model_harms_no_other(server):
    error = post(server, "/v1/completions", {"model": "broken", "prompt": "a"}, 503)["error"]
    assert error["code"] == "model_failed"
    assert completion(server, "chat", PROMPTS[1])
    assert server.request("GET", "/health/ready")[0] == 200
    # The reason stays after the pause, in which the state is failed.
    assert get(server, "/v1/models/broken")["error"] in error["message"]


@pytest.mark.slow
def test_ollama_lists_and_unloads(server):
    post(server, "/api/generate", {"model": "chat", "keep_alive": "1h"})
    (shown,) = (each for each in get(server, "/api/ps")["models"] if each["name"] == "chat:latest")
    assert not shown["expires_at"].startswith("9999")
    assert len(get(server, "/api/tags")["models"]) == 4
    assert post(server, "/models/unload", {"model": "chat"})["state"] == "cold"
    assert "chat:latest" not in [each["name"] for each in get(server, "/api/ps")["models"]]
    assert post(server, "/models/load", {"model": "chat"})["state"] == "awake"
    answer = post(server, "/api/generate", {"model": "chat", "keep_alive": 0})
    assert answer["done_reason"] == "unload"
    post(server, "/models/load", {"model": "unknown"}, 404)


@pytest.mark.slow
def test_metrics_have_each_family_once(server):
    for name in ("chat", "code"):
        completion(server, name, PROMPTS[0])
    lines = get(server, "/metrics").decode().splitlines()
    families = [line for line in lines if line.startswith("# TYPE")]
    assert len(families) == len(set(families))
    tokens = [line for line in lines if line.startswith("trouper:generation_tokens_total")]
    assert {name for name in ("chat", "code") if any(name in line for line in tokens)} == {
        "chat",
        "code",
    }
    assert 'trouper:model_state{model_name="code",state="awake"} 1.0' in lines


@pytest.mark.slow
def test_administrator_sleeps_and_wakes_one_model(server):
    completion(server, "code", PROMPTS[0])
    assert server.request("POST", "/sleep?model=code&level=1&mode=keep")[0] == 200
    assert get(server, "/is_sleeping?model=code") == {"is_sleeping": True}
    assert server.request("POST", "/wake_up?model=code")[0] == 200
    assert completion(server, "code", PROMPTS[0])
