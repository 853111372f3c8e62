"""Find the GGUF files of a model by their names, and translate the fields and tensors of their headers.

A model is one file, or a split of several files.  Its name is that of its (first) file without `.gguf` and the split's suffix.  QUANT
in `ORG/NAME:QUANT` matches complete parts of the name, ignoring case: parts are separated by `-`, `.` and `/`, and may
begin after `_`.  So F16 does not match BF16, and Q4_K matches neither Q4_K_M nor IQ4_K.  A complete name matches exactly.

Fields become those of config.json, and tensors get their names in safetensors, so the traits of a model are read from a GGUF file
like from any other.  Some properties follow only from the architecture's name, so they are defined here: Gemma's attention scale
and local base frequency, and permuted rows.
"""

import re
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, cast

from trouper.config.gguf.families import (
    LAYER_NORM_FAMILIES,
    SCALE,
    SHARED_WIDTH,
    SIBLINGS,
    WINDOW,
    Family,
    check_keys,
    expert_width,
    experts_of,
    granite_scales,
    layer_numbers,
    layer_types,
    shared_width,
)
from trouper.config.gguf.header import SPLIT, Gguf, GgufStrings
from trouper.config.gguf.hybrids import HYBRIDS
from trouper.errors import UnsupportedFeatureError, invalid

# The depth of folders in a folder: repositories have one folder for each QUANT, or none.
DEPTH = 2
MANY = 30  # names in a message
# Files that belong to a model, or were used to make it.
NO_MODELS = {"mmproj", "imatrix"}


def gguf_models(names: Iterable[str]) -> dict[str, list[str]]:
    """Group file names by model: each model's name with its files in order.

    A model is one file or a split with all its parts.  Other files, such as image projectors, are omitted.

    Args:

        names: paths in the folder or the repository, with `/`.
    """
    known = sorted(name for name in names if name.endswith(".gguf") and name.count("/") <= DEPTH)
    found: dict[str, list[str]] = {}
    for name in known:
        split = SPLIT.fullmatch(name)
        label = name.removesuffix(".gguf") if split is None else split[1]
        if NO_MODELS & set(re.split(r"[-._]", label.rpartition("/")[2].lower())):
            continue
        if split is None or int(split[2]) == 1:
            files = [name] if split is None else [x for x in known if _parts(x) == _parts(name)]
            found[name if label in found else label] = files
    return found


def _parts(name: str) -> tuple[str, str] | None:
    split = SPLIT.fullmatch(name)
    return split and (split[1], split[3])


def choose_gguf(
    names: Iterable[str], quantization: str, place: str, what: str = "its GGUF files"
) -> list[str]:
    """Choose the files of the model that `quantization` names, or of the only model.  Returns no files if there are no models.

    Args:
        names: paths in the folder or the repository, with `/`.
        place: the folder or the repository, for messages.
        what: a description of these files, for messages.

    Raises:
        TrouperValidationError: several models match, or none of them; the message lists them.
    """
    models = gguf_models(names)
    matching = _matching(models, quantization) if quantization else list(models)
    if len(matching) == 1 or not models:
        return models[matching[0]] if models else []
    whole = [models[label][0] for label in matching or models]
    shown = ", ".join(whole[:MANY]) + (", …" if len(whole) > MANY else "")
    if not matching:
        rule = f"no model matches {quantization} among {what}: {shown}"
    elif quantization:
        rule = f"{quantization} matches several of {what}: {shown}"
    else:
        rule = f"there are several models among {what}; choose one with {place}:QUANT: {shown}"
    raise invalid("model", rule, place)


def _matching(labels: Iterable[str], quantization: str) -> list[str]:
    wanted = quantization.lower().removesuffix(".gguf")
    whole = [
        label for label in labels if wanted in (label.lower(), label.lower().rpartition("/")[2])
    ]
    parts = re.compile(rf"(?:^|[-._/]){re.escape(wanted)}(?:$|[-./])")
    return whole or [label for label in labels if parts.search(label.lower())]


def gguf_names(folder: Path) -> list[str]:
    """List the GGUF files in a folder and its subfolders, as relative paths."""
    patterns = ("*/" * depth + "*.gguf" for depth in range(DEPTH + 1))
    found = (file for pattern in patterns for file in folder.glob(pattern) if file.is_file())
    return sorted(file.relative_to(folder).as_posix() for file in found)


def find_gguf(folder: Path, quantization: str = "", place: str = "") -> Path | None:
    """Find the first file of the model in a folder, or None if there are no models.  Raises the errors of `choose_gguf`."""
    files = choose_gguf(gguf_names(folder), quantization, place or str(folder))
    return folder / files[0] if files else None


LOCAL_BASE = "rope.freq_base_swa"
# By `pooling_type`; NONE leaves the choice to the caller.
POOLINGS = {1: "MEAN", 2: "CLS", 3: "LAST", 4: "RANK"}
ENCODER_NAMES = ("bert", "nomic-bert")  # see `encoders.py`
# The `quant_method` that marks a checkpoint as quantized.
METHOD = "gguf"
# Additional tokens that end an answer, like in llama.cpp, if `eos_token_id` is another token.
END_TEXTS = frozenset(
    {"<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>"}
)
CONTROL = 3  # in tokenizer.ggml.token_type
MODULES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "self_attn.sinks": "attn_sinks", "mlp.router": "ffn_gate_inp", "mlp.router.layer": "ffn_gate_inp",
    "mlp.gate": "ffn_gate_inp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp", "shared_mlp.gate_proj": "ffn_gate_shexp",
    "shared_mlp.up_proj": "ffn_up_shexp", "shared_mlp.down_proj": "ffn_down_shexp",
}  # fmt: skip
# One tensor contains a projection of all experts.
EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(gate_proj|up_proj|down_proj)")
# Other names of mixtures. The dense layers of LFM2 are also a `feed_forward`.
SPARSE = re.compile(r"block_sparse_moe\.|feed_forward\.(?=experts\.|gate$)")
MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
OTHER_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


class Place(NamedTuple):
    """The place of a tensor in a file: its name there, and the index of the expert if one tensor contains all experts."""

    name: str
    expert: int | None = None


def family_of(header: Gguf) -> Family:
    """Return the family of the architecture.

    Raises:
        UnsupportedFeatureError: the architecture is not supported; the message lists the supported ones.
    """
    name = header.need("general.architecture", str)
    family = FAMILIES.get(name)
    if family is None:
        known = ", ".join((*FAMILIES, *ENCODER_NAMES))
        raise UnsupportedFeatureError(
            f"{header.path.name}: architecture {name[:80]!r} is not supported; supported: {known}",
            parameter="model",
        )
    return family


def hf_config(header: Gguf) -> dict[str, Any]:
    """Return the config.json that corresponds to a decoder's header.

    Raises:
        UnsupportedFeatureError: the architecture is not supported.
        TrouperValidationError: a key is missing or has another type.
    """
    family = family_of(header)
    at = header.need("general.architecture", str) + "."
    table = header.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise invalid("model", f"{header.path.name}: has no token_embd.weight", str(header.path))
    num_heads = header.need(at + "attention.head_count", int)
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "dtype": dtype_of(header),
        "vocab_size": table.shape[0],
        "hidden_size": header.need(at + "embedding_length", int),
        "intermediate_size": _mlp_width(header, at),
        "num_hidden_layers": _num_layers(header, at),
        "num_attention_heads": num_heads,
        "num_key_value_heads": _num_kv_heads(header, at) or num_heads,
        "max_position_embeddings": header.need(at + "context_length", int),
        family.eps[1]: header.need(at + family.eps[0], float),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        # The first layers of a hybrid have no attention.
        "attention_bias": any(name.endswith(".attn_q.bias") for name in header.tensors),
        "eos_token_id": _end_ids(header),
    }
    for name, key, kind in (
        ("bos_token_id", "tokenizer.ggml.bos_token_id", int),
        ("head_dim", at + "attention.key_length", int),
        ("sliding_window", at + "attention.sliding_window", int),
        ("rope_theta", at + "rope.freq_base", float),
    ):
        if (value := header.get(key, kind)) is not None:
            config[name] = value
    check_keys(header, at, config, family.reads)
    if header.get(at + "attention.causal", bool) is False:
        config["is_causal"] = False
    if family.reads >= WINDOW and (kinds := layer_types(header, at, config["num_hidden_layers"])):
        config["layer_types"] = kinds
    if rotated := header.get(at + "rope.dimension_count", int):
        # llama.cpp rotates this many dimensions of each head; for Phi-3 this key contains the number.
        config["partial_rotary_factor"] = rotated / max(1, _head_dim(config))
    if scaling := rope_scaling(header, at, config):
        config["rope_scaling"] = scaling
    config |= quantization_of(header) | pooling_of(header, at)
    if config.get("gguf_pooling") == "RANK":
        rule = f"{header.path.name}: {at}pooling_type=4 (RANK) is supported for bert only"
        raise UnsupportedFeatureError(rule, parameter="model")
    return config | (family.own(header, at, config) if family.own else {})


def _mlp_width(header: Gguf, at: str) -> int:
    """Return the width of dense MLPs, or that of an expert if all layers have experts."""
    width = header.get(at + "feed_forward_length", int)
    return width or header.need(at + "expert_feed_forward_length", int)


def _num_layers(header: Gguf, at: str) -> int:
    """Return the number of layers, without the additional ones at the end that predict several tokens (MTP)."""
    count, key = header.need(at + "block_count", int), at + "nextn_predict_layers"
    extra = header.get(key, int) or 0
    if not 0 <= extra < count:
        raise invalid("model", f"{header.path.name}: {key}={extra} of {count}", str(header.path))
    return count - extra


def _num_kv_heads(header: Gguf, at: str) -> int | None:
    """Return the number of KV heads.  Hybrids have one for each layer, 0 in layers without attention."""
    key = at + "attention.head_count_kv"
    numbers = layer_numbers(header, key)
    if numbers is None:
        return header.get(key, int)
    found = set(numbers) - {0}
    if len(found) > 1:
        rule = f"{header.path.name}: {key} has several numbers of heads, {sorted(found)[:8]}, which is not supported"
        raise UnsupportedFeatureError(rule, parameter="model")
    return next(iter(found), None)


# Endings of vectors' names in a checkpoint, and the different endings in a file.
VECTORS = {
    "A_log": "ssm_a", "dt_bias": "ssm_dt.bias", "D": "ssm_d", "expert_bias": "exp_probs_b.bias",
}  # fmt: skip


def place_of(family: Family, name: str) -> Place:
    """Translate a checkpoint's name of a tensor."""
    if name.endswith(".sinks"):
        name += ".weight"
    layer, _, vector = name.removeprefix(family.layers).partition(".")
    if (last := vector.rpartition(".")[2]) in VECTORS:
        return Place(f"blk.{layer}.{VECTORS[last]}")
    stem, _, kind = name.rpartition(".")
    outer = {**OUTER, **family.outer}
    if stem in outer:
        return Place(f"{outer[stem]}.{kind}")
    layer, _, module = stem.removeprefix(family.layers).partition(".")
    if (begin := SPARSE.match(module)) is not None:
        path, _, last = ("mlp." + module[begin.end() :]).rpartition(".")
        module = f"{path}.{MIXTRAL.get(last, last)}"
    if (found := EXPERT.fullmatch(module)) is not None:
        return Place(f"blk.{layer}.{MODULES[f'mlp.{found[2]}']}_exps.{kind}", int(found[1]))
    modules = {**MODULES, **family.norms, **family.modules}
    return Place(f"blk.{layer}.{modules[module]}.{kind}")


def dtype_of(header: Gguf) -> str:
    """Return the dtype of the layers' matrices, or bfloat16 for integers, which their kernels support."""
    matrices = {name: each for name, each in header.tensors.items() if len(each.shape) > 1}
    # Converters store an encoder's small tables in F32.
    layers = [each for name, each in matrices.items() if name.startswith("blk.")]
    kinds = {each.type.name for each in layers or matrices.values()}
    names = {"F32": "float32", "F16": "float16"}
    return names.get(kinds.pop(), "bfloat16") if len(kinds) == 1 else "bfloat16"


def quantization_of(header: Gguf) -> dict[str, Any]:
    """Return the field that marks a file with integers as quantized."""
    is_packed = any(tensor.type.length > 1 for tensor in header.tensors.values())
    return {"quantization_config": {"quant_method": METHOD}} if is_packed else {}


def pooling_of(header: Gguf, at: str) -> dict[str, Any]:
    """Return how the model pools, or no fields if the file does not define it."""
    kind = header.get(at + "pooling_type", int) or 0
    if kind and kind not in POOLINGS:
        rule = f"{header.path.name}: {at}pooling_type={kind} is not supported"
        raise UnsupportedFeatureError(rule, parameter="model")
    return {"gguf_pooling": POOLINGS[kind]} if kind else {}


def _end_ids(header: Gguf) -> list[int]:
    """List the tokens that end an answer, the primary one first."""
    # Imported here, because `trouper --help` does not need it.
    import numpy as np

    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    found = [header.get(f"tokenizer.ggml.{key}", int) for key in keys]
    texts: Any = header.metadata.get("tokenizer.ggml.tokens")
    kinds: Any = header.metadata.get("tokenizer.ggml.token_type")
    num_texts = len(texts) if isinstance(texts, GgufStrings) else -1
    if isinstance(kinds, np.ndarray) and np.shape(cast("Any", kinds)) == (num_texts,):
        found += [i for i in np.flatnonzero(kinds == CONTROL).tolist() if texts[i] in END_TEXTS]
    return list(dict.fromkeys(i for i in found if i is not None))


def rope_scaling(header: Gguf, at: str, config: dict[str, Any]) -> dict[str, Any] | None:
    """Return the scaling of the context.  Factors by frequency, like Llama 3's, have the form of longrope."""
    original = header.get(at + "rope.scaling.original_context_length", int)
    length = original or config["max_position_embeddings"]
    if "rope_freqs.weight" in header.tensors:
        factors = _floats(header, "rope_freqs.weight")
        return {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "attention_factor": 1.0,
            "original_max_position_embeddings": length,
        }
    if "rope_factors_long.weight" in header.tensors:
        scaling: dict[str, Any] = {
            "rope_type": "longrope",
            "short_factor": _floats(header, "rope_factors_short.weight"),
            "long_factor": _floats(header, "rope_factors_long.weight"),
            "original_max_position_embeddings": length,
        }
        if (factor := header.get(at + "rope.scaling.attn_factor", float)) is not None:
            scaling["attention_factor"] = factor
        return scaling
    return _plain_scaling(header, at, original)


def _plain_scaling(header: Gguf, at: str, original: int | None) -> dict[str, Any] | None:
    """Return a scaling that needs no tensors, from current keys or from those of old files."""
    kind = header.get(at + "rope.scaling.type", str)
    old_factor = header.get(at + "rope.scale_linear", float)
    if kind is None and old_factor not in (None, 0.0, 1.0):
        return {"rope_type": "linear", "factor": old_factor}
    if kind in (None, "none"):
        return None
    scaling = {"rope_type": kind, "factor": header.need(at + "rope.scaling.factor", float)}
    if original is not None:
        scaling["original_max_position_embeddings"] = original
    if kind == "yarn":
        for name in ("beta_fast", "beta_slow"):
            if (value := header.get(f"{at}rope.scaling.yarn_{name}", float)) is not None:
                scaling[name] = value
    if header.get(at + "rope.scaling.attn_factor", float) not in (None, 1.0):
        rule = f"{header.path.name}: {at}rope.scaling.attn_factor is supported only for longrope"
        raise UnsupportedFeatureError(rule, parameter="model")
    return scaling


def _floats(header: Gguf, name: str) -> list[float]:
    tensor = header.tensors.get(name)
    if tensor is None or tensor.type.name != "F32" or tensor.num_bytes > 2**16:
        raise invalid(
            "model", f"{header.path.name}: {name} must be a vector of type F32", str(header.path)
        )
    with open(tensor.file, "rb") as file:
        file.seek(tensor.offset)
        return list(struct.unpack(f"<{tensor.num_bytes // 4}f", file.read(tensor.num_bytes)))


def _head_dim(config: dict[str, Any]) -> int:
    return config.get("head_dim") or config["hidden_size"] // max(1, config["num_attention_heads"])


def _gemma(header: Gguf, at: str, config: dict[str, Any], num_large: int) -> dict[str, Any]:
    """Add Gemma's attention scale: for the largest model of a family the hidden size divided by the heads, else the head's width."""
    is_large = config["num_hidden_layers"] == num_large
    share = config["hidden_size"] // max(1, config["num_attention_heads"])
    return {
        "query_pre_attn_scalar": share if is_large else _head_dim(config),
        "attn_logit_softcapping": header.get(at + "attn_logit_softcapping", float),
        "final_logit_softcapping": header.get(at + "final_logit_softcapping", float),
    }


def _gemma2(header: Gguf, at: str, config: dict[str, Any]) -> dict[str, Any]:
    return _gemma(header, at, config, num_large=46)


def _gemma3(header: Gguf, at: str, config: dict[str, Any]) -> dict[str, Any]:
    whole: dict[str, Any] = {
        "rope_theta": config.get("rope_theta", 1e6),
        **(config.get("rope_scaling") or {}),
    }
    local = header.get(at + LOCAL_BASE, float) or 10_000.0
    ropes = {"full_attention": whole, "sliding_attention": {"rope_theta": local}}
    return _gemma(header, at, config, num_large=62) | {"rope_parameters": ropes}


def _olmo(_header: Gguf, _at: str, config: dict[str, Any]) -> dict[str, Any]:
    """Recognise OLMo 3, whose files use the name of OLMo 2, by its windows.  Only layers without a window are scaled."""
    if not config.get("sliding_window"):
        return {}
    theta: dict[str, Any] = {"rope_theta": config.get("rope_theta", 500_000.0)}
    ropes: dict[str, Any] = {
        "full_attention": theta | (config.get("rope_scaling") or {}),
        "sliding_attention": theta | {"rope_type": "default"},
    }
    return {
        "architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "rope_parameters": ropes, "rope_scaling": None,
    }  # fmt: skip


def _exaone4(_header: Gguf, _at: str, config: dict[str, Any]) -> dict[str, Any]:
    return {"sliding_window": config.get("sliding_window") or None}


def _granite(header: Gguf, at: str, config: dict[str, Any]) -> dict[str, Any]:
    """Read a dense Granite.  Files of Granite 4 without recurrent layers have the width of the MLP in another key."""
    width = header.get(at + SHARED_WIDTH, int) or config["intermediate_size"]
    return granite_scales(header, at, config) | {"intermediate_size": width}


def _granite_moe(header: Gguf, at: str, config: dict[str, Any]) -> dict[str, Any]:
    own = granite_scales(header, at, config) | experts_of(header, at)
    if not (shared := shared_width(header, at)):
        return own
    return own | {
        "architectures": ["GraniteMoeSharedForCausalLM"],
        "model_type": "granitemoeshared",
        "shared_intermediate_size": shared,
        "gguf_names": "granite_apart",
    }


def _llama(header: Gguf, at: str, _config: dict[str, Any]) -> dict[str, Any]:
    """Recognise Mixtral, whose files use the name of Llama, by its experts."""
    if not header.get(at + "expert_count", int):
        return {}
    own = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    return own | experts_of(header, at)


def _qwen_moe(header: Gguf, at: str, config: dict[str, Any]) -> dict[str, Any]:
    own = experts_of(header, at) | {"moe_intermediate_size": expert_width(header, at, config)}
    if config["model_type"] == "qwen3_moe":
        return own | {"norm_topk_prob": True}
    width = shared_width(header, at)
    return own | {"shared_expert_intermediate_size": width, "qkv_bias": config["attention_bias"]}


def _olmoe(header: Gguf, at: str, config: dict[str, Any]) -> dict[str, Any]:
    return experts_of(header, at) | {"intermediate_size": expert_width(header, at, config)}


def _gpt_oss(header: Gguf, at: str, config: dict[str, Any]) -> dict[str, Any]:
    scaling = config.get("rope_scaling") or {"rope_type": "default"}
    return experts_of(header, at) | {
        "intermediate_size": expert_width(header, at, config),
        "rope_scaling": {**scaling, "truncate": False},
    }


FAMILIES = (
    {
        "llama": Family("LlamaForCausalLM", "llama", is_permuted=True, own=_llama),
        "qwen2": Family("Qwen2ForCausalLM", "qwen2"),
        "qwen3": Family("Qwen3ForCausalLM", "qwen3"),
        "phi3": Family("Phi3ForCausalLM", "phi3", reads=WINDOW),
        "gemma": Family("GemmaForCausalLM", "gemma", norm_offset=1.0),
        "exaone4": Family("Exaone4ForCausalLM", "exaone4", OTHER_NORMS, own=_exaone4, reads=WINDOW),
        "seed_oss": Family(
            "SeedOssForCausalLM", "seed_oss", {"post_attention_layernorm": "post_attention_norm"}
        ),
        "gemma2": Family(
            "Gemma2ForCausalLM", "gemma2", OTHER_NORMS, norm_offset=1.0, own=_gemma2, reads=WINDOW
        ),
        "gemma3": Family(
            "Gemma3ForCausalLM",
            "gemma3",
            OTHER_NORMS,
            norm_offset=1.0,
            own=_gemma3,
            reads=WINDOW | {LOCAL_BASE},
        ),
        "granite": Family(
            "GraniteForCausalLM",
            "granite",
            is_permuted=True,
            own=_granite,
            reads=frozenset({SCALE}),
        ),
        "olmo2": Family("Olmo2ForCausalLM", "olmo2", OTHER_NORMS, own=_olmo, reads=WINDOW),
        "smollm3": Family("SmolLM3ForCausalLM", "smollm3", is_permuted=True),
        "qwen2moe": Family("Qwen2MoeForCausalLM", "qwen2_moe", own=_qwen_moe),
        "qwen3moe": Family("Qwen3MoeForCausalLM", "qwen3_moe", own=_qwen_moe),
        "olmoe": Family("OlmoeForCausalLM", "olmoe", own=_olmoe),
        "granitemoe": Family(
            "GraniteMoeForCausalLM",
            "granitemoe",
            is_permuted=True,
            own=_granite_moe,
            reads=frozenset({SCALE}),
        ),
        "gpt-oss": Family("GptOssForCausalLM", "gpt_oss", OTHER_NORMS, own=_gpt_oss, reads=WINDOW),
    }
    | LAYER_NORM_FAMILIES
    | SIBLINGS
    | HYBRIDS
)
