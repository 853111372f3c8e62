"""Bring the config.json of any release and family into one shape: flat, with one name for each field.

A config may say the same thing twice: inside and outside of `text_config`, under a name of before transformers 5 and
today's.  Law: where it says two things, the one that transformers uses counts; where transformers has no rule, the
config is refused.
"""

from typing import Any, TypeGuard, cast

from trouper.config.files import checked
from trouper.config.overrides import LOCAL, OLD_ROPE, ROPE, WHOLE, is_grouped
from trouper.errors import invalid

Fields = dict[str, Any]
# Names of some families for what nearly all others call so.
_OTHER_NAMES = {
    "hidden_size": ("dim", "n_embd"),
    "num_attention_heads": ("n_heads", "n_head"),
    "num_hidden_layers": ("n_layers", "n_layer"),
    "intermediate_size": ("hidden_dim", "n_inner"),
    "max_position_embeddings": ("n_positions", "max_seq_len"),
}
# The sizes that a text_config leaves out are those of its class in transformers.
_LLAMA = {
    "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
}  # fmt: skip
TEXT_DEFAULTS: dict[str, Fields] = {
    "llama": _LLAMA,
    "mistral": _LLAMA
    | {
        "intermediate_size": 14_336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "sliding_window": 4096,
    },
    "gemma3_text": {
        "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131_072,
    },
}  # fmt: skip
# What the outer model decides, if its config says it: the end of an answer, the stored dtype, and whether the head is
# the embedding.  A text_config repeats the defaults of its class for these.
_OUTER = ("eos_token_id", "bos_token_id", "pad_token_id", "tie_word_embeddings")
_STRETCHED = ("llama3", "yarn", "longrope", "su")
# Families whose layers of both kinds have frequencies of their own, and the kinds that `rope_scaling` changes.
_SCALED_GROUPS = {
    "gemma3": (WHOLE,),
    "gemma3_text": (WHOLE,),
    "olmo3": (WHOLE,),
    "modernbert": (WHOLE, LOCAL),
}
_FLOATS = {"Infinity": float("inf"), "-Infinity": float("-inf"), "NaN": float("nan")}


def with_floats(value: Any) -> Any:
    """Replace `{"__float__": "Infinity"}`, as transformers writes numbers that JSON does not have."""
    if isinstance(value, dict):
        fields = cast("Fields", value)
        if fields.keys() == {"__float__"}:
            return _FLOATS.get(fields["__float__"], fields)
        return {name: with_floats(each) for name, each in fields.items()}
    return (
        [with_floats(each) for each in cast("list[Any]", value)]
        if isinstance(value, list)
        else value
    )


def flattened(raw: Fields) -> Fields:
    """Put the fields of a nested text_config at the top, where a plain decoder has them, and use one name for each field.

    Raises:
        TrouperValidationError: two fields contradict each other, and transformers has no rule for them.
    """
    nested = checked(raw.get("text_config") or {}, Fields, "config.json: text_config")
    defaults = TEXT_DEFAULTS.get(str(nested.get("model_type")), {})
    config = {**defaults, **raw, **nested}
    config["architectures"] = raw.get("architectures") or config.get("architectures") or []
    for name in _OUTER:
        if raw.get(name) is not None:
            config[name] = raw[name]
    if nested:
        # Without a flag the outer classes share the embedding, whatever the text model's own class does.
        config["tie_word_embeddings"] = raw.get("tie_word_embeddings", True)
    config["dtype"] = next(
        (
            part[name]
            for part in (raw, nested)
            for name in ("dtype", "torch_dtype")
            if part.get(name) is not None
        ),
        None,
    )
    for name, others in _OTHER_NAMES.items():
        for other in others:
            if config.get(name) is None and config.get(other) is not None:
                config[name] = config[other]
    _use_one_rope(config)
    return config


def _use_one_rope(config: Fields) -> None:
    """Merge `rope_scaling` and `rope_parameters`, and the trained length beside them."""
    old, new = config.get(OLD_ROPE), config.get(ROPE)
    if isinstance(old, dict) and isinstance(new, dict) and old and new and old != new:
        scaling, ropes = cast("Fields", old), cast("Fields", new)
        if not is_grouped(ropes):
            config[ROPE] = scaling
        else:
            groups = _SCALED_GROUPS.get(str(config.get("model_type")))
            if groups is None or is_grouped(scaling):
                rule = f"config.json has both {OLD_ROPE} and {ROPE}, and they differ; keep only one of them"
                raise invalid("model", rule, scaling)
            config[ROPE] = ropes | {name: (ropes.get(name) or {}) | scaling for name in groups}
        del config[OLD_ROPE]
    original = config.get("original_max_position_embeddings")
    for name in (ROPE, OLD_ROPE):
        if original is not None and _stretches(rope := config.get(name)):
            config[name] = {**rope, "original_max_position_embeddings": original}


def _stretches(rope: Any) -> TypeGuard[Fields]:
    """Check for one way of all layers to stretch positions, which reads the length before."""
    if not isinstance(rope, dict):
        return False
    fields = cast("Fields", rope)
    return (fields.get("rope_type") or fields.get("type")) in _STRETCHED
