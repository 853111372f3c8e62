"""Fields that `hf_overrides` puts over those of config.json.

Law: what is asked for wins, or is refused by its name.  A config says how its positions are stretched in one of several places,
by its age and its family, and its reader looks at the newest; so an override goes to where the config at hand says it.
"""

from typing import Any, cast

from trouper.errors import invalid

Fields = dict[str, Any]
ROPE, OLD_ROPE = "rope_parameters", "rope_scaling"
# Groups of layers with frequencies of their own, and the names that configs had for those before.
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
# What a model keeps when its positions are stretched in another way.
KEPT = ("rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")


def overridden(config: Fields, overrides: Fields) -> Fields:
    """Replace fields of a config; objects are merged, field by field.

    Raises:
        TrouperValidationError: a kind of `rope_type` that there is not, or a field that this config cannot follow.
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
    """Replace one field where the config has it."""
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
    """Put what is asked for where readers look first; one of both names is left, for transformers looks at the other one first."""
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
        rule = f"{name}: this model has one for each of {', '.join(own)}; name one of those"
        raise invalid("hf_overrides", rule, wish)


def is_grouped(ropes: Fields) -> bool:
    """Check whether each kind of layer has frequencies of its own."""
    return bool(ropes) and all(isinstance(each, dict) for each in ropes.values())


def _stretched(own: Fields, wish: Any) -> Any:
    """Put one way to stretch positions over another: of the same kind field by field, of another kind whole."""
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
