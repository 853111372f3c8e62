"""FP8, W8A8, FP4, 8-bit GPTQ and mixed checkpoints: written here by hand, read, and compared with the plain weights that they are."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from trouper.actors.executor.models.families.registry import decoder_traits
from trouper.actors.executor.models.parameters import layer_parameters, outer_parameters
from trouper.actors.executor.runners.cpu.runner import CpuRunner
from trouper.actors.executor.weights.checkpoint import Checkpoint
from trouper.actors.executor.weights.schemes import read_scheme
from trouper.errors import TrouperValidationError, UnsupportedFeatureError

from . import hf_families
from .driver import engine_config
from .test_architectures import SPARSE, tiny_model
from .test_integer_checkpoints import FILE, eight_to_a_word, load, run

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
FP8_BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [48, 24]}
FP8_TENSORS = {"quant_method": "fp8", "activation_scheme": "static"}
BNB4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
GPTQ8 = {"quant_method": "gptq", "bits": 8, "group_size": 32, "desc_act": True}


def compressed(form, weights, **group):
    """A config of one group."""
    of_group = {"targets": ["Linear"], "weights": weights, **group}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": of_group},
        "ignore": ["lm_head"],
    }


def weights(bits, kind, strategy, **others):
    return {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, **others}


def fp8_by(shape_of_scales, name="weight_scale", dtype=torch.float32):
    """E4m3 with scales of some shape; each covers as many outputs and inputs."""

    def quantise(weight):
        num_out, num_in = weight.shape
        q = (weight / weight.abs().max() * 400).to(torch.float8_e4m3fn)
        shape = shape_of_scales(num_out, num_in)
        scales = ((torch.rand(shape) + 0.5) / 400 / num_in**0.5).to(dtype)
        rows, columns = (*scales.reshape(-1, *shape[1:]).shape, 1)[:2] if shape else (1, 1)
        if len(shape) < 2:
            rows, columns = math.prod(shape), 1
        whole = scales.float().reshape(rows, columns)
        block = (num_out, 48)[rows > 1], (num_in, 24)[columns > 1]
        block = (1 if rows == num_out else block[0], block[1])
        whole = whole.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
        parts = {"weight": q, name: scales, "input_scale": torch.tensor(0.01)}
        return parts, q.float() * whole[:num_out, :num_in]

    return quantise


def int8(weight, has_zeros=False):
    q = torch.randint(-128, 128, weight.shape, dtype=torch.int8)
    scales = ((torch.rand(len(q), 1) + 0.5) / 128 / weight.shape[1] ** 0.5).bfloat16()
    zeros = torch.randint(-128, 128, (len(q), 1), dtype=torch.int8)
    parts = {"weight": q, "weight_scale": scales}
    if has_zeros:
        parts["weight_zero_point"] = zeros
    return parts, (q.float() - (zeros.float() if has_zeros else 0)) * scales.float()


def fp4(weight, *, has_global_scale):
    """Two e2m1 a byte, the low half first; scales of 16 inputs are e4m3, those of 32 powers of two."""
    size = 16 if has_global_scale else 32
    groups = (len(weight), weight.shape[1] // size)
    codes = torch.randint(0, 16, weight.shape)
    values = torch.tensor([*E2M1, *(-x for x in E2M1)])[codes]
    parts = {"weight_packed": (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)}
    if has_global_scale:
        parts["weight_scale"] = (torch.rand(groups) * 100 + 50).to(torch.float8_e4m3fn)
        parts["weight_global_scale"] = torch.tensor([4096.0])
        scales = parts["weight_scale"].float() / 4096
    else:
        exponents = torch.randint(119, 124, groups)
        parts["weight_scale"] = exponents.to(torch.uint8)
        scales = 2.0 ** (exponents - 127).float()
    return parts, values * scales.repeat_interleave(size, 1)


def gptq8(weight, *, is_ordered=True):
    """Bytes with zeros, and groups of inputs that do not lie side by side, the same ones for all readers of an input."""
    num_out, num_in = weight.shape
    q, groups = torch.randint(0, 256, weight.shape), (num_out, num_in // 32)
    zeros = torch.randint(0, 256, groups)
    scales = ((torch.rand(groups) + 0.5) / 128 / num_in**0.5).half()
    g_idx = torch.arange(num_in) // 32
    if is_ordered:
        g_idx = g_idx[torch.randperm(num_in, generator=torch.Generator().manual_seed(num_in))]
    plain = (q - zeros[:, g_idx]) * scales.float()[:, g_idx]

    def words(numbers):  # four to an int32
        return numbers.to(torch.uint8).flatten().view(torch.int32).view(len(numbers), -1)

    parts = {
        "qweight": words(q).T.contiguous(),
        "qzeros": words((zeros.T - 1) % 256),
        "scales": scales.T.contiguous(),
        "g_idx": g_idx.int(),
    }
    return parts, plain


def nvfp4_of_modelopt(weight):
    parts, plain = fp4(weight, has_global_scale=True)
    inverse = 1 / parts["weight_global_scale"]
    own = {"weight": parts["weight_packed"], "weight_scale": parts["weight_scale"]}
    return {**own, "weight_scale_2": inverse[0], "input_scale": torch.tensor(0.01)}, plain


def bnb8(weight):
    """The bytes of LLM.int8(), with the largest number of each row."""
    q, largest = torch.randint(-127, 128, weight.shape, dtype=torch.int8), torch.rand(len(weight))
    parts = {"weight": q, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return parts, q.float() * (largest / 127).unsqueeze(1)


def bnb4(weight, *, kind="nf4", block=64, nested=None):
    """Codes of four bits in row order, the first in the high half; absmax of blocks, coded in bytes where `nested` is a size."""
    num_blocks, code = -(-weight.numel() // block), torch.randint(0, 16, (weight.numel(),))
    table, absmax = torch.rand(16) * 2 - 1, torch.rand(num_blocks)
    state = {
        "quant_type": kind,
        "blocksize": block,
        "dtype": "bfloat16",
        "shape": list(weight.shape),
    }
    parts = {
        "weight": (code[::2] << 4 | code[1::2]).to(torch.uint8).unsqueeze(1),
        "weight.absmax": absmax,
        "weight.quant_map": table,
    }
    if nested is not None:
        bytes_, other = torch.randint(0, 256, (num_blocks,)), torch.rand(256)
        whole = torch.rand(-(-num_blocks // nested))
        absmax = other[bytes_] * whole[torch.arange(num_blocks) // nested] + 0.25
        parts |= {
            "weight.absmax": bytes_.to(torch.uint8),
            "weight.nested_absmax": whole,
            "weight.nested_quant_map": other,
        }
        state |= {"nested_blocksize": nested, "nested_dtype": "float32", "nested_offset": 0.25}
    written = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    parts[f"weight.quant_state.bitsandbytes__{kind}"] = written
    of_block = torch.arange(weight.numel()) // block
    return parts, (table[code] * absmax[of_block]).view(weight.shape)


def packed8(weight):
    """Bytes of 1 … 256 less 128, in groups, four to an int32."""
    q, groups = torch.randint(0, 256, weight.shape), (len(weight), weight.shape[1] // 32)
    scales = ((torch.rand(groups) + 0.5) / 128 / weight.shape[1] ** 0.5).bfloat16()
    parts = {
        "weight_packed": q.to(torch.uint8).view(torch.int32),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    return parts, (q - 128) * scales.float().repeat_interleave(32, 1)


def packed4(weight):
    """Integers of four bits with a scale for each output."""
    q = torch.randint(0, 16, weight.shape)
    scales = ((torch.rand(len(weight), 1) + 0.5) / 8 / weight.shape[1] ** 0.5).bfloat16()
    parts = {
        "weight_packed": eight_to_a_word(q),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    return parts, (q - 8) * scales.float()


def blocks(num_out, num_in):
    return -(-num_out // 48), -(-num_in // 24)


KINDS = {
    "fp8_blocks": (FP8_BLOCKS, fp8_by(blocks, "weight_scale_inv")),
    "fp8_tensor": (FP8_TENSORS, fp8_by(lambda *_: ())),
    "fp8_tensors_of_one": (FP8_TENSORS, fp8_by(lambda *_: (1,), dtype=torch.bfloat16)),
    "fp8_channels": (
        compressed("float-quantized", weights(8, "float", "channel")),
        fp8_by(lambda num_out, _: (num_out, 1), dtype=torch.bfloat16),
    ),
    "int8_channels": (
        compressed(
            "int-quantized",
            weights(8, "int", "channel"),
            input_activations=weights(8, "int", "token"),
        ),
        int8,
    ),
    "int8_zeros": (
        compressed("naive-quantized", weights(8, "int", "channel") | {"symmetric": False}),
        lambda weight: int8(weight, has_zeros=True),
    ),
    "mxfp4": (
        compressed("mxfp4-pack-quantized", weights(4, "float", "group", group_size=32)),
        lambda weight: fp4(weight, has_global_scale=False),
    ),
    "nvfp4": (
        compressed("nvfp4-pack-quantized", weights(4, "float", "tensor_group", group_size=16)),
        lambda weight: fp4(weight, has_global_scale=True),
    ),
    "modelopt_fp8": (
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
        fp8_by(lambda *_: ()),
    ),
    "modelopt_fp8_channels": (
        {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
        fp8_by(lambda num_out, _: (num_out,)),
    ),
    "modelopt_nvfp4": (
        {"quant_method": "modelopt_fp4", "quantization": {"quant_algo": "NVFP4", "group_size": 16}},
        nvfp4_of_modelopt,
    ),
    "bnb_8_bits": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, bnb8),
    "bnb_nf4": (BNB4, bnb4),
    "bnb_nf4_nested": (BNB4, lambda weight: bnb4(weight, nested=256)),
    "bnb_fp4": (BNB4 | {"bnb_4bit_quant_type": "fp4"}, lambda w: bnb4(w, kind="fp4", block=128)),
    "auto_round": (
        {
            "quant_method": "auto-round",
            "bits": 8,
            "group_size": 32,
            "packing_format": "auto_round:auto_gptq",
        },
        lambda weight: gptq8(weight, is_ordered=False),
    ),
    "gptq_8_bits": (GPTQ8, lambda weight: gptq8(weight, is_ordered=False)),
    "gptq_act_order": (GPTQ8, gptq8),
    "packed_8_bits": (
        compressed("pack-quantized", weights(8, "int", "group", group_size=32)),
        packed8,
    ),
}
MIXED = {
    "quant_method": "compressed-tensors",
    "format": "mixed-precision",
    "config_groups": {
        "bytes": {
            "targets": ["re:.*self_attn.[qk]_proj$"],
            "format": "pack-quantized",
            "weights": weights(8, "int", "group", group_size=32),
        },
        "floats": {
            "targets": ["model.layers.1.mlp.down_proj"],
            "format": "float-quantized",
            "weights": weights(8, "float", "channel"),
        },
        "nibbles": {
            "targets": ["Linear"],
            "format": "pack-quantized",
            "weights": weights(4, "int", "channel"),
        },
    },
}


def mixed(name):
    if name.endswith(("q_proj.weight", "k_proj.weight")):
        return packed8
    if name == "model.layers.0.self_attn.o_proj.weight":
        return None  # is left plain
    is_down = name == "model.layers.1.mlp.down_proj.weight"
    return KINDS["fp8_channels"][1] if is_down else packed4


def tiny_dense(folder):
    tiny_model("Qwen3", {"num_hidden_layers": 2, "tie_word_embeddings": True}, folder)


def tiny_experts(folder):
    hf_families.tiny_model("qwen3_moe", folder)


def write(tmp_path, config, quantiser_of, changes=None, model=tiny_dense):
    """A plain folder and a quantised one, of the same weights."""
    plain, narrow = tmp_path / "plain", tmp_path / "narrow"
    model(plain)
    torch.manual_seed(1)
    tensors, stored = load_file(plain / FILE), {}
    for name, weight in tensors.items():
        quantise = quantiser_of(name) if name.endswith("_proj.weight") else None
        if quantise is None:
            stored[name] = weight
            continue
        parts, tensors[name] = quantise(weight)
        base = name.removesuffix("weight")
        stored |= {base + part: x for part, x in parts.items()}
    if changes is not None:
        changes(stored)
    narrow.mkdir()
    save_file(tensors, plain / FILE, metadata={"format": "pt"})
    save_file(stored, narrow / FILE, metadata={"format": "pt"})
    hf_config = json.loads((plain / "config.json").read_text())
    hf_config["quantization_config"] = config
    (narrow / "config.json").write_text(json.dumps(hf_config))
    return plain, narrow


@pytest.mark.parametrize("kind", KINDS)
def test_the_answers_are_those_of_the_plain_weights(tmp_path, kind):
    config, quantise = KINDS[kind]
    plain, narrow = write(tmp_path, config, lambda _: quantise)
    (_, ids, logprobs), (_, found_ids, found) = run(plain), run(narrow)
    assert found_ids == ids
    assert torch.equal(found, logprobs)


def test_groups_of_modules_are_each_read_as_config_json_says(tmp_path):
    plain, narrow = write(tmp_path, MIXED, mixed)
    (_, ids, logprobs), (_, found_ids, found) = run(plain), run(narrow)
    assert found_ids == ids
    assert torch.equal(found, logprobs)


def gptq_by(bits):
    """Groups of 32 in order, of any of the two widths."""

    def quantise(weight):
        if bits == 8:
            return gptq8(weight, is_ordered=False)
        q, shape = torch.randint(0, 16, weight.shape), (len(weight), weight.shape[1] // 32)
        zeros, scales = torch.randint(0, 16, shape), ((torch.rand(shape) + 0.5) / 64).half()
        parts = {
            "qweight": eight_to_a_word(q).T.contiguous(),
            "qzeros": eight_to_a_word((zeros.T - 1) % 16),
            "scales": scales.T.contiguous(),
        }
        wide = (x.repeat_interleave(32, 1) for x in (zeros, scales.float()))
        return parts, (q - next(wide)) * next(wide)

    return quantise


EXCEPTIONS = {
    "gptqmodel": {
        **GPTQ8, "bits": 4,
        "dynamic": {"-:.*0.*o_proj": {}, r"+:.*\.[qk]_proj": {"bits": 8}, r".*\.1\.mlp\.down.*": {"bits": 8}},
    },
    "auto-round": {
        "quant_method": "auto-round", "bits": 4, "group_size": 32, "packing_format": "auto_round:auto_gptq",
        "extra_config": {
            "model.layers.0.self_attn.o_proj": {"bits": 16, "data_type": "float"},
            ".*[qk]_proj": {"bits": 8}, "model.layers.1.mlp.down_proj": {"bits": 8},
        },
    },
}  # fmt: skip


@pytest.mark.parametrize("method", EXCEPTIONS)
def test_modules_may_be_excepted_by_name_or_pattern(tmp_path, method):
    def kind_of(name):
        if name == "model.layers.0.self_attn.o_proj.weight":
            return None  # is left plain
        is_wide = "q_proj" in name or "k_proj" in name or "1.mlp.down_proj" in name
        return gptq_by(8 if is_wide else 4)

    plain, narrow = write(tmp_path, EXCEPTIONS[method], kind_of)
    assert torch.equal(run(narrow)[2], run(plain)[2])


def test_names_in_a_larger_model_count_too():
    """A composite checkpoint's config names modules as its file does, `model.language_model.…`."""
    scheme = read_scheme({"quantization_config": EXCEPTIONS["gptqmodel"] | {
        "dynamic": {r"+:^model\.language_model\.layers\.0\..*": {"bits": 8}}}})  # fmt: skip
    assert scheme is not None
    name = "model.layers.0.mlp.up_proj.weight"
    stored = {name.replace("weight", "qweight"): None}
    inner = name.replace("model.", "model.language_model.")
    assert scheme.layout(name, stored).bits == 4
    assert scheme.layout(name, stored, inner).bits == 8


def test_modelopt_may_have_a_file_of_its_own(tmp_path):
    config, quantise = KINDS["modelopt_nvfp4"]
    plain, narrow = write(tmp_path, config, lambda _: quantise)
    hf_config = json.loads((narrow / "config.json").read_text())
    del hf_config["quantization_config"]
    (narrow / "config.json").write_text(json.dumps(hf_config))
    own = {"producer": {"name": "modelopt"}, "quantization": config["quantization"]}
    (narrow / "hf_quant_config.json").write_text(json.dumps(own))
    assert torch.equal(run(narrow)[2], run(plain)[2])


@pytest.mark.parametrize("kind", ["bnb_nf4_nested", "bnb_8_bits", "modelopt_nvfp4"])
def test_all_tensors_are_given_plain_to_the_library(tmp_path, kind):
    config, quantise = KINDS[kind]
    plain, narrow = write(tmp_path, config, lambda _: quantise)
    scheme = read_scheme({"quantization_config": config})
    found, expected = dict(Checkpoint(narrow, scheme=scheme).plain()), load_file(plain / FILE)
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name].float(), weight.float(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", ["fp8_blocks", "gptq_act_order"])
def test_experts_are_quantised_matrices_too(tmp_path, kind):
    config, quantise = KINDS[kind]
    plain, narrow = write(tmp_path, config, lambda _: quantise, model=tiny_experts)
    (_, ids, logprobs), (runner, found_ids, found) = run(plain), run(narrow)
    assert isinstance(runner, CpuRunner)
    assert found_ids == ids
    assert torch.equal(found, logprobs)


@pytest.mark.parametrize("case", ["gpt-oss", "granite-moe"])
def test_fp8_of_experts_stored_together_is_refused(case, tmp_path):
    tiny_model(*SPARSE[case], tmp_path)
    stored = load_file(tmp_path / FILE)
    narrow = {name: x.to(torch.float8_e4m3fn) if x.ndim == 3 else x for name, x in stored.items()}
    save_file(narrow, tmp_path / FILE, metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = FP8_TENSORS
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedFeatureError, match=r"quant_method: .* fp8 of .* 3 dimensions"):
        CpuRunner(engine_config(tmp_path)).load()


@pytest.mark.parametrize("kind", ["fp8_blocks", "int8_zeros", "gptq_act_order", "nvfp4"])
def test_beside_bfloat16_answers_are_as_near_as_its_rounding(tmp_path, kind):
    config, quantise = KINDS[kind]
    plain, narrow = write(tmp_path, config, lambda _: quantise)
    (_, _, logprobs), (_, _, found) = run(plain, "bfloat16"), run(narrow, "auto")
    torch.testing.assert_close(found, logprobs, atol=0.25, rtol=0)
    assert (found - logprobs).abs().mean() < 0.03


def test_gpt_oss_experts_equal_transformers_bitwise(tmp_path):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    name = "model.layers.0.mlp.experts.down_proj"
    packed = torch.randint(0, 256, (3, 64, 2, 16), dtype=torch.uint8)
    powers = torch.randint(100, 140, (3, 64, 2), dtype=torch.uint8)
    save_file({f"{name}_blocks": packed, f"{name}_scales": powers}, tmp_path / FILE)
    scheme = read_scheme({"quantization_config": {"quant_method": "mxfp4"}})
    checkpoint = Checkpoint(tmp_path, scheme=scheme)
    expected = convert_moe_packed_tensors(packed, powers, dtype=torch.bfloat16)
    assert torch.equal(checkpoint.read(name, (3, 64, 64)).bfloat16(), expected)
    assert [found for found, _ in checkpoint.plain()] == [name]


UP = "model.layers.0.mlp.up_proj."


def spoil(part, value):
    return lambda stored: stored[UP + part].view(-1)[:1].copy_(torch.tensor([value]))


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("fp8_blocks", lambda t: t.pop(UP + "weight_scale_inv"), r"lacks 1 .*up_proj\.weight_scale"),
        ("int8_channels", lambda t: t.pop(UP + "weight_scale"), r"lacks 1 .*up_proj\.weight_scale"),
        ("fp8_channels", spoil("weight_scale", math.nan), r"up_proj\.weight_scale: .*not finite"),
        ("fp8_blocks", spoil("weight_scale_inv", math.inf), r"weight_scale_inv: .*not finite"),
        ("fp8_channels", spoil("weight", math.nan), r"up_proj\.weight: weights that are not numbers"),
        ("mxfp4", spoil("weight_scale", 255), r"up_proj\.weight_scale: .*not finite"),
        ("packed_8_bits", spoil("weight_shape", 7), r"up_proj\.weight_shape: must be \[\d+, \d+\]"),
        ("bnb_nf4", spoil("weight.absmax", math.nan), r"up_proj\.weight\.absmax: .*not finite"),
        ("bnb_nf4", spoil("weight.quant_state.bitsandbytes__nf4", 7), r"up_proj\.weight\.quant_state: is not"),
        ("bnb_nf4", lambda t: t.pop(UP + "weight.absmax"), r"lacks 1 .*up_proj\.weight\.absmax"),
        ("bnb_nf4", lambda t: t.pop(UP + "weight.quant_state.bitsandbytes__nf4"), r"lacks 1 .*quant_state"),
        ("bnb_nf4_nested", lambda t: t.pop(UP + "weight.nested_absmax"), r"bytes without weight\.nested_absmax"),
        ("bnb_8_bits", spoil("SCB", math.inf), r"up_proj\.SCB: .*not finite"),
        ("bnb_8_bits", spoil("weight_format", 1), r"up_proj\.weight_format: must be 0"),
        ("modelopt_nvfp4", spoil("weight_scale_2", math.nan), r"up_proj\.weight_scale_2: .*not finite"),
        ("gptq_8_bits", spoil("g_idx", 1), r"up_proj\.g_idx: each group must have 32 inputs"),
        (
            "fp8_channels",
            lambda t: t.update({UP + "weight_scale": torch.ones(3, 1)}),
            r"misshapen 1 .*up_proj\.weight_scale \[3, 1\]",
        ),
        (
            "int8_channels",
            lambda t: t.update({UP + "weight_scale": t[UP + "weight_scale"].int()}),
            r"mistyped 1 .*up_proj\.weight_scale I32 instead of F32",
        ),
        (
            "mxfp4",
            lambda t: t.update({UP + "weight_packed": t[UP + "weight_packed"].int()}),
            r"mistyped 1 .*up_proj\.weight_packed I32 instead of U8",
        ),
    ],
)  # fmt: skip
def test_a_malformed_tensor_is_named(tmp_path, kind, changes, message):
    config, quantise = KINDS[kind]
    _, narrow = write(tmp_path, config, lambda _: quantise, changes)
    with pytest.raises(TrouperValidationError, match=message):
        load(narrow)


@pytest.mark.parametrize("kind", ["fp8_tensor", "nvfp4"])
@pytest.mark.parametrize("name", ["self_attn.k_scale", "self_attn.v_proj.v_scale"])
def test_scales_of_kv_cache_are_left_out_with_line(tmp_path, caplog, kind, name):
    def add(stored):
        stored[f"model.layers.0.{name}"] = torch.tensor(3.0)

    config, quantise = KINDS[kind]
    config = {**config, "kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    plain, narrow = write(tmp_path, config, lambda _: quantise, add)
    with caplog.at_level("INFO", logger="trouper"):
        assert torch.equal(run(narrow)[2], run(plain)[2])
    assert "of a KV cache, which are not used" in caplog.text


def test_a_quantised_module_of_no_group_is_named(tmp_path):
    config = json.loads(json.dumps(MIXED))
    del config["config_groups"]["nibbles"]
    _, narrow = write(tmp_path, config, mixed)
    with pytest.raises(UnsupportedFeatureError, match=r"config_groups: .*v_proj\.weight"):
        load(narrow)


def test_integers_without_a_quantization_config_are_not_weights(tmp_path):
    _, narrow = write(tmp_path, None, lambda _: lambda w: ({"weight": w.to(torch.int8)}, w))
    with pytest.raises(TrouperValidationError, match=r"mistyped 14 tensors: .*I8 instead of F32"):
        load(narrow)


def test_a_pattern_that_is_none_is_named():
    config = json.loads(json.dumps(MIXED))
    config["config_groups"]["bytes"]["targets"] = ["re:("]
    with pytest.raises(TrouperValidationError, match="targets: no regular expression"):
        read_scheme({"quantization_config": config})


EDITS = st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), min_size=1, max_size=6)
CHANGES = st.dictionaries(
    st.sampled_from(
        ["bits", "group_size", "format", "weight_block_size", "config_groups", "quant_method"]
    ),
    st.none() | st.integers(-3, 300) | st.lists(st.integers(-1, 300), max_size=3) | st.text(max_size=9),
    max_size=1,
)  # fmt: skip
DRAWN = ("fp8_blocks", "packed_8_bits", "nvfp4", "gptq_act_order")


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    """Folders, the bytes of their tensors, their configs, and the parameters that they hold."""
    found = []
    for kind in DRAWN:
        config, quantise = KINDS[kind]
        _, narrow = write(tmp_path_factory.mktemp(kind), config, lambda _, q=quantise: q)
        hf_config = json.loads((narrow / "config.json").read_text())
        traits = decoder_traits(hf_config, "Qwen3ForCausalLM")
        parameters = [*outer_parameters(traits), *layer_parameters(traits, 0), *layer_parameters(traits, 1)]  # fmt: skip
        found.append((narrow, (narrow / FILE).read_bytes(), hf_config, parameters))
    return found


def read_changed(target, edits, changes):
    """Change bytes of the file's header and fields of the config, and read all that a model is made of."""
    folder, content, hf_config, parameters = target
    changed = bytearray(content)
    for place, byte in edits:
        changed[place % len(changed)] = byte
    (folder / FILE).write_bytes(changed)
    config = {**hf_config["quantization_config"], **changes}
    try:
        checkpoint = Checkpoint(folder, scheme=read_scheme({"quantization_config": config}))
        checkpoint.check(parameters, ignored=frozenset())
        for parameter in parameters:
            if checkpoint.integers(parameter, torch.float32) is None:
                for name, shape in parameter.sources:
                    checkpoint.read(name, shape)
        dict(checkpoint.plain())
    except (TrouperValidationError, UnsupportedFeatureError):
        return


@settings(max_examples=100, deadline=None)
@given(index=st.integers(0, len(DRAWN) - 1), edits=EDITS, changes=CHANGES)
def test_mutated_checkpoint_is_read_or_refused_with_typed_error(targets, index, edits, changes):
    read_changed(targets[index], edits, changes)
