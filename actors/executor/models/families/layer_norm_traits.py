"""Read the fields that families with layer norms share, including partial rotation, renamed fields and refused flags."""

from typing import Any

from trouper.actors.executor.models.traits import (
    DecoderTraits,
    HfConfig,
    common_traits,
    known_activation,
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
