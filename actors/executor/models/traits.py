"""The traits that distinguish one decoder from another, as plain data: no torch, no files, no names of tensors.

A decoder is: embed -> layers of (attention, MLP) with residual sums -> norm -> head.  Traits say
the rest.  `registry.decoder_traits` reads them from a Hugging Face config.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

import msgspec

from trouper.actors.executor.models.names import Family
from trouper.config.checkpoint.files import checked
from trouper.config.checkpoint.hf_fields import Rope
from trouper.errors import TrouperValidationError, UnsupportedFeatureError
from trouper.kernels.formats import Activation, Norm

HfConfig = Mapping[str, Any]
T = TypeVar("T")
# parallel: attention and MLP read the same norm of the layer's input; parallel_apart: each one of its own.
NormPlacement = Literal["pre", "post", "sandwich", "parallel", "parallel_apart"]


ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_python": "gelu", "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh", "gelu_python_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh", "relu": "relu",
    "relu2": "relu2",
}  # fmt: skip


class RopeTraits(msgspec.Struct, frozen=True, kw_only=True):
    """The way from positions to angles; `models/rotary.py` has the formulas."""

    kind: Literal["default", "linear", "llama3", "yarn", "longrope"] = "default"
    theta: float = 10_000.0
    width: int  # rotated dimensions of a head, even
    factor: float = 1.0  # by how much the context was stretched
    original_max_position: int = 0  # length before stretching; 0 where the kind has no use for it
    attention_factor: float = 1.0  # multiplies cos and sin
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()  # longrope, [width / 2] each
    long_factors: tuple[float, ...] = ()
    # A query at position p is multiplied by 1 + growth · ln(1 + ⌊p / growth_length⌋) (Ministral 3).
    growth: float = 0.0
    growth_length: int = 1


class LayerTraits(msgspec.Struct, frozen=True):
    """The traits in which layers of one model differ."""

    # A query sees this many keys, itself included, or without causality those at most this far away; None = all.
    window: int | None = None
    rope: int | None = 0  # index into `DecoderTraits.ropes`; None = no positions (NoPE)
    query_rope: int | None = None  # of the queries, where it is not that of the keys
    is_sparse: bool = False  # its MLP is that of `DecoderTraits.experts`


class MlpTraits(msgspec.Struct, frozen=True, kw_only=True):
    """down(act(gate(x)) · up(x)), or down(act(up(x))) without a gate; `models/mlp.py` computes it."""

    intermediate_size: int
    activation: Activation = "silu"
    swiglu_alpha: float = 0.0  # of clamped_swiglu, as the limit is
    swiglu_limit: float = 0.0
    has_bias: bool = False
    is_gated: bool = True


class ExpertsTraits(msgspec.Struct, frozen=True, kw_only=True):
    """A mixture of gated MLPs, of which a router chooses some for each token; `kernels/experts.py` has the formula."""

    count: int
    top_k: int
    intermediate_size: int  # of each
    is_normalised: bool = False  # the weights of a token's experts add up to one
    shared_size: int = (
        0  # of one more that all tokens use, times a gate of its own; 0 = there is none
    )
    has_bias: bool = False  # the router too
    # in the checkpoint
    names: Literal["mlp", "block_sparse_moe", "gpt_oss", "granite_moe"] = "mlp"


class DecoderTraits(msgspec.Struct, frozen=True, kw_only=True):
    """One architecture with the sizes of one model."""

    vocab_size: int
    hidden_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    mlp: MlpTraits
    experts: ExpertsTraits | None = None
    max_position: int
    layers: tuple[LayerTraits, ...]
    ropes: tuple[RopeTraits, ...]
    norm: Norm = "rms"
    norm_eps: float = 1e-6
    norm_placement: NormPlacement = "pre"
    norm_offset: float = 0.0  # Gemma stores w - 1
    norm_has_weight: bool = True
    norm_has_bias: bool = False
    # Over each head with the same weights, over each head with its own, or over all heads together.
    qk_norm: Literal["head", "own_head", "projection"] | None = None
    qk_norm_has_bias: bool = False
    is_norm_last: bool = False  # the norm of each head follows its rotation (Hunyuan)
    # Neighbouring dimensions turn together in the checkpoint, and not those that are half a head apart.
    is_interleaved: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    head_bias: bool = False
    # The row of position 0 in a table of learnt positions, which are added to the embeddings; None = there is no table.
    first_position: int | None = None
    has_sinks: bool = False  # attention to one more key for each head, without a value (gpt-oss)
    attention_scale: float
    attention_softcap: float | None = None
    final_softcap: float | None = None
    embedding_scale: float = 1.0
    embeds_are_scaled: bool = False  # embeddings from outside come with the scale (Gemma)
    residual_scale: float = 1.0  # of what attention and MLP add
    logits_scale: float = 1.0
    tied_embeddings: bool = False
    is_causal: bool = True  # False: a token sees those behind it too, so that the model only pools
    names: Family = "llama"  # of the tensors
    # The one matrix of q, k and v holds for each KV head its queries, its key and its value, and not all queries first.
    qkv_by_group: bool = False

    @property
    def is_parallel(self) -> bool:
        """Whether attention and MLP of a layer both read the layer's input."""
        return self.norm_placement in ("parallel", "parallel_apart")

    @property
    def q_size(self) -> int:
        return self.num_q_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def mlp_widths(self) -> tuple[int, ...]:
        """The widths of all gated MLPs."""
        if self.experts is None:
            return (self.mlp.intermediate_size,)
        own = self.experts.intermediate_size, self.experts.shared_size
        return self.mlp.intermediate_size, *filter(None, own)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The distinct windows, so that a batch plans its attention once for each."""
        return tuple(dict.fromkeys(layer.window for layer in self.layers))


def read_traits(reader: Callable[[HfConfig], T], config: HfConfig, kind: str) -> T:
    """Call the reader of an architecture, or of another kind of thing that config.json describes.

    Raises:
        UnsupportedFeatureError: the reader does not know a trait.
        TrouperValidationError: the config is not one of this kind.
    """
    try:
        traits = reader(config)
        return msgspec.convert(msgspec.to_builtins(traits), type(traits))  # types and nulls
    except (TrouperValidationError, UnsupportedFeatureError):
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise TrouperValidationError(
            f"config.json: no {kind} can be read from it ({type(error).__name__}: {error})",
            parameter="model",
        ) from error


def common_traits(
    config: HfConfig,
    *,
    activation: Activation | None = None,
    mlp_bias: bool = False,
    is_gated: bool = True,
    **own: Any,
) -> DecoderTraits:
    """Read what nearly every decoder's config says in the same words.

    Args:
        activation: of the MLP, where the family has its own word for it; None = the config says it.
        own: fields that the family adds.

    Raises:
        TrouperValidationError: a number is missing or does not fit the others.
    """
    num_q_heads = require(config, "num_attention_heads")
    head_dim = config.get("head_dim") or require(config, "hidden_size") // num_q_heads
    if head_dim < 1:
        raise TrouperValidationError(
            "config.json: more heads than hidden_size",
            parameter="num_attention_heads",
            value=num_q_heads,
        )
    num_layers = require(config, "num_hidden_layers")
    fields: dict[str, Any] = {
        "vocab_size": require(config, "vocab_size"),
        "hidden_size": require(config, "hidden_size"),
        "num_q_heads": num_q_heads,
        "num_kv_heads": config.get("num_key_value_heads") or num_q_heads,
        "head_dim": head_dim,
        "mlp": MlpTraits(
            intermediate_size=require(config, "intermediate_size"),
            activation=activation or activation_of(config),
            has_bias=mlp_bias,
            is_gated=is_gated,
        ),
        "max_position": require(config, "max_position_embeddings"),
        "layers": (LayerTraits(),) * num_layers,
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "attention_scale": head_dim**-0.5,
        "tied_embeddings": bool(config.get("tie_word_embeddings", False)),
        "is_causal": config.get("is_causal") is not False,
        **own,
    }
    if "ropes" not in fields:
        fields["ropes"] = (rope_traits(config, head_dim),)
    traits = DecoderTraits(**fields)
    if traits.num_q_heads % traits.num_kv_heads:
        raise TrouperValidationError(
            f"{traits.num_q_heads} query heads cannot share {traits.num_kv_heads} KV heads",
            parameter="num_key_value_heads",
        )
    if len(traits.layers) != num_layers:
        raise TrouperValidationError(
            f"config.json describes {len(traits.layers)} layers, not {num_layers}",
            parameter="layer_types",
        )
    return traits


def require(config: HfConfig, name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or value < 1:
        raise TrouperValidationError(
            "config.json needs a positive integer", parameter=name, value=value
        )
    return value


def head_dim_of(config: HfConfig) -> int:
    """Return the width of a head: the config's own, else an equal share of the hidden state."""
    share = require(config, "hidden_size") // require(config, "num_attention_heads")
    return config.get("head_dim") or share


def granite_traits(config: HfConfig, **own: Any) -> DecoderTraits:
    """Read what all of Granite's decoders have: multipliers of what others take as it is."""
    bias = bool(config.get("attention_bias", False))
    if config.get("attention_multiplier") == 0:
        raise UnsupportedFeatureError("attention_multiplier=0 is not supported")
    return common_traits(
        config,
        qkv_bias=bias,
        o_bias=bias,
        attention_scale=float(config.get("attention_multiplier", 1.0)),
        embedding_scale=float(config.get("embedding_multiplier", 1.0)),
        residual_scale=float(config.get("residual_multiplier", 1.0)),
        logits_scale=1.0 / float(config.get("logits_scaling", 1.0)),
        **own,
    )


def layers_of(config: HfConfig, window: int | None, *, pattern: int = 0) -> tuple[LayerTraits, ...]:
    """Read `layer_types` if the config has them; else every `pattern`-th layer sees all, 0 = none does."""
    num_layers = require(config, "num_hidden_layers")
    kinds = config.get("layer_types") or [
        "full_attention" if pattern and (i + 1) % pattern == 0 else "sliding_attention"
        for i in range(num_layers)
    ]
    if window is None and "sliding_attention" in (config.get("layer_types") or ()):
        rule = "layer_types has sliding_attention, but sliding_window is null or switched off"
        raise UnsupportedFeatureError(rule)
    if window == 0 and "sliding_attention" in kinds:
        rule = "sliding_window=0 would hide every token from every other; use null for no window"
        raise UnsupportedFeatureError(rule)
    return tuple(LayerTraits(window if kind == "sliding_attention" else None) for kind in kinds)


def activation_of(config: HfConfig) -> Activation:
    return known_activation(config.get("hidden_activation") or config.get("hidden_act") or "silu")


def known_activation(name: str) -> Activation:
    """Return our word for a name of transformers.

    Raises:
        UnsupportedFeatureError: there is none.
    """
    if name not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise UnsupportedFeatureError(f"activation {name!r} is not supported; known are {known}")
    return ACTIVATIONS[name]


def rope_traits(
    config: HfConfig,
    head_dim: int,
    *,
    parameters: Mapping[str, Any] | None = None,
    default_theta: float = 10_000.0,
    may_be_partial: bool = False,
) -> RopeTraits:
    """Read `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).

    Args:
        may_be_partial: the family rotates only `partial_rotary_factor` of each head, if its config says so.

    Raises:
        UnsupportedFeatureError: a kind of scaling that is not known here, or a partial rotation in another family.
    """
    if parameters is None:
        parameters = config.get("rope_parameters") or config.get("rope_scaling")
    parameters = parameters or {}
    checked(parameters, Rope, "config.json: rope_parameters")
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    share = parameters.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if share != 1 and not may_be_partial:
        rule = f"partial_rotary_factor={share} is not supported for this architecture"
        raise UnsupportedFeatureError(rule)
    theta = parameters.get("rope_theta") or config.get("rope_theta") or default_theta
    plain = RopeTraits(theta=float(theta), width=int(head_dim * share))
    if plain.width < 2 or plain.width % 2:
        raise TrouperValidationError(
            f"config.json: {plain.width} of a head's {head_dim} dimensions would be rotated, an odd number or none",
            parameter="head_dim",
            value=head_dim,
        )
    # Below the trained length, which max_model_len never exceeds, dynamic scaling is none at all.
    if kind in ("default", "mrope", "dynamic"):
        return plain
    original = (
        parameters.get("original_max_position_embeddings")
        or config.get("original_max_position_embeddings")
        or require(config, "max_position_embeddings")
    )
    factor = parameters.get("factor") or require(config, "max_position_embeddings") / original
    stretched = msgspec.structs.replace(
        plain, factor=float(factor), original_max_position=int(original)
    )
    if kind == "linear":
        return msgspec.structs.replace(stretched, kind="linear")
    if kind == "llama3":
        low, high = parameters.get("low_freq_factor"), parameters.get("high_freq_factor")
        if low is None or high is None or not low < high:
            rule = "config.json: llama3 needs low_freq_factor < high_freq_factor"
            raise TrouperValidationError(rule, parameter="rope_parameters", value=(low, high))
        return msgspec.structs.replace(
            stretched,
            kind="llama3",
            low_freq_factor=float(low),
            high_freq_factor=float(high),
        )
    if kind == "yarn":
        return _yarn(stretched, parameters)
    if kind in ("longrope", "su"):
        return _longrope(stretched, parameters)
    raise UnsupportedFeatureError(f"rope_type={kind!r} is not supported")


def _yarn(stretched: RopeTraits, parameters: Mapping[str, Any]) -> RopeTraits:
    def magnitude(scale: float) -> float:
        return 1.0 if stretched.factor <= 1 else 0.1 * scale * math.log(stretched.factor) + 1.0

    if stretched.theta <= 1:
        rule = "config.json: yarn needs a rope_theta above 1"
        raise TrouperValidationError(rule, parameter="rope_parameters", value=stretched.theta)
    mscale, mscale_all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
    by_default = (
        magnitude(mscale) / magnitude(mscale_all_dim)
        if mscale and mscale_all_dim
        else magnitude(1.0)
    )
    return msgspec.structs.replace(
        stretched,
        kind="yarn",
        attention_factor=float(parameters.get("attention_factor") or by_default),
        beta_fast=float(parameters.get("beta_fast") or 32),
        beta_slow=float(parameters.get("beta_slow") or 1),
        truncate=parameters.get("truncate", True),
    )


def _longrope(stretched: RopeTraits, parameters: Mapping[str, Any]) -> RopeTraits:
    by_default = 1.0
    if stretched.factor > 1:
        by_default = math.sqrt(
            1 + math.log(stretched.factor) / math.log(stretched.original_max_position)
        )
    short, long = (tuple(map(float, parameters[name])) for name in ("short_factor", "long_factor"))
    if not len(short) == len(long) == stretched.width // 2:
        raise TrouperValidationError(
            f"longrope needs {stretched.width // 2} factors", parameter="rope_parameters"
        )
    return msgspec.structs.replace(
        stretched,
        kind="longrope",
        attention_factor=float(parameters.get("attention_factor") or by_default),
        short_factors=short,
        long_factors=long,
    )
