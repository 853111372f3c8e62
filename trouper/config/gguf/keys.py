"""Check the keys of a GGUF header that change attention or positions: each is read, neutral, or refused by name.

llama.cpp adds such keys as models need them.  If this engine ignored a key, the model would silently compute something
else.  So an unknown key is an error, and a known key without support must have its neutral value.
"""

from typing import Any

from trouper.config.gguf.header import Gguf
from trouper.errors import UnsupportedFeatureError

# Keys that `names.hf_config` reads for every architecture.
_READ = frozenset(
    {
        "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.layer_norm_rms_epsilon",
        "attention.causal", "rope.freq_base",
        "rope.dimension_count", "rope.scale_linear", "rope.scaling.type", "rope.scaling.factor",
        "rope.scaling.original_context_length", "rope.scaling.attn_factor", "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
    }
)  # fmt: skip
# Keys that describe the file, or norms that no supported architecture has.
_HARMLESS = frozenset(
    {"rope.scaling.finetuned", "attention.layer_norm_epsilon", "attention.group_norm_epsilon"}
)
# The neutral values.
_NEUTRAL: dict[str, tuple[float, ...]] = {
    "attention.max_alibi_bias": (0,), "attention.clamp_kqv": (0,), "attention.shared_kv_layers": (0,),
    "attention.q_lora_rank": (0,), "attention.kv_lora_rank": (0,), "attention.output_scale": (0, 1),
    "attention.temperature_length": (0,), "attention.temperature_scale": (0,),
    "rope.scaling.yarn_ext_factor": (-1, 1), "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_log_multiplier": (0,), "expert_weights_scale": (0, 1), "expert_gating_func": (0, 1),
}  # fmt: skip
# Keys that architectures with windows in some layers read.
WINDOW = frozenset({"attention.sliding_window", "attention.sliding_window_pattern"})
_ARRAYS = frozenset({"rope.dimension_sections"})


def check_keys(header: Gguf, at: str, config: dict[str, Any], reads: frozenset[str]) -> None:
    """Check every key of attention, positions and experts' weights.

    Args:
        at: the architecture's name and a dot.
        config: the config.json that corresponds to the header.
        reads: keys that the architecture's own reader handles.

    Raises:
        UnsupportedFeatureError: a key would be ignored; the message names it and its value.
    """
    head_dim = config.get("head_dim") or config["hidden_size"] // max(
        1, config["num_attention_heads"]
    )
    head_dim = max(1, head_dim)
    same: dict[str, float] = {
        "attention.value_length": head_dim,
        "attention.key_length_swa": head_dim,
        "attention.value_length_swa": head_dim,
        "attention.scale": head_dim**-0.5,
        "rope.freq_base_swa": config.get("rope_theta", 10_000.0),
        "rope.dimension_count_swa": header.get(at + "rope.dimension_count", int) or head_dim,
    }
    for key, value in header.metadata.items():
        name = key.removeprefix(at)
        if name == key or name in _READ or name in _HARMLESS or name in reads:
            continue
        if not name.startswith(("attention.", "rope.")) and name not in _NEUTRAL:
            continue
        if name == "attention.sliding_window":
            # A window over the whole context has no effect.
            longest = config["max_position_embeddings"]
            is_neutral = isinstance(value, int) and (value == 0 or value >= longest)
        elif name in _ARRAYS:
            is_neutral = not any(bool(number) for number in _numbers(value))
        elif name in same:
            is_neutral = _is_near(value, same[name])
        else:
            is_neutral = any(_is_near(value, neutral) for neutral in _NEUTRAL.get(name, ()))
        if not is_neutral:
            rule = f"{header.path.name}: {key}={str(value)[:40]} is not supported"
            raise UnsupportedFeatureError(rule, parameter="model")


def layer_types(header: Gguf, at: str, num_layers: int) -> list[str] | None:
    """Return the layers with a sliding window: from one flag for each layer, or from the length of a pattern that ends with a layer
    without a window.
    """
    key = at + "attention.sliding_window_pattern"
    value = header.metadata.get(key)
    if value is None:
        return None
    if isinstance(value, bool | int):
        count = int(value)
        flags = [count == 0 or i % count < count - 1 for i in range(num_layers)]
    else:
        flags = [bool(x) for x in _numbers(value)]
    return ["sliding_attention" if flag else "full_attention" for flag in flags]


def layer_numbers(header: Gguf, key: str) -> list[int] | None:
    """Return the integers of an array with one for each layer, or None if the key is missing or has another type."""
    found = header.metadata.get(key)
    if found is None or isinstance(found, int | float | str | bytes):
        return None
    return [int(x) for x in _numbers(found)]


def _numbers(value: Any) -> list[Any]:
    try:
        return list(value)
    except TypeError:
        return [value]


def _is_near(value: Any, wanted: float) -> bool:
    # Headers store float32.
    return isinstance(value, int | float) and abs(value - wanted) <= 1e-6 * max(1.0, abs(wanted))
