"""GGUF's names and keys of the families with layer norms, as their config.json and their checkpoints have them."""

from typing import Any

from trouper.config.gguf import Gguf
from trouper.config.gguf_family import Family
from trouper.errors import UnsupportedFeatureError

Fields = dict[str, Any]
# The key of the number in the roots of the norms.
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
# Of two norms the first one is that of the MLP.
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
    """Read what GPT-2 and BigCode say; its width has another name in config.json."""
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
