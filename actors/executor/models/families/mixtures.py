"""Readers of the config files of decoders with mixtures of experts (MoE), by architecture."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from trouper.actors.executor.models.traits import (
    DecoderTraits,
    ExpertsTraits,
    HfConfig,
    LayerTraits,
    MlpTraits,
    common_traits,
    granite_traits,
    layers_of,
    require,
    rope_traits,
)
from trouper.errors import UnsupportedFeatureError, invalid

# The defaults of transformers for fields that the config lacks.
GPT_OSS: HfConfig = {
    "attention_bias": True,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "sliding_window": 128,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
}
GPT_OSS_ROPE: HfConfig = {
    "rope_type": "yarn",
    "factor": 32.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def check_device(traits: DecoderTraits, device: str) -> None:
    """Check that a device, "cpu" or "cuda", has kernels for all layers of the model.

    Raises:
        UnsupportedFeatureError: there are none.
    """
    if device == "cpu":
        return
    part = None
    if traits.keeps_state:
        part = "a model with recurrent layers"
    elif traits.experts is not None:
        part = "a mixture of experts"
    elif traits.norm == "layer":
        part = "a model with layer norms"
    elif not traits.mlp.is_gated:
        part = "an MLP without a gate"
    elif traits.mlp.activation not in ("silu", "gelu_tanh"):
        part = f"the activation {traits.mlp.activation}"
    if part is not None:
        rule = f"{part} runs on the CPU only; set device='cpu'"
        raise UnsupportedFeatureError(rule, parameter="device")


def _mixtral(config: HfConfig) -> DecoderTraits:
    experts = experts_of(
        config, size="intermediate_size", is_normalised=True, names="block_sparse_moe"
    )
    return common_traits(
        config,
        experts=experts,
        layers=sparse_layers(layers_of(config, config.get("sliding_window")), config),
    )


def _qwen2_moe(config: HfConfig) -> DecoderTraits:
    shared = require(config, "shared_expert_intermediate_size")
    return common_traits(
        config,
        qkv_bias=bool(config.get("qkv_bias", True)),
        experts=experts_of(config, shared_size=shared),
        layers=sparse_layers(_qwen2_moe_layers(config), config),
    )


def _qwen2_moe_layers(config: HfConfig) -> tuple[LayerTraits, ...]:
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    if config.get("layer_types"):
        return layers_of(config, window)
    # Every other layer among the first ones has a window, whereas in dense Qwen2 models the last ones have.
    most, num_layers = config.get("max_window_layers", 28), require(config, "num_hidden_layers")
    return tuple(
        LayerTraits(window if i < most and i % 2 == 0 else None) for i in range(num_layers)
    )


def _qwen3_moe(config: HfConfig) -> DecoderTraits:
    bias = bool(config.get("attention_bias", False))
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    return common_traits(
        config,
        qk_norm="head",
        qkv_bias=bias,
        o_bias=bias,
        experts=experts_of(config),
        layers=sparse_layers((LayerTraits(window),) * require(config, "num_hidden_layers"), config),
    )


def _qwen3_vl_moe(config: HfConfig) -> DecoderTraits:
    # All layers have experts in the released models, whose configs keep the width of a dense MLP.
    traits = _qwen3_moe(config)
    experts = experts_of(config, is_normalised=True, names="qwen3_vl_moe")
    return msgspec.structs.replace(traits, experts=experts)


def _olmoe(config: HfConfig) -> DecoderTraits:
    if config.get("clip_qkv") is not None:
        raise UnsupportedFeatureError("clip_qkv is not supported")
    bias = bool(config.get("attention_bias", False))
    return common_traits(
        config,
        qk_norm="projection",
        qkv_bias=bias,
        o_bias=bias,
        norm_eps=config.get("rms_norm_eps", 1e-5),
        experts=experts_of(config, size="intermediate_size"),
        layers=sparse_layers((LayerTraits(),) * require(config, "num_hidden_layers"), config),
    )


def _gpt_oss(config: HfConfig) -> DecoderTraits:
    config = {**GPT_OSS, **config}
    bias = bool(config["attention_bias"])
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or GPT_OSS_ROPE
    head_dim = config["head_dim"] or require(config, "hidden_size") // require(
        config, "num_attention_heads"
    )
    return common_traits(
        config,
        has_sinks=True,
        qkv_bias=bias,
        o_bias=bias,
        mlp=MlpTraits(
            intermediate_size=require(config, "intermediate_size"),
            activation="clamped_swiglu",
            swiglu_alpha=float(config["swiglu_alpha"]),
            swiglu_limit=float(config["swiglu_limit"]),
        ),
        experts=experts_of(
            config, size="intermediate_size", is_normalised=True, names="gpt_oss", has_bias=True
        ),
        layers=sparse_layers(layers_of(config, config["sliding_window"], pattern=2), config),
        ropes=(rope_traits(config, head_dim, parameters=scaling, default_theta=150_000.0),),
    )


def _granite_moe(config: HfConfig) -> DecoderTraits:
    experts = experts_of(config, size="intermediate_size", is_normalised=True, names="granite_moe")
    layers = (LayerTraits(is_sparse=True),) * require(config, "num_hidden_layers")
    return granite_traits(config, experts=experts, layers=layers)


def _granite_moe_shared(config: HfConfig) -> DecoderTraits:
    """Read a Granite model with experts.  A size of 0 means no shared MLP."""
    shared = config.get("shared_intermediate_size", 0)
    if not shared:
        return _granite_moe(config)
    layers = (LayerTraits(is_sparse=True),) * require(config, "num_hidden_layers")
    return granite_traits(
        {**config, "intermediate_size": shared},
        names=config.get("gguf_names", "granite_hybrid"),
        experts=granite_experts(config, shared),
        layers=layers,
    )


def granite_experts(config: HfConfig, shared_size: int) -> ExpertsTraits:
    """Read the experts of a Granite whose shared MLP has this width and no gate."""
    return experts_of(
        config,
        size="intermediate_size",
        is_normalised=True,
        names="granite_moe",
        shared_size=shared_size,
        has_shared_gate=False,
    )


def experts_of(
    config: HfConfig,
    *,
    size: str = "moe_intermediate_size",
    is_normalised: bool | None = None,
    **own: Any,
) -> ExpertsTraits:
    """Read the experts. Without `is_normalised`, the config determines it.

    Raises:
        TrouperValidationError: a number is missing, or a token uses more experts than there are.
    """
    name = "num_experts" if config.get("num_experts") else "num_local_experts"
    count, top_k = require(config, name), require(config, "num_experts_per_tok")
    if top_k > count:
        raise invalid("num_experts_per_tok", f"config.json: there are {count} experts", top_k)
    if is_normalised is None:
        is_normalised = bool(config.get("norm_topk_prob", False))
    return ExpertsTraits(
        count=count,
        top_k=top_k,
        intermediate_size=require(config, size),
        is_normalised=is_normalised,
        **own,
    )


def sparse_layers(layers: tuple[LayerTraits, ...], config: HfConfig) -> tuple[LayerTraits, ...]:
    """Mark the layers with experts: every `decoder_sparse_step`-th one, except `mlp_only_layers`."""
    step, dense = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or ()
    return tuple(
        msgspec.structs.replace(layer, is_sparse=(i + 1) % step == 0 and i not in dense)
        for i, layer in enumerate(layers)
    )


MIXTURES: Mapping[str, Callable[[HfConfig], DecoderTraits]] = {
    "MixtralForCausalLM": _mixtral,
    "Qwen2MoeForCausalLM": _qwen2_moe,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "Qwen3VLMoeForCausalLM": _qwen3_vl_moe,
    "OlmoeForCausalLM": _olmoe,
    "GptOssForCausalLM": _gpt_oss,
    "GraniteMoeForCausalLM": _granite_moe,
    "GraniteMoeSharedForCausalLM": _granite_moe_shared,
}
