"""The benchmark of models by way of transformers: what it writes, and a tiny run."""

import json

import pytest

from trouper.bench import peers
from trouper.bench.studies.models import fallback
from trouper.config.args import EngineArgs
from trouper.config.resolve import resolve


@pytest.mark.parametrize("kind", fallback.MODELS)
def test_the_written_configuration_is_a_model_that_resolves(tmp_path, kind):
    fallback.write_config(tmp_path / kind, kind, 2)
    config = resolve(EngineArgs(str(tmp_path / kind), load_format="dummy"), offline=True)
    assert config.model.architecture == fallback.MODELS[kind]
    assert json.loads((tmp_path / kind / "config.json").read_text())["num_hidden_layers"] == 2


def test_ways_alternate_and_first_round_is_warm_up(monkeypatch):
    """Own code takes a second and more, the library three times as long."""
    clock, calls, turns_s = [0.0], [], {"trouper": [50, 2, 1, 3], "transformers": [9, 3, 6, 9]}

    class Llm:
        def __init__(self, folder, *, model_impl, **_):
            self.model_impl = model_impl

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def generate(self, prompts, params, **_):
            assert [len(prompt["prompt_token_ids"]) for prompt in prompts] == [4, 4]
            assert params.max_tokens == 3
            calls.append(self.model_impl)
            clock[0] += turns_s[self.model_impl].pop(0)

    monkeypatch.setattr(fallback, "LLM", Llm)
    monkeypatch.setattr(fallback, "perf_counter", lambda: clock[0])
    found = fallback.beside_own_code("llama", peers.Workload(2, 4, 3), 3)
    assert calls == ["trouper", "transformers"] * 4
    assert found == {"own_tok_s": 3.0, "by_transformers_tok_s": 1.0, "ratio": 0.333}


@pytest.mark.slow
def test_both_ways_of_computing_a_llama_are_measured(tmp_path, monkeypatch):
    tiny = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2}
    tiny |= {"num_key_value_heads": 2, "vocab_size": 64}
    monkeypatch.setattr(fallback, "SHAPE", {**fallback.SHAPE, **tiny})
    fallback.write_config(tmp_path / "llama", "llama", 1)
    found = fallback.beside_own_code(tmp_path / "llama", peers.Workload(2, 4, 3), 1)
    assert all(figure > 0 for figure in found.values())
