"""GPTQ, AWQ and compressed-tensors: packed here by hand, read, and compared with the plain weights that they are."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from trouper.actors.executor.runners.cpu.runner import CpuRunner
from trouper.actors.executor.weights.schemes import read_scheme
from trouper.actors.messages.steps import Sampling
from trouper.config.args import EngineArgs
from trouper.config.resolve import resolve
from trouper.errors import TrouperValidationError, UnsupportedFeatureError
from trouper.kernels.codegen import units

from .driver import Driver, engine_config, random_prompts
from .test_architectures import VOCAB, tiny_model

FILE = "model.safetensors"
GROUP = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
CONFIGS = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False},
    "gptq_v2": {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": GROUP,
        "checkpoint_format": "gptq_v2",
    },
    "awq": {
        "quant_method": "awq",
        "bits": 4,
        "group_size": GROUP,
        "version": "gemm",
        "zero_point": True,
    },
    "compressed": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 4,
                    "type": "int",
                    "symmetric": True,
                    "strategy": "group",
                    "group_size": GROUP,
                },
            }
        },
        "ignore": ["lm_head"],
    },
}
needs_native = pytest.mark.skipif(not units.is_available(), reason="needs native kernels")
WEIGHTS = CONFIGS["compressed"]["config_groups"]["group_0"]["weights"]


def compressed(weights, **others):
    return {**CONFIGS["compressed"], "config_groups": {"group_0": {"weights": weights, **others}}}


CONFIGS["compressed_zeros"] = compressed(WEIGHTS | {"symmetric": False})


def eight_to_a_word(numbers, order=range(8)):
    """Rows of integers 0 … 15 to rows of int32; the nibble k of a word is the number order[k] of eight."""
    rows = []
    for row in numbers.tolist():
        words = []
        for first in range(0, len(row), 8):
            word = sum(row[first + at] << 4 * k for k, at in enumerate(order))
            words.append(word - (1 << 32) if word >= 1 << 31 else word)
        rows.append(words)
    return torch.tensor(rows, dtype=torch.int32)


def parts_of(kind, q, zeros, scales):
    """The tensors of one projection; q [O, I], zeros and scales [O, G], all 0 … 15."""
    num_in = q.shape[1]
    if kind.startswith("gptq"):
        less = 0 if kind == "gptq_v2" else 1
        return {
            "qweight": eight_to_a_word(q).T.contiguous(),
            "qzeros": eight_to_a_word((zeros.T - less) % 16),
            "scales": scales.T.half().contiguous(),
            "g_idx": torch.arange(num_in, dtype=torch.int32) // GROUP,
            "bias": torch.zeros(len(q), dtype=torch.float16),
        }
    if kind == "awq":
        return {
            "qweight": eight_to_a_word(q.T, AWQ_ORDER),
            "qzeros": eight_to_a_word(zeros.T, AWQ_ORDER),
            "scales": scales.T.half().contiguous(),
        }
    parts = {
        "weight_packed": eight_to_a_word(q),
        "weight_scale": scales.bfloat16(),
        "weight_shape": torch.tensor(q.shape),
    }
    if kind == "compressed_zeros":
        parts["weight_zero_point"] = eight_to_a_word(zeros.T).T.contiguous()
    return parts


def write(tmp_path, kind, *, is_symmetric=False, changes=None, family="Qwen3", **model):
    """A plain folder and one of integers, of the same weights; `model` are changes to the tiny one."""
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    own = {"num_hidden_layers": 2, "tie_word_embeddings": True, **model}
    tiny_model(family, own, plain)
    torch.manual_seed(1)
    tensors, stored = load_file(plain / FILE), {}
    for name, weight in tensors.items():  # the projections among them become others
        base = name.removesuffix("weight")
        if not name.endswith("_proj.weight"):
            stored[name] = weight
            continue
        groups = weight.shape[0], weight.shape[1] // GROUP
        q = torch.randint(0, 16, weight.shape)
        zeros = torch.full(groups, 8) if is_symmetric else torch.randint(0, 16, groups)
        scales = (torch.rand(groups) + 0.5) * 0.3 / weight.shape[1] ** 0.5
        scales = scales.bfloat16() if kind.startswith("compressed") else scales.half()
        differences = q - zeros.repeat_interleave(GROUP, 1)
        tensors[name] = differences * scales.float().repeat_interleave(GROUP, 1)
        stored |= {base + part: x for part, x in parts_of(kind, q, zeros, scales).items()}
    if changes is not None:
        changes(stored)
    packed.mkdir()
    save_file(tensors, plain / FILE, metadata={"format": "pt"})
    save_file(stored, packed / FILE, metadata={"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = CONFIGS[kind]
    (packed / "config.json").write_text(json.dumps(config))
    return plain, packed


def run(folder, dtype="float32"):
    """Greedy tokens, and log-probabilities of the prompts' tokens."""
    runner = CpuRunner(engine_config(folder, dtype=dtype))
    sampling = Sampling(temperature=0.0, prompt_logprobs=0)
    sequences = Driver(runner).run(random_prompts((3, 40), VOCAB), 4, sampling)
    found = [position.logprobs[0] for s in sequences for position in s.prompt_logprobs]
    assert len(found) == 41
    return runner, [s.token_ids for s in sequences], torch.tensor(found)


def load(folder, **changes):
    CpuRunner(engine_config(folder, **changes)).load()


@pytest.mark.parametrize(
    ("kind", "is_symmetric"),
    [
        ("gptq", False),
        ("gptq", True),
        ("gptq_v2", False),
        ("awq", False),
        ("compressed", True),
        ("compressed_zeros", False),
    ],
)
def test_the_answers_are_those_of_the_plain_weights(tmp_path, kind, is_symmetric):
    plain, packed = write(tmp_path, kind, is_symmetric=is_symmetric)
    (_, ids, logprobs), (_, found_ids, found) = run(plain), run(packed)
    assert found_ids == ids
    assert torch.equal(found, logprobs)


@pytest.mark.parametrize("kind", ["gptq", "awq", "compressed"])
def test_integers_follow_the_order_of_their_rows(tmp_path, kind):
    """Rows of q and k are put into halves where they are stored in pairs, and their scales and zeros with them."""
    plain, packed = write(
        tmp_path, kind, is_symmetric=kind == "compressed", family="Ernie4_5", head_dim=16
    )
    (_, ids, logprobs), (_, found_ids, found) = run(plain), run(packed)
    assert found_ids == ids
    assert torch.equal(found, logprobs)


@needs_native
@pytest.mark.parametrize("kind", ["gptq", "awq", "compressed"])
def test_beside_bfloat16_the_integers_stay_integers(tmp_path, kind):
    plain, packed = write(tmp_path, kind, is_symmetric=kind == "compressed")
    (rounded, _, logprobs), (runner, _, found) = run(plain, "bfloat16"), run(packed, "auto")
    assert runner.model.decoder.num_bytes < 0.45 * rounded.model.decoder.num_bytes
    # products by bytes round rows, too
    torch.testing.assert_close(found, logprobs, atol=0.4, rtol=0)
    assert (found - logprobs).abs().mean() < 0.06


@needs_native
def test_groups_of_permuted_inputs_are_read_in_their_order(tmp_path, monkeypatch):
    monkeypatch.setattr(units, "can_decode", units.is_available)

    def permute(stored):  # down_proj: its weights are the same numbers at other inputs
        base = "model.layers.1.mlp.down_proj."
        stored[base + "g_idx"] = stored[base + "g_idx"].flip(0)

    kept, permuted = tmp_path / "kept", tmp_path / "permuted"
    kept.mkdir()
    permuted.mkdir()
    _, packed = write(permuted, "gptq", changes=permute)
    runner, _, found = run(packed, "auto")
    _, _, expected = run(packed, "float32")
    torch.testing.assert_close(found, expected, atol=0.25, rtol=0)
    assert (found - expected).abs().mean() < 0.03
    _, packed = write(kept, "gptq")
    assert (run(packed, "float32")[2] - expected).abs().mean() > 0.03
    assert runner.model.decoder.num_bytes < 1.01 * run(packed, "auto")[0].model.decoder.num_bytes


def test_a_missing_part_is_named(tmp_path):
    _, packed = write(tmp_path, "awq", changes=lambda t: t.pop("model.layers.0.mlp.up_proj.scales"))
    with pytest.raises(TrouperValidationError, match=r"lacks 1 tensors: .*up_proj\.scales"):
        load(packed)


def test_a_bias_that_is_not_zero_is_unexpected(tmp_path):
    _, packed = write(
        tmp_path, "gptq", changes=lambda t: t["model.layers.0.mlp.up_proj.bias"].add_(1)
    )
    with pytest.raises(TrouperValidationError, match=r"unexpected 1 tensors: .*up_proj\.bias"):
        load(packed)


def test_half_of_a_fused_matrix_may_be_plain(tmp_path):
    def plain_k(stored):
        for name in [name for name in stored if "layers.0.self_attn.k_proj" in name]:
            del stored[name]
        stored["model.layers.0.self_attn.k_proj.weight"] = torch.zeros(256, 64)

    plain, packed = write(tmp_path, "awq", changes=plain_k)
    tensors = load_file(plain / FILE)
    tensors["model.layers.0.self_attn.k_proj.weight"].zero_()
    save_file(tensors, plain / FILE, metadata={"format": "pt"})
    assert torch.equal(run(packed)[2], run(plain)[2])


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"quant_method": "aqlm"}, "quant_method"),
        ({"quant_method": "bitsandbytes"}, "load_in_4bit"),
        (
            {
                "quant_method": "bitsandbytes",
                "load_in_4bit": True,
                "bnb_4bit_quant_storage": "float16",
            },
            "bnb_4bit_quant_storage",
        ),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "int4"},
            "bnb_4bit_quant_type",
        ),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo"),
        (
            {"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4", "group_size": 32}},
            "group_size",
        ),
        (
            {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:exllamav2"},
            "packing_format",
        ),
        (
            {"quant_method": "auto-round", "bits": 4, "backend": "gptqmodel:awq_marlin"},
            "packing_format",
        ),
        (
            {"quant_method": "auto-round", "bits": 2, "packing_format": "auto_round:auto_gptq"},
            "bits",
        ),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "weight_block_size"),
        ({**CONFIGS["gptq"], "bits": 3}, "bits"),
        ({**CONFIGS["gptq"], "group_size": 48}, "group_size"),
        ({**CONFIGS["gptq"], "checkpoint_format": "marlin"}, "checkpoint_format"),
        ({**CONFIGS["gptq"], "dynamic": {"+:.*": {"bits": 3}}}, "bits"),
        ({**CONFIGS["gptq"], "is_marlin_format": True}, "is_marlin_format"),
        ({**CONFIGS["awq"], "version": "gemv"}, "version"),
        ({**CONFIGS["compressed"], "format": "marlin-24"}, "format"),
        ({**CONFIGS["compressed"], "sparsity_config": {"format": "sparse-bitmask"}}, "format"),
        ({**CONFIGS["compressed"], "transform_config": {"config_groups": {}}}, "transform_config"),
        ({**CONFIGS["compressed"], "config_groups": {}}, "config_groups"),
        (compressed(WEIGHTS | {"num_bits": 3}), "num_bits"),
        (compressed(WEIGHTS | {"strategy": "block"}), "strategy"),
        (compressed(WEIGHTS, output_activations={"num_bits": 8}), "output_activations"),
    ],
)
def test_what_is_not_read_is_named(config, field):
    with pytest.raises(UnsupportedFeatureError, match=f"quantization_config: {field}: "):
        read_scheme({"quantization_config": config})


@pytest.mark.parametrize("config", [CONFIGS["awq"], compressed(WEIGHTS | {"strategy": "channel"})])
def test_one_group_for_all_inputs_where_config_says_so(config):
    scheme = read_scheme({"quantization_config": {**config, "group_size": -1}})
    assert scheme is not None
    assert scheme.groups[0][1].group_size is None


def test_integers_are_not_rounded_again(tmp_path):
    _, packed = write(tmp_path, "awq")
    with pytest.raises(TrouperValidationError, match="already quantized"):
        resolve(EngineArgs(model=str(packed), quantization="int8", skip_tokenizer_init=True))
