"""Normalise config.json: apply `hf_overrides`, and bring any release and family into one flat shape with one name for each field.

An override of `hf_overrides` takes effect, or is refused by name.  Depending on its age and family, a config describes the scaling
of positions in one of several places, and readers look at the newest one.  So an override is written to the place that the config
uses.

A config may contain the same information twice: inside and outside of `text_config`, or under names from before and after
transformers 5.  Law: if the two contradict each other, the one that transformers uses counts; if transformers has no rule, the
config is refused.
"""

from typing import Any, TypeGuard, cast

from trouper.config.checkpoint.files import checked
from trouper.errors import invalid

Fields = dict[str, Any]
ROPE, OLD_ROPE = "rope_parameters", "rope_scaling"
# Groups of layers with their own frequencies, and the older names of these groups.
WHOLE, LOCAL = "full_attention", "sliding_attention"
OLD_NAMES = {
    "rope_theta": WHOLE, "global_rope_theta": WHOLE, "rope_local_base_freq": LOCAL, "local_rope_theta": LOCAL,
}  # fmt: skip
KINDS = (
    "default",
    "linear",
    "dynamic",
    "yarn",
    "longrope",
    "llama3",
    "proportional",
    "mrope",
    "su",
)
# Fields that remain valid if an override replaces the method of scaling.
KEPT = ("rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")


def overridden(config: Fields, overrides: Fields) -> Fields:
    """Apply the option `hf_overrides` to a copy of a config.  Objects are merged field by field.

    Raises:

        TrouperValidationError: an unknown `rope_type`, or a field that this config cannot support.
    """
    found = dict(config)
    for name, value in overrides.items():
        nested = found.get("text_config")
        if name not in ("architectures", "text_config") and isinstance(nested, dict):
            nested = cast("Fields", nested)
            if not _says(found, name) and _says(nested, name):
                found["text_config"] = overridden(nested, {name: value})
                continue
        _put(found, name, value)
    return found


def _says(config: Fields, name: str) -> bool:
    has_ropes = name in (ROPE, OLD_ROPE, *OLD_NAMES) and bool(
        config.get(ROPE) or config.get(OLD_ROPE)
    )
    return name in config or has_ropes


def _put(config: Fields, name: str, value: Any) -> None:
    """Replace one field in the object, outer or nested, that contains it."""
    own = config.get(name)
    if name in (ROPE, OLD_ROPE) and (value is None or isinstance(value, dict)):
        _put_rope(config, name, cast("Fields | None", value))
    elif name in (*OLD_NAMES, "partial_rotary_factor") and config.get(ROPE):
        ropes = cast("Fields", config[ROPE])
        group = OLD_NAMES.get(name, WHOLE)
        change = {name if name == "partial_rotary_factor" else "rope_theta": value}
        config[name] = value
        if is_grouped(ropes):
            config[ROPE] = overridden(ropes, {group: change})
        elif group == WHOLE:
            config[ROPE] = ropes | change
    elif isinstance(own, dict) and isinstance(value, dict):
        config[name] = overridden(cast("Fields", own), cast("Fields", value))
    else:
        config[name] = value


def _put_rope(config: Fields, name: str, wish: Fields | None) -> None:
    """Write an override of rope where readers look first.

    Only one of the two names remains, because transformers reads the other one first.
    """
    place = ROPE if config.get(ROPE) else name
    own = cast("Fields", config.get(ROPE) or config.get(OLD_ROPE) or {})
    if place == ROPE:
        config.pop(OLD_ROPE, None)
    if wish is None and name == ROPE:
        config[ROPE] = None
    elif is_grouped(wish or {}):
        groups = cast("Fields", wish)
        config[ROPE] = own | {key: _stretched(own.get(key) or {}, groups[key]) for key in groups}
    elif not is_grouped(own):
        config[place] = _stretched(own, wish)
    elif WHOLE in own:
        config[place] = own | {WHOLE: _stretched(own[WHOLE], wish)}
    else:
        rule = f"{name}: this model has separate values for {', '.join(own)}; override one of them"
        raise invalid("hf_overrides", rule, wish)


def is_grouped(ropes: Fields) -> bool:
    """Return whether each kind of layer has its own frequencies, so that rope parameters are objects by layer type.

    Some families use one set of frequencies for layers with a sliding window, and another for full attention.
    """
    return bool(ropes) and all(isinstance(each, dict) for each in ropes.values())


def rope_groups(config: Fields) -> list[Fields]:
    """Return the rope parameters of a flat config: one object, or one for each kind of layer."""
    ropes = cast("Fields", config.get(ROPE) or config.get(OLD_ROPE) or {})
    return list(ropes.values()) if is_grouped(ropes) else [ropes]


def _stretched(own: Fields, wish: Any) -> Any:
    """Apply an override to a scaling of positions: field by field for the same kind, as a whole for another kind."""
    if wish is None:
        wish = {"rope_type": "default"}
    if not isinstance(wish, dict):
        return wish
    wish = dict(cast("Fields", wish))
    kind = wish.get("rope_type") or wish.get("type")
    own_kind = own.get("rope_type") or own.get("type")
    if kind is None:
        return own | wish
    if kind not in (*KINDS, own_kind):
        rule = f"rope_type must be one of {', '.join(KINDS)}"
        raise invalid("hf_overrides", rule, kind)
    wish.pop("type", None)
    wish["rope_type"] = kind
    if kind != own_kind:
        own = {name: own[name] for name in KEPT if name in own}
    return {name: value for name, value in own.items() if name != "type"} | wish


# Unusual names of some families, with the usual name of each field.
_OTHER_NAMES = {
    "hidden_size": ("dim", "n_embd", "d_model"),
    "num_attention_heads": ("n_heads", "n_head", "num_heads"),
    "num_hidden_layers": ("n_layers", "n_layer", "num_layers"),
    "intermediate_size": ("hidden_dim", "n_inner", "d_ff"),
    "max_position_embeddings": ("n_positions", "max_seq_len"),
}
# Sizes that a text_config omits: the defaults of its class in transformers.
_LLAMA = {
    "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
}  # fmt: skip
_SIGLIP: Fields = {
    "vocab_size": 32_000, "hidden_size": 768, "num_hidden_layers": 12, "max_position_embeddings": 64,
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
    "clip_text_model": {
        "vocab_size": 49_408, "hidden_size": 512, "num_hidden_layers": 12, "max_position_embeddings": 77,
    },
    "siglip_text_model": _SIGLIP,
    "siglip2_text_model": _SIGLIP,
    "gemma": {
        "vocab_size": 256_000, "hidden_size": 3072, "intermediate_size": 24_576, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 256, "max_position_embeddings": 8192,
    },
    "gemma2": {
        "vocab_size": 256_000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 8192,
        "query_pre_attn_scalar": 256, "sliding_window": 4096,
    },
    "gemma3_text": {
        "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131_072,
    },
}  # fmt: skip
# Fields for which the outer config takes precedence over its text_config, which only repeats the defaults of its class: the end
# of an answer, the stored dtype, whether the head is the embedding, and the size of CLIP's embeddings.
_OUTER = (
    "eos_token_id", "bos_token_id", "pad_token_id", "tie_word_embeddings", "projection_dim",
)  # fmt: skip
# Fields in the outer config of a page retriever.  Its `vlm_config` is the config of the model that reads the pages.
_RETRIEVER = ("architectures", "model_type", "embedding_dim", "dtype", "torch_dtype", "vlm_config")
_STRETCHED = ("llama3", "yarn", "longrope", "su")
# Families with two kinds of layers, each with its own frequencies, and the kinds that `rope_scaling` changes.
_SCALED_GROUPS = {
    "gemma3": (WHOLE,),
    "gemma3_text": (WHOLE,),
    "olmo3": (WHOLE,),
    "modernbert": (WHOLE, LOCAL),
}
_FLOATS = {"Infinity": float("inf"), "-Infinity": float("-inf"), "NaN": float("nan")}


def with_floats(value: Any) -> Any:
    """Return a copy of a JSON value in which each `{"__float__": "Infinity"}` is a number.

    transformers writes numbers that JSON lacks in this form.
    """
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


def of_retriever(raw: Fields) -> Fields:
    """Return the config of the model inside ColPali or ColQwen2, with the architecture and the sizes of the retriever.

    Any other config is returned unchanged.
    """
    inner = raw.get("vlm_config")
    if not isinstance(inner, dict):
        return raw
    return {**cast("Fields", inner), **{name: raw[name] for name in _RETRIEVER if name in raw}}


def outer_fields(raw: Fields) -> Fields:
    """Undo `of_retriever`, for the class of transformers that reads the whole config."""
    return raw if "vlm_config" not in raw else {n: raw[n] for n in _RETRIEVER if n in raw}


def flattened(raw: Fields) -> Fields:
    """Lift the fields of a nested text_config to the top, like in a plain decoder, and use one name for each field.

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
        # Without the flag, the outer classes of transformers tie the embedding, even if the text model's own class does not.
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
    if config.get("model_type") in ("t5", "mt5"):
        # Positions are relative, so only the trained length limits a text.
        config.setdefault("max_position_embeddings", 512)
    _use_one_rope(config)
    return config


def _use_one_rope(config: Fields) -> None:
    """Merge `rope_scaling`, `rope_parameters` and the trained length, which may be outside of them."""
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
    """Check whether all layers share one scaling of positions, which depends on the original length."""
    if not isinstance(rope, dict):
        return False
    fields = cast("Fields", rope)
    return (fields.get("rope_type") or fields.get("type")) in _STRETCHED
