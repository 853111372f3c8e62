"""Replace the linear layers of a transformers model by this engine's products.

A layer is exchanged only if the model calls it as a layer.  Some models also multiply with a layer's weight
directly (Mamba: `self.dt_proj.weight @ x`), which a packed or rounded weight cannot serve, so such a layer keeps
the library's own product.  A pass of the unchanged model shows which layers these are, and gives the logits that
the exchanged model must reproduce.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from trouper.actors.executor.models.hf_decoder import QUESTIONS, HfLinear
from trouper.config.engine_config import EngineConfig
from trouper.kernels.cpu.linear.quantization import can_quantize, dequantized, quantize
from trouper.kernels.formats import Format
from trouper.kernels.linear import LinearConfig
from trouper.kernels.select import make_linear

# Outputs.  Routers are smaller, and rounding costs them more accuracy than it saves time.
MIN_QUANTIZED = 64


class Layer(NamedTuple):
    """A linear layer of the model, and the format in which this engine keeps its weight."""

    parent: nn.Module
    name: str
    module: nn.Module
    quantization: Format | None


def linear_layers(model: nn.Module, quantization: Format | None) -> list[Layer]:
    """List the linear layers that can be replaced. Subclasses are omitted, because they compute something else."""
    from transformers.pytorch_utils import Conv1D

    head = cast("Any", model).get_output_embeddings()
    found: list[Layer] = []
    for parent in model.modules():
        for name, module in parent.named_children():
            if type(module) in (nn.Linear, Conv1D):
                kept = _kept_as(module, quantization, is_head=module is head)
                found.append(Layer(parent, name, module, kept))
    return found


def observed(
    layers: Sequence[Layer], run: Callable[[], list[Tensor]]
) -> tuple[list[Tensor], list[Layer]]:
    """Run the unchanged model, and find which layers it only calls, without using their weights directly.

    Weights that this engine will round are rounded for this run too, one at a time, so that its results differ from
    those of the exchanged model by no more than the order of additions.

    Returns:
        What `run` returned, and the layers that can be exchanged.
    """
    watch = _WeightWatch(layers)
    hooks = [
        hook for layer in layers for hook in (_entering(layer, watch), _rounding(layer, watch))
    ]
    try:
        with watch:
            results = run()
    finally:
        for hook in hooks:
            hook.remove()
    return results, [layer for layer in layers if id(layer.module) not in watch.used_directly]


def exchange(layers: Sequence[Layer], config: EngineConfig, dtype: torch.dtype) -> None:
    """Replace each layer by this engine's product, with the same weights.

    The library's own weights are freed one layer at a time, so the peak of memory stays low.
    """
    linear = LinearConfig(is_compressed=config.compress_weights)
    for layer in layers:
        weight, bias = _matrix(layer.module)
        method = make_linear(weight.data, None, linear._replace(quantization=layer.quantization))
        method.bias = None if bias is None else bias.data
        setattr(layer.parent, layer.name, HfLinear(method, dtype))


class _WeightWatch(TorchFunctionMode):
    """Records each layer with a weight used as an operand while the layer itself is not running."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        super().__init__()
        self.used_directly: set[int] = set()
        self.running: list[nn.Module] = []
        self._owners = {id(layer.module.weight): layer.module for layer in layers}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # A tied embedding looks rows up in the head's weight; it keeps that tensor when the head is exchanged.
        if func not in QUESTIONS and func is not F.embedding:
            for operand in _operands((*args, *kwargs.values())):
                owner = self._owners.get(id(operand))
                if owner is not None and (not self.running or self.running[-1] is not owner):
                    self.used_directly.add(id(owner))
        return func(*args, **kwargs)


def _operands(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _operands(value)
        else:
            yield value


def _entering(layer: Layer, watch: _WeightWatch) -> Any:
    return layer.module.register_forward_pre_hook(lambda module, _: watch.running.append(module))


def _rounding(layer: Layer, watch: _WeightWatch) -> Any:
    def leave(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        rounded = None
        if layer.quantization is not None:
            weight, bias = _matrix(module)
            integers = quantize(weight.data, layer.quantization)
            rounded = F.linear(inputs[0], dequantized(integers).to(output.dtype), bias)
        watch.running.pop()
        return rounded

    return layer.module.register_forward_hook(leave)


def _kept_as(module: nn.Module, wanted: Format | None, *, is_head: bool) -> Format | None:
    """Choose the format of a weight. Returns None for weights that stay plain: small ones, and those without whole groups."""
    if wanted is None:
        return None
    if is_head:
        return "int8"
    num_out, num_in = _matrix(module)[0].shape
    return wanted if num_out >= MIN_QUANTIZED and can_quantize(num_in, wanted) else None


def _matrix(module: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Return weight [O, I] and bias of a linear layer."""
    weight = cast("Tensor", module.weight)
    # Conv1D stores [I, O].
    is_turned = not isinstance(module, nn.Linear)
    return weight.T.contiguous() if is_turned else weight, cast("Tensor | None", module.bias)
