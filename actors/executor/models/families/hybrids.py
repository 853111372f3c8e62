"""Readers of the config files of decoders in which recurrent mixers replace the attention of most layers."""

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import msgspec

from trouper.actors.executor.models.families.mixtures import (
    experts_of,
    granite_experts,
    sparse_layers,
)
from trouper.actors.executor.models.traits import (
    DecoderTraits,
    GatedDeltaTraits,
    HfConfig,
    LayerTraits,
    Mamba2Traits,
    Mixer,
    ShortConvTraits,
    common_traits,
    granite_traits,
    require,
    rope_traits,
)
from trouper.errors import TrouperValidationError, UnsupportedFeatureError

ATTENTION: Mapping[str, Mixer] = {"full_attention": "attention", "attention": "attention"}
# Pairs of a head that are rotated by time, height and width.
SECTIONS = 11, 11, 10
# The defaults of transformers for fields that the config lacks.
QWEN3_NEXT: HfConfig = {
    "intermediate_size": 5632,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
}
QWEN3_5_MOE: HfConfig = {
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}


def _qwen3_next(config: HfConfig) -> DecoderTraits:
    """Read a Qwen3-Next model.  Its matrices store the rows of each key head together."""
    config = {**QWEN3_NEXT, **config}
    traits = _qwen3_5(config)
    delta = traits.gated_delta
    assert delta is not None
    # GGUF files have the rows of q, k, v and z apart, and those of b and a as in the checkpoint.
    apart = bool(config.get("gguf_qkvz_apart"))
    delta = msgspec.structs.replace(delta, has_qkvz=not apart, has_ba=True)
    traits = msgspec.structs.replace(traits, gated_delta=delta)
    return _with_experts(traits, config) if config["num_experts"] else traits


def _qwen3_5_moe(config: HfConfig) -> DecoderTraits:
    config = {**QWEN3_5_MOE, **config, "norm_topk_prob": True}
    # All layers have experts, so no dense MLP exists.
    config["intermediate_size"] = require(config, "moe_intermediate_size")
    config |= {"decoder_sparse_step": 1, "mlp_only_layers": ()}
    return _with_experts(_qwen3_5(config), config)


def _with_experts(traits: DecoderTraits, config: HfConfig) -> DecoderTraits:
    shared = require(config, "shared_expert_intermediate_size")
    return msgspec.structs.replace(
        traits,
        experts=experts_of(config, shared_size=shared),
        layers=sparse_layers(traits.layers, config),
    )


def _qwen3_5(config: HfConfig) -> DecoderTraits:
    bias = bool(config.get("attention_bias", False))
    every = config.get("full_attention_interval") or 4
    num_layers = require(config, "num_hidden_layers")
    by_default = [
        "linear_attention" if (i + 1) % every else "full_attention" for i in range(num_layers)
    ]
    _check_activation(config)
    head_dim = config.get("head_dim", 256)
    partial = {"partial_rotary_factor": 0.25} | dict(config)
    num_k, num_v = (config.get(f"linear_num_{x}_heads", n) for x, n in (("key", 16), ("value", 32)))
    if num_k < 1 or num_v < 1 or num_v % num_k:
        raise TrouperValidationError(
            f"config.json: {num_v} value heads cannot share {num_k} key heads",
            parameter="linear_num_value_heads",
            value=num_v,
        )
    rope = rope_traits(partial, head_dim, may_be_partial=True)
    if not rope.sections and rope.width // 2 == sum(SECTIONS):
        rope = msgspec.structs.replace(rope, sections=SECTIONS)
    # The library interleaves the three positions of images, whatever the config says.
    rope = msgspec.structs.replace(rope, is_interleaved=bool(rope.sections))
    return common_traits(
        config,
        head_dim=head_dim,
        norm_offset=1.0,
        qk_norm="head",
        qkv_bias=bias,
        o_bias=bias,
        attention_scale=head_dim**-0.5,
        attention_gate=True,
        ropes=(rope,),
        layers=_layers(config, by_default, {"linear_attention": "gated_delta"}),
        gated_delta=GatedDeltaTraits(
            num_k_heads=num_k,
            num_v_heads=num_v,
            k_dim=config.get("linear_key_head_dim", 128),
            v_dim=config.get("linear_value_head_dim", 128),
            taps=_taps(config, "linear_conv_kernel_dim", 4),
        ),
    )


def _lfm2_dense(config: HfConfig) -> DecoderTraits:
    return _lfm2({**config, "intermediate_size": _lfm2_width(config)})


def _lfm2_moe(config: HfConfig) -> DecoderTraits:
    """Read an LFM2 with experts in all layers but the first ones."""
    num_dense = config.get("num_dense_layers", 2)
    traits = _lfm2(config)
    layers = tuple(
        msgspec.structs.replace(layer, is_sparse=i >= num_dense)
        for i, layer in enumerate(traits.layers)
    )
    experts = experts_of(
        config,
        is_normalised=bool(config.get("norm_topk_prob", True)),
        is_sigmoid=True,
        scale=float(config.get("routed_scaling_factor", 1.0)),
        has_choice_bias=bool(config.get("use_expert_bias", True)),
        names="lfm2_moe",
    )
    return msgspec.structs.replace(traits, layers=layers, experts=experts)


def _lfm2(config: HfConfig) -> DecoderTraits:
    num_layers = require(config, "num_hidden_layers")
    chosen = config.get("full_attn_idxs")
    by_default = [
        "full_attention" if chosen is None or i in chosen else "conv" for i in range(num_layers)
    ]
    head_dim = config.get("head_dim") or (
        require(config, "hidden_size") // require(config, "num_attention_heads")
    )
    return common_traits(
        config,
        names="lfm2",
        head_dim=head_dim,
        norm_eps=config.get("norm_eps", 1e-5),
        qk_norm="head",
        tied_embeddings=bool(config.get("tie_embedding", config.get("tie_word_embeddings", True))),
        ropes=(rope_traits(config, head_dim, default_theta=1_000_000.0),),
        layers=_layers(config, by_default, {"conv": "short_conv"}),
        short_conv=ShortConvTraits(
            taps=_taps(config, "conv_L_cache", 3), has_bias=bool(config.get("conv_bias", False))
        ),
    )


def _taps(config: HfConfig, name: str, default: int) -> int:
    """Return the number of taps of a convolution.  With a single one there is no state, so it is refused.

    Raises:
        TrouperValidationError: it is not a positive integer.
        UnsupportedFeatureError: the number is 1.
    """
    taps = require({name: default, **config}, name)
    if taps < 2:
        rule = f"{name} must be at least 2: a convolution of a single tap is not supported"
        raise UnsupportedFeatureError(rule, parameter=name)
    return taps


def _time_steps(config: HfConfig) -> tuple[float, float | None]:
    """Return the smallest and the largest time step.  None is no limit.

    Raises:
        TrouperValidationError: the config has no such pair.
    """
    name = "time_step_limit"
    found: Any = config.get(name) or (0.0, math.inf)
    pair = tuple(cast("list[Any]", found)) if isinstance(found, list | tuple) else ()
    if len(pair) != 2 or not all(isinstance(x, int | float) for x in pair) or pair[0] > pair[1]:
        rule = "config.json needs the smallest and the largest time step, such as [0.001, 0.1]"
        raise TrouperValidationError(rule, parameter=name, value=found)
    low, high = map(float, pair)
    return low, None if math.isinf(high) else high


def _lfm2_width(config: HfConfig) -> int:
    """Return the width of the MLP: two thirds of the configured one, rounded up, unless the config is exact."""
    width = config.get("block_ff_dim") or require(config, "intermediate_size")
    if not config.get("block_auto_adjust_ff_dim", True):
        return width
    width = int(2 * width / 3)
    factor, step = config.get("block_ffn_dim_multiplier", 1.0), config.get("block_multiple_of", 256)
    if factor is None:
        return width
    return step * math.ceil(int(factor * width) / step)


def _granite_hybrid(config: HfConfig) -> DecoderTraits:
    """Read a Granite 4 model.  Its shared MLP replaces the experts, or computes all tokens in addition to them."""
    kinds = config.get("layer_types") or config.get("layers_block_type")
    num_layers = require(config, "num_hidden_layers")
    layers = _layers(
        {**config, "layer_types": kinds},
        ["mamba"] * num_layers,
        # The library writes its own name of recurrent layers since version 5.
        {"mamba": "mamba2", "linear_attention": "mamba2"},
        rope=0 if config.get("position_embedding_type") == "rope" else None,
    )
    width = config.get("shared_intermediate_size", 1024)
    has_states = any(layer.mixer == "mamba2" for layer in layers)
    own: dict[str, Any] = {}
    if config.get("num_local_experts", 8):
        defaults = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 11008}
        own["experts"] = granite_experts({**defaults, **config}, width)
        layers = tuple(msgspec.structs.replace(layer, is_sparse=True) for layer in layers)
    return granite_traits(
        {**config, "intermediate_size": width},
        names=config.get("gguf_names", "granite_hybrid"),
        layers=layers,
        mamba2=_granite_mamba(config) if has_states else None,
        **own,
    )


def _granite_mamba(config: HfConfig) -> Mamba2Traits:
    _check_activation(config)
    num_heads = config.get("mamba_n_heads", 128)
    size = config.get("mamba_expand", 2) * require(config, "hidden_size")
    head_dim = config.get("mamba_d_head", "auto")
    low, high = _time_steps(config)
    traits = Mamba2Traits(
        num_heads=num_heads,
        head_dim=size // num_heads if head_dim == "auto" else head_dim,
        num_states=config.get("mamba_d_state", 256),
        num_groups=config.get("mamba_n_groups", 1),
        taps=_taps(config, "mamba_d_conv", 4),
        has_bias=bool(config.get("mamba_proj_bias", False)),
        has_conv_bias=bool(config.get("mamba_conv_bias", True)),
        low=low,
        high=high,
    )
    if traits.size != size:
        raise TrouperValidationError(
            f"config.json: {num_heads} heads of {traits.head_dim} are not mamba_expand · hidden_size",
            parameter="mamba_n_heads",
            value=num_heads,
        )
    return traits


def _check_activation(config: HfConfig) -> None:
    """Check that the convolutions, which share the activation of the MLP, have SiLU behind them."""
    found = config.get("hidden_act", "silu")
    if found not in ("silu", "swish"):
        rule = f"hidden_act={found!r} is not supported: convolutions are followed by silu"
        raise UnsupportedFeatureError(rule, parameter="hidden_act")


def _layers(
    config: HfConfig,
    by_default: list[str],
    recurrent: Mapping[str, Mixer],
    *,
    rope: int | None = 0,
) -> tuple[LayerTraits, ...]:
    """Read the mixer of each layer from `layer_types`.

    Args:
        recurrent: the family's recurrent mixers by their names in `layer_types`.

    Raises:
        UnsupportedFeatureError: the family has no such layers.
    """
    kinds: list[str] = config.get("layer_types") or by_default
    known: dict[str, Mixer] = {**ATTENTION, **recurrent}
    others = set(kinds) - known.keys()
    if others:
        rule = f"layer_types has {sorted(others)}, which are not supported for this architecture"
        raise UnsupportedFeatureError(rule, parameter="layer_types")
    return tuple(LayerTraits(rope=rope, mixer=known[kind]) for kind in kinds)


HYBRIDS: Mapping[str, Callable[[HfConfig], DecoderTraits]] = {
    "GraniteMoeHybridForCausalLM": _granite_hybrid,
    "Lfm2ForCausalLM": _lfm2_dense,
    "Lfm2MoeForCausalLM": _lfm2_moe,
    "Qwen3NextForCausalLM": _qwen3_next,
    "Qwen3_5ForCausalLM": _qwen3_5,
    "Qwen3_5MoeForCausalLM": _qwen3_5_moe,
}
