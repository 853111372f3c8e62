"""Recurrent layers in config.json: whether there are any, how many layers keep keys, and what they exclude."""

import json

import pytest

from trouper.config.args import EngineArgs
from trouper.config.checkpoint.recurrent import keeps_state, num_attention_layers
from trouper.config.model import ModelConfig, kv_bytes_per_token
from trouper.config.resolve import resolve
from trouper.errors import UnsupportedFeatureError

CASES = [
    ({"model_type": "llama"}, None),
    ({"model_type": "gemma3", "layer_types": ["sliding_attention", "full_attention"] * 4}, None),
    ({"model_type": "granitemoehybrid", "layer_types": ["attention"] * 8}, None),
    (
        {
            "model_type": "qwen3_5_text",
            "layer_types": [*["linear_attention"] * 3, "full_attention"],
        },
        1,
    ),
    ({"model_type": "qwen3_next", "full_attention_interval": 4}, 2),
    ({"model_type": "lfm2", "layer_types": ["conv", "full_attention"]}, 1),
    ({"model_type": "lfm2", "full_attn_idxs": [2, 5]}, 2),
    ({"model_type": "jamba", "attn_layer_period": 4, "attn_layer_offset": 1}, 2),
    ({"model_type": "bamba", "attn_layer_indices": [1, 3, 5]}, 3),
    ({"model_type": "nemotron_h", "hybrid_override_pattern": "M-M*M-M*"}, 2),
    ({"model_type": "nemotron_h", "layers_block_type": ["mamba", "attention", "mlp", "moe"]}, 1),
    ({"model_type": "zamba2", "layers_block_type": ["mamba", "hybrid", "mamba"]}, 1),
    ({"model_type": "falcon_h1"}, 8),
    ({"model_type": "mamba2"}, 0),
]


@pytest.mark.parametrize(("fields", "num_layers"), CASES)
def test_attention_layers_are_counted_in_each_family(fields, num_layers):
    config = {"num_hidden_layers": 8, **fields}
    assert keeps_state(config) == (num_layers is not None)
    assert num_attention_layers(config) == (8 if num_layers is None else num_layers)


@pytest.fixture
def folder(tmp_path):
    """Writes a config.json."""

    def write(config):
        (tmp_path / "config.json").write_text(json.dumps(config))
        return str(tmp_path)

    return write


HYBRID = {
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "layer_types": ["conv", "full_attention", "conv", "conv"],
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def test_token_bytes_are_those_of_attention_layers(folder):
    model = ModelConfig.load(EngineArgs(folder(HYBRID)))
    assert kv_bytes_per_token(model, "float32") == 1 * 2 * 2 * 8 * 4


@pytest.mark.parametrize(
    ("options", "parameter"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size"),
        ({"runner": "pooling"}, "runner"),
    ],
)
def test_options_that_states_exclude_are_refused(folder, options, parameter):
    with pytest.raises(UnsupportedFeatureError, match="recurrent states") as error:
        resolve(EngineArgs(folder(HYBRID), **options))
    assert error.value.parameter == parameter


def test_recurrent_models_may_have_stages(folder):
    assert resolve(EngineArgs(folder(HYBRID), pipeline_parallel_size=2)).num_stages == 2


def test_recurrent_models_have_small_blocks(folder):
    assert resolve(EngineArgs(folder(HYBRID))).block_size == 32
    assert resolve(EngineArgs(folder(HYBRID), block_size=64)).block_size == 64


def test_draft_model_with_states_is_refused(folder):
    path = folder(HYBRID)
    with pytest.raises(
        UnsupportedFeatureError, match="recurrent layers, which cannot undo"
    ) as error:
        resolve(EngineArgs(path, speculative_config={"model": path}))
    assert error.value.parameter == "speculative_config"
