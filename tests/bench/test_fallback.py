"""The benchmark of models by way of transformers: what it writes, and a tiny run."""

import json

import pytest

from trouper.bench import fallback, peers
from trouper.config.args import EngineArgs
from trouper.config.resolve import resolve


@pytest.mark.parametrize("kind", fallback.MODELS)
def test_the_written_configuration_is_a_model_that_resolves(tmp_path, kind):
    fallback.write_config(tmp_path / kind, kind, 2)
    config = resolve(EngineArgs(str(tmp_path / kind), load_format="dummy"), offline=True)
    assert config.model.architecture == fallback.MODELS[kind]
    assert json.loads((tmp_path / kind / "config.json").read_text())["num_hidden_layers"] == 2


@pytest.mark.slow
def test_both_ways_of_computing_a_llama_are_measured(tmp_path, monkeypatch):
    tiny = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2}
    tiny |= {"num_key_value_heads": 2, "vocab_size": 64}
    monkeypatch.setattr(fallback, "SHAPE", {**fallback.SHAPE, **tiny})
    fallback.write_config(tmp_path / "llama", "llama", 1)
    found = fallback.beside_own_code(tmp_path / "llama", peers.Workload(2, 4, 3), 1)
    assert found["own_tok_s"] > 0
    assert found["ratio"] == pytest.approx(
        found["by_transformers_tok_s"] / found["own_tok_s"], rel=0.01
    )
