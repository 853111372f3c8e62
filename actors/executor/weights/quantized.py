"""Checkpoints whose projections are integers of 4 bits already: GPTQ, AutoAWQ and compressed-tensors.

Instead of X.weight [O, I], in G groups of inputs, eight integers to an int32, lowest bits first:

    gptq                X.qweight [I / 8, O]  X.qzeros [G, O / 8]  X.scales [G, O]  X.g_idx [I]
    awq                 X.qweight [I, O / 8]  X.qzeros [G, O / 8]  X.scales [G, O]
    compressed-tensors  X.weight_packed [O, I / 8]  X.weight_scale [O, G]  X.weight_shape [2], and where
                        it is not symmetric X.weight_zero_point [O / 8, G]

all 0 … 15, and w = s · (q - z); without zeros z = 8.  awq has the outputs 0 2 4 6 1 3 5 7 of each eight
in this order; gptq stores z - 1, unless its format is gptq_v2.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor

from trouper.actors.executor.models.traits import read_traits
from trouper.errors import UnsupportedFeatureError
from trouper.kernels.cpu.linear.quantization import IntegerWeight

Method = Literal["gptq", "awq", "compressed-tensors"]
Stored = tuple[str, tuple[int, ...]]  # a tensor's name and shape
FIRST = {"gptq": "qweight", "awq": "qweight", "compressed-tensors": "weight_packed"}
AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # of the outputs of eight
MIDDLE = 8


class Scheme(msgspec.Struct, frozen=True):
    """How a checkpoint stores its integers."""

    method: Method
    group_size: int | None  # None: all inputs
    zeros_less: int = 0  # zeros are stored less by so much
    has_zeros: bool = True

    def stored(self, name: str, shape: tuple[int, ...], names: Container[str]) -> list[Stored]:
        """List the stored tensors, among `names`, that make up the tensor `name`: itself, or its quantized parts."""
        base = name.removesuffix("weight")
        if base + FIRST[self.method] not in names:
            return [(name, shape)]
        num_out, num_in = shape
        size = self.group_size or num_in
        if num_in % size:
            raise unsupported("group_size", f"{size} does not divide the {num_in} inputs of {name}")
        groups = num_in // size
        parts: dict[str, tuple[int, ...]]
        match self.method:
            case "gptq":
                parts = {"qweight": (num_in // 8, num_out)}
            case "awq":
                parts = {"qweight": (num_in, num_out // 8)}
            case "compressed-tensors":
                parts = {"weight_packed": (num_out, num_in // 8), "weight_scale": (num_out, groups)}
                parts["weight_shape"] = (2,)
        if self.method != "compressed-tensors":
            parts |= {"qzeros": (groups, num_out // 8), "scales": (groups, num_out)}
        elif self.has_zeros:
            parts["weight_zero_point"] = (num_out // 8, groups)
        order = "g_idx" if self.method == "gptq" else "weight_g_idx"
        if base + order in names:
            parts[order] = (num_in,)
        return [(base + part, size) for part, size in parts.items()]

    def integers(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> IntegerWeight:
        """The matrix [O, I] of the parts of X, by their names without X.

        Raises:
            UnsupportedFeatureError: the order of the inputs is not that of their groups.
        """
        zeros = None
        if self.method == "compressed-tensors":
            q, scales = _unpacked(parts["weight_packed"]), parts["weight_scale"]
            if self.has_zeros:
                zeros = _unpacked(parts["weight_zero_point"].T).T
        elif self.method == "gptq":
            q, scales = _unpacked(parts["qweight"].T), parts["scales"].T
            zeros = (_unpacked(parts["qzeros"]).T + self.zeros_less) & 15
        else:
            q, zeros = (_in_order(_unpacked(parts[name])).T for name in ("qweight", "qzeros"))
            scales = parts["scales"].T
        order, num_in = parts.get("g_idx", parts.get("weight_g_idx")), q.shape[1]
        if order is not None:
            group_of_input = torch.arange(num_in) // (self.group_size or num_in)
            if not torch.equal(order.long(), group_of_input):
                raise unsupported("desc_act", "groups whose inputs are permuted (g_idx)")
        return IntegerWeight(
            "int4",
            dtype,
            (q - MIDDLE).contiguous(),
            scales if scales.dtype == torch.bfloat16 else scales.float(),
            None if zeros is None or (zeros == MIDDLE).all() else zeros - MIDDLE,
        )


def integer_scheme(hf_config: Mapping[str, Any]) -> Scheme | None:
    """Read the quantization scheme from config.json; None where the weights are plain.

    Raises:
        UnsupportedFeatureError: a method or a field that is not read here; the message names it.
        TrouperValidationError: a field of the wrong type.
    """
    config = hf_config.get("quantization_config")
    if not config:
        return None
    method = config.get("quant_method")
    reader = READERS.get(method) if isinstance(method, str) else None
    if reader is None:
        raise unsupported("quant_method", f"{method!r}; {', '.join(READERS)} are")
    return read_traits(reader, config, "quantization_config")


def joined(parts: Sequence[IntegerWeight]) -> IntegerWeight:
    """Outputs below outputs."""
    zeros = [part.zeros_OG for part in parts]
    if any(zero is not None for zero in zeros):
        zeros = [
            torch.zeros(part.scales_OG.shape, dtype=torch.int8) if zero is None else zero
            for part, zero in zip(parts, zeros, strict=True)
        ]
    return parts[0]._replace(
        q_OI=torch.cat([part.q_OI for part in parts]),
        scales_OG=torch.cat([part.scales_OG for part in parts]),
        zeros_OG=None if zeros[0] is None else torch.cat([x for x in zeros if x is not None]),
    )


def unsupported(field: str, what: str) -> UnsupportedFeatureError:
    return UnsupportedFeatureError(f"quantization_config: {field}: not supported: {what}")


def _gptq(config: Mapping[str, Any]) -> Scheme:
    _expect(config, "bits", 4)
    _expect(config, "checkpoint_format", None, "gptq", "gptq_v2")
    _expect(config, "lm_head", None, False)
    _expect(config, "dynamic", None, {})
    less = 0 if config.get("checkpoint_format") == "gptq_v2" else 1
    return Scheme("gptq", _group_size(config), zeros_less=less)


def _awq(config: Mapping[str, Any]) -> Scheme:
    names = {"w_bit": "bits", "q_group_size": "group_size"}  # as AutoAWQ's own file calls them
    config = {names.get(name, name): value for name, value in config.items()}
    _expect(config, "bits", 4)
    _expect(config, "version", None, "gemm", "GEMM")
    _expect(config, "zero_point", None, True)
    return Scheme("awq", _group_size(config))


def _compressed(config: Mapping[str, Any]) -> Scheme:
    _expect(config, "format", "pack-quantized")
    _expect(config, "kv_cache_scheme", None)
    named: Mapping[str, Mapping[str, Any]] = config.get("config_groups") or {}
    groups = list(named.values())
    if len(groups) != 1:
        raise unsupported("config_groups", f"{len(groups)} groups; one is")
    _expect(groups[0], "input_activations", None)
    _expect(groups[0], "output_activations", None)
    weights: Mapping[str, Any] = groups[0].get("weights") or {}
    _expect(weights, "num_bits", 4)
    _expect(weights, "type", "int")
    _expect(weights, "strategy", "group", "channel")
    size = _group_size(weights) if weights["strategy"] == "group" else None
    return Scheme("compressed-tensors", size, has_zeros=not weights.get("symmetric", True))


READERS: dict[str, Callable[[Mapping[str, Any]], Scheme]] = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed,
}


def _expect(config: Mapping[str, Any], field: str, *allowed: object) -> None:
    if config.get(field) not in allowed:
        shown = " or ".join(str(value) for value in allowed if value is not None)
        raise unsupported(field, f"{config.get(field)!r}; {shown or 'none'} is")


def _group_size(config: Mapping[str, Any]) -> int | None:
    size = config.get("group_size", -1)
    if size in (-1, None):
        return None
    if not isinstance(size, int) or size < 1 or size % 32:
        raise unsupported("group_size", f"{size!r}; multiples of 32 and -1 are")
    return size


def _unpacked(words: Tensor) -> Tensor:
    """[N, M] int32 to [N, 8 M] int8."""
    bytes_ = words.contiguous().view(torch.uint8)
    return torch.stack((bytes_ & 15, bytes_ >> 4), -1).flatten(1).to(torch.int8)


def _in_order(stored: Tensor) -> Tensor:
    places: Tensor = stored.reshape(len(stored), -1, 8)[..., AWQ_PLACES]
    return places.reshape(len(stored), -1)
