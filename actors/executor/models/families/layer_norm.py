"""Readers of the config files of decoders with layer norms: GPT-2 and the families that descend from it.

Most of them have biases and an MLP without a gate. A reader states how its family differs from the others; fields that the
config lacks have the defaults of the transformers library's config classes.  `layer_normed` and the functions beside it read what several
families share: partial rotation, renamed fields and refused flags.
"""

from collections.abc import Callable
from typing import Any

from trouper.actors.executor.models.traits import (
    DecoderTraits,
    HfConfig,
    LayerTraits,
    RopeTraits,
    common_traits,
    head_dim_of,
    known_activation,
    layers_of,
    require,
    rope_traits,
)
from trouper.errors import UnsupportedFeatureError, invalid


def layer_normed(
    config: HfConfig,
    *,
    eps: str | None,
    activation: str,
    has_bias: bool = False,
    is_gated: bool = False,
    is_tied: bool = False,
    mlp_bias: bool | None = None,
    **own: Any,
) -> DecoderTraits:
    """Read the fields that all of these families have.

    Args:
        eps: the config's field for the epsilon of norms, or None if it is always 1e-5.
        activation: the activation of the MLP.
        has_bias: whether the products of the layers have biases, unless another argument decides.
        is_tied: whether the head is the embedding by default.
        mlp_bias: whether the MLP's products have biases; `has_bias` by default.
        own: traits that the family adds or changes.
    """
    hidden = require(config, "hidden_size")
    if config.get("intermediate_size") is None:
        config = {**config, "intermediate_size": 4 * hidden}
    fields: dict[str, Any] = {
        "head_dim": own["head_dim"] if "head_dim" in own else even_head_dim(config),
        "num_kv_heads": require(config, "num_attention_heads"),
        "norm": "layer",
        "norm_eps": 1e-5 if eps is None else config.get(eps, 1e-5),
        "norm_has_bias": True,
        "qkv_bias": has_bias,
        "o_bias": has_bias,
        "tied_embeddings": bool(config.get("tie_word_embeddings", is_tied)),
        **own,
    }
    fields.setdefault("attention_scale", fields["head_dim"] ** -0.5)
    return common_traits(
        config,
        activation=known_activation(activation),
        is_gated=is_gated,
        mlp_bias=has_bias if mlp_bias is None else mlp_bias,
        **fields,
    )


def part_rope(config: HfConfig, head_dim: int, **defaults: float) -> Any:
    """Read the rotary embedding of a part of each head. `defaults` apply to fields that the config lacks."""
    found: HfConfig = config.get("rope_parameters") or config.get("rope_scaling") or {}
    said = {name: config[name] for name in defaults if config.get(name) is not None}
    parameters = {**defaults, **said, **found}
    return rope_traits(config, head_dim, parameters=parameters, may_be_partial=True)


def even_head_dim(config: HfConfig) -> int:
    """Return the width of a head: the hidden size divided by the number of heads.

    Raises:
        TrouperValidationError: the number of heads does not divide the hidden size.
    """
    hidden, num_heads = require(config, "hidden_size"), require(config, "num_attention_heads")
    if hidden % num_heads:
        raise invalid("num_attention_heads", f"must divide hidden_size {hidden}", num_heads)
    return hidden // num_heads


def renamed(config: HfConfig, **names: str) -> HfConfig:
    """Return the config with common names for fields that the family names differently.

    The family ignores a field with the common name, so its value is replaced even if the family's own field is absent.
    """
    return {**config, **{ours: config.get(own) for ours, own in names.items()}}


def refuse(config: HfConfig, **values: bool) -> None:
    """Raise UnsupportedFeatureError if a flag of the config has an unsupported value.

    Ignoring such a flag would silently compute another model.  An absent flag has its supported value.
    """
    for name, refused in values.items():
        value = config.get(name)
        if value is not None and bool(value) is refused:
            raise UnsupportedFeatureError(f"{name}={value} is not supported", parameter=name)


def _gpt2(config: HfConfig) -> DecoderTraits:
    refuse(config, scale_attn_by_inverse_layer_idx=True)
    return _of_openai(config, names="gpt2")


def _bigcode(config: HfConfig) -> DecoderTraits:
    is_multi_query = bool(config.get("multi_query", True))
    return _of_openai(
        config,
        names="bigcode",
        activation="gelu_pytorch_tanh",
        num_kv_heads=1 if is_multi_query else require(config, "num_attention_heads"),
        qkv_by_group=not is_multi_query,
    )


def _of_openai(config: HfConfig, *, activation: str = "gelu_new", **own: Any) -> DecoderTraits:
    refuse(config, add_cross_attention=True)
    is_scaled = config.get("scale_attn_weights", True)
    return layer_normed(
        renamed(config, intermediate_size="n_inner"),
        eps="layer_norm_epsilon",
        activation=config.get("activation_function", activation),
        has_bias=True,
        is_tied=True,
        ropes=(),
        layers=(LayerTraits(rope=None),) * require(config, "num_hidden_layers"),
        first_position=0,
        attention_scale=even_head_dim(config) ** -0.5 if is_scaled else 1.0,
        **own,
    )


def _gpt_neo(config: HfConfig) -> DecoderTraits:
    """Read GPT-Neo: layers alternate between full and windowed attention, and scores are not scaled."""
    for ours, own in (("num_attention_heads", "num_heads"), ("num_hidden_layers", "num_layers")):
        config = {**config, ours: config.get(own) or config.get(ours)}
    window = config.get("window_size", 256)
    given: Any = config.get("attention_types")
    groups: list[tuple[list[str], int]] = [(["global", "local"], 12)] if given is None else given
    kinds = [kind for group, count in groups for _ in range(count) for kind in group]
    if unknown := set(kinds) - {"global", "local"}:
        rule = f"attention_types: {sorted(unknown)} are not supported; supported: global, local"
        raise UnsupportedFeatureError(rule, parameter="attention_types")
    if not window and "local" in kinds:
        rule = "window_size=0 would hide every token from every other"
        raise UnsupportedFeatureError(rule, parameter="window_size")
    return layer_normed(
        config,
        names="gpt_neo",
        eps="layer_norm_epsilon",
        activation=config.get("activation_function", "gelu_new"),
        is_tied=True,
        mlp_bias=True,
        o_bias=True,
        ropes=(),
        layers=tuple(LayerTraits(window if kind == "local" else None, None) for kind in kinds),
        first_position=0,
        attention_scale=1.0,
    )


def _opt(config: HfConfig) -> DecoderTraits:
    refuse(config, do_layer_norm_before=False, _remove_final_layer_norm=True)
    width = config.get("word_embed_proj_dim")
    if width is not None and width != require(config, "hidden_size"):
        rule = f"word_embed_proj_dim={width} is not supported: embeddings of another width than hidden_size"
        raise UnsupportedFeatureError(rule, parameter="word_embed_proj_dim")
    has_bias = bool(config.get("enable_bias", True))
    has_weights = bool(config.get("layer_norm_elementwise_affine", True))
    return layer_normed(
        {**config, "intermediate_size": config.get("ffn_dim", 4096)},
        names="opt",
        eps=None,
        activation=config.get("activation_function", "relu"),
        has_bias=has_bias,
        is_tied=True,
        norm_has_weight=has_weights,
        norm_has_bias=has_weights,
        ropes=(),
        layers=(LayerTraits(rope=None),) * require(config, "num_hidden_layers"),
        first_position=2,
    )


def _gpt_neox(config: HfConfig) -> DecoderTraits:
    is_parallel = config.get("use_parallel_residual", True)
    rope = part_rope(
        config,
        even_head_dim(config),
        rope_theta=config.get("rotary_emb_base", 10_000.0),
        partial_rotary_factor=config.get("rotary_pct", 0.25),
    )
    return layer_normed(
        config,
        names="gpt_neox",
        eps="layer_norm_eps",
        activation=config.get("hidden_act", "gelu"),
        has_bias=bool(config.get("attention_bias", True)),
        mlp_bias=True,
        norm_placement="parallel_apart" if is_parallel else "pre",
        qkv_by_group=True,
        ropes=(rope,),
    )


def _phi(config: HfConfig) -> DecoderTraits:
    head_dim = head_dim_of(config)
    has_qk_norm = bool(config.get("qk_layernorm", False))
    if has_qk_norm and head_dim != even_head_dim(config):
        raise invalid("head_dim", "qk_layernorm needs heads that share hidden_size", head_dim)
    return layer_normed(
        config,
        names="phi",
        eps="layer_norm_eps",
        activation=config.get("hidden_act", "gelu_new"),
        has_bias=True,
        head_bias=True,
        norm_placement="parallel",
        qk_norm="head" if has_qk_norm else None,
        qk_norm_has_bias=has_qk_norm,
        head_dim=head_dim,
        num_kv_heads=config.get("num_key_value_heads") or require(config, "num_attention_heads"),
        ropes=(part_rope(config, head_dim, partial_rotary_factor=0.5),),
    )


def _starcoder2(config: HfConfig) -> DecoderTraits:
    head_dim = head_dim_of(config)
    window = config.get("sliding_window")
    if window == 0:
        rule = "sliding_window=0 would hide every token from every other; use null for no window"
        raise UnsupportedFeatureError(rule, parameter="sliding_window")
    return layer_normed(
        config,
        names="starcoder2",
        eps="norm_epsilon",
        activation=config.get("hidden_act", "gelu_pytorch_tanh"),
        has_bias=bool(config.get("use_bias", True)),
        is_tied=True,
        head_dim=head_dim,
        num_kv_heads=config.get("num_key_value_heads", 2),
        layers=(LayerTraits(window),) * require(config, "num_hidden_layers"),
        ropes=(rope_traits(config, head_dim),),
    )


def _stablelm(config: HfConfig) -> DecoderTraits:
    head_dim = even_head_dim(config)
    has_qk_norm = bool(config.get("qk_layernorm", False))
    return layer_normed(
        config,
        names="stablelm",
        eps="layer_norm_eps",
        activation=config.get("hidden_act", "silu"),
        is_gated=True,
        qkv_bias=bool(config.get("use_qkv_bias", False)),
        norm_placement="parallel" if config.get("use_parallel_residual", False) else "pre",
        qk_norm="own_head" if has_qk_norm else None,
        num_kv_heads=config.get("num_key_value_heads", 32),
        ropes=(part_rope(config, head_dim, partial_rotary_factor=0.25),),
    )


def _falcon(config: HfConfig) -> DecoderTraits:
    refuse(config, alibi=True)
    is_new = bool(config.get("new_decoder_architecture", False))
    is_multi_query = bool(config.get("multi_query", True))
    is_parallel = bool(config.get("parallel_attn", True))
    num_norms = config.get("num_ln_in_parallel_attn")
    if num_norms is None and is_new:
        num_norms = 2
    if is_new and not is_parallel:
        rule = "new_decoder_architecture has parallel attention, and parallel_attn=False contradicts it"
        raise invalid("parallel_attn", rule, is_parallel)
    if not is_new and is_parallel and num_norms == 2:
        rule = "num_ln_in_parallel_attn=2 needs new_decoder_architecture"
        raise invalid("num_ln_in_parallel_attn", rule, num_norms)
    has_two = is_new and num_norms == 2
    placement = "parallel_apart" if has_two else "parallel" if is_parallel else "pre"
    num_heads = require(config, "num_attention_heads")
    num_kv_heads = 1
    if is_new or not is_multi_query:
        num_kv_heads = config.get("num_kv_heads") or num_heads
    if not is_new and num_kv_heads not in (1, num_heads):
        rule = "without new_decoder_architecture each head has a key of its own, or all share one"
        raise invalid("num_kv_heads", rule, num_kv_heads)
    return layer_normed(
        renamed(config, intermediate_size="ffn_hidden_size"),
        names="falcon_two_norms" if has_two else "falcon",
        eps="layer_norm_epsilon",
        activation=config.get("activation", "gelu"),
        has_bias=bool(config.get("bias", False)),
        is_tied=True,
        norm_placement=placement,
        num_kv_heads=num_kv_heads,
        qkv_by_group=True,
        ropes=(rope_traits(config, even_head_dim(config)),),
    )


def _gptj(config: HfConfig) -> DecoderTraits:
    head_dim, rotated = even_head_dim(config), config.get("rotary_dim", 64)
    if not isinstance(rotated, int) or not 2 <= rotated <= head_dim or rotated % 2:
        rule = f"must be an even number of at most {head_dim}, the width of a head"
        raise invalid("rotary_dim", rule, rotated)
    return layer_normed(
        renamed(config, intermediate_size="n_inner"),
        names="gptj",
        eps="layer_norm_epsilon",
        activation=config.get("activation_function", "gelu_new"),
        mlp_bias=True,
        head_bias=True,
        norm_placement="parallel",
        is_interleaved=True,
        ropes=(RopeTraits(width=rotated),),
    )


def _cohere(config: HfConfig) -> DecoderTraits:
    has_qk_norm = bool(config.get("use_qk_norm", False))
    return _of_cohere(config, theta=500_000.0, qk_norm="own_head" if has_qk_norm else None)


def _cohere2(config: HfConfig) -> DecoderTraits:
    """Read Cohere 2: layers with a window rotate their queries and keys, and layers without one do not."""
    pattern = config.get("sliding_window_pattern", 4)
    layers = layers_of(config, config.get("sliding_window", 4096), pattern=pattern)
    return _of_cohere(
        config,
        theta=10_000.0,
        layers=tuple(
            LayerTraits(layer.window, None if layer.window is None else 0) for layer in layers
        ),
    )


def _of_cohere(config: HfConfig, *, theta: float, **own: Any) -> DecoderTraits:
    head_dim = head_dim_of(config)
    return layer_normed(
        config,
        eps="layer_norm_eps",
        activation=config.get("hidden_act", "silu"),
        is_gated=True,
        is_tied=True,
        qkv_bias=bool(config.get("attention_bias", False)),
        o_bias=bool(config.get("attention_bias", False)),
        norm_has_bias=False,
        norm_placement="parallel",
        is_interleaved=True,
        logits_scale=float(config.get("logit_scale", 0.0625)),
        head_dim=head_dim,
        num_kv_heads=config.get("num_key_value_heads") or require(config, "num_attention_heads"),
        ropes=(rope_traits(config, head_dim, default_theta=theta),),
        **own,
    )


def _nemotron(config: HfConfig) -> DecoderTraits:
    head_dim = head_dim_of(config)
    return layer_normed(
        config,
        eps="norm_eps",
        activation=config.get("hidden_act", "relu2"),
        has_bias=bool(config.get("attention_bias", False)),
        mlp_bias=bool(config.get("mlp_bias", False)),
        norm_offset=1.0,
        head_dim=head_dim,
        num_kv_heads=config.get("num_key_value_heads") or require(config, "num_attention_heads"),
        ropes=(part_rope(config, head_dim, partial_rotary_factor=0.5),),
    )


def _olmo(config: HfConfig) -> DecoderTraits:
    if config.get("clip_qkv") is not None:
        raise UnsupportedFeatureError("clip_qkv is not supported", parameter="clip_qkv")
    head_dim = head_dim_of(config)
    has_bias = bool(config.get("attention_bias", False))
    return layer_normed(
        config,
        eps=None,
        activation=config.get("hidden_act", "silu"),
        is_gated=True,
        qkv_bias=has_bias,
        o_bias=has_bias,
        norm_has_weight=False,
        norm_has_bias=False,
        head_dim=head_dim,
        num_kv_heads=config.get("num_key_value_heads") or require(config, "num_attention_heads"),
        ropes=(rope_traits(config, head_dim),),
    )


def _persimmon(config: HfConfig) -> DecoderTraits:
    head_dim = even_head_dim(config)
    has_qk_norm = bool(config.get("qk_layernorm", True))
    return layer_normed(
        config,
        names="persimmon",
        eps="layer_norm_eps",
        activation=config.get("hidden_act", "relu2"),
        has_bias=True,
        qk_norm="head" if has_qk_norm else None,
        qk_norm_has_bias=has_qk_norm,
        qkv_by_group=True,
        ropes=(part_rope(config, head_dim, partial_rotary_factor=0.5),),
    )


def _arcee(config: HfConfig) -> DecoderTraits:
    """Read Arcee: a Llama with an ungated MLP."""
    bias = bool(config.get("attention_bias", False))
    return common_traits(
        config,
        activation=known_activation(config.get("hidden_act", "relu2")),
        is_gated=False,
        mlp_bias=bool(config.get("mlp_bias", False)),
        qkv_bias=bias,
        o_bias=bias,
        norm_eps=config.get("rms_norm_eps", 1e-5),
    )


LAYER_NORM_FAMILIES: dict[str, Callable[[HfConfig], DecoderTraits]] = {
    "ArceeForCausalLM": _arcee,
    "Cohere2ForCausalLM": _cohere2,
    "CohereForCausalLM": _cohere,
    "FalconForCausalLM": _falcon,
    "GPT2LMHeadModel": _gpt2,
    "GPTBigCodeForCausalLM": _bigcode,
    "GPTJForCausalLM": _gptj,
    "GPTNeoForCausalLM": _gpt_neo,
    "GPTNeoXForCausalLM": _gpt_neox,
    "NemotronForCausalLM": _nemotron,
    "OlmoForCausalLM": _olmo,
    "OPTForCausalLM": _opt,
    "PersimmonForCausalLM": _persimmon,
    "PhiForCausalLM": _phi,
    "StableLmForCausalLM": _stablelm,
    "Starcoder2ForCausalLM": _starcoder2,
}
