"""Read GGUF architectures in which recurrent mixers replace the attention of most layers.

llama.cpp reorders the value heads of Qwen3.5's gated delta nets: first the first value head of every key head, then the second of
every key head, and so on.  A checkpoint stores all value heads of a key head together.  `actors/executor/weights/gguf.py` restores the
checkpoint's order in all tensors with an axis of value heads.  Files of Qwen3-Next have the checkpoint's order; old ones store q, k, v
and z in one matrix (`ssm_in`).
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from trouper.config.gguf.families import (
    SCALE,
    Family,
    Fields,
    expert_width,
    experts_of,
    granite_scales,
    layer_numbers,
    shared_width,
)
from trouper.config.gguf.header import Gguf
from trouper.errors import UnsupportedFeatureError, invalid

_DELTA = {
    "linear_attn.in_proj_qkv": "attn_qkv", "linear_attn.in_proj_z": "attn_gate", "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta", "linear_attn.conv1d": "ssm_conv1d", "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out", "linear_attn.in_proj_qkvz": "ssm_in", "linear_attn.in_proj_ba": "ssm_ba",
}  # fmt: skip
_MAMBA = {
    "mamba.in_proj": "ssm_in", "mamba.out_proj": "ssm_out", "mamba.conv1d": "ssm_conv1d", "mamba.norm": "ssm_norm",
}  # fmt: skip
_RECURRENT, _GATING = "attention.recurrent_layers", "expert_gating_func"
_SIGMOID = 2
_LFM2_NORMS = MappingProxyType({"operator_norm": "attn_norm", "ffn_norm": "ffn_norm"})
_LFM2 = {
    "conv.conv": "shortconv.conv", "conv.in_proj": "shortconv.in_proj", "conv.out_proj": "shortconv.out_proj",
    "self_attn.out_proj": "attn_output", "self_attn.q_layernorm": "attn_q_norm", "self_attn.k_layernorm": "attn_k_norm",
    "feed_forward.w1": "ffn_gate", "feed_forward.w3": "ffn_up", "feed_forward.w2": "ffn_down",
}  # fmt: skip


def _qwen35(header: Gguf, at: str, config: Fields) -> Fields:
    """Read the sizes of the gated delta nets.

    Raises:
        TrouperValidationError: the sizes contradict each other.
    """
    taps, k_dim, num_k, num_v, size = _ssm_sizes(header, at)
    every = header.get(at + "full_attention_interval", int) or 4
    if min(taps, k_dim, num_k, num_v, size, every) < 1 or num_v % num_k or size % num_v:
        rule = f"{header.path.name}: {at}ssm.*: {num_v} value heads of {size} numbers and {num_k} key heads do not fit"
        raise invalid("model", rule, str(header.path))
    num_layers = config["num_hidden_layers"]
    recurrent = layer_numbers(header, at + _RECURRENT)
    if recurrent is None:
        recurrent = [(i + 1) % every for i in range(num_layers)]
    if len(recurrent) < num_layers:
        rule = (
            f"{header.path.name}: {at}{_RECURRENT} must have a flag for each of {num_layers} layers"
        )
        raise invalid("model", rule, str(header.path))
    return {
        "linear_conv_kernel_dim": taps,
        "linear_key_head_dim": k_dim,
        "linear_num_key_heads": num_k,
        "linear_num_value_heads": num_v,
        "linear_value_head_dim": size // num_v,
        "layer_types": [
            "linear_attention" if flag else "full_attention" for flag in recurrent[:num_layers]
        ],
    }


def _ssm_sizes(header: Gguf, at: str) -> tuple[int, ...]:
    """Return the number of taps, the size of a state, and the numbers of groups, heads and inner dimensions."""
    names = ("conv_kernel", "state_size", "group_count", "time_step_rank", "inner_size")
    return tuple(header.need(f"{at}ssm.{name}", int) for name in names)


def _qwen_moe(header: Gguf, at: str, config: Fields) -> Fields:
    return (
        _qwen35(header, at, config)
        | experts_of(header, at)
        | {
            "moe_intermediate_size": expert_width(header, at, config),
            "shared_expert_intermediate_size": shared_width(header, at),
        }
    )


def _qwen3_next(header: Gguf, at: str, config: Fields) -> Fields:
    is_old = any(name.endswith(".ssm_in.weight") for name in header.tensors)
    return _qwen_moe(header, at, config) | {"gguf_qkvz_apart": not is_old}


def _granite_hybrid(header: Gguf, at: str, config: Fields) -> Fields:
    """Read a Granite 4 H, whose shared MLP is the only one if there are no experts.

    Raises:
        TrouperValidationError: the sizes contradict each other.
    """
    taps, num_states, num_groups, num_heads, size = _ssm_sizes(header, at)
    hidden = max(1, config["hidden_size"])
    if min(taps, num_states, num_groups, num_heads, size) < 1 or size % num_heads or size % hidden:
        rule = f"{header.path.name}: {at}ssm.*: {num_heads} heads of {size} numbers do not fit a hidden size of {hidden}"
        raise invalid("model", rule, str(header.path))
    names = header.tensors
    has_rope = header.get(at + "rope.scaling.finetuned", bool)
    shared = shared_width(header, at) or config["intermediate_size"]
    own: Fields = granite_scales(header, at, config) | {
        "layer_types": [
            "attention" if count else "mamba" for count in _kv_heads(header, at, config)
        ],
        "mamba_d_conv": taps,
        "mamba_d_state": num_states,
        "mamba_n_groups": num_groups,
        "mamba_n_heads": num_heads,
        "mamba_d_head": size // num_heads,
        "mamba_expand": size // hidden,
        "mamba_conv_bias": any(name.endswith(".ssm_conv1d.bias") for name in names),
        "mamba_proj_bias": any(name.endswith(".ssm_in.bias") for name in names),
        # llama.cpp rotates unless the key forbids it.
        "position_embedding_type": None if has_rope is False else "rope",
        "shared_intermediate_size": shared,
        "num_local_experts": 0,
        "gguf_names": "llama",
    }
    if not header.get(at + "expert_count", int):
        return own
    experts = experts_of(header, at)
    return own | {
        "num_local_experts": experts["num_experts"],
        "num_experts_per_tok": experts["num_experts_per_tok"],
        "intermediate_size": expert_width(header, at, config),
        "gguf_names": "granite_apart",
    }


def _lfm2_moe(header: Gguf, at: str, config: Fields) -> Fields:
    """Read an LFM2 with experts.

    Raises:
        UnsupportedFeatureError: experts are not weighted by sigmoids.
    """
    gating, normalised = header.need(at + _GATING, int), at + "expert_weights_norm"
    if gating != _SIGMOID:
        rule = f"{header.path.name}: {at}{_GATING}={gating} is not supported, only {_SIGMOID} (sigmoid)"
        raise UnsupportedFeatureError(rule, parameter="model")
    return (
        _lfm2(header, at, config)
        | experts_of(header, at)
        | {
            "moe_intermediate_size": expert_width(header, at, config),
            "num_dense_layers": header.get(at + "leading_dense_block_count", int) or 0,
            "use_expert_bias": any(name.endswith(".exp_probs_b.bias") for name in header.tensors),
            "norm_topk_prob": header.get(normalised, bool) is not False,
        }
    )


def _lfm2(header: Gguf, at: str, config: Fields) -> Fields:
    """Read which layers have attention (those with KV heads), and the taps of the convolutions in the others."""
    heads = _kv_heads(header, at, config)
    own: dict[str, Any] = {
        "layer_types": ["full_attention" if count else "conv" for count in heads],
        "conv_L_cache": header.need(at + "shortconv.l_cache", int),
        "block_auto_adjust_ff_dim": False,
    }
    return own


def _kv_heads(header: Gguf, at: str, config: Fields) -> list[int]:
    """Return the number of KV heads of each layer, 0 without attention.

    Raises:
        TrouperValidationError: the header does not describe each layer.
    """
    key = at + "attention.head_count_kv"
    heads, num_layers = layer_numbers(header, key), config["num_hidden_layers"]
    if heads is None or len(heads) != num_layers:
        rule = f"{header.path.name}: {key} must have a number for each of {num_layers} layers"
        raise invalid("model", rule, str(header.path))
    return heads


_POST_NORM: Mapping[str, str] = MappingProxyType(
    {"post_attention_layernorm": "post_attention_norm"}
)
HYBRIDS = {
    "granitehybrid": Family(
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        is_permuted=True,
        modules=_MAMBA,
        own=_granite_hybrid,
        reads=frozenset({SCALE}),
    ),
    "lfm2": Family(
        "Lfm2ForCausalLM",
        "lfm2",
        norms=_LFM2_NORMS,
        modules=_LFM2,
        outer={"model.embedding_norm": "token_embd_norm"},
        eps=("attention.layer_norm_rms_epsilon", "norm_eps"),
        own=_lfm2,
    ),
    "lfm2moe": Family(
        "Lfm2MoeForCausalLM",
        "lfm2_moe",
        norms=_LFM2_NORMS,
        modules=_LFM2,
        outer={"model.embedding_norm": "token_embd_norm"},
        eps=("attention.layer_norm_rms_epsilon", "norm_eps"),
        own=_lfm2_moe,
        reads=frozenset({_GATING}),
    ),
    "qwen35": Family(
        "Qwen3_5ForCausalLM",
        "qwen3_5_text",
        norms=_POST_NORM,
        modules=_DELTA,
        norm_offset=1.0,
        is_tiled=True,
        own=_qwen35,
        reads=frozenset({"rope.dimension_sections", _RECURRENT}),
    ),
    "qwen35moe": Family(
        "Qwen3_5MoeForCausalLM",
        "qwen3_5_moe_text",
        norms=_POST_NORM,
        modules=_DELTA,
        norm_offset=1.0,
        is_tiled=True,
        own=_qwen_moe,
        reads=frozenset({"rope.dimension_sections", _RECURRENT}),
    ),
    "qwen3next": Family(
        "Qwen3NextForCausalLM",
        "qwen3_next",
        norms=_POST_NORM,
        modules=_DELTA,
        norm_offset=1.0,
        own=_qwen3_next,
        reads=frozenset({_RECURRENT}),
    ),
}
