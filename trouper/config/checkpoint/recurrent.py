"""Read from config.json whether a model has recurrent layers, how many layers keep keys and values, and the bytes of its states.

Each family has its own fields for this.  They serve estimates, early refusals and `trouper models`; the layers themselves are
known only after the model is loaded.
"""

from collections.abc import Mapping
from typing import Any, cast

from trouper.errors import UnsupportedFeatureError

# Every layer is recurrent.
PURE = ("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm")
# Every layer has a recurrent mixer and attention.
PARALLEL = ("falcon_h1",)
# Some layers are recurrent, even if no field of config.json lists them.
MIXED = (
    "jamba", "bamba", "zamba", "zamba2", "qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text",
    "nemotron_h", "olmo_hybrid", "kimi_linear", "minimax", "recurrent_gemma", "lfm2", "lfm2_moe", "lfm3",
)  # fmt: skip
# Kinds of layers in `layer_types` and `layers_block_type` that keep no keys and values.
RECURRENT_KINDS = {"linear_attention", "mamba", "mamba2", "conv", "recurrent"}
WITHOUT_KEYS = RECURRENT_KINDS | {"mlp", "moe"}
# Context length of recurrent models whose config sets none: they can compute any number of positions.
OPEN_POSITIONS = 32768


def keeps_state(config: Mapping[str, Any]) -> bool:
    """Return whether a model has layers with a recurrent state."""
    kinds = layer_kinds(config)
    if kinds is not None and config.get("model_type") not in (*PURE, *PARALLEL):
        return not RECURRENT_KINDS.isdisjoint(kinds)
    return config.get("model_type") in (*PURE, *PARALLEL, *MIXED)


def num_attention_layers(config: Mapping[str, Any]) -> int:
    """Count the layers that keep keys and values.

    Raises:
        KeyError: config.json has no number of layers.
        TypeError, ValueError, ZeroDivisionError: a field has a wrong value.
    """
    kinds, kind = layer_kinds(config), config.get("model_type")
    if kind in PURE:
        return 0
    if kinds is not None and not RECURRENT_KINDS.isdisjoint(kinds):
        return sum(each not in WITHOUT_KEYS for each in kinds)
    num_layers = int(config["num_hidden_layers"])
    if kind == "jamba":
        period, offset = int(config["attn_layer_period"]), int(config["attn_layer_offset"])
        return sum(i % period == offset for i in range(num_layers))
    if kind == "bamba":
        return len(config.get("attn_layer_indices") or ())
    if kind in MIXED and config.get("full_attention_interval"):
        return num_layers // int(config["full_attention_interval"])
    if kind in MIXED and isinstance(config.get("full_attn_idxs"), list):
        return len(config["full_attn_idxs"])
    return num_layers


def check_states(config: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    """Refuse options that the engine does not support for recurrent models.

    Args:
        asked: these options by name, each with a falsy value unless it is in use.

    Raises:
        UnsupportedFeatureError: an option is in use; the error names it.
    """
    if not keeps_state(config):
        return
    for name, value in asked.items():
        if value:
            raise UnsupportedFeatureError(
                f"{name}={value!r} is not supported yet for a model with recurrent states "
                f"({config.get('model_type')})",
                parameter=name,
            )


def layer_kinds(config: Mapping[str, Any]) -> list[str] | None:
    """Return the kind of each layer, or None if config.json has no list of them."""
    for name in ("layer_types", "layers_block_type"):
        kinds: Any = config.get(name)
        if isinstance(kinds, list):
            return [str(kind) for kind in cast("list[Any]", kinds)]
    pattern = config.get("hybrid_override_pattern")
    if isinstance(pattern, str):
        letters = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
        return [letters.get(letter, "attention") for letter in pattern]
    return None


MATRIX_BYTES = 4
# Each tensor of a state begins at a multiple of this.
ALIGNMENT = 64


def state_bytes(config: Mapping[str, Any], item_bytes: int) -> int:
    """Return the bytes of all recurrent states of one sequence; 0 without such states, and if config.json lacks a size.

    Args:
        item_bytes: bytes of one number in the model's dtype.
    """
    if not keeps_state(config):
        return 0
    try:
        inputs, matrix = _sizes(config)
        layer = _aligned(inputs * item_bytes) + _aligned(matrix * MATRIX_BYTES)
        return _num_layers(config) * layer
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return 0


def _sizes(config: Mapping[str, Any]) -> tuple[int, int]:
    """Return how many inputs a convolution keeps, and the size of the recurrent matrices, of one layer."""
    kind = config.get("model_type")

    def size(*names: str) -> int:
        return int(next(config[name] for name in names if config.get(name) is not None))

    try:
        if "conv_L_cache" in config:
            return (size("conv_L_cache") - 1) * size("hidden_size"), 0
        if kind == "kimi_linear":
            heads, width = size("linear_num_heads"), size("linear_head_dim")
            taps = size("linear_conv_kernel_dim")
            return (taps - 1) * 3 * heads * width, heads * width * width
        if "linear_num_value_heads" in config:
            keys = size("linear_num_key_heads"), size("linear_key_head_dim")
            values = size("linear_num_value_heads"), size("linear_value_head_dim")
            channels = 2 * keys[0] * keys[1] + values[0] * values[1]
            taps = size("linear_conv_kernel_dim")
            return (taps - 1) * channels, values[0] * keys[1] * values[1]
        taps = size("mamba_d_conv", "conv_kernel")
        states = size("mamba_d_state", "ssm_state_size", "state_size")
        if kind in ("mamba", "falcon_mamba", "jamba"):
            channels = size("mamba_expand", "expand") * size("hidden_size")
            return (taps - 1) * channels, channels * states
        heads = size("mamba_n_heads", "n_mamba_heads", "mamba_num_heads", "num_heads")
        width = size("mamba_d_head", "mamba_headdim", "mamba_head_dim", "head_dim")
        groups = size("mamba_n_groups", "mamba_ngroups", "n_groups")
        channels = heads * width + 2 * groups * states
        return (taps - 1) * channels, heads * width * states
    except StopIteration:
        raise KeyError("a size") from None


def _num_layers(config: Mapping[str, Any]) -> int:
    kinds = layer_kinds(config)
    if config.get("model_type") in PARALLEL:
        return int(config["num_hidden_layers"])
    if kinds is not None:
        return sum(kind in RECURRENT_KINDS or kind == "hybrid" for kind in kinds)
    return int(config["num_hidden_layers"]) - num_attention_layers(config)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
