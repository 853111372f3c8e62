"""The benchmark of draft models: its pairs of models, and a run on the bundled one."""

import argparse

import pytest
import torch

from trouper.bench.studies.models import draft_model
from trouper.config.model import DEMO_MODEL

TENSORS = {
    "model.embed_tokens.weight": torch.ones(3),
    "model.layers.0.mlp.down_proj.weight": torch.ones(2),
    "model.layers.1.mlp.down_proj.weight": torch.ones(2),
    "model.layers.1.mlp.up_proj.weight": torch.ones(2),
}


def test_the_draft_model_is_the_first_layers():
    config = {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
    config, kept = draft_model.first_layers(config, TENSORS, 1)
    assert config == {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    assert list(kept) == list(TENSORS)[:2]


def test_what_the_other_layers_add_is_weakened():
    found = draft_model.weakened(TENSORS, 1, 0.5)
    weakened = [name for name in TENSORS if not torch.equal(found[name], TENSORS[name])]
    assert weakened == ["model.layers.1.mlp.down_proj.weight"]
    assert found[weakened[0]].tolist() == [0.5, 0.5]


@pytest.mark.slow
def test_pair_that_says_same_accepts_every_draft(tmp_path):
    config, tensors = draft_model.read_folder(DEMO_MODEL)
    draft_model.write_folder(tmp_path / "draft", *draft_model.first_layers(config, tensors, 1))
    draft_model.write_folder(tmp_path / "model", config, draft_model.weakened(tensors, 1, 0.0))
    options = argparse.Namespace(input_len=8, output_len=16, rounds=1, drafts=3, quantization=None)
    found = draft_model.measure(tmp_path, options)
    assert found["num_right"] == found["num_drafted"] > 0
    assert found["tokens_per_step"] > 1
