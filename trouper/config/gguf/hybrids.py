"""GGUF architectures in which recurrent mixers replace the attention of most layers.

llama.cpp stores the value heads of a gated delta net in another order: the first value head of each key head, then the
second of each, while a checkpoint has all value heads of a key head together.  `actors/executor/weights/gguf.py` undoes this
for all tensors that have rows, columns or numbers of value heads.
"""

from types import MappingProxyType
from typing import Any

from trouper.config.gguf.families import Family, Fields
from trouper.config.gguf.header import Gguf
from trouper.config.gguf.keys import layer_numbers
from trouper.errors import invalid

_DELTA = {
    "linear_attn.in_proj_qkv": "attn_qkv", "linear_attn.in_proj_z": "attn_gate", "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta", "linear_attn.conv1d": "ssm_conv1d", "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}  # fmt: skip
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
    names = ("conv_kernel", "state_size", "group_count", "time_step_rank", "inner_size")
    taps, k_dim, num_k, num_v, size = (header.need(f"{at}ssm.{name}", int) for name in names)
    every = header.get(at + "full_attention_interval", int) or 4
    if min(taps, k_dim, num_k, num_v, size, every) < 1 or num_v % num_k or size % num_v:
        rule = f"{header.path.name}: {at}ssm.*: {num_v} value heads of {size} numbers and {num_k} key heads do not fit"
        raise invalid("model", rule, str(header.path))
    num_layers = config["num_hidden_layers"]
    return {
        "linear_conv_kernel_dim": taps,
        "linear_key_head_dim": k_dim,
        "linear_num_key_heads": num_k,
        "linear_num_value_heads": num_v,
        "linear_value_head_dim": size // num_v,
        "layer_types": [
            "linear_attention" if (i + 1) % every else "full_attention" for i in range(num_layers)
        ],
    }


def _lfm2(header: Gguf, at: str, config: Fields) -> Fields:
    """Read the layers with attention, which have KV heads, and the taps of the others.

    Raises:
        TrouperValidationError: the header does not describe each layer.
    """
    key = at + "attention.head_count_kv"
    heads, num_layers = layer_numbers(header, key), config["num_hidden_layers"]
    if heads is None or len(heads) != num_layers:
        rule = f"{header.path.name}: {key} must have a number for each of {num_layers} layers"
        raise invalid("model", rule, str(header.path))
    own: dict[str, Any] = {
        "layer_types": ["full_attention" if count else "conv" for count in heads],
        "conv_L_cache": header.need(at + "shortconv.l_cache", int),
        "block_auto_adjust_ff_dim": False,
    }
    return own


HYBRIDS = {
    "lfm2": Family(
        "Lfm2ForCausalLM",
        "lfm2",
        norms=MappingProxyType({"operator_norm": "attn_norm", "ffn_norm": "ffn_norm"}),
        modules=_LFM2,
        outer={"model.embedding_norm": "token_embd_norm"},
        eps=("attention.layer_norm_rms_epsilon", "norm_eps"),
        own=_lfm2,
    ),
    "qwen35": Family(
        "Qwen3_5ForCausalLM",
        "qwen3_5_text",
        norms={"post_attention_layernorm": "post_attention_norm"},
        modules=_DELTA,
        norm_offset=1.0,
        own=_qwen35,
        reads=frozenset({"rope.dimension_sections"}),
    ),
}
