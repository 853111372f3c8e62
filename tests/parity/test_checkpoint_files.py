"""Folders with stray, sharded, doubled and missing files are read as transformers reads them, or refused."""

import json
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given, settings
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from trouper.actors.executor.weights.checkpoint import Checkpoint
from trouper.actors.executor.workers.model_files import judge
from trouper.config.adapters import WEIGHTS as ADAPTER
from trouper.errors import TrouperValidationError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
CONFIG = LlamaConfig(
    vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
    tie_word_embeddings=False, max_position_embeddings=8,
)  # fmt: skip
torch.manual_seed(0)
WEIGHTS = {name: x.contiguous() for name, x in LlamaForCausalLM(CONFIG).state_dict().items()}
OLDER = {name: x + 1 for name, x in WEIGHTS.items()}
CONSOLIDATED = {"tok_embeddings.weight": torch.ones(16, 8)}
STRAYS = {
    "model_old.safetensors": OLDER, "model-00009-of-00009.safetensors": OLDER, "adapter_model.safetensors": CONSOLIDATED,
    "consolidated.safetensors": CONSOLIDATED, SINGLE: OLDER,
}  # fmt: skip
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def shards():
    names = sorted(WEIGHTS)
    half = len(names) // 2
    return {
        FIRST: {n: WEIGHTS[n] for n in names[:half]},
        SECOND: {n: WEIGHTS[n] for n in names[half:]},
    }


def write(folder, kind, strays, missing):
    (folder / "config.json").write_text(
        json.dumps(CONFIG.to_dict() | {"architectures": ["LlamaForCausalLM"]})
    )
    files = {name: STRAYS[name] for name in strays}
    files |= {SINGLE: WEIGHTS} if kind == "single" else shards()
    for name, tensors in files.items():
        if name != missing:
            save_file(tensors, folder / name, metadata={"format": "pt"})
    if kind == "indexed":
        weight_map = {tensor: file for file, part in shards().items() for tensor in part}
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def by_transformers(folder):
    try:
        return LlamaForCausalLM.from_pretrained(folder, use_safetensors=True).state_dict()
    except OSError:
        return None


def by_trouper(folder):
    try:
        checkpoint = Checkpoint(folder)
        return {name: checkpoint.read(name, shape) for name, shape in checkpoint.shapes.items()}
    except TrouperValidationError:
        return None


@settings(max_examples=40)
@given(
    st.sampled_from(["single", "indexed", "shards"]),
    st.sets(st.sampled_from(sorted(STRAYS))),
    st.sampled_from([None, None, SINGLE, FIRST]),
)
@example("single", {"model_old.safetensors"}, None)
@example("single", {"consolidated.safetensors", "adapter_model.safetensors"}, None)
@example("single", {"model-00009-of-00009.safetensors", "consolidated.safetensors"}, SINGLE)
@example("single", {"model_old.safetensors"}, SINGLE)
@example("indexed", {"model_old.safetensors"}, FIRST)
@example("shards", {"model_old.safetensors"}, None)
def test_a_folder_is_read_as_transformers_reads_it(kind, strays, missing):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, kind, strays, missing)
        expected, found = by_transformers(folder), by_trouper(folder)
        if found is None:
            assert expected is None or missing or kind == "shards"
        elif expected is None:
            # Without `model.safetensors` and an index, only trouper reads the folder: all files together.
            assert kind == "shards" or missing
            files = sorted(folder.glob("*.safetensors"))
            union = {n: x for f in files if f.name != ADAPTER for n, x in load_file(f).items()}
            assert found.keys() == union.keys()
            assert all(torch.equal(found[n], union[n]) for n in found)
        else:
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[n], expected[n]) for n in found)


def test_tensor_in_two_files_is_refused_with_both_names(tmp_path):
    write(tmp_path, "shards", {"model_old.safetensors"}, None)
    with pytest.raises(TrouperValidationError, match=f"{FIRST} and in model_old.safetensors"):
        Checkpoint(tmp_path)


def test_a_missing_shard_is_seen_before_loading(tmp_path):
    write(tmp_path, "indexed", set(), SECOND)
    assert f"lacks {SECOND}" in judge(tmp_path).reason
    write(tmp_path, "indexed", set(), None)
    assert judge(tmp_path).reason == ""


def test_a_missing_shard_is_seen_without_an_index(tmp_path):
    write(tmp_path, "shards", set(), FIRST)
    with pytest.raises(TrouperValidationError, match=f"the folder lacks {FIRST}"):
        Checkpoint(tmp_path)
    assert FIRST in judge(tmp_path).reason
