"""Readers of the config files of decoders with RMS norms: Llama and the families that descend from it.

A reader takes the fields of a `config.json` and returns `DecoderTraits`. It states only how its family differs from
Llama; `common_traits` reads everything else.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from trouper.actors.executor.models.traits import (
    DecoderTraits,
    HfConfig,
    LayerTraits,
    activation_of,
    common_traits,
    granite_traits,
    head_dim_of,
    layers_of,
    require,
    rope_traits,
)
from trouper.errors import UnsupportedFeatureError

# The defaults of configs without `rope_parameters`.
CWM_ROPE: HfConfig = {
    "rope_type": "llama3", "rope_theta": 1_000_000.0, "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
MINISTRAL3_ROPE: HfConfig = {
    "rope_type": "yarn", "rope_theta": 1_000_000.0, "factor": 16.0, "original_max_position_embeddings": 16384,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
GELU_TANH = "gelu_pytorch_tanh"


def _llama(config: HfConfig) -> DecoderTraits:
    bias = bool(config.get("attention_bias", False))
    return common_traits(
        config, qkv_bias=bias, o_bias=bias, mlp_bias=bool(config.get("mlp_bias", False))
    )


def _mistral(config: HfConfig) -> DecoderTraits:
    return common_traits(config, layers=layers_of(config, config.get("sliding_window")))


def _qwen2(config: HfConfig) -> DecoderTraits:
    return common_traits(config, qkv_bias=True, layers=_qwen_layers(config))


def _qwen3(config: HfConfig) -> DecoderTraits:
    bias = bool(config.get("attention_bias", False))
    return common_traits(
        config, qk_norm="head", qkv_bias=bias, o_bias=bias, layers=_qwen_layers(config)
    )


def _phi3(config: HfConfig) -> DecoderTraits:
    head_dim = head_dim_of(config)
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if (parameters.get("rope_type") or parameters.get("type")) in ("su", "yarn"):
        # Phi-3's names for longrope from before it had one.
        parameters["rope_type"] = "longrope"
    return common_traits(
        config,
        names="phi3",
        layers=layers_of(config, config.get("sliding_window")),
        ropes=(rope_traits(config, head_dim, parameters=parameters, may_be_partial=True),),
    )


def _gemma1(config: HfConfig) -> DecoderTraits:
    head_dim, act = config.get("head_dim", 256), config.get("hidden_act")
    return _gemma(
        config,
        norm_placement="pre",
        attention_scale=head_dim**-0.5,
        # The first releases contain "gelu" but were trained with its tanh approximation.
        activation=activation_of({"hidden_act": GELU_TANH if act in (None, "gelu") else act}),
        is_causal=not config.get("use_bidirectional_attention")
        and config.get("is_causal") is not False,
    )


def _gemma2(config: HfConfig) -> DecoderTraits:
    if config.get("use_bidirectional_attention"):
        raise UnsupportedFeatureError("use_bidirectional_attention is not supported for Gemma 2")
    return _gemma(
        config,
        layers=layers_of(config, config.get("sliding_window", 4096), pattern=2),
        attention_softcap=config.get("attn_logit_softcapping", 50.0),
        final_softcap=config.get("final_logit_softcapping", 30.0),
    )


def _gemma3(config: HfConfig) -> DecoderTraits:
    if config.get("attn_logit_softcapping") is not None:
        raise UnsupportedFeatureError("attn_logit_softcapping is not supported for Gemma 3")
    window = config.get("sliding_window", 4096)
    sees_ahead = bool(config.get("use_bidirectional_attention"))
    if sees_ahead:
        # EmbeddingGemma: half of the window on each side.
        window = window and window // 2
    layers = layers_of(config, window, pattern=config.get("sliding_window_pattern") or 6)
    head_dim = config.get("head_dim", 256)
    scaling: HfConfig = config.get("rope_parameters") or {}
    whole: HfConfig = scaling.get("full_attention") or config.get("rope_scaling") or {}
    local: HfConfig = scaling.get("sliding_attention") or {
        "rope_theta": config.get("rope_local_base_freq", 10_000.0)
    }
    return _gemma(
        config,
        layers=tuple(LayerTraits(layer.window, int(layer.window is not None)) for layer in layers),
        ropes=(
            rope_traits(config, head_dim, parameters=whole, default_theta=1_000_000.0),
            rope_traits(config, head_dim, parameters=local),
        ),
        qk_norm="head",
        final_softcap=config.get("final_logit_softcapping"),
        is_causal=not sees_ahead and config.get("is_causal") is not False,
    )


def _gemma(config: HfConfig, **own: Any) -> DecoderTraits:
    bias = bool(config.get("attention_bias", False))
    fields: dict[str, Any] = {
        "head_dim": config.get("head_dim", 256),
        "norm_placement": "sandwich",
        "norm_offset": 1.0,
        # Configs older than `hidden_activation` contain "gelu" but were trained with its tanh approximation.
        "activation": activation_of({"hidden_act": config.get("hidden_activation") or GELU_TANH}),
        "qkv_bias": bias,
        "o_bias": bias,
        "attention_scale": config.get("query_pre_attn_scalar", 256) ** -0.5,
        "embedding_scale": require(config, "hidden_size") ** 0.5,
        "embeds_are_scaled": True,
        "tied_embeddings": bool(config.get("tie_word_embeddings", True)),
        **own,
    }
    if "ropes" not in fields:
        fields["ropes"] = (rope_traits(config, fields["head_dim"]),)
    return common_traits(config, **fields)


def _granite(config: HfConfig) -> DecoderTraits:
    return granite_traits(config, mlp_bias=bool(config.get("mlp_bias", False)))


def _olmo2(config: HfConfig) -> DecoderTraits:
    bias = bool(config.get("attention_bias", False))
    return common_traits(
        config,
        norm_placement="post",
        qk_norm="projection",
        qkv_bias=bias,
        o_bias=bias,
        norm_eps=config.get("rms_norm_eps", 1e-5),
    )


def _olmo3(config: HfConfig) -> DecoderTraits:
    layers = layers_of(config, config.get("sliding_window", 4096), pattern=4)
    head_dim = head_dim_of(config)
    found: HfConfig = config.get("rope_parameters") or {}
    whole: HfConfig = found.get("full_attention") or config.get("rope_scaling") or {}
    local: HfConfig = found.get("sliding_attention") or {}
    if found and not (whole or local):
        # Both kinds of layers use the same rotary embedding.
        whole = local = found
    return msgspec.structs.replace(
        _olmo2(config),
        layers=tuple(LayerTraits(layer.window, int(layer.window is not None)) for layer in layers),
        ropes=tuple(
            rope_traits(config, head_dim, parameters=each, default_theta=500_000.0)
            for each in (whole, local)
        ),
    )


def _exaone4(config: HfConfig) -> DecoderTraits:
    """Read EXAONE 4: layers with a window rotate their queries and keys, and layers without one do not."""
    window = config.get("sliding_window", 4096)
    pattern = config.get("sliding_window_pattern", 4)
    if isinstance(pattern, str):
        pattern = len(pattern)
    layers = layers_of(config, window, pattern=pattern or 1)
    return common_traits(
        config,
        norm_placement="post",
        qk_norm="head",
        norm_eps=config.get("rms_norm_eps", 1e-5),
        layers=tuple(
            LayerTraits(layer.window, 0 if window is None or layer.window is not None else None)
            for layer in layers
        ),
    )


def _seed_oss(config: HfConfig) -> DecoderTraits:
    return common_traits(
        {"head_dim": 128} | dict(config),
        qkv_bias=bool(config.get("attention_bias", True)),
        o_bias=bool(config.get("attention_out_bias", False)),
        mlp_bias=bool(config.get("mlp_bias", False)),
    )


def _cwm(config: HfConfig) -> DecoderTraits:
    num_layers = require(config, "num_hidden_layers")
    kinds = ["sliding_attention" if i % 4 else "full_attention" for i in range(num_layers)]
    layers = layers_of({"layer_types": kinds} | dict(config), config.get("sliding_window", 8192))
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or CWM_ROPE
    rope = rope_traits(
        config, head_dim_of(config), parameters=parameters, default_theta=1_000_000.0
    )
    return common_traits(
        config, mlp_bias=bool(config.get("mlp_bias", False)), layers=layers, ropes=(rope,)
    )


def _ministral3(config: HfConfig) -> DecoderTraits:
    """Read Ministral 3, which scales queries by their positions: they use a rotary table of their own."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or MINISTRAL3_ROPE
    rope = rope_traits(config, head_dim_of(config), parameters=parameters)
    beta = parameters.get("llama_4_scaling_beta")
    length = parameters.get("original_max_position_embeddings")
    if beta is None or length is None:
        rule = "rope_parameters need llama_4_scaling_beta and original_max_position_embeddings"
        raise UnsupportedFeatureError(f"{rule} for Ministral 3", parameter="model")
    grown = msgspec.structs.replace(rope, growth=float(beta), growth_length=int(length))
    traits = common_traits(
        config,
        layers=layers_of(config, config.get("sliding_window")),
        ropes=(rope, grown),
        norm_eps=config.get("rms_norm_eps", 1e-5),
    )
    layers = [msgspec.structs.replace(layer, query_rope=1) for layer in traits.layers]
    return msgspec.structs.replace(traits, layers=tuple(layers))


def _hunyuan(config: HfConfig) -> DecoderTraits:
    bias, head_dim = bool(config.get("attention_bias", False)), head_dim_of(config)
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = parameters.get("rope_type") or parameters.get("type")
    if kind == "dynamic" and parameters.get("alpha"):
        # The base is scaled by a constant, so nothing about it is dynamic.
        theta = parameters.get("rope_theta") or config.get("rope_theta") or 10_000.0
        theta *= parameters["alpha"] ** (head_dim / (head_dim - 2))
        parameters = {"rope_type": "default", "rope_theta": theta}
    return common_traits(
        config,
        qk_norm="head",
        is_norm_last=True,
        names="hunyuan",
        qkv_bias=bias,
        o_bias=bias,
        norm_eps=config.get("rms_norm_eps", 1e-5),
        ropes=(rope_traits(config, head_dim, parameters=parameters),),
    )


def _ernie4_5(config: HfConfig) -> DecoderTraits:
    bias = bool(config.get("use_bias", False))
    config = {"head_dim": 128, "num_key_value_heads": 2, "tie_word_embeddings": True} | dict(config)
    return common_traits(
        config,
        is_interleaved=True,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        norm_eps=config.get("rms_norm_eps", 1e-5),
        ropes=(rope_traits(config, head_dim_of(config), default_theta=500_000.0),),
    )


def _glm(config: HfConfig, **own: Any) -> DecoderTraits:
    config = {"head_dim": 128, "num_key_value_heads": 2, "partial_rotary_factor": 0.5} | dict(
        config
    )
    return common_traits(
        config,
        is_interleaved=True,
        names="glm",
        qkv_bias=bool(config.get("attention_bias", True)),
        norm_eps=config.get("rms_norm_eps", 1.5625e-7),
        ropes=(rope_traits(config, head_dim_of(config), may_be_partial=True),),
        **own,
    )


def _glm4(config: HfConfig) -> DecoderTraits:
    return _glm(config, norm_placement="sandwich")


def _helium(config: HfConfig) -> DecoderTraits:
    config = {"head_dim": 128} | dict(config)
    return common_traits(
        config,
        is_interleaved=True,
        qkv_bias=bool(config.get("attention_bias", False)),
        mlp_bias=bool(config.get("mlp_bias", False)),
        norm_eps=config.get("rms_norm_eps", 1e-8),
        ropes=(rope_traits(config, head_dim_of(config), default_theta=100_000.0),),
    )


def _smollm3(config: HfConfig) -> DecoderTraits:
    bias = bool(config.get("attention_bias", False))
    num_layers = require(config, "num_hidden_layers")
    interval = config.get("no_rope_layer_interval") or 4
    has_rope = config.get("no_rope_layers") or [(i + 1) % interval for i in range(num_layers)]
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    kinds = config.get("layer_types") or [
        "full_attention" if rope else "sliding_attention" for rope in has_rope[:num_layers]
    ]
    head_dim = head_dim_of(config)
    return common_traits(
        config,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        tied_embeddings=bool(config.get("tie_word_embeddings", True)),
        ropes=(rope_traits(config, head_dim, default_theta=2_000_000.0),),
        layers=tuple(
            LayerTraits(window if kind == "sliding_attention" else None, 0 if rope else None)
            for kind, rope in zip(kinds, has_rope, strict=False)
        ),
    )


def _qwen_layers(config: HfConfig) -> tuple[LayerTraits, ...]:
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    if config.get("layer_types"):
        return layers_of(config, window)
    first = config.get("max_window_layers", 28)
    return tuple(
        LayerTraits(window if i >= first else None)
        for i in range(require(config, "num_hidden_layers"))
    )


RMS_NORM_FAMILIES: dict[str, Callable[[HfConfig], DecoderTraits]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "Phi3ForCausalLM": _phi3,
    "GemmaForCausalLM": _gemma1,
    "Gemma2ForCausalLM": _gemma2,
    "Gemma3ForCausalLM": _gemma3,
    "Gemma3TextForCausalLM": _gemma3,
    "GraniteForCausalLM": _granite,
    "Olmo2ForCausalLM": _olmo2,
    "Olmo3ForCausalLM": _olmo3,
    "Exaone4ForCausalLM": _exaone4,
    "SeedOssForCausalLM": _seed_oss,
    "MinistralForCausalLM": _mistral,
    "CwmForCausalLM": _cwm,
    "SmolLM3ForCausalLM": _smollm3,
    "Ministral3ForCausalLM": _ministral3,
    "HunYuanDenseV1ForCausalLM": _hunyuan,
    "Ernie4_5ForCausalLM": _ernie4_5,
    "GlmForCausalLM": _glm,
    "Glm4ForCausalLM": _glm4,
    "HeliumForCausalLM": _helium,
}
