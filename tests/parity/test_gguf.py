"""GGUF files: every type against the package `gguf`, whole models against folders of safetensors, and bad files."""

import contextlib
import itertools
import os
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tokenizers import Regex, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM

from trouper import LLM, SamplingParams
from trouper.actors.executor.models.families.registry import decoder_traits
from trouper.actors.executor.models.layers import SparseMlp
from trouper.actors.executor.models.parameters import (
    Cut,
    Parameter,
    layer_parameters,
    outer_parameters,
)
from trouper.actors.executor.models.sharding import part_of
from trouper.actors.executor.runners.cpu.runner import CpuRunner
from trouper.actors.executor.weights.gguf import FORMATS, GgufCheckpoint, stacked
from trouper.actors.executor.weights.gguf_types import READERS, Affine, dequantized_affine
from trouper.actors.messages.steps import Sampling
from trouper.actors.rendering.gguf_tokenizer import read_tokenizer
from trouper.actors.rendering.tokenizer import Tokenizer
from trouper.bench.studies.models.edits import write_folder
from trouper.config.args import EngineArgs
from trouper.config.context import weight_bytes
from trouper.config.gguf.header import TENSOR_TYPES, read_gguf
from trouper.config.gguf.names import FAMILIES, find_gguf, hf_config, place_of
from trouper.config.model import ModelConfig
from trouper.config.resolve import resolve
from trouper.errors import TrouperValidationError, UnsupportedFeatureError
from trouper.kernels.cpu.linear.quantization import dequantized, packed
from trouper.kernels.reference.linear import integer_linear_reference
from trouper.kernels.select import make_linear

from .driver import Driver, engine_config, random_prompts
from .test_architectures import LLAMA3, VOCAB, YARN, check_against, tiny_model
from .test_encoders import run

SMOLLM2 = os.environ.get("TROUPER_SMOLLM2")
needs_smollm2 = pytest.mark.skipif(not SMOLLM2, reason="TROUPER_SMOLLM2 names no file")
TOKENS = ["<unk>", "<s>", "</s>", "a", "b", "c", "ab", "abc", "Ġ", "Ġa"]
SIZES = {
    "context_length": 256, "embedding_length": 64, "feed_forward_length": 96, "block_count": 4,
    "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 16,
    "attention.layer_norm_rms_epsilon": 1e-6, "attention.layer_norm_epsilon": 1e-5, "rope.freq_base": 10_000.0,
}  # fmt: skip
HALF_ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
MANY_KEYS = {"attention.head_count_kv": 4}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 16}
# our name: (name of the config's class, changes to it, what the file says besides)
MODELS = {
    "llama": ("Llama", {"tie_word_embeddings": True}, {}),
    "qwen2": ("Qwen2", {}, {}),
    "qwen3": ("Qwen3", {"head_dim": 16}, {}),
    "phi3": ("Phi3", {"sliding_window": 24}, {"attention.sliding_window": 24, "rope.dimension_count": 16}),
    "gemma2": (
        "Gemma2",
        GEMMA | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0},
        {"attention.sliding_window": 16, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0}),
    "gemma3": (
        "Gemma3Text", GEMMA, {"attention.sliding_window": 16, "rope.freq_base": 1e6}),
    "granite": (
        "Granite",
        {"embedding_multiplier": 6.0, "residual_multiplier": 0.5, "attention_multiplier": 0.25, "logits_scaling": 3.0},
        {"embedding_scale": 6.0, "residual_scale": 0.5, "attention.scale": 0.25, "logit_scale": 3.0}),
    "olmo2": ("Olmo2", {}, {}),
    "gemma": ("Gemma", {"head_dim": 16}, {}),
    "exaone4": ("Exaone4", {"head_dim": 16, "sliding_window": 16}, {"attention.sliding_window": 16}),
    "seed_oss": ("SeedOss", {"head_dim": 16, "attention_bias": True}, {}),
    "smollm3": ("SmolLM3", {}, {"rope.freq_base": 2e6}),
    "gpt2": ("GPT2", {"n_inner": 96}, MANY_KEYS),
    "starcoder": ("GPTBigCode", {"n_inner": 96}, {"attention.head_count_kv": 1}),
    "starcoder2": ("Starcoder2", {"sliding_window": None}, {}),
    "phi2": ("Phi", {"rope_parameters": HALF_ROPE}, {"rope.dimension_count": 8}),
    "stablelm": ("StableLm", {"rope_parameters": HALF_ROPE, "use_qkv_bias": True}, {"rope.dimension_count": 8}),
    "gptneox": ("GPTNeoX", {"rope_parameters": HALF_ROPE}, {"rope.dimension_count": 8, "use_parallel_residual": True, **MANY_KEYS}),
    "falcon": ("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 96}, {}),
    "nemotron": ("Nemotron", {"rope_parameters": HALF_ROPE, "head_dim": 16}, {"rope.dimension_count": 8}),
    "arcee": ("Arcee", {"mlp_bias": True}, {}),
    "olmo": ("Olmo", {}, {}),
    "mistral3": (
        "Ministral3",
        {"head_dim": 16, "rope_parameters": {
            **YARN, "mscale": 1.0, "mscale_all_dim": 0.5, "llama_4_scaling_beta": 0.3,
            "original_max_position_embeddings": 16}},
        {"attention.temperature_scale": 0.3, "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
         "rope.scaling.original_context_length": 16, "rope.scaling.yarn_log_multiplier": 0.5}),
    "glm4": ("Glm4", {"head_dim": 16, "rope_parameters": HALF_ROPE}, {"rope.dimension_count": 8}),
    "chatglm": ("Glm", {"head_dim": 16, "rope_parameters": HALF_ROPE}, {"rope.dimension_count": 8}),
    "ernie4_5": ("Ernie4_5", {"head_dim": 16, "use_bias": True}, {"rope.freq_base": 500_000.0}),
    "hunyuan-dense": ("HunYuanDenseV1", {"head_dim": 16}, {"rope.scaling.type": "none"}),
    "qwen2vl": ("Qwen2", {}, {"rope.dimension_sections": [2, 3, 3, 0]}),
    "qwen3vl": ("Qwen3", {"head_dim": 16}, {"rope.dimension_sections": [3, 3, 2, 0]}),
    "exaone": ("Llama", {}, {}),
    "internlm2": ("Llama", {}, {}),
    "minicpm": (
        "Granite",
        {"embedding_multiplier": 12.0, "residual_multiplier": 0.7, "attention_multiplier": 0.25, "logits_scaling": 2.0},
        {"embedding_scale": 12.0, "residual_scale": 0.7, "logit_scale": 2.0}),
    "xverse": ("Llama", {"num_key_value_heads": 4}, MANY_KEYS),
}  # fmt: skip
DELTA_NUMBERS = {
    "ssm.conv_kernel": 4, "ssm.state_size": 32, "ssm.group_count": 2, "ssm.time_step_rank": 6, "ssm.inner_size": 192,
    "full_attention_interval": 2, "rope.dimension_count": 4, "rope.dimension_sections": [1, 1, 0, 0],
}  # fmt: skip
RECURRENT = {
    "lfm2": (
        "Lfm2", {"layer_types": ["conv", "full_attention", "conv", "conv"], "block_auto_adjust_ff_dim": False, "norm_eps": 1e-6,
                 "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        {"attention.head_count_kv": [0, 2, 0, 0], "shortconv.l_cache": 3}),
    "qwen35": (
        "Qwen3_5Text", {
            "head_dim": 16, "layer_types": ["linear_attention", "full_attention"] * 2, "linear_key_head_dim": 32,
            "linear_value_head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 6},
        DELTA_NUMBERS),
}  # fmt: skip
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3}
EXPERT_NUMBERS = {"expert_count": 6, "expert_used_count": 3}
SPARSE_NUMBERS = EXPERT_NUMBERS | {"expert_feed_forward_length": 32}
SHARED_NUMBERS = SPARSE_NUMBERS | {"expert_shared_feed_forward_length": 64}
SHARED = EXPERTS | {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}
SCALES = {
    "attention.scale": 0.25,
    "embedding_scale": 2.0,
    "residual_scale": 0.5,
    "logit_scale": 4.0,
}
GRANITE_H = {
    "layer_types": ["mamba", "attention", "mamba", "mamba"], "shared_intermediate_size": 64, "mamba_n_heads": 6, "mamba_d_head": 32,
    "mamba_expand": 3, "mamba_d_state": 16, "mamba_n_groups": 2, "attention_multiplier": 0.25, "embedding_multiplier": 2.0,
    "residual_multiplier": 0.5, "logits_scaling": 4.0,
}  # fmt: skip
GRANITE_H_NUMBERS = SCALES | {
    "attention.head_count_kv": [0, 2, 0, 0], "ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.group_count": 2,
    "ssm.time_step_rank": 6, "ssm.inner_size": 192, "expert_shared_feed_forward_length": 64, "rope.scaling.finetuned": False,
}  # fmt: skip
RECURRENT |= {
    "granitehybrid": ("GraniteMoeHybrid", GRANITE_H | {"num_local_experts": 0, "num_experts_per_tok": 0}, GRANITE_H_NUMBERS | {"expert_count": 0}),
    "granitehybrid with experts": (
        "GraniteMoeHybrid", GRANITE_H | {
            "num_local_experts": 6, "num_experts_per_tok": 3, "position_embedding_type": "rope", "mamba_proj_bias": True,
            "tie_word_embeddings": True},
        GRANITE_H_NUMBERS | EXPERT_NUMBERS | {"rope.scaling.finetuned": True}),
    "lfm2moe": (
        "Lfm2Moe", EXPERTS | {
            "layer_types": ["conv", "full_attention", "conv", "conv"], "norm_eps": 1e-6, "moe_intermediate_size": 32,
            "num_dense_layers": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        SPARSE_NUMBERS | {
            "attention.head_count_kv": [0, 2, 0, 0], "shortconv.l_cache": 3, "leading_dense_block_count": 2,
            "expert_gating_func": 2}),
    "qwen35moe": ("Qwen3_5MoeText", RECURRENT["qwen35"][1] | SHARED, DELTA_NUMBERS | SHARED_NUMBERS),
    "qwen3next": ("Qwen3Next", RECURRENT["qwen35"][1] | SHARED, {
        name: value for name, value in (DELTA_NUMBERS | SHARED_NUMBERS).items() if name != "rope.dimension_sections"}),
}  # fmt: skip
WITH_FLAGS = {
    "block_count": 5,
    "nextn_predict_layers": 1,
    "attention.recurrent_layers": [True, False, True, False, False],
}
RECURRENT |= {
    "qwen35moe fused": (
        *RECURRENT["qwen35moe"][:2],
        RECURRENT["qwen35moe"][2] | WITH_FLAGS | {"full_attention_interval": 3},
    ),
    "qwen3next of old files": RECURRENT["qwen3next"],
}
MODELS |= RECURRENT | {
    "granite 4": (
        "GraniteMoeHybrid",
        GRANITE_H
        | {
            "layer_types": ["attention"] * 4,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "position_embedding_type": "rope",
            "intermediate_size": 32,
        },
        SCALES | {"expert_shared_feed_forward_length": 64, "feed_forward_length": 32},
    ),
}
MIXED = {
    "llama": (
        "Mixtral", {"num_local_experts": 6, "num_experts_per_tok": 3},
        EXPERT_NUMBERS | {"rope.freq_base": 1e6}),
    "qwen2moe": (
        "Qwen2Moe", EXPERTS | {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64},
        EXPERT_NUMBERS | {"expert_feed_forward_length": 32, "expert_shared_feed_forward_length": 64}),
    "qwen3moe": (
        "Qwen3Moe", EXPERTS | {"moe_intermediate_size": 32, "norm_topk_prob": True, "head_dim": 16},
        EXPERT_NUMBERS | {"expert_feed_forward_length": 32}),
    "olmoe": ("Olmoe", EXPERTS, EXPERT_NUMBERS),
    "granitemoe": (
        "GraniteMoe", {"num_local_experts": 6, "num_experts_per_tok": 3, "attention_multiplier": 0.25},
        EXPERT_NUMBERS | {
            "attention.scale": 0.25, "embedding_scale": 1.0, "residual_scale": 1.0, "logit_scale": 1.0}),
    "granitemoe with shared": (
        "GraniteMoeShared", {
            "num_local_experts": 6, "num_experts_per_tok": 3, "attention_multiplier": 0.25, "shared_intermediate_size": 64},
        EXPERT_NUMBERS | {
            "attention.scale": 0.25, "embedding_scale": 1.0, "residual_scale": 1.0, "logit_scale": 1.0,
            "expert_shared_feed_forward_length": 64}),
    "gpt-oss": (
        "GptOss",
        {"num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 16, "sliding_window": 16,
         "rope_parameters": {**YARN, "truncate": False}},
        EXPERT_NUMBERS | {
            "expert_feed_forward_length": 96, "attention.sliding_window": 16, "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64}),
}  # fmt: skip


def write(path, arch="llama", tensors=(), numbers=None, pre="smollm"):
    """A small file; `numbers` adds to the sizes."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in (SIZES | (numbers or {})).items():
        kinds = {
            float: writer.add_float32, str: writer.add_string, int: writer.add_uint32, bool: writer.add_bool,
            list: writer.add_array,
        }  # fmt: skip
        add = kinds[type(value)]
        add(f"{arch}.{key}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([2, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["a b", "ab c", "Ġ a"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    for name, array, kind in tensors:
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def permuted(rows, num_heads):
    """As llama.cpp's converter stores q and k."""
    heads = rows.reshape(num_heads, 2, len(rows) // num_heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(heads.swapaxes(1, 2).reshape(rows.shape))


def ungrouped(rows, config):
    """All queries, all keys, all values, of rows that have for each KV head its queries, its key and its value."""
    num_kv = getattr(config, "num_kv_heads", config.num_attention_heads)
    num_shared = config.num_attention_heads // num_kv
    groups = rows.reshape(num_kv, num_shared + 2, -1, *rows.shape[1:])
    parts = groups[:, :num_shared], groups[:, num_shared], groups[:, num_shared + 1]
    return np.concatenate([part.reshape(-1, *rows.shape[1:]) for part in parts])


def converted(model, path, arch, numbers=None, kind=None, others=()):
    """A model of transformers, saved in the same folder, as a GGUF file; matrices of `kind`, or as they are.

    Words behind the name of the architecture choose another form of file. `others` names more tensors, of zeros.
    """
    arch, _, form = arch.partition(" ")
    family, config, tensors = FAMILIES[arch], model.config, {}
    for name, tensor in unstacked(load_file(path.parent / "model.safetensors")):
        array = tensor.float().numpy()
        if form != "of old files" and "in_proj_qkvz" in name:
            for part, rows in apart(array, config).items():
                tensors[place_of(family, name.replace("qkvz", part)).name] = {None: rows}
            continue
        place = place_of(family, name)
        tensors.setdefault(place.name, {})[place.expert] = in_file(array, name, arch, config)
    if form == "fused":
        tensors = with_fused_experts(tensors)
    more = [(name, np.zeros(32, np.float32), None) for name in others]
    return write(path, arch, [stored(*each, kind) for each in tensors.items()] + more, numbers)


def in_file(array, name, arch, config):
    """The numbers of a tensor as converters write them."""
    family = FAMILIES[arch]
    if family.norm_offset and name.endswith("norm.weight") and ".linear_attn." not in name:
        array = array + np.float32(family.norm_offset)
    array = as_mixer(array, name, config, is_tiled=family.is_tiled)
    for part, heads in (
        (".q_proj.", config.num_attention_heads),
        (".k_proj.", config.num_key_value_heads),
    ):
        if family.is_permuted and part in name:
            array = permuted(array, heads)
    if arch == "gpt2" and ".h." in name and array.ndim == 2:
        array = np.ascontiguousarray(array.T)
    if family.is_regrouped and "query_key_value" in name:
        array = ungrouped(array, config)
    return array


def as_mixer(array, name, config, *, is_tiled):
    """A tensor of a recurrent mixer, or any other one unchanged."""
    if is_tiled and ".linear_attn." in name:
        array = as_delta(array, name, config)
    if name.endswith("A_log"):
        array = -np.exp(array)
    if name.endswith(("conv1d.weight", "conv.conv.weight")):
        array = array.squeeze(1)
    return as_mamba(array, name, config) if ".mamba." in name else array


def with_fused_experts(tensors):
    """The same tensors, with the rows of gate and up of all experts in one."""
    found = {name: each for name, each in tensors.items() if "_gate_exps" not in name}
    for name, gates in tensors.items():
        if "_gate_exps" in name:
            ups = found.pop(name.replace("_gate_", "_up_"))
            fused = {i: np.concatenate((gate, ups[i])) for i, gate in gates.items()}
            found[name.replace("_gate_", "_gate_up_")] = fused
    return found


def as_delta(array, name, config):
    """A tensor of a gated delta net: value heads with their key heads in turn, and the rates of decay themselves."""
    num_k, num_v = config.linear_num_key_heads, config.linear_num_value_heads
    width = config.linear_value_head_dim
    last = name.removesuffix(".weight").rpartition(".")[2]

    def turned(x):
        heads = x.reshape(num_k, num_v // num_k, -1, *x.shape[1:])
        return np.ascontiguousarray(heads.swapaxes(0, 1).reshape(x.shape))

    if last == "out_proj":
        return np.ascontiguousarray(turned(array.T).T)
    if last in ("in_proj_qkv", "conv1d"):
        before, values = np.split(array, [len(array) - num_v * width])
        return np.concatenate([before, turned(values)])
    return array if last == "norm" else turned(array)


def apart(array, config):
    """The rows of q, k and v, and those of z, of a matrix that has them for one key head after another."""
    width = (
        config.linear_num_value_heads // config.linear_num_key_heads * config.linear_value_head_dim
    )
    heads = array.reshape(config.linear_num_key_heads, -1, array.shape[1])
    ends = np.cumsum([config.linear_key_head_dim, config.linear_key_head_dim, width])
    *qkv, z = (np.concatenate(part) for part in np.split(heads, ends, axis=1))
    return {"qkv": np.concatenate(qkv), "z": z}


def as_mamba(array, name, config):
    """A tensor of Mamba-2: numbers of heads as columns, the norm in rows of groups."""
    if name.endswith(("A_log", ".D")):
        return array[:, None]
    return array.reshape(config.mamba_n_groups, -1) if name.endswith("norm.weight") else array


def unstacked(tensors):
    """Tensors by name; those of all experts, and of gate and up, in parts."""
    is_turned = any(name.endswith(".sinks") for name in tensors)
    has_experts = any("sparse_moe" in name for name in tensors)
    for name, tensor in sorted(tensors.items()):
        module, found, projection = name.partition(".experts.")
        if "shared_mlp." in name:
            own = name.partition("shared_mlp.")[0] + ("shared_mlp" if has_experts else "mlp")
            parts = linear_parts(tensor, name)
            yield from ((f"{own}.{which}_proj.weight", x) for which, x in parts.items())
        elif name.endswith("_linear.weight"):
            own = name.rpartition(".")[0].rpartition(".")[0]
            for i, part in enumerate(tensor):
                for which, x in linear_parts(part, name).items():
                    yield f"{own}.experts.{i}.{which}_proj.weight", x
        elif not found or projection.count("."):
            yield name, tensor
        else:
            kind = "bias" if projection.endswith("_bias") else "weight"
            for i, part in enumerate(tensor):
                rows = part.T if kind == "weight" and is_turned else part
                for which, x in expert_parts(rows, projection, is_turned).items():
                    yield f"{module}.experts.{i}.{which}_proj.{kind}", x.contiguous()


def linear_parts(tensor, name):
    """Gate and up of Granite's `input_linear`, or down of its `output_linear`."""
    if "output_linear" in name:
        return {"down": tensor}
    return dict(zip(("gate", "up"), tensor.chunk(2), strict=True))


def expert_parts(rows, projection, is_turned):
    """Gate and up of one expert, which take turns in gpt-oss, or its down."""
    if not projection.startswith("gate_up"):
        return {"down": rows}
    halves = (rows[::2], rows[1::2]) if is_turned else rows.chunk(2)
    return dict(zip(("gate", "up"), halves, strict=True))


def stored(name, parts, kind):
    """A tensor as converters write it: all experts in one, a single row as a vector."""
    array = parts[None] if None in parts else np.stack([parts[i] for i in range(len(parts))])
    array = array[0] if len(array) == 1 and array.ndim > 1 else array
    is_small = array.ndim < 2 or array.shape[-1] < 32 or name.endswith("_norm.weight")
    given = None if is_small or name.endswith(".bias") else kind
    return name, array if given is None else gguf.quantize(array, given), given


def traits_of(path):
    config = ModelConfig.load(EngineArgs(model=str(path)))
    return decoder_traits(config.hf_config, config.architecture)


def parameters_of(traits):
    return [
        *outer_parameters(traits),
        *(p for i in range(len(traits.layers)) for p in layer_parameters(traits, i)),
    ]


@pytest.mark.parametrize("kind", [kind for kind in TENSOR_TYPES if kind not in (0, 1, 30)])
def test_every_type_gives_the_numbers_of_the_reference(kind):
    name, length, num_bytes, _ = TENSOR_TYPES[kind]
    assert gguf.GGML_QUANT_SIZES[kind] == (length, num_bytes)
    stored = np.random.default_rng(kind).integers(0, 256, (3, 2, num_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        wanted = gguf.dequantize(stored.reshape(3, -1), gguf.GGMLQuantizationType(kind))
    affine = READERS[name](torch.from_numpy(stored))
    np.testing.assert_array_equal(dequantized_affine(affine).numpy(), wanted)


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_plain_types_are_read_as_they_are(tmp_path, name):
    kind = gguf.GGMLQuantizationType[name]
    table = np.random.default_rng(0).standard_normal((10, 64), dtype=np.float32)
    path = write(
        tmp_path / "m.gguf", tensors=[("token_embd.weight", gguf.quantize(table, kind), kind)]
    )
    found = GgufCheckpoint(path).read("model.embed_tokens.weight", (10, 64))
    np.testing.assert_array_equal(
        found.float().numpy(), gguf.dequantize(gguf.quantize(table, kind), kind)
    )


@pytest.mark.parametrize("arch", MODELS)
def test_tokens_and_logprobs_equal_those_of_model_converted(tmp_path, arch):
    name, changes, numbers = MODELS[arch]
    model = tiny_model(name, {"num_hidden_layers": 4, "rms_norm_eps": 1e-6, **changes}, tmp_path)
    path = converted(model, tmp_path / "m.gguf", arch, numbers)
    driver = Driver(CpuRunner(engine_config(path)), chunk=13)
    prompts = random_prompts((7, 40), VOCAB)
    found = driver.run(prompts, 16, Sampling(temperature=0.0, logprobs=-1))
    check_against(model, found, atol=2e-4 if arch in RECURRENT else 1e-4)


HALF = {"rope_parameters": HALF_ROPE}
LOCAL = {
    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
}  # fmt: skip
KEYED = {
    "a part of each head": ("phi3", HALF, {"rope.dimension_count": 8}),
    "frequencies of local layers": ("gemma3", {"rope_parameters": LOCAL}, {"rope.freq_base_swa": 500.0}),
    "the length of a pattern": ("gemma2", {"layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2},
        {"attention.sliding_window_pattern": 3}),
    "a stretch of old files": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
        {"rope.scale_linear": 2.0}),
    "yarn's betas": ("llama", {"rope_parameters": {**YARN, "beta_fast": 4.0, "beta_slow": 2.0}},
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64,
         "rope.scaling.yarn_beta_fast": 4.0, "rope.scaling.yarn_beta_slow": 2.0}),
    "mistral3 of before Ministral": ("mistral3",
        {"rope_parameters": {**YARN, "llama_4_scaling_beta": 0.0}},
        {"attention.temperature_scale": 0.0, "rope.scaling.original_context_length": 64,
         "rope.scaling.yarn_log_multiplier": 0.0}),
    "growth without a stretch": ("mistral3",
        {"rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.3,
            "original_max_position_embeddings": 16}},
        {"rope.scaling.type": "none", "rope.scaling.yarn_log_multiplier": 0.0}),
    "no window at all": ("exaone4",
        {"sliding_window": None, "sliding_window_pattern": None, "layer_types": ["full_attention"] * 4},
        {"attention.sliding_window": 0}),
    "values that change nothing": ("qwen3", {},
        {"attention.value_length": 16, "attention.clamp_kqv": 0.0, "rope.scaling.yarn_attn_factor": 1.0,
         "attention.scale": 0.25, "rope.freq_base_swa": 1e4, "rope.dimension_count": 16}),
}  # fmt: skip


def test_a_file_of_olmo_with_windows_is_olmo3(tmp_path):
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    ropes = {
        "full_attention": {**YARN, "rope_theta": 1e4},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    config = {
        "num_hidden_layers": 6,
        "sliding_window": 16,
        "layer_types": kinds,
        "rms_norm_eps": 1e-6,
    }
    model = tiny_model("Olmo3", config | {"rope_parameters": ropes}, tmp_path)
    path = converted(model, tmp_path / "m.gguf", "olmo2", {
        "block_count": 6, "attention.sliding_window": 16, "attention.sliding_window_pattern": 3,
        "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64,
    })  # fmt: skip
    driver = Driver(CpuRunner(engine_config(path)), chunk=13)
    prompts = random_prompts((40,), VOCAB)
    check_against(model, driver.run(prompts, 6, Sampling(temperature=0.0, logprobs=-1)))


@pytest.mark.parametrize("case", KEYED)
def test_keys_of_attention_and_positions_are_read(case, tmp_path):
    arch, keyed, more = KEYED[case]
    name, changes, numbers = MODELS[arch]
    size = {"num_hidden_layers": len(keyed.get("layer_types", "four")), "rms_norm_eps": 1e-6}
    model = tiny_model(name, size | changes | keyed, tmp_path)
    more = {"block_count": size["num_hidden_layers"]} | numbers | more
    path = converted(model, tmp_path / "m.gguf", arch, more)
    prompts = random_prompts((40,), VOCAB)
    driver = Driver(CpuRunner(engine_config(path)), chunk=13)
    check_against(model, driver.run(prompts, 6, Sampling(temperature=0.0, logprobs=-1)))


@pytest.mark.parametrize(("key", "value"), [
    ("attention.clamp_kqv", 8.0), ("attention.sliding_window", 16), ("attention.max_alibi_bias", 8.0), ("attention.value_length", 32),
    ("attention.scale", 0.5), ("attention.temperature_scale", 0.1), ("attention.a_key_of_tomorrow", 1),
    ("rope.freq_base_swa", 500.0), ("rope.scaling.yarn_log_multiplier", 0.1), ("rope.dimension_count", 8),
    ("rope.a_key_of_tomorrow", "x"), ("rope.scaling.yarn_attn_factor", 0.5), ("expert_gating_func", 2),
])  # fmt: skip
def test_keys_not_read_are_refused_by_name(key, value, tmp_path):
    model = tiny_model("Llama", {"num_hidden_layers": 4}, tmp_path)
    path = converted(model, tmp_path / "m.gguf", "llama", {key: value})
    word = "partial_rotary_factor" if key == "rope.dimension_count" else key
    with pytest.raises(UnsupportedFeatureError, match=word):
        CpuRunner(engine_config(path)).load()


@pytest.mark.parametrize(
    ("arch", "numbers", "word"),
    [
        ("glm4", {"rope.dimension_sections": [2, 3, 3, 0]}, "rope.dimension_sections"),
        ("mistral3", {"rope.scaling.type": "none"}, "yarn_log_multiplier without yarn"),
        ("xverse", {"attention.head_count_kv": 2}, "head_count_kv"),
    ],
)
def test_what_converter_stores_in_another_way_is_refused(arch, numbers, word, tmp_path):
    name, changes, own = MODELS[arch]
    model = tiny_model(name, {"num_hidden_layers": 4, **changes}, tmp_path)
    path = converted(model, tmp_path / "m.gguf", arch, own | numbers)
    with pytest.raises(UnsupportedFeatureError, match=word):
        CpuRunner(engine_config(path)).load()


@pytest.mark.parametrize("key", ["embedding_scale", "residual_scale", "logit_scale"])
def test_a_file_of_minicpm_must_have_its_scales(key, tmp_path):
    name, changes, numbers = MODELS["minicpm"]
    model = tiny_model(name, {"num_hidden_layers": 4, **changes}, tmp_path)
    kept = {k: v for k, v in numbers.items() if k != key}
    path = converted(model, tmp_path / "m.gguf", "minicpm", kept)
    with pytest.raises(TrouperValidationError, match=key):
        CpuRunner(engine_config(path)).load()


@pytest.mark.parametrize(
    ("arch", "kind"), [*itertools.product(MIXED, ["F32", "Q8_0"]), ("gpt-oss", "MXFP4")]
)
def test_experts_of_file_equal_those_of_their_dequantised_weights(tmp_path, arch, kind):
    name, changes, numbers = MIXED[arch]
    model = tiny_model(name, {"num_hidden_layers": 4, "rms_norm_eps": 1e-6, **changes}, tmp_path)
    kind = gguf.GGMLQuantizationType[kind]
    for name, parameter in model.named_parameters():
        if len(parameter.squeeze().shape) > 1 and not name.endswith("bias"):
            is_turned = arch == "gpt-oss" and parameter.ndim == 3  # inputs by outputs
            rows = parameter.detach().transpose(1, 2) if is_turned else parameter.detach()
            given = np.ascontiguousarray(rows.numpy())
            array = torch.from_numpy(gguf.dequantize(gguf.quantize(given, kind), kind).copy())
            parameter.data = array.transpose(1, 2).contiguous() if is_turned else array
    model.save_pretrained(tmp_path)
    path = converted(model, tmp_path / "m.gguf", arch, numbers, kind)
    driver = Driver(CpuRunner(engine_config(path)), chunk=13)
    prompts = random_prompts((7, 40), VOCAB)
    check_against(model, driver.run(prompts, 16, Sampling(temperature=0.0, logprobs=-1)))


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["qwen3moe", "qwen35moe", "lfm2moe"])
def test_bfloat16_differs_by_the_choice_of_experts(tmp_path, arch, monkeypatch):
    """With the router's logits of float32, a quantized file has almost the same logprobs in bfloat16.

    Without them, other experts are chosen at near ties.
    """
    name, changes, numbers = (MIXED | MODELS)[arch]
    model = tiny_model(name, {"num_hidden_layers": 4, "rms_norm_eps": 1e-6, **changes}, tmp_path)
    path = converted(model, tmp_path / "m.gguf", arch, numbers, gguf.GGMLQuantizationType.Q8_0)
    routes, passes = [], []

    def forward(mlp, x_TE, ops):
        shared_TE = None if mlp._shared is None else mlp._shared.forward(x_TE, ops)
        logits_TX = mlp._router.apply(x_TE)
        # The memory of the logits is used again.
        passes.append(logits_TX.clone())
        if routes:
            logits_TX = routes[len(passes) - 1].to(logits_TX.dtype)
        return mlp._experts.forward(x_TE, logits_TX, shared_TE, ops.act_and_mul)

    monkeypatch.setattr(SparseMlp, "forward", forward)
    found = []
    for dtype in ("float32", "bfloat16"):
        config = engine_config(path, dtype=dtype, enforce_eager=True)
        sampling = Sampling(temperature=0.0, logprobs=-1)
        driver = Driver(CpuRunner(config), chunk=13)
        sequences = driver.run(random_prompts((7, 40), VOCAB), 1, sampling)
        firsts = [sequence.logprobs[0] for sequence in sequences]
        found.append([np.array(f.logprobs)[np.argsort(f.token_ids)] for f in firsts])
        routes, passes = passes, []
    for exact, rounded in zip(*found, strict=True):
        assert np.corrcoef(exact, rounded)[0, 1] > 0.999


def test_another_number_of_experts_than_tensors_have_is_refused(tmp_path):
    table, experts = np.zeros((10, 64), np.float32), np.zeros((4, 96, 64), np.float32)
    tensors = [("token_embd.weight", table, None), ("blk.0.ffn_gate_exps.weight", experts, None)]
    path = write(tmp_path / "m.gguf", "qwen3moe", tensors, EXPERT_NUMBERS)
    with pytest.raises(TrouperValidationError, match="expert_count: 6 of 4"):
        ModelConfig.load(EngineArgs(model=str(path)))


def test_frequencies_are_divided_by_factors_of_file(tmp_path):
    config = {"num_hidden_layers": 4, "rope_parameters": LLAMA3}
    model = tiny_model("Llama", config, tmp_path)
    plain = 10000.0 ** -(np.arange(0, 16, 2, dtype=np.float32) / 16)
    factors = (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    converted(model, tmp_path / "plain.gguf", "llama")
    checkpoint = gguf.GGUFReader(tmp_path / "plain.gguf")
    tensors = [(t.name, np.array(t.data), None) for t in checkpoint.tensors]
    path = write(tmp_path / "m.gguf", tensors=[*tensors, ("rope_freqs.weight", factors, None)])
    driver = Driver(CpuRunner(engine_config(path)))
    prompts = random_prompts((40,), VOCAB)
    check_against(model, driver.run(prompts, 16, Sampling(temperature=0.0, logprobs=-1)))


@pytest.mark.parametrize(
    ("kind", "fmt"),
    [
        ("Q4_0", "int4"),
        ("Q4_1", "int4"),
        ("Q5_0", "int5"),
        ("Q5_1", "int5"),
        ("Q8_0", "int8"),
        ("MXFP4", "fp4"),
    ],
)
def test_integers_stay_what_they_are(tmp_path, kind, fmt):
    model = tiny_model("Llama", {"num_hidden_layers": 4}, tmp_path)
    path = converted(model, tmp_path / "m.gguf", "llama", kind=gguf.GGMLQuantizationType[kind])
    checkpoint = GgufCheckpoint(path)
    for parameter in layer_parameters(traits_of(path), 0):
        if parameter.name.endswith("weight"):
            integers = checkpoint.integers(parameter, torch.bfloat16)
            plain = torch.cat([checkpoint.read(name, shape) for name, shape in parameter.sources])
            assert integers.fmt == fmt
            torch.testing.assert_close(dequantized(integers), plain, atol=1e-5, rtol=1e-6)


PACKED = [kind for kind, of_type in TENSOR_TYPES.items() if of_type.length > 1]


def random_blocks(number, num_rows):
    """Blocks of 256 inputs with finite scales."""
    length, num_bytes = gguf.GGML_QUANT_SIZES[number]
    shape = num_rows, 256 // length * num_bytes
    return np.random.default_rng(number).integers(0, 60, shape).astype(np.uint8)


def checkpoint_of_types(folder, kinds, num_rows=64):
    """A file with one matrix for each type, of 256 inputs, and the numbers of the reference."""
    names = ("ffn_gate", "ffn_up", "attn_q", "attn_k")
    blocks = [random_blocks(number, num_rows) for number in kinds]
    tensors = [("token_embd.weight", np.zeros((10, 256), np.float32), None)]
    tensors += [
        (f"blk.0.{name}.weight", part, gguf.GGMLQuantizationType(number))
        for name, part, number in zip(names, blocks, kinds, strict=False)
    ]
    numbers = [
        torch.from_numpy(gguf.dequantize(part, gguf.GGMLQuantizationType(number)))
        for part, number in zip(blocks, kinds, strict=True)
    ]
    return GgufCheckpoint(write(folder / "m.gguf", "qwen3", tensors)), numbers


def fused(*names, num_rows=64):
    return Parameter(
        "gate_up.weight",
        tuple((f"model.layers.0.{name}.weight", (num_rows, 256)) for name in names),
    )


@pytest.mark.parametrize("kind", PACKED, ids=lambda kind: TENSOR_TYPES[kind].name)
def test_every_type_takes_the_bytes_that_are_announced(tmp_path, kind):
    checkpoint, (wanted,) = checkpoint_of_types(tmp_path, [kind])
    found = checkpoint.integers(fused("mlp.gate_proj"), torch.bfloat16)
    assert found.fmt == FORMATS.get(TENSOR_TYPES[kind].name, "int8")
    # Minima of weights without a sign are rounded once more.
    step = found.scales_OG.abs().max()
    torch.testing.assert_close(dequantized(found), wanted, atol=1e-5 * step, rtol=1e-6)
    held = [part for part in packed(found, is_for_bytes=True) if isinstance(part, torch.Tensor)]
    assert sum(part.nbytes for part in held) == TENSOR_TYPES[kind].held * 64 * 256


def test_parts_of_several_types_keep_their_bits(tmp_path):
    kinds = [12, 14]  # Q4_K, Q6_K
    checkpoint, numbers = checkpoint_of_types(tmp_path, kinds)
    found = checkpoint.integers(fused("mlp.gate_proj", "mlp.up_proj"), torch.bfloat16)
    assert [part.fmt for part in found.parts] == ["int4", "int6"]
    assert all(part.blocks is not None for part in found.parts)
    torch.testing.assert_close(dequantized(found), torch.cat(numbers), atol=1e-2, rtol=1e-5)
    linear = make_linear(found)
    held = sum(TENSOR_TYPES[kind].held for kind in kinds)
    assert linear.num_bytes == held * 64 * 256
    x = torch.randn(3, 256).bfloat16()
    wanted = x.double() @ torch.cat(numbers).double().T
    assert (linear.apply(x) - wanted).norm() < 9e-3 * wanted.norm()


def test_parts_without_whole_registers_become_one_weight(tmp_path):
    checkpoint, numbers = checkpoint_of_types(tmp_path, [12, 14], num_rows=24)
    parameter = fused("mlp.gate_proj", "mlp.up_proj", num_rows=24)
    found = checkpoint.integers(parameter, torch.bfloat16)
    assert found.fmt == "int8"
    torch.testing.assert_close(dequantized(found), torch.cat(numbers), atol=0, rtol=1e-6)


@pytest.mark.parametrize("columns", [(256, 512), (128, 384)])
def test_part_of_columns_keeps_blocks_if_they_are_whole(tmp_path, columns):
    blocks = np.concatenate([random_blocks(14, 16)] * 2, 1)
    number = gguf.GGMLQuantizationType.Q6_K
    tensors = [
        ("token_embd.weight", np.zeros((10, 512), np.float32), None),
        ("blk.0.ffn_gate.weight", blocks, number),
    ]
    checkpoint = GgufCheckpoint(write(tmp_path / "m.gguf", "llama", tensors))
    name = "model.layers.0.mlp.gate_proj.weight"
    parameter = Parameter(name, ((name, (16, 512)),), cuts=(Cut(columns=columns),))
    found = checkpoint.integers(parameter, torch.bfloat16)
    assert (found.blocks is None) == (columns == (128, 384))
    wanted = torch.from_numpy(gguf.dequantize(blocks, number))[:, slice(*columns)]
    assert torch.equal(dequantized(found), wanted)
    if found.blocks is not None:
        x = torch.randn(3, 256).bfloat16()
        assert torch.equal(make_linear(found).apply(x), integer_linear_reference(x, found))


def test_memory_of_weights_counts_bytes_that_are_held(tmp_path):
    packed, number = np.zeros((96, 84), np.uint8), gguf.GGMLQuantizationType.Q2_K
    table = np.zeros((10, 256), np.float32)
    tensors = [("token_embd.weight", table, None), ("blk.0.ffn_gate.weight", packed, number)]
    args = EngineArgs(model=str(write(tmp_path / "m.gguf", "llama", tensors)))
    model = ModelConfig.load(args)
    assert weight_bytes(args, model, "bfloat16") == 10 * 256 * (2 + 2) + 96 * 256 * 0.640625
    assert weight_bytes(args, model, "float32") == 10 * 256 * (4 + 4) + 96 * 256 * 4


def test_parts_of_several_types_are_bytes_in_smallest_groups():
    q = torch.randint(0, 16, (3, 64), dtype=torch.int8)
    coarse = Affine(q, torch.rand(3, 2), torch.rand(3, 2))
    fine = Affine(q - 8, torch.rand(3, 4))
    both = stacked([coarse, fine])
    assert both.scales_OG.shape == both.minima_OG.shape == (6, 4)
    wanted = torch.cat([dequantized_affine(coarse), dequantized_affine(fine)])
    assert torch.equal(dequantized_affine(both), wanted)


def test_tokenizer_and_template_come_from_file(tmp_path):
    table = np.zeros((10, 64), np.float32)
    path = write(tmp_path / "m.gguf", tensors=[("token_embd.weight", table, None)])
    tokenizer = Tokenizer.load(path)
    assert tokenizer.encode("abc a<s>") == [7, 9, 1]
    assert tokenizer.decode([7, 9, 1]) == "abc a"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.chat_templates == {"default": "{{ messages[0]['content'] }}"}
    assert ModelConfig.load(EngineArgs(model=str(path))).eos_token_ids == (2,)


PIECES = {
    "exaone": ["it", "'s", "Ġ", "1", "2", "3", "4", "Ġup", "!", "\u010a"],
    "exaone4": ["it", "'s", "Ġ1234", "Ġup", "!", "\u010a"],
    "glm4": ["it", "'s", "Ġ", "123", "4", "Ġup", "!\u010a"],
    "hunyuan": ["it", "'s", "Ġ", "1", "2", "3", "4", "Ġup", "!\u010a"],
    "hunyuan-dense": ["it", "'s", "Ġ", "123", "4", "Ġup", "!\u010a"],
    "seed-coder": ["it", "'s", "Ġ", "1", "2", "3", "4", "Ġup", "!", "\u010a"],
    "lfm2": ["it", "'s", "Ġ", "123", "4", "Ġup", "!\u010a"],
    "qwen35": ["it", "'s", "Ġ", "1", "2", "3", "4", "Ġup", "!\u010a"],
    "falcon": ["it", "'", "s", "Ġ", "123", "4", "Ġup", "!", "\u010a"],
}


@pytest.mark.parametrize("name", PIECES)
def test_texts_are_split_as_the_name_says(name, tmp_path):
    table = np.zeros((10, 64), np.float32)
    path = write(tmp_path / "m.gguf", tensors=[("token_embd.weight", table, None)], pre=name)
    splitter = read_tokenizer(read_gguf(path)).backend.pre_tokenizer
    assert [item for item, _ in splitter.pre_tokenize_str("it's 1234 up!\n")] == PIECES[name]


def test_combining_marks_belong_to_words_of_qwen35(tmp_path):
    table = np.zeros((10, 64), np.float32)
    found = []
    for name in ("qwen35", "qwen2"):
        path = write(tmp_path / name, tensors=[("token_embd.weight", table, None)], pre=name)
        splitter = read_tokenizer(read_gguf(path)).backend.pre_tokenizer
        found.append(
            len(splitter.pre_tokenize_str("\u0e19\u0e49\u0e33"))
        )  # Thai: letter, mark, letter
    assert found == [1, 2]


def test_folder_with_one_file_and_quantization_name_it(tmp_path):
    write(tmp_path / "m-Q4_0.gguf")
    assert find_gguf(tmp_path) == tmp_path / "m-Q4_0.gguf"
    write(tmp_path / "m-Q8_0.gguf")
    assert find_gguf(tmp_path, "q8_0") == tmp_path / "m-Q8_0.gguf"
    with pytest.raises(TrouperValidationError, match=r"m-Q4_0\.gguf, m-Q8_0\.gguf"):
        find_gguf(tmp_path)
    with pytest.raises(TrouperValidationError, match="no model matches Q5_K"):
        find_gguf(tmp_path, "Q5_K")


def small(path, kind=None):
    table = np.ones((10, 64), np.float32)
    norm = np.ones(64, np.float32)
    tensors = [("token_embd.weight", table, None), ("output_norm.weight", norm, None)]
    if kind is not None:
        blocks = np.ones((4, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8)
        tensors.append(("output.weight", blocks, kind))
    return write(path, tensors=tensors).read_bytes()


def changed(content, at, form, value):
    size = struct.calcsize(form)
    return content[:at] + struct.pack(form, value) + content[at + size :]


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda c: b"", "cannot be read"),
        (lambda c: b"GGML" + c[4:], "magic"),
        (lambda c: changed(c, 4, "<I", 1), "version 1"),
        (lambda c: changed(c, 4, ">I", 3), "big endian"),
        (lambda c: changed(c, 8, "<Q", 2**40), "tensors"),
        (lambda c: changed(c, 16, "<Q", 2**40), "keys"),
        (lambda c: changed(c, 24, "<Q", 2**60), "truncated"),
        (lambda c: c[:-400], "truncated"),
        (lambda c: c[:300], "truncated"),
        (lambda c: changed(c, c.index(b"output_norm.weight") + 18 + 4 + 8 + 4, "<Q", 33), "multiple"),
        (lambda c: changed(c, c.index(b"output_norm.weight") + 18 + 4 + 8 + 4, "<Q", 0), "overlaps"),
        (lambda c: changed(c, c.index(b"output_norm.weight") + 18 + 4 + 8, "<I", 77), "unknown type"),
    ],
)  # fmt: skip
def test_bad_header_is_refused_by_what_is_wrong(tmp_path, change, rule):
    path = tmp_path / "m.gguf"
    path.write_bytes(change(small(path)))
    with pytest.raises(TrouperValidationError, match=rule):
        read_gguf(path)


def test_what_is_not_read_here_is_named(tmp_path):
    table = np.zeros((10, 64), np.float32)
    with pytest.raises(UnsupportedFeatureError, match="'mamba'"):
        ModelConfig.load(EngineArgs(model=str(write(tmp_path / "m.gguf", "mamba"))))
    path = tmp_path / "q.gguf"
    content = write(path, tensors=[("token_embd.weight", table, None)]).read_bytes()
    at = content.index(b"token_embd.weight") + 17 + 4 + 16
    path.write_bytes(changed(content, at, "<I", 40))
    with pytest.raises(UnsupportedFeatureError, match="NVFP4"):
        read_gguf(path)


def test_types_with_tables_need_package_and_say_which(tmp_path, monkeypatch):
    table = np.zeros((10, 98), np.uint8)
    kind = gguf.GGMLQuantizationType.IQ3_XXS
    path = write(tmp_path / "m.gguf", tensors=[("token_embd.weight", table, kind)])
    assert read_gguf(path).tensors["token_embd.weight"].shape == (10, 256)
    monkeypatch.setattr("trouper.config.gguf.header.find_spec", lambda name: None)
    with pytest.raises(UnsupportedFeatureError, match="IQ3_XXS, which needs the package gguf: "):
        read_gguf(path)


@pytest.mark.parametrize("kind", ["Q8_0", "MXFP4"])
def test_vector_of_packed_type_is_refused_by_its_name(tmp_path, kind):
    name, changes, numbers = MODELS["llama"]
    model = tiny_model(name, {"num_hidden_layers": 2, **changes}, tmp_path)
    path = converted(model, tmp_path / "m.gguf", "llama", numbers)
    content = path.read_bytes()
    at = content.index(b"blk.1.ffn_norm.weight") + 21 + 4 + 8
    number = gguf.GGMLQuantizationType[kind]
    path.write_bytes(changed(content, at, "<I", number))
    rule = rf"blk\.1\.ffn_norm\.weight \[\d+\] may not be of type {kind}, only F32"
    with pytest.raises(TrouperValidationError, match=rule):
        GgufCheckpoint(path).check(parameters_of(traits_of(path)))


def test_tensor_of_a_layer_that_nothing_reads_is_refused(tmp_path):
    name, changes, numbers = MODELS["lfm2"]
    model = tiny_model(name, {"num_hidden_layers": 4, **changes, "conv_bias": True}, tmp_path)
    path = converted(model, tmp_path / "m.gguf", "lfm2", numbers)
    rule = r"has 9 tensors that Lfm2ForCausalLM does not use: blk\.0\.shortconv\.conv\.bias, "
    with pytest.raises(UnsupportedFeatureError, match=rule) as error:
        GgufCheckpoint(path).check(parameters_of(traits_of(path)))
    assert error.value.parameter == "model"


def test_tensors_with_other_uses_are_ignored(tmp_path):
    """Rotary tables of old files, a layer that predicts further tokens, a tower, and a bias that changes nothing."""
    name, changes, numbers = MODELS["lfm2"]
    model = tiny_model(name, {"num_hidden_layers": 4, **changes}, tmp_path)
    others = [
        "blk.0.attn_rot_embd.weight", "blk.4.nextn.eh_proj.weight", "v.blk.0.attn_q.weight", "blk.0.ffn_up.bias",
    ]  # fmt: skip
    path = converted(model, tmp_path / "m.gguf", "lfm2", numbers, others=others)
    GgufCheckpoint(path).check(parameters_of(traits_of(path)))


def load_changed(path, content, edits):
    """Load it whole, or end in a typed error."""
    changed = bytearray(content)
    for at, byte in edits:
        changed[at % len(changed)] = byte
    path.write_bytes(changed)
    with contextlib.suppress(TrouperValidationError, UnsupportedFeatureError):
        GgufCheckpoint(path).check(parameters_of(traits_of(path)))
    with contextlib.suppress(TrouperValidationError, UnsupportedFeatureError):
        if kept := read_gguf(path).tensors.get("output.weight"):
            GgufCheckpoint(path).read("lm_head.weight", kept.shape)
    with contextlib.suppress(TrouperValidationError, UnsupportedFeatureError):
        Tokenizer.load(path)


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mutated")
    kinds = [getattr(gguf.GGMLQuantizationType, name) for name in ("Q2_K", "IQ4_XS", "IQ3_S")]
    whole = [folder / f"{i}.gguf" for i in range(4)]
    for path, kind in zip(whole, [None, *kinds], strict=True):
        small(path, kind)
    return folder / "m.gguf", whole


EDITS = st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), min_size=1, max_size=8)


@settings(max_examples=200, deadline=None)
@given(which=st.integers(0, 3), edits=EDITS)
def test_mutated_file_loads_or_ends_in_typed_error(targets, which, edits):
    load_changed(targets[0], targets[1][which].read_bytes(), edits)


@pytest.mark.slow
@pytest.mark.timeout(600)
@settings(max_examples=4_000, deadline=None)
@given(which=st.integers(0, 3), edits=EDITS)
def test_thousands_of_mutated_files_load_or_end_in_typed_errors(targets, which, edits):
    load_changed(targets[0], targets[1][which].read_bytes(), edits)


def test_folder_written_of_file_has_its_numbers(tmp_path):
    name, changes, numbers = MODELS["llama"]
    model = tiny_model(name, {"num_hidden_layers": 4, "rms_norm_eps": 1e-6, **changes}, tmp_path)
    write_folder(converted(model, tmp_path / "m.gguf", "llama", numbers), tmp_path / "folder")
    found = load_file(tmp_path / "folder" / "model.safetensors")
    wanted = load_file(tmp_path / "model.safetensors")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], wanted[key].bfloat16()) for key in wanted)
    assert ModelConfig.load(EngineArgs(str(tmp_path / "folder"))).vocab_size == VOCAB
    assert Tokenizer.load(tmp_path / "folder").encode("ab a") == Tokenizer.load(
        tmp_path / "m.gguf"
    ).encode("ab a")


@needs_smollm2
def test_a_real_model_answers_in_its_own_words():
    with LLM(model=SMOLLM2, max_model_len=512) as llm:
        (answer,) = llm.chat(
            [{"role": "user", "content": "What is the capital of France?"}],
            SamplingParams(temperature=0.0, max_tokens=16),
            use_tqdm=False,
        )
    assert answer.outputs[0].text == "The capital of France is Paris."


@needs_smollm2
def test_real_tokenizer_gives_ids_of_reference():
    from transformers import AutoTokenizer

    path = Path(SMOLLM2)
    reference = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    # transformers gives every byte-level file GPT-2's splitting; this is what the name `smollm` stands for
    words = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    reference.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"),
            pre_tokenizers.Split(Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    own, random = Tokenizer.load(path), np.random.default_rng(0)
    letters = [*"abcdeXYZ  \n\t.,!'1234567890éßñ漢字かな🙂€—", "'s", "the ", "<|im_end|>"]
    for _ in range(1000):
        text = "".join(random.choice(letters, random.integers(1, 60)))
        ids = own.encode(text)
        assert ids == reference.encode(text)
        assert own.decode(ids, skip_special_tokens=False) == reference.decode(ids)


@needs_smollm2
@torch.no_grad()
def test_real_model_gives_logits_of_its_dequantised_weights(tmp_path):
    config = engine_config(SMOLLM2, max_model_len=256)
    hf = AutoConfig.for_model(
        **{k: v for k, v in config.model.hf_config.items() if k != "quantization_config"}
    )
    model = AutoModelForCausalLM.from_config(hf, dtype=torch.float32, attn_implementation="eager")
    checkpoint = GgufCheckpoint(Path(SMOLLM2))
    for name, parameter in model.named_parameters():
        parameter.data = checkpoint.read(name, tuple(parameter.shape)).clone()
    model.tie_weights()
    driver = Driver(CpuRunner(config))
    prompts = random_prompts((9, 40), 1000)
    check_against(model.eval(), driver.run(prompts, 8, Sampling(temperature=0.0, logprobs=-1)))


@pytest.mark.parametrize(("number", "name"), [(None, None), (3, "LAST"), (1, "MEAN")])
def test_decoder_of_file_embeds_as_model_converted(tmp_path, number, name):
    model = tiny_model("Qwen3", {"head_dim": 16, "rms_norm_eps": 1e-6}, tmp_path)
    numbers = {"block_count": model.config.num_hidden_layers}
    numbers |= {} if number is None else {"pooling_type": number}
    path = converted(model, tmp_path / "m.gguf", "qwen3", numbers)
    spec = resolve(EngineArgs(str(path), skip_tokenizer_init=True)).pooler
    assert (spec and spec.seq_pooling_type) == name
    ids = tuple(range(5, 30))
    (mine,) = run(path, "token_embed", texts=[ids])
    (wanted,) = run(tmp_path, "token_embed", texts=[ids], load_format="safetensors")
    np.testing.assert_allclose(mine, wanted, atol=1e-5, rtol=1e-5)


def test_a_decoder_that_ranks_is_refused(tmp_path):
    table = np.zeros((10, 64), np.float32)
    path = write(tmp_path / "m.gguf", "qwen3", [("token_embd.weight", table, None)], {"pooling_type": 4})  # fmt: skip
    with pytest.raises(UnsupportedFeatureError, match="RANK"):
        resolve(EngineArgs(str(path)))


@pytest.mark.parametrize(
    ("arch", "change", "word"),
    [
        ("granitehybrid", {"ssm.inner_size": 191}, "191 numbers"),
        ("granitehybrid", {"attention.head_count_kv": [0, 2]}, "each of 4 layers"),
        ("lfm2moe", {"expert_gating_func": 1}, "expert_gating_func=1"),
        ("lfm2moe", {"expert_weights_scale": 2.5}, "expert_weights_scale=2.5"),
        ("qwen3next", {"ssm.time_step_rank": 5}, "5 value heads"),
        ("qwen35moe", {"nextn_predict_layers": 9}, "nextn_predict_layers=9"),
        ("qwen35moe", {"attention.recurrent_layers": [True]}, "a flag for each"),
    ],
)
def test_recurrent_header_that_contradicts_itself_is_refused(arch, change, word, tmp_path):
    numbers = MODELS[arch][2] | change
    tensors = [("token_embd.weight", np.zeros((10, 64), np.float32), None)]
    path = write(tmp_path / "m.gguf", arch, tensors, numbers)
    with pytest.raises((TrouperValidationError, UnsupportedFeatureError), match=word):
        hf_config(read_gguf(path))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
@pytest.mark.parametrize("arch", RECURRENT)
def test_integers_of_mixers_are_those_of_the_file(tmp_path, arch, kind):
    name, changes, numbers = MODELS[arch]
    model = tiny_model(name, {"num_hidden_layers": 4, "rms_norm_eps": 1e-6, **changes}, tmp_path)
    path = converted(model, tmp_path / "m.gguf", arch, numbers, gguf.GGMLQuantizationType[kind])
    checkpoint = GgufCheckpoint(path)
    found = 0
    for parameter in parameters_of(traits_of(path)):
        integers = checkpoint.integers(parameter, torch.bfloat16)
        if integers is None or not parameter.name.startswith(("in_proj", "out_proj", "gates")):
            continue
        exact = [part_of(checkpoint.read(*source), cut) for *source, cut in parameter.parts]
        torch.testing.assert_close(
            dequantized(integers).float(), torch.cat(exact), rtol=1e-2, atol=1e-3
        )
        found += 1
    assert found >= 4
    driver = Driver(CpuRunner(engine_config(path, dtype="bfloat16")), chunk=13)
    (sequence,) = driver.run(random_prompts((20,), VOCAB), 4)
    assert len(sequence.token_ids) == 4
