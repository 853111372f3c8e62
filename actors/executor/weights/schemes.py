"""Read the scheme of a quantised checkpoint from config.json: the layout of each matrix.

The stored tensors themselves show which modules are quantised, so lists of excluded modules need not be read. Nothing here
imports torch, because `trouper models` uses it to decide whether a checkpoint is supported.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

from trouper.actors.executor.models.traits import read_traits
from trouper.actors.executor.weights.layouts import (
    FP8,
    StoredNames,
    WeightLayout,
    base_of,
    unsupported,
)
from trouper.config.checks import METHOD_ALIASES
from trouper.errors import TrouperValidationError

# The most characters of a regular expression among the targets.
LONGEST_PATTERN = 512


class Scheme(msgspec.Struct, frozen=True):
    """The layouts of a checkpoint's matrices, each with the names of its modules. A group without names applies to all."""

    groups: tuple[tuple[tuple[str, ...], WeightLayout], ...]

    def layout(
        self, name: str, stored: StoredNames, stored_name: str | None = None
    ) -> WeightLayout | None:
        """Find the layout of the tensor `name`. Returns None if it is stored as a plain tensor.

        Args:
            stored: the names and dtypes of all stored tensors.
            stored_name: its name in a multimodal model, which config.json may use instead.

        Raises:
            UnsupportedFeatureError: it is quantised, but belongs to no group of config.json.
        """
        first = self.groups[0][1]
        if first.method == "mxfp4":
            return first if name + "_blocks" in stored else None
        base = base_of(name)
        is_packed = base + "qweight" in stored or base + "weight_packed" in stored
        if not is_packed and (name not in stored or stored.dtype(name) not in ("I8", "U8", FP8)):
            return None
        module = base.removesuffix(".")
        modules = (
            [module] if stored_name is None else [module, base_of(stored_name).removesuffix(".")]
        )
        found = [
            (rank, layout)
            for names, layout in self.groups
            for each in modules
            if (rank := _rank(each, names))
        ]
        if not found:
            raise unsupported("config_groups", f"{name}, which is quantised and in no group")
        return min(found, key=lambda each: each[0])[1]


def read_scheme(hf_config: Mapping[str, Any]) -> Scheme | None:
    """Read the quantization scheme from config.json. Returns None if the weights are plain.

    Raises:
        UnsupportedFeatureError: the method, or a field's value, is not supported; the message names it.
        TrouperValidationError: a field has the wrong type.
    """
    config = hf_config.get("quantization_config")
    if not config:
        return None
    method = config.get("quant_method")
    method = METHOD_ALIASES.get(method, method) if isinstance(method, str) else method
    reader = READERS.get(method) if isinstance(method, str) else None
    if reader is None:
        rule = f"{method!r}; {', '.join(READERS)} are, and GGUF files, and plain weights that quantization='int4' rounds"
        raise unsupported("quant_method", rule)
    return read_traits(reader, config, "quantization_config")


def _gptq(config: Mapping[str, Any]) -> Scheme:
    _expect(config, "bits", 4, 8)
    _expect(config, "checkpoint_format", None, "gptq", "gptq_v2")
    _expect(config, "is_marlin_format", None, False)
    _expect(config, "pack_dtype", None, "int32")
    less = 0 if config.get("checkpoint_format") == "gptq_v2" else 1

    def layout(fields: Mapping[str, Any]) -> WeightLayout:
        _expect(fields, "bits", 4, 8)
        return WeightLayout("gptq", fields["bits"], _group_size(fields), zeros_less=less)

    # GPTQModel's exceptions by pattern; the first match counts. Modules of "-:" patterns are plain, as their tensors show.
    named: Mapping[str, Mapping[str, Any]] = config.get("dynamic") or {}
    exceptions = {
        "re:" + pattern.removeprefix("+:"): layout({**config, **fields})
        for pattern, fields in named.items()
        if not pattern.startswith("-:")
    }
    return _with_exceptions(layout(config), exceptions)


def _auto_round(config: Mapping[str, Any]) -> Scheme:
    packing = config.get("packing_format") or config.get("backend") or "auto_round:auto_gptq"
    kind: Literal["gptq", "awq"]
    # A backend, which older files name instead, may be `auto_round:gptq:exllamav2`.
    words = set(str(packing).split(":"))
    if words & {"auto_gptq", "gptq"}:
        kind = "gptq"
    elif words & {"auto_awq", "awq"}:
        kind = "awq"
    else:
        raise unsupported("packing_format", f"{packing!r}; auto_round:auto_gptq and auto_awq are")
    _expect(config, "data_type", None, "int")

    def layout(fields: Mapping[str, Any]) -> WeightLayout:
        _expect(fields, "bits", *((4, 8) if kind == "gptq" else (4,)))
        _expect(fields, "data_type", None, "int")
        less = 1 if kind == "gptq" else 0
        return WeightLayout(kind, fields["bits"], _group_size(fields), zeros_less=less)

    named: Mapping[str, Mapping[str, Any]] = config.get("extra_config") or {}
    exceptions = {
        (name if name.replace(".", "").replace("_", "").isalnum() else "re:" + name): layout(
            {**config, **fields}
        )
        for name, fields in named.items()
        # Modules of 16 or 32 bits are stored as plain tensors.
        if fields.get("bits", config.get("bits")) not in (16, 32)
    }
    return _with_exceptions(layout(config), exceptions)


def _modelopt(config: Mapping[str, Any]) -> Scheme:
    # The fields may be nested, like in hf_quant_config.json.
    config = config.get("quantization") or config
    match config.get("quant_algo"):
        case "FP8" | "FP8_PER_CHANNEL_PER_TOKEN":
            return _one(WeightLayout("fp8", 8))
        case "NVFP4":
            _expect(config, "group_size", None, 16)
            return _one(WeightLayout("nvfp4", 4, 16))
        case algorithm:
            rule = f"{algorithm!r}; FP8, FP8_PER_CHANNEL_PER_TOKEN and NVFP4 are"
            raise unsupported("quant_algo", rule)


def _bitsandbytes(config: Mapping[str, Any]) -> Scheme:
    if config.get("load_in_8bit") or config.get("_load_in_8bit"):
        return _one(WeightLayout("bnb8", 8))
    if not (config.get("load_in_4bit") or config.get("_load_in_4bit")):
        raise unsupported("load_in_4bit", "neither this nor load_in_8bit is true")
    _expect(config, "bnb_4bit_quant_type", None, "nf4", "fp4")
    _expect(config, "bnb_4bit_quant_storage", None, "uint8")
    return _one(WeightLayout("bnb4", 4))


def _awq(config: Mapping[str, Any]) -> Scheme:
    names = {"w_bit": "bits", "q_group_size": "group_size"}  # as AutoAWQ's own file calls them
    config = {names.get(name, name): value for name, value in config.items()}
    _expect(config, "bits", 4)
    _expect(config, "version", None, "gemm", "GEMM")
    _expect(config, "zero_point", None, True)
    return _one(WeightLayout("awq", 4, _group_size(config)))


def _fp8(config: Mapping[str, Any]) -> Scheme:
    return _one(WeightLayout("fp8", 8, block=_block(config, "weight_block_size")))


def _mxfp4(_config: Mapping[str, Any]) -> Scheme:
    return _one(WeightLayout("mxfp4", 4, 32))


def _compressed(config: Mapping[str, Any]) -> Scheme:
    _expect(config, "transform_config", None, {})
    sparsity: Mapping[str, Any] = config.get("sparsity_config") or {}
    _expect(sparsity, "format", None, "dense")
    named: Mapping[str, Mapping[str, Any]] = config.get("config_groups") or {}
    if not named:
        raise unsupported("config_groups", "none; one or more are")
    return Scheme(tuple(_group(group, config, len(named)) for group in named.values()))


def _group(
    group: Mapping[str, Any], config: Mapping[str, Any], num_groups: int
) -> tuple[tuple[str, ...], WeightLayout]:
    _expect(group, "output_activations", None)
    kind = group.get("format") or config.get("format")
    weights: Mapping[str, Any] = group.get("weights") or {}
    reader = FORMATS.get(kind) if isinstance(kind, str) else None
    if reader is None:
        raise unsupported("format", f"{kind!r}; {', '.join(FORMATS)} are")
    layout = reader(weights)
    targets = msgspec.convert(group.get("targets") or ["Linear"], tuple[str, ...])
    for target in targets:
        _check_pattern(target)
    return (() if num_groups == 1 and "Linear" in targets else targets), layout


def _packed(weights: Mapping[str, Any]) -> WeightLayout:
    _expect(weights, "num_bits", 4, 8)
    _expect(weights, "type", None, "int")
    _expect(weights, "strategy", "group", "channel", "tensor")
    has_zeros = not weights.get("symmetric", True)
    return WeightLayout("packed", weights["num_bits"], _ct_group_size(weights), has_zeros=has_zeros)


def _bytes(weights: Mapping[str, Any]) -> WeightLayout:
    """Read a group with weights of one byte each: integers or e4m3."""
    if weights.get("type", "int") == "float":
        _expect(weights, "num_bits", 8)
        _expect(weights, "strategy", "tensor", "channel", "group", "block")
        if weights["strategy"] == "block":
            block = _block(weights, "block_structure")
            if block is None:
                raise unsupported("block_structure", "none where strategy is block")
            return WeightLayout("fp8", 8, block=block)
        return WeightLayout("fp8", 8, _ct_group_size(weights))
    _expect(weights, "num_bits", 4, 8)
    _expect(weights, "type", None, "int")
    _expect(weights, "strategy", "tensor", "channel", "group")
    has_zeros = not weights.get("symmetric", True)
    return WeightLayout("int8", 8, _ct_group_size(weights), has_zeros=has_zeros)


def _fp4(weights: Mapping[str, Any], size: int) -> WeightLayout:
    _expect(weights, "num_bits", 4)
    _expect(weights, "type", "float")
    _expect(weights, "group_size", size)
    _expect(weights, "symmetric", None, True)
    return WeightLayout("fp4", 4, size, has_global_scale=size == 16)


FORMATS: dict[str, Callable[[Mapping[str, Any]], WeightLayout]] = {
    "pack-quantized": _packed,
    "int-quantized": _bytes,
    "float-quantized": _bytes,
    "naive-quantized": _bytes,
    "mxfp4-pack-quantized": lambda weights: _fp4(weights, 32),
    "nvfp4-pack-quantized": lambda weights: _fp4(weights, 16),
}
READERS: dict[str, Callable[[Mapping[str, Any]], Scheme]] = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed,
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "mxfp4": _mxfp4,
    "modelopt": _modelopt,
    "auto-round": _auto_round,
    "bitsandbytes": _bitsandbytes,
}


def _one(layout: WeightLayout) -> Scheme:
    return Scheme((((), layout),))


def _with_exceptions(layout: WeightLayout, exceptions: Mapping[str, WeightLayout]) -> Scheme:
    """Make a scheme of one layout for all modules but those that a name or a pattern (`re:`) excepts."""
    for name in exceptions:
        _check_pattern(name)
    groups = (((name,), other) for name, other in exceptions.items())
    return Scheme((((), layout), *groups))


def _expect(config: Mapping[str, Any], field: str, *allowed: object) -> None:
    value = config.get(field)
    if not any(value == one and type(value) is type(one) for one in allowed):
        shown = " or ".join(str(one) for one in allowed if one is not None)
        raise unsupported(field, f"{value!r}; {shown or 'none'} is")


def _group_size(config: Mapping[str, Any]) -> int | None:
    size = config.get("group_size", -1)
    if size in (-1, None):
        return None
    if not isinstance(size, int) or isinstance(size, bool) or size < 1 or size % 32:
        raise unsupported("group_size", f"{size!r}; multiples of 32 and -1 are")
    return size


def _ct_group_size(weights: Mapping[str, Any]) -> int | None:
    return _group_size(weights) if weights["strategy"] == "group" else None


def _block(config: Mapping[str, Any], field: str) -> tuple[int, int] | None:
    found = config.get(field)
    if found is None:
        return None
    block = msgspec.convert(found, tuple[int, int])
    if min(block) < 1:
        raise unsupported(field, f"{found!r}; two numbers above 0 are")
    return block


def _check_pattern(target: str) -> None:
    if not target.startswith("re:"):
        return
    try:
        if len(target) > LONGEST_PATTERN:
            raise unsupported("targets", f"a pattern of more than {LONGEST_PATTERN} characters")
        re.compile(target.removeprefix("re:"))
    except re.error as error:
        raise TrouperValidationError(
            f"config.json: quantization_config: targets: no regular expression: {error}",
            parameter="model",
            value=target,
        ) from error


def _rank(module: str, names: tuple[str, ...]) -> int:
    """Rate how closely targets name a module: 1 by its name, 2 by a pattern, 3 as one of its class, 0 not at all."""
    if module in names:
        return 1
    patterns = (name.removeprefix("re:") for name in names if name.startswith("re:"))
    if any(re.match(pattern, module) for pattern in patterns):
        return 2
    return 3 if not names or "Linear" in names else 0
