"""The traits that distinguish one decoder from another, as plain data, and the parts that their readers share.

Every supported decoder has the same structure: embed -> layers of (attention, MLP) with residual sums -> norm -> head. All
differences between families are fields here, so one class computes all of them. `registry.decoder_traits` reads these
fields from a Hugging Face config. Nothing here needs torch or files.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar, cast

import msgspec

from trouper.actors.executor.models.names import Family
from trouper.config.checkpoint.files import Rope, checked
from trouper.errors import TrouperValidationError, UnsupportedFeatureError
from trouper.kernels.formats import Activation, Norm

HfConfig = Mapping[str, Any]
T = TypeVar("T")
# With "parallel", attention and MLP read the same norm of the layer's input; with "parallel_apart" each has its own norm.
NormPlacement = Literal["pre", "post", "sandwich", "parallel", "parallel_apart"]


ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_python": "gelu", "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh", "gelu_python_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh", "relu": "relu",
    "relu2": "relu2",
}  # fmt: skip


class RopeTraits(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters of a rotary position embedding.

    `models/layers.py` computes its tables; `kind` names the method of scaling to longer contexts.
    """

    kind: Literal["default", "linear", "llama3", "yarn", "longrope"] = "default"
    theta: float = 10_000.0
    # The number of rotated dimensions of a head, an even number.
    width: int
    # The ratio of the supported length to the original one.
    factor: float = 1.0
    # The length before scaling, or 0 for kinds that do not use it.
    original_max_position: int = 0
    # A factor of cosines and sines.
    attention_factor: float = 1.0
    # Only llama3 uses these two.
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    # Only yarn uses these three.
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    # Only longrope uses these two, [width / 2] each.
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    # A query at position p is multiplied by 1 + growth · ln(1 + ⌊p / growth_length⌋) (Ministral 3).
    growth: float = 0.0
    growth_length: int = 1
    # For positions in time, height and width (M-RoPE): how many frequencies belong to each.
    sections: tuple[int, ...] = ()
    # Whether the frequencies of the three take turns, instead of following each other.
    is_interleaved: bool = False


# The window of a layer, or its window and block table if layers have tables of their own.
PlanKey = int | None | tuple[int | None, int]
# What mixes the tokens of a layer. All but attention keep a state instead of keys and values.
Mixer = Literal["attention", "gated_delta", "mamba2", "short_conv"]


class LayerTraits(msgspec.Struct, frozen=True):
    """The traits in which the layers of one model differ.

    Everything else is common to all layers and belongs to `DecoderTraits`. Models usually repeat a short pattern of
    them.
    """

    # A query sees this many keys including its own, or with bidirectional attention the keys at most this far away.
    # Without a window it sees all keys.
    window: int | None = None
    # An index into `DecoderTraits.ropes`, or None for a layer without positions (NoPE).
    rope: int | None = 0
    # The rotary embedding of queries, if it differs from that of keys.
    query_rope: int | None = None
    # Whether the MLP is the mixture `DecoderTraits.experts`.
    is_sparse: bool = False
    mixer: Mixer = "attention"
    # The block table of the layer's keys and values; None if all layers share one.
    table: int | None = None

    @property
    def plan_key(self) -> PlanKey:
        """Return the key of the layer's attention plan in a step."""
        return self.window if self.table is None else (self.window, self.table)


class GatedDeltaTraits(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of gated delta nets; `models/mixers.py` computes them.

    Consecutive value heads share a key head.
    """

    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int
    # The inputs of the convolution, the newest included.
    taps: int
    # Whether one matrix stores the rows of q, k, v and z by key head, and another one those of b and a.
    has_qkvz: bool = False
    has_ba: bool = False

    @property
    def k_size(self) -> int:
        return self.num_k_heads * self.k_dim

    @property
    def v_size(self) -> int:
        return self.num_v_heads * self.v_dim

    @property
    def num_channels(self) -> int:
        """Return the channels of the convolution: queries, keys and values."""
        return 2 * self.k_size + self.v_size


class Mamba2Traits(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of Mamba-2 mixers; `models/mixers.py` computes them. Consecutive heads share a group."""

    num_heads: int
    head_dim: int
    num_states: int
    num_groups: int
    taps: int
    has_bias: bool = False
    has_conv_bias: bool = True
    # The least and largest time step; no bound above if `high` is None.
    low: float = 0.0
    high: float | None = None

    @property
    def size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def num_channels(self) -> int:
        """Return the channels of the convolution: inputs, B and C."""
        return self.size + 2 * self.num_groups * self.num_states


class ShortConvTraits(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of gated short convolutions (LFM2); `models/mixers.py` computes them."""

    taps: int
    has_bias: bool = False


class MlpTraits(msgspec.Struct, frozen=True, kw_only=True):
    """The traits of an MLP: down(act(gate(x)) · up(x)), or down(act(up(x))) without a gate.

    `models/layers.py` computes it.
    """

    intermediate_size: int
    activation: Activation = "silu"
    # Only clamped_swiglu uses these two.
    swiglu_alpha: float = 0.0
    swiglu_limit: float = 0.0
    has_bias: bool = False
    is_gated: bool = True


class ExpertsTraits(msgspec.Struct, frozen=True, kw_only=True):
    """A mixture of gated MLPs. A router chooses `top_k` of them for each token; `kernels/experts.py` has the formula."""

    count: int
    top_k: int
    # The width of each expert.
    intermediate_size: int
    # Whether the weights of a token's experts add up to one.
    is_normalised: bool = False
    # The width of a shared expert, which computes all tokens. There is none if it is 0.
    shared_size: int = 0
    # Whether the shared expert has a gate of its own. Without one its output is added, and it is named like a dense MLP.
    has_shared_gate: bool = True
    # Whether weights are sigmoids of the logits, multiplied by `scale`, instead of a softmax.
    is_sigmoid: bool = False
    scale: float = 1.0
    # Whether each expert has a bias that is added to its sigmoid for the choice only.
    has_choice_bias: bool = False
    # Whether experts and the router have biases.
    has_bias: bool = False
    # The naming scheme in the checkpoint.
    names: Literal[
        "mlp", "block_sparse_moe", "gpt_oss", "granite_moe", "lfm2_moe", "qwen3_vl_moe"
    ] = "mlp"


class DecoderTraits(msgspec.Struct, frozen=True, kw_only=True):
    """One architecture, with the sizes of one model.

    It is plain data, made from config.json, from which `NativeDecoder` computes any supported family. No code depends
    on the name of a family.
    """

    vocab_size: int
    hidden_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    mlp: MlpTraits
    experts: ExpertsTraits | None = None
    max_position: int
    layers: tuple[LayerTraits, ...]
    # The window of each block table. A pipeline stage has all tables here, because its plans name all of them.
    table_windows: tuple[int | None, ...] = (None,)
    ropes: tuple[RopeTraits, ...]
    norm: Norm = "rms"
    norm_eps: float = 1e-6
    norm_placement: NormPlacement = "pre"
    # Added to stored weights of norms: Gemma stores w - 1.
    norm_offset: float = 0.0
    norm_has_weight: bool = True
    norm_has_bias: bool = False
    # Normalises each head with shared weights, each head with its own weights, or all heads together.
    qk_norm: Literal["head", "own_head", "projection"] | None = None
    qk_norm_has_bias: bool = False
    # Whether the norm of each head follows its rotation (Hunyuan) instead of preceding it.
    is_norm_last: bool = False
    # Whether rotary pairs are neighbouring dimensions in the checkpoint rather than half a head apart.
    is_interleaved: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    head_bias: bool = False
    # The row of position 0 in a table of learnt positions, if the model adds learnt positions to its embeddings.
    first_position: int | None = None
    gated_delta: GatedDeltaTraits | None = None
    mamba2: Mamba2Traits | None = None
    short_conv: ShortConvTraits | None = None
    # Whether the output of each attention head is multiplied by the sigmoid of a gate, whose rows follow those of its query.
    attention_gate: bool = False
    # Whether each head also attends to a learnt key without a value (gpt-oss).
    has_sinks: bool = False
    attention_scale: float
    attention_softcap: float | None = None
    final_softcap: float | None = None
    embedding_scale: float = 1.0
    # Whether prompt embeddings from outside already contain the scale (Gemma).
    embeds_are_scaled: bool = False
    # A factor of the outputs of attention and MLP before they are added.
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    tied_embeddings: bool = False
    # Without causal attention, tokens see later ones, so the model can only pool.
    is_causal: bool = True
    # The naming scheme of tensors in the checkpoint.
    names: Family = "llama"
    # Whether the matrix of q, k and v contains queries, key and value of one KV head after another, not all queries first.
    qkv_by_group: bool = False

    @property
    def is_parallel(self) -> bool:
        """Whether attention and MLP of a layer both read the layer's input.

        Their outputs are then added together, as in GPT-NeoX, and neither depends on the other.
        """
        return self.norm_placement in ("parallel", "parallel_apart")

    @property
    def q_size(self) -> int:
        return self.num_q_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def mlp_widths(self) -> tuple[int, ...]:
        """Return the widths of all kinds of MLPs of the model: dense ones, experts, and shared experts.

        Kernels must support each of them.
        """
        if self.experts is None:
            return (self.mlp.intermediate_size,)
        own = self.experts.intermediate_size, self.experts.shared_size
        return self.mlp.intermediate_size, *filter(None, own)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Return the distinct attention windows, in the order of the layers.

        A batch plans its attention once for each of them. None is full attention.
        """
        return tuple(
            dict.fromkeys(layer.window for layer in self.layers if layer.mixer == "attention")
        )

    @property
    def keeps_state(self) -> bool:
        """Whether a layer has a mixer that keeps a state."""
        return any(layer.mixer != "attention" for layer in self.layers)


def read_traits(reader: Callable[[HfConfig], T], config: HfConfig, kind: str) -> T:
    """Call the reader of an architecture, or of another section of config.json, and check the types of its result.

    Args:
        kind: what is read, for errors.

    Raises:
        UnsupportedFeatureError: the reader does not support a trait of the model.
        TrouperValidationError: the config is malformed.
    """
    try:
        traits = reader(config)
        # The conversion refuses values of a wrong type, such as null.
        return msgspec.convert(msgspec.to_builtins(traits), type(traits))
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
    """Read the fields that nearly all configs of decoders share.

    Args:
        activation: the activation of the MLP. By default the config's usual fields determine it.
        mlp_bias: whether the products of the MLP have biases.
        is_gated: whether the MLP has a gate.
        own: traits that the family adds or changes.

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
    """Return a positive integer of the config.

    Raises:
        TrouperValidationError: it is missing or not a positive integer.
    """
    value = config.get(name)
    if not isinstance(value, int) or value < 1:
        raise TrouperValidationError(
            "config.json needs a positive integer", parameter=name, value=value
        )
    return value


def head_dim_of(config: HfConfig) -> int:
    """Return the width of a head: `head_dim` of the config, else the hidden size divided by the number of heads."""
    share = require(config, "hidden_size") // require(config, "num_attention_heads")
    return config.get("head_dim") or share


def granite_traits(config: HfConfig, **own: Any) -> DecoderTraits:
    """Read the fields that all decoders of the Granite family share: they scale embeddings, scores, residuals and logits."""
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
    """Read the attention window of each layer from `layer_types`.

    Args:
        window: the window of layers with `sliding_attention`.
        pattern: without `layer_types`, every `pattern`-th layer has full attention, and none does if this is 0.

    Raises:
        UnsupportedFeatureError: layers should have a window, but its size is missing or 0.
    """
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
    """Return the activation of the MLP from the usual fields of a config; SiLU by default.

    Raises the errors of `known_activation`. Older configs have another field for it.
    """
    return known_activation(config.get("hidden_activation") or config.get("hidden_act") or "silu")


def known_activation(name: str) -> Activation:
    """Return the activation with this name in the transformers library.

    Raises:
        UnsupportedFeatureError: the activation is not supported.
    """
    if name not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise UnsupportedFeatureError(f"activation {name!r} is not supported; supported: {known}")
    return ACTIVATIONS[name]


def rope_traits(
    config: HfConfig,
    head_dim: int,
    *,
    parameters: Mapping[str, Any] | None = None,
    default_theta: float = 10_000.0,
    may_be_partial: bool = False,
) -> RopeTraits:
    """Read a rotary embedding from `rope_parameters` (transformers 5), or from `rope_theta` and `rope_scaling` (before).

    Args:
        head_dim: the width of a head.
        parameters: replaces the config's own `rope_parameters`, for models with several rotary embeddings.
        default_theta: the base, if the config has none.
        may_be_partial: whether the family may rotate only the share `partial_rotary_factor` of each head.

    Raises:
        UnsupportedFeatureError: the kind of scaling, or a partial rotation in this family, is not supported.
        TrouperValidationError: a number is missing or does not fit the others.
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
            f"config.json: must rotate an even, positive number of a head's {head_dim} dimensions, not {plain.width}",
            parameter="head_dim",
            value=head_dim,
        )
    plain = _with_sections(plain, parameters)
    # Dynamic scaling only begins beyond the trained length, which max_model_len never exceeds.
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


def _with_sections(plain: RopeTraits, parameters: Mapping[str, Any]) -> RopeTraits:
    """Add the sections of positions in three dimensions, which images have.  A text has the same positions without them."""
    given: Any = parameters.get("mrope_section")
    if not isinstance(given, list | tuple):
        return plain
    sections = tuple(int(size) for size in cast("list[Any]", given))
    if len(sections) != 3 or sum(sections) != plain.width // 2:
        return plain
    return msgspec.structs.replace(
        plain, sections=sections, is_interleaved=bool(parameters.get("mrope_interleaved"))
    )


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
