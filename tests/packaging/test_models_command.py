"""`trouper models` lists the models on this machine, and explains why a missing hub id cannot be used."""

import json
import shutil

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from trouper.config.args import EngineArgs
from trouper.config.model import DEMO_MODEL, ModelConfig
from trouper.errors import TrouperValidationError
from trouper.frontends.cli.main import run_line

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip


def listed(capsys, *arguments):
    assert run_line(["models", "--json", *map(str, arguments)]) == 0
    return {entry.pop("model"): entry for entry in json.loads(capsys.readouterr().out)}


@pytest.fixture
def empty_cache(tmp_path):
    return "--download-dir", str(tmp_path / "no-cache")


def test_folders_are_listed_with_command_or_reason(capsys, tmp_path, empty_cache):
    files = {
        "pickled": {"config.json": json.dumps(LLAMA), "pytorch_model.bin": "x"},
        "empty": {"config.json": json.dumps(LLAMA)},
        "broken": {"config.json": "{", "model.safetensors": ""},
        "odd": {"config.json": json.dumps({**LLAMA, "num_key_value_heads": 3}),
                "model.safetensors": ""},
    }  # fmt: skip
    for method in ("fp8", "aqlm"):
        config = {**LLAMA, "quantization_config": {"quant_method": method}}
        files[method] = {"config.json": json.dumps(config), "model.safetensors": ""}
    for name, contents in files.items():
        (tmp_path / name).mkdir()
        for file, text in contents.items():
            (tmp_path / name / file).write_text(text)
    shutil.copytree(DEMO_MODEL, tmp_path / "demo")
    found = {
        name.rpartition("/")[2]: e for name, e in listed(capsys, *empty_cache, tmp_path).items()
    }
    assert found["demo"]["served_by"] == "trouper"
    assert found["demo"]["size_bytes"] > 10_000_000
    reasons = {name: entry["reason"] for name, entry in found.items()}
    assert "pickled" in reasons["pickled"]
    assert "no weights" in reasons["empty"]
    assert "config.json cannot be read" in reasons["broken"]
    assert "query heads" in reasons["odd"]
    assert found["fp8"]["served_by"] == "trouper"
    assert "quant_method: not supported: 'aqlm'" in reasons["aqlm"]
    assert "GGUF" in reasons["aqlm"]


def test_models_of_the_hub_have_their_ids(capsys, tmp_path):
    repo = tmp_path / "models--some--model"
    snapshot = repo / "snapshots" / ("a" * 40)
    shutil.copytree(DEMO_MODEL, snapshot)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("a" * 40)
    (repo / "blobs").mkdir()
    found = listed(capsys, "--download-dir", tmp_path)
    assert found["some/model"]["type"] == "Qwen3ForCausalLM"
    assert found["some/model"]["path"] == str(snapshot)


def test_a_machine_without_models_says_so(capsys, empty_cache):
    assert run_line(["models", *empty_cache]) == 0
    assert f"no models in the hub's cache {empty_cache[1]}" in capsys.readouterr().out
    assert run_line(["models", *empty_cache, "/no/such/folder"]) == 2


def test_hub_id_without_network_names_searched_folders(monkeypatch):
    def fail(*_, **__):
        raise LocalEntryNotFoundError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(TrouperValidationError, match=r"hub cannot be reached.*some/model"):
        ModelConfig.load(EngineArgs("some/model"))


def test_split_model_has_total_size(capsys, tmp_path, empty_cache):
    (tmp_path / "Q4_K_M").mkdir()
    files = [tmp_path / "Q4_K_M" / f"x-{n:05}-of-00003.gguf" for n in (1, 2, 3)]
    for file in (*files, tmp_path / "x-Q8_0.gguf", tmp_path / "mmproj-F16.gguf"):
        file.write_bytes(b"GGUF" * 8)
    found = listed(capsys, *empty_cache, tmp_path)
    sizes = {name: entry["size_bytes"] for name, entry in found.items()}
    assert sizes == {str(files[0]): 96, str(tmp_path / "x-Q8_0.gguf"): 32}
    (found,) = listed(capsys, *empty_cache, files[0]).values()
    assert found["size_bytes"] == 96


@pytest.mark.parametrize("extra", [[], ["config.json"]])
def test_hub_gguf_files_have_runnable_names(capsys, tmp_path, extra):
    repo = tmp_path / "models--some--model"
    snapshot = repo / "snapshots" / ("a" * 40)
    for name in (*extra, "Q8_0/x-Q8_0.gguf", "x-Q4_0.gguf"):
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / name).write_bytes(b"GGUF")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("a" * 40)
    (repo / "blobs").mkdir()
    found = listed(capsys, "--download-dir", tmp_path)
    assert found.keys() == {"some/model:Q8_0/x-Q8_0", "some/model:x-Q4_0"}
