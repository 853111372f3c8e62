"""Folders of safetensors, whole and broken."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from trouper.actors.executor.runners.cpu.runner import CpuRunner
from trouper.actors.executor.weights import checkpoint
from trouper.actors.messages.steps import Sampling
from trouper.errors import TrouperValidationError, UnsupportedFeatureError

from .driver import Driver, engine_config, random_prompts
from .test_architectures import LAYER_NORMED, VOCAB, check_against, tiny_model

FILE = "model.safetensors"


@pytest.fixture
def folder(tmp_path):
    tiny_model("Qwen3", {"num_hidden_layers": 2, "tie_word_embeddings": True}, tmp_path)
    return tmp_path


def rewrite(folder, change):
    tensors = load_file(folder / FILE)
    change(tensors)
    save_file(tensors, folder / FILE, metadata={"format": "pt"})


def load(folder, **changes):
    CpuRunner(engine_config(folder, **changes)).load()


def test_missing_tensors_are_named(folder):
    rewrite(folder, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(
        TrouperValidationError, match=r"lacks 1 tensors: model\.layers\.1\.mlp\.up_proj"
    ):
        load(folder)


def test_unexpected_tensors_are_named(folder):
    rewrite(folder, lambda t: t.update({"model.layers.0.adapter": torch.zeros(3)}))
    with pytest.raises(
        TrouperValidationError, match=r"unexpected 1 tensors: model\.layers\.0\.adapter"
    ):
        load(folder)


def test_tensors_of_another_shape_are_named_with_both(folder):
    rewrite(folder, lambda t: t.update({"model.norm.weight": torch.zeros(3)}))
    with pytest.raises(
        TrouperValidationError, match=r"model\.norm\.weight \[3\] instead of \[64\]"
    ):
        load(folder)


def test_redundant_head_and_rope_buffers_are_ignored(folder):
    def add(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)

    rewrite(folder, add)
    load(folder)


def test_names_and_masks_of_first_files_of_gpt2_are_read(tmp_path):
    """They lack the prefix, and hold the mask of each layer."""
    model = tiny_model("GPT2", {}, tmp_path)

    def change(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        for layer in range(3):
            tensors[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 256, 256)

    rewrite(tmp_path, change)
    prompts = random_prompts((9,), VOCAB)
    runner = CpuRunner(engine_config(tmp_path))
    check_against(model, Driver(runner).run(prompts, 4, Sampling(temperature=0.0, logprobs=-1)))


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("case", ["gpt2", "phi", "falcon-new"])
def test_rounded_weights_of_layer_normed_models_stay_near(case, quantization, tmp_path):
    model = tiny_model(*LAYER_NORMED[case], tmp_path)
    prompts = random_prompts((30,), VOCAB)
    runner = CpuRunner(engine_config(tmp_path, dtype="bfloat16", quantization=quantization))
    (s,) = Driver(runner).run(prompts, 1, Sampling(temperature=0.0, logprobs=-1))
    with torch.no_grad():
        expected = model(torch.tensor(prompts)).logits[0, -1].log_softmax(-1)
    found = torch.empty_like(expected)
    found[list(s.logprobs[0].token_ids)] = torch.tensor(s.logprobs[0].logprobs)
    assert torch.corrcoef(torch.stack((found, expected)))[0, 1] > 0.95


def test_a_quantised_checkpoint_of_turned_matrices_is_refused(tmp_path):
    tiny_model("GPT2", {}, tmp_path)
    path = tmp_path / "config.json"
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
    with pytest.raises(UnsupportedFeatureError, match="inputs by outputs"):
        load(tmp_path)


def test_a_folder_without_safetensors_is_refused(folder):
    (folder / FILE).rename(folder / "pytorch_model.bin")
    with pytest.raises(TrouperValidationError, match="no safetensors"):
        load(folder)


def test_a_broken_file_is_refused(folder):
    (folder / FILE).write_bytes(b"\0" * 64)
    with pytest.raises(TrouperValidationError, match="cannot be read"):
        load(folder)


def test_file_that_index_promises_and_is_not_refused(folder):
    (folder / FILE).unlink()
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}})
    )
    with pytest.raises(TrouperValidationError, match="model-00001-of-00002"):
        load(folder)


def test_shards_give_the_answers_of_the_single_file(folder):
    prompts = random_prompts((5, 9), VOCAB)
    whole = Driver(CpuRunner(engine_config(folder))).run(prompts, 6)
    tensors = load_file(folder / FILE)
    (folder / FILE).unlink()
    weight_map = {}
    for i, name in enumerate(sorted(tensors)):
        weight_map[name] = f"model-0000{i % 3}-of-00003.safetensors"
    for file in set(weight_map.values()):
        part = {name: tensors[name] for name, where in weight_map.items() if where == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    sharded = Driver(CpuRunner(engine_config(folder))).run(prompts, 6)
    assert [s.token_ids for s in sharded] == [s.token_ids for s in whole]


def test_dummy_weights_need_no_files_and_depend_on_seed(folder):
    (folder / FILE).unlink()
    prompts = random_prompts((5,), VOCAB)

    def answer(seed):
        runner = CpuRunner(engine_config(folder, load_format="dummy", seed=seed))
        return Driver(runner).run(prompts, 8)[0].token_ids

    assert answer(1) == answer(1) != answer(2)


def test_dummy_numbers_depend_on_seed_name_and_place_alone(monkeypatch):
    monkeypatch.setattr(checkpoint, "CHUNK", 64)
    read = checkpoint.RandomWeights(3, torch.bfloat16).read
    rows = read("a.weight", (50, 20))
    assert rows.dtype == torch.bfloat16
    assert rows.float().std() == pytest.approx(checkpoint.DUMMY_STD, rel=0.05)
    assert len(rows.unique()) > 200
    assert torch.equal(read("a.weight", (10, 20)), rows[:10])
    monkeypatch.setattr(checkpoint, "num_physical_cores", lambda: 7)
    assert torch.equal(read("a.weight", (50, 20)), rows)
    assert not torch.equal(read("b.weight", (50, 20)), rows)
    assert torch.equal(read("norm.weight", (5,)), torch.ones(5, dtype=torch.bfloat16))


def test_an_unknown_load_format_is_refused(folder):
    with pytest.raises(TrouperValidationError, match="load_format"):
        load(folder, load_format="pickle")


def test_an_unknown_architecture_is_an_unsupported_feature(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["Mamba"]}))
    with pytest.raises(UnsupportedFeatureError, match="Mamba"):
        load(folder)


@pytest.mark.parametrize(
    "name",
    [
        "mtp.fc.weight",
        "model.mtp.layers.0.x",
        "model.layers.2.mlp.up_proj.weight",
        "v_head.summary.weight",
        "score.weight",
    ],
)
def test_tensors_of_other_uses_are_left_out_with_line(folder, caplog, name):
    """Layers that predict ahead, and heads that value or score."""
    rewrite(folder, lambda t: t.update({name: torch.zeros(3)}))
    with caplog.at_level("INFO", logger="trouper"):
        load(folder)
    assert f"1 tensors that its model does not use, such as {name}" in caplog.text
