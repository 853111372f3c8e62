"""The bytes of a sequence's recurrent states, from config.json: what `trouper models` shows before weights are read."""

from collections.abc import Mapping
from typing import Any

from trouper.config.checkpoint.recurrent import (
    PARALLEL,
    RECURRENT_KINDS,
    keeps_state,
    layer_kinds,
    num_attention_layers,
)

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
