"""GGUF architectures that one of the decoders here computes, though they have names, keys or scales of their own.

Each entry says how a file's rows of q and k are stored.  llama.cpp's architectures with "normal" rotation turn
neighbouring dimensions: their files are permuted where the checkpoint's halves turn, and as in the checkpoint where its
neighbours turn as well (GLM, ERNIE).
"""

from typing import Any

from trouper.config.gguf import Gguf
from trouper.config.gguf_family import Family
from trouper.config.gguf_keys import WINDOW
from trouper.errors import UnsupportedFeatureError

Fields = dict[str, Any]
_GROWTH, _LOG_MULTIPLIER = "attention.temperature_scale", "rope.scaling.yarn_log_multiplier"
# Positions of text are the same number in each of the sections, so the sections change nothing.
_SECTIONS = frozenset({"rope.dimension_sections"})
_GLM4_NORMS = {
    "post_self_attn_layernorm": "post_attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "post_mlp_layernorm": "post_ffw_norm",
}
_HUNYUAN = {"self_attn.query_layernorm": "attn_q_norm", "self_attn.key_layernorm": "attn_k_norm"}


def _mistral3(header: Gguf, at: str, config: Fields) -> Fields:
    """Read Ministral 3, whose queries grow with their positions, and the older models that share its name."""
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
    """Read the scales; old files leave them out, and a default would be a guess."""
    share = config["hidden_size"] // max(1, config["num_attention_heads"])
    return {
        "attention_multiplier": (config.get("head_dim") or share) ** -0.5,
        "embedding_multiplier": header.need(at + "embedding_scale", float),
        "residual_multiplier": header.need(at + "residual_scale", float),
        "logits_scaling": header.need(at + "logit_scale", float),
    }


def _xverse(header: Gguf, at: str, config: Fields) -> Fields:
    if config["num_key_value_heads"] != config["num_attention_heads"]:
        # Its converter does not permute the keys of fewer heads as it does queries.
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
