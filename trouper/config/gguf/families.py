"""Describe how GGUF architectures differ: names of modules, keys, scales, layer norms and experts.

Each entry also records the order of a file's rows of q and k.  llama.cpp's architectures with "normal" rotation rotate
neighbouring dimensions.  Their files are permuted if the checkpoint rotates halves, and unchanged if the checkpoint rotates
neighbours as well (GLM, ERNIE).  The number and width of experts are read from the header in the same way for all architectures.

llama.cpp adds keys about attention and positions when a new model needs them.  If trouper ignored such a key, the model would silently
compute something else.  So an unknown key is an error, and a known but unsupported key must have its neutral value.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from trouper.config.gguf.header import Gguf, GgufTensor
from trouper.errors import UnsupportedFeatureError, invalid

# Keys that `names.hf_config` reads for every architecture.
_READ = frozenset(
    {
        "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.layer_norm_rms_epsilon",
        "attention.causal", "rope.freq_base",
        "rope.dimension_count", "rope.scale_linear", "rope.scaling.type", "rope.scaling.factor",
        "rope.scaling.original_context_length", "rope.scaling.attn_factor", "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
    }
)  # fmt: skip
# Keys that describe the file, or norms that no supported architecture has.
_HARMLESS = frozenset(
    {"rope.scaling.finetuned", "attention.layer_norm_epsilon", "attention.group_norm_epsilon"}
)
# Keys accepted only with these neutral values.
_NEUTRAL: dict[str, tuple[float, ...]] = {
    "attention.max_alibi_bias": (0,), "attention.clamp_kqv": (0,), "attention.shared_kv_layers": (0,),
    "attention.q_lora_rank": (0,), "attention.kv_lora_rank": (0,), "attention.output_scale": (0, 1),
    "attention.temperature_length": (0,), "attention.temperature_scale": (0,),
    "rope.scaling.yarn_ext_factor": (-1, 1), "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_log_multiplier": (0,), "expert_weights_scale": (0, 1), "expert_gating_func": (0, 1),
}  # fmt: skip
# Keys that architectures with windows in some layers read.
WINDOW = frozenset({"attention.sliding_window", "attention.sliding_window_pattern"})
_ARRAYS = frozenset({"rope.dimension_sections"})


def check_keys(header: Gguf, at: str, config: dict[str, Any], reads: frozenset[str]) -> None:
    """Check every key of attention, positions and experts' weights.

    Args:
        at: the architecture's name and a dot.
        config: the config.json that corresponds to the header.
        reads: keys that the architecture's own reader handles.

    Raises:
        UnsupportedFeatureError: a key would be ignored; the message names it and its value.
    """
    head_dim = config.get("head_dim") or config["hidden_size"] // max(
        1, config["num_attention_heads"]
    )
    head_dim = max(1, head_dim)
    same: dict[str, float] = {
        "attention.value_length": head_dim,
        "attention.key_length_swa": head_dim,
        "attention.value_length_swa": head_dim,
        "attention.scale": head_dim**-0.5,
        "rope.freq_base_swa": config.get("rope_theta", 10_000.0),
        "rope.dimension_count_swa": header.get(at + "rope.dimension_count", int) or head_dim,
    }
    for key, value in header.metadata.items():
        name = key.removeprefix(at)
        if name == key or name in _READ or name in _HARMLESS or name in reads:
            continue
        if not name.startswith(("attention.", "rope.")) and name not in _NEUTRAL:
            continue
        if name == "attention.sliding_window":
            # A window over the whole context has no effect.
            longest = config["max_position_embeddings"]
            is_neutral = isinstance(value, int) and (value == 0 or value >= longest)
        elif name in _ARRAYS:
            is_neutral = not any(bool(number) for number in _numbers(value))
        elif name in same:
            is_neutral = _is_near(value, same[name])
        else:
            is_neutral = any(_is_near(value, neutral) for neutral in _NEUTRAL.get(name, ()))
        if not is_neutral:
            rule = f"{header.path.name}: {key}={str(value)[:40]} is not supported"
            raise UnsupportedFeatureError(rule, parameter="model")


def layer_types(header: Gguf, at: str, num_layers: int) -> list[str] | None:
    """Return the layers with a sliding window: from one flag for each layer, or from the length of a pattern that ends with a layer
    without a window.
    """
    key = at + "attention.sliding_window_pattern"
    value = header.metadata.get(key)
    if value is None:
        return None
    if isinstance(value, bool | int):
        count = int(value)
        flags = [count == 0 or i % count < count - 1 for i in range(num_layers)]
    else:
        flags = [bool(x) for x in _numbers(value)]
    return ["sliding_attention" if flag else "full_attention" for flag in flags]


def layer_numbers(header: Gguf, key: str) -> list[int] | None:
    """Return an array with one integer for each layer, or None if the key is missing or has another type."""
    found = header.metadata.get(key)
    if found is None or isinstance(found, int | float | str | bytes):
        return None
    return [int(x) for x in _numbers(found)]


def _numbers(value: Any) -> list[Any]:
    try:
        return list(value)
    except TypeError:
        return [value]


def _is_near(value: Any, wanted: float) -> bool:
    # Headers store float32.
    return isinstance(value, int | float) and abs(value - wanted) <= 1e-6 * max(1.0, abs(wanted))


# A projection of all experts, or gate and up of all experts with the rows of gate first.
GATES = (".ffn_gate_exps.weight", ".ffn_gate_up_exps.weight")
SHARED_WIDTH = "expert_shared_feed_forward_length"


def experts_of(header: Gguf, at: str) -> dict[str, Any]:
    """Return the number of experts and how many of them a token uses.

    Args:
        at: the architecture's name and a dot.

    Raises:
        TrouperValidationError: the file has no tensor with this number of experts.  Without this check, a header could claim any
            number, and the names of that many experts would fill the memory.
    """
    count = header.need(at + "expert_count", int)
    gate = _first(header, *GATES)
    found = 0 if gate is None else gate.shape[0]
    if count != found:
        rule = (
            f"{header.path.name}: {at}expert_count: {count} of {found} in the tensors ffn_gate_exps"
        )
        raise invalid("model", rule, str(header.path))
    return {
        "num_experts": count,
        "num_experts_per_tok": header.need(at + "expert_used_count", int),
    }


def expert_width(header: Gguf, at: str, config: dict[str, Any]) -> int:
    """Return the width of an expert, which is that of the MLPs in files without a key for experts."""
    return header.get(at + "expert_feed_forward_length", int) or config["intermediate_size"]


def shared_width(header: Gguf, at: str) -> int | None:
    """Return the width of the shared expert, or None without one.  Older files lack its key, so its tensor is used there."""
    width = header.get(at + SHARED_WIDTH, int)
    gate = _first(header, ".ffn_gate_shexp.weight")
    return width or (None if gate is None else gate.shape[0])


def _first(header: Gguf, *endings: str) -> GgufTensor | None:
    return next((each for name, each in header.tensors.items() if name.endswith(endings)), None)


SCALE = "attention.scale"
PRE_NORMS: Mapping[str, str] = MappingProxyType({"post_attention_layernorm": "ffn_norm"})


class Family(NamedTuple):
    """The differences of one GGUF architecture from the others.

    The defaults describe the most common layout, with RMS norms before attention and MLP.  An entry lists only what
    differs, so support for a family is one row of data.
    """

    architecture: str
    model_type: str
    norms: Mapping[str, str] = PRE_NORMS
    # Whether the rows of q and k are stored in pairs, not in halves.
    is_permuted: bool = False
    # The number added to the weights of norms in the file, relative to a checkpoint.
    norm_offset: float = 0.0
    # The modules of a layer with other names than Llama's.
    modules: Mapping[str, str] = MappingProxyType({})
    layers: str = "model.layers."  # prefix of their names
    outer: Mapping[str, str] = MappingProxyType({})
    # The key of the norms' ε, and its name in config.json.
    eps: tuple[str, str] = ("attention.layer_norm_rms_epsilon", "rms_norm_eps")
    # The checkpoint's rows of q, k and v are grouped by KV head, while the file has all of q, then all of k, then all of v.
    is_regrouped: bool = False
    # Whether the first value heads of all key heads of gated delta nets precede the second ones.
    is_tiled: bool = False
    own: Callable[[Gguf, str, dict[str, Any]], dict[str, Any]] | None = None
    # Keys of attention and positions that `own` reads.
    reads: frozenset[str] = frozenset()


Fields = dict[str, Any]
_GROWTH, _LOG_MULTIPLIER = "attention.temperature_scale", "rope.scaling.yarn_log_multiplier"
# The positions of text are the same in all sections, so the sections have no effect.
_SECTIONS = frozenset({"rope.dimension_sections"})
_GLM4_NORMS = {
    "post_self_attn_layernorm": "post_attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "post_mlp_layernorm": "post_ffw_norm",
}
_HUNYUAN = {"self_attn.query_layernorm": "attn_q_norm", "self_attn.key_layernorm": "attn_k_norm"}


def _mistral3(header: Gguf, at: str, config: Fields) -> Fields:
    """Read Ministral 3, whose queries are scaled by position, and older models with the same architecture name."""
    scaling: Fields = dict(config.get("rope_scaling") or {"rope_type": "default"})
    multiplier = header.get(at + _LOG_MULTIPLIER, float)
    if multiplier and scaling["rope_type"] == "yarn":
        scaling |= {"mscale": 1.0, "mscale_all_dim": multiplier}
    elif multiplier:
        rule = f"{header.path.name}: {at}{_LOG_MULTIPLIER} without yarn is not supported"
        raise UnsupportedFeatureError(rule, parameter="model")
    growth = header.get(at + _GROWTH, float)
    if not growth:
        own: Fields = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
        return own | {"rope_scaling": scaling}
    length = header.get(at + "rope.scaling.original_context_length", int)
    scaling["original_max_position_embeddings"] = length or config["max_position_embeddings"]
    return {"rope_scaling": scaling | {"llama_4_scaling_beta": growth}}


def _ernie4_5(_header: Gguf, _at: str, config: Fields) -> Fields:
    return {"use_bias": config["attention_bias"]}


def _chatglm(header: Gguf, _at: str, _config: Fields) -> Fields:
    if "blk.0.attn_qkv.weight" in header.tensors:
        rule = f"{header.path.name}: chatglm with one matrix for q, k and v is not supported; convert the -hf model"
        raise UnsupportedFeatureError(rule, parameter="model")
    return {}


def _minicpm(header: Gguf, at: str, config: Fields) -> Fields:
    """Read MiniCPM's scales.  Old files omit them, and are refused, because a default would be a guess."""
    share = config["hidden_size"] // max(1, config["num_attention_heads"])
    return {
        "attention_multiplier": (config.get("head_dim") or share) ** -0.5,
        "embedding_multiplier": header.need(at + "embedding_scale", float),
        "residual_multiplier": header.need(at + "residual_scale", float),
        "logits_scaling": header.need(at + "logit_scale", float),
    }


def granite_scales(header: Gguf, at: str, config: Fields) -> Fields:
    """Return the scales of Granite's embeddings, scores, residuals and logits."""
    share = config["hidden_size"] // max(1, config["num_attention_heads"])
    by_default = (config.get("head_dim") or share) ** -0.5
    return {
        "attention_multiplier": header.get(at + SCALE, float) or by_default,
        "embedding_multiplier": header.get(at + "embedding_scale", float) or 1.0,
        "residual_multiplier": header.get(at + "residual_scale", float) or 1.0,
        "logits_scaling": header.get(at + "logit_scale", float) or 1.0,
    }


def _xverse(header: Gguf, at: str, config: Fields) -> Fields:
    if config["num_key_value_heads"] != config["num_attention_heads"]:
        # Its converter permutes the keys of fewer heads differently from the queries.
        rule = f"{header.path.name}: {at}attention.head_count_kv: xverse with fewer KV heads is not supported"
        raise UnsupportedFeatureError(rule, parameter="model")
    return {}


SIBLINGS = {
    "mistral3": Family(
        "Ministral3ForCausalLM",
        "ministral3",
        is_permuted=True,
        own=_mistral3,
        reads=WINDOW | {_GROWTH, _LOG_MULTIPLIER},
    ),
    "glm4": Family("Glm4ForCausalLM", "glm4", _GLM4_NORMS),
    "chatglm": Family("GlmForCausalLM", "glm", own=_chatglm),
    "ernie4_5": Family("Ernie4_5ForCausalLM", "ernie4_5", own=_ernie4_5),
    "hunyuan-dense": Family("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", modules=_HUNYUAN),
    "qwen2vl": Family("Qwen2ForCausalLM", "qwen2", reads=_SECTIONS),
    "qwen3vl": Family("Qwen3ForCausalLM", "qwen3", reads=_SECTIONS),
    "exaone": Family("LlamaForCausalLM", "llama"),
    "internlm2": Family("LlamaForCausalLM", "llama", is_permuted=True),
    "minicpm": Family("GraniteForCausalLM", "granite", is_permuted=True, own=_minicpm),
    "xverse": Family("LlamaForCausalLM", "llama", is_permuted=True, own=_xverse),
}


# The key of ε in the norms.
_EPS = "attention.layer_norm_epsilon"
_OPENAI = {
    "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output", "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down",
    "ln_1": "attn_norm", "ln_2": "ffn_norm",
}  # fmt: skip
_PHI = {"self_attn.dense": "attn_output", "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down"}
_STARCODER = {
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
    "post_attention_layernorm": "ffn_norm",
}
_NEOX = {
    "attention.query_key_value": "attn_qkv", "attention.dense": "attn_output", "mlp.dense_h_to_4h": "ffn_up",
    "mlp.dense_4h_to_h": "ffn_down", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
# The first of two norms belongs to the MLP.
_FALCON = _NEOX | {
    "self_attention.query_key_value": "attn_qkv", "self_attention.dense": "attn_output", "ln_mlp": "attn_norm",
    "ln_attn": "attn_norm_2",
}  # fmt: skip
_OUTER_OF_OPENAI = {
    "transformer.wte": "token_embd", "transformer.wpe": "position_embd", "transformer.ln_f": "output_norm",
    "transformer.word_embeddings": "token_embd",
}  # fmt: skip
_OUTER_OF_NEOX = {
    "gpt_neox.embed_in": "token_embd", "gpt_neox.final_layer_norm": "output_norm", "embed_out": "output",
}  # fmt: skip
_OUTER_OF_PHI = {"model.final_layernorm": "output_norm"}
_PARALLEL = "use_parallel_residual"


def _gpt2(header: Gguf, _at: str, config: Fields) -> Fields:
    """Read the fields of GPT-2 and BigCode, for which config.json has another name of the MLP's width."""
    is_multi_query = config["num_key_value_heads"] == 1
    if not is_multi_query and config["model_type"] == "gpt_bigcode":
        rule = f"{header.path.name}: starcoder with a key for each head is not supported"
        raise UnsupportedFeatureError(rule, parameter="model")
    return {"n_inner": config["intermediate_size"], "multi_query": is_multi_query}


def _starcoder2(_header: Gguf, _at: str, config: Fields) -> Fields:
    return {"use_bias": config["attention_bias"], "sliding_window": None}


def _stablelm(header: Gguf, _at: str, config: Fields) -> Fields:
    if "blk.0.attn_q_norm.weight" in header.tensors:
        rule = (
            f"{header.path.name}: stablelm with norms of queries and keys is not supported as GGUF"
        )
        raise UnsupportedFeatureError(rule, parameter="model")
    return {
        "use_qkv_bias": config["attention_bias"],
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in header.tensors,
    }


def _gpt_neox(header: Gguf, at: str, _config: Fields) -> Fields:
    is_parallel = header.get(at + _PARALLEL, bool)
    return {
        "use_parallel_residual": True if is_parallel is None else is_parallel,
        "attention_bias": "blk.0.attn_qkv.bias" in header.tensors,
    }


def _falcon(header: Gguf, _at: str, config: Fields) -> Fields:
    num_kv_heads = config["num_key_value_heads"]
    return {
        "num_kv_heads": num_kv_heads,
        "new_decoder_architecture": num_kv_heads > 1,
        "num_ln_in_parallel_attn": 2 if "blk.0.attn_norm_2.weight" in header.tensors else 1,
        "bias": "blk.0.attn_qkv.bias" in header.tensors,
        "ffn_hidden_size": config["intermediate_size"],
    }


def _with_mlp_bias(header: Gguf, _at: str, _config: Fields) -> Fields:
    return {"mlp_bias": "blk.0.ffn_up.bias" in header.tensors}


LAYER_NORM_FAMILIES = {
    "gpt2": Family(
        "GPT2LMHeadModel",
        "gpt2",
        modules=_OPENAI,
        layers="transformer.h.",
        outer=_OUTER_OF_OPENAI,
        eps=(_EPS, "layer_norm_epsilon"),
        own=_gpt2,
    ),
    "starcoder": Family(
        "GPTBigCodeForCausalLM",
        "gpt_bigcode",
        modules=_OPENAI,
        layers="transformer.h.",
        outer=_OUTER_OF_OPENAI,
        eps=(_EPS, "layer_norm_epsilon"),
        own=_gpt2,
    ),
    "starcoder2": Family(
        "Starcoder2ForCausalLM",
        "starcoder2",
        modules=_STARCODER,
        eps=(_EPS, "norm_epsilon"),
        own=_starcoder2,
    ),
    "phi2": Family(
        "PhiForCausalLM",
        "phi",
        modules=_PHI,
        outer=_OUTER_OF_PHI,
        eps=(_EPS, "layer_norm_eps"),
    ),
    "stablelm": Family(
        "StableLmForCausalLM",
        "stablelm",
        eps=(_EPS, "layer_norm_eps"),
        own=_stablelm,
    ),
    "gptneox": Family(
        "GPTNeoXForCausalLM",
        "gpt_neox",
        modules=_NEOX,
        layers="gpt_neox.layers.",
        outer=_OUTER_OF_NEOX,
        eps=(_EPS, "layer_norm_eps"),
        is_regrouped=True,
        own=_gpt_neox,
    ),
    "falcon": Family(
        "FalconForCausalLM",
        "falcon",
        modules=_FALCON,
        layers="transformer.h.",
        outer=_OUTER_OF_OPENAI,
        eps=(_EPS, "layer_norm_epsilon"),
        is_regrouped=True,
        own=_falcon,
    ),
    "nemotron": Family(
        "NemotronForCausalLM",
        "nemotron",
        norm_offset=1.0,
        eps=(_EPS, "norm_eps"),
        own=_with_mlp_bias,
    ),
    "arcee": Family("ArceeForCausalLM", "arcee", is_permuted=True, own=_with_mlp_bias),
    "olmo": Family("OlmoForCausalLM", "olmo", is_permuted=True, eps=(_EPS, "layer_norm_eps")),
}
