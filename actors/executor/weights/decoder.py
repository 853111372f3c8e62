"""From a folder of safetensors to the decoder's tensors: checked, fused, cast and packed.

Laws:
  * Names and shapes are checked against the traits before a byte of a tensor is read (but of biases
    that the model does not use, which are ignored where they are zeros).
  * Files are memory-mapped; one parameter at a time is copied, cast and packed, so that the peak is
    the model plus its largest matrix.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from tqdm import tqdm

from trouper.actors.executor.models.decoder import Decoder, DecoderLayer, OpsT
from trouper.actors.executor.models.layer_split import traits_of
from trouper.actors.executor.models.mlp import GatedMlp, Mlp, SparseMlp
from trouper.actors.executor.models.parameters import (
    EMBEDDING,
    HEAD,
    Parameter,
    layer_parameters,
    outer_parameters,
)
from trouper.actors.executor.models.registry import is_text_part
from trouper.actors.executor.models.traits import DecoderTraits
from trouper.actors.executor.weights.checkpoint import Checkpoint
from trouper.actors.executor.weights.gguf import GgufCheckpoint
from trouper.actors.executor.weights.random import RandomWeights
from trouper.actors.executor.weights.schemes import read_scheme
from trouper.config.gguf import is_gguf
from trouper.config.resolve import EngineConfig
from trouper.config.stages import Stage
from trouper.errors import TrouperValidationError, UnsupportedFeatureError
from trouper.kernels.codegen.units import LANES
from trouper.kernels.cpu.linear.quantization import (
    GROUP,
    IntegerWeight,
    can_quantize,
    dequantized,
)
from trouper.kernels.experts import Routing
from trouper.kernels.linear import LinearConfig, LinearMethod
from trouper.kernels.select import make_experts, make_linear

ACTIVATION_SCALES = (
    "the checkpoint has %d scales of activations, which are not used: activations stay in %s"
)
BAR_DELAY_S = 1.0
BASE = "model."
ROUTER = "router"
ADAPTED = ("qkv", "o", "gate_up", "down")  # which all tokens use
logger = logging.getLogger("trouper.loading")
Wrap = Callable[[Parameter, LinearMethod], LinearMethod]


class Source(Protocol):
    """Reader of a checkpoint's tensors, by name."""

    def read_into(self, name: str, out: Tensor) -> None:
        """Read a tensor of out's shape, and cast it to its dtype."""
        ...

    def integers(self, parameter: Parameter, dtype: torch.dtype) -> IntegerWeight | None:
        """Read a quantized matrix; None where the checkpoint stores it as a plain tensor."""
        ...


def load_decoder(
    config: EngineConfig,
    traits: DecoderTraits,
    *,
    ops: Callable[[], OpsT],
    has_head: bool = True,
    device: torch.device | None = None,
    stage: Stage | None = None,
    wrap: Wrap | None = None,
) -> Decoder[OpsT]:
    """Build the decoder of the config's model, or one stage of it.

    With a quantization the projections are quantised and the head is int8; the embedding stays as it is.

    Args:
        ops: asked for last; they may be compiled while the weights are read.
        has_head: False for a model that pools.
        device: where the weights go, one after another; None = they stay in host memory.
        stage: the part that is built; the whole checkpoint is checked all the same.
        wrap: puts something on top of each projection of the layers, such as adapters.

    Raises:
        TrouperValidationError: the folder and the traits do not fit; the message names the tensors.
        UnsupportedFeatureError: experts on a GPU.
    """
    folder, load_format = Path(config.model.path), config.load_format
    dtype: torch.dtype = getattr(torch, config.dtype)
    scheme = None if is_gguf(folder) else read_scheme(config.model.hf_config)
    linear = LinearConfig(
        device="cpu" if device is None else "cuda",
        quantization=config.quantization,
        is_compressed=config.compress_weights,
        is_batch_invariant=config.batch_invariant,
    )
    if traits.experts is not None and device is not None:
        raise UnsupportedFeatureError("a mixture of experts runs on the CPU alone so far")
    num_layers = len(traits.layers)
    outer = [p for p in outer_parameters(traits) if has_head or p.name != "head"]
    source: Source
    if load_format == "dummy":
        source = RandomWeights(config.seed, dtype)
    elif load_format in ("auto", "gguf") and is_gguf(folder):
        source = GgufCheckpoint(folder)
        source.check([*outer, *(p for i in range(num_layers) for p in layer_parameters(traits, i))])
    elif load_format in ("auto", "safetensors"):
        parameters = list(outer)
        parameters += [p for i in range(num_layers) for p in layer_parameters(traits, i)]
        checkpoint = Checkpoint(
            folder, scheme=scheme, is_part=is_text_part(config.model.architecture)
        )
        if not has_head and EMBEDDING not in checkpoint.shapes:
            # what the generating sibling wraps is stored bare
            checkpoint = Checkpoint(folder, BASE, scheme)
        source = checkpoint
        ignored = frozenset({HEAD} if traits.tied_embeddings else ())
        checkpoint.check(parameters, ignored=ignored if has_head else frozenset(checkpoint.shapes))
        if checkpoint.num_activation_scales:
            logger.info(ACTIVATION_SCALES, checkpoint.num_activation_scales, config.dtype)
    else:
        raise TrouperValidationError(
            "must be auto, safetensors, gguf (of a GGUF file) or dummy",
            parameter="load_format",
            value=load_format,
        )
    place = Placement(dtype, device, linear)
    stage = stage or Stage(0, 1, 0, num_layers)
    has_head = has_head and stage.is_last
    wanted = {"embedding"} if stage.is_first else set[str]()
    if stage.is_last:
        wanted |= {"norm"} | (
            {"embedding" if traits.tied_embeddings else "head"} if has_head else set()
        )
    found = {p.name: _assemble(p, source, place) for p in outer if p.name in wanted}
    # The head is packed even where it is tied, and then exists twice: the lookup needs the plain
    # rows, the GEMM of a decode step runs 1.5-1.7 x faster on the packed ones (32000 x 1024 bf16, one
    # core: 5.9 -> 3.4 ms), and the price is one embedding, 7 % of the memory of a 0.5 B model.
    head = None
    if has_head:
        name = "embedding" if traits.tied_embeddings else "head"
        parameter = next(p for p in outer if p.name == name)
        integers = source.integers(parameter, dtype) if device is None else None
        fmt = "int8" if linear.quantization else None
        head = make_linear(
            found[name] if integers is None else integers, config=linear._replace(quantization=fmt)
        )
    indices = indices_shown(stage.last - stage.first)
    layers = [_layer(traits, stage.first + i, source, place, wrap) for i in indices]
    return Decoder(
        traits_of(stage, traits),
        embedding=found["embedding"] if stage.is_first else None,
        layers=layers,
        norm=found["norm"] if stage.is_last else None,
        head=head,
        max_model_len=config.max_model_len,
        ops=ops(),
        dtype=dtype,
    )


def adapted_parameters(traits: DecoderTraits) -> Iterator[Parameter]:
    """Yield the matrices of all layers that adapters may change."""
    for layer in range(len(traits.layers)):
        for parameter in layer_parameters(traits, layer):
            name, _, kind = parameter.name.partition(".")
            if kind == "weight" and name in ADAPTED:
                yield parameter


def indices_shown(num_layers: int) -> Iterable[int]:
    """Yield the index of each layer; a terminal has a progress bar where the load takes longer than a moment."""
    return tqdm(range(num_layers), "loading weights", delay=BAR_DELAY_S, disable=None, leave=False)


class Placement(NamedTuple):
    """How weights are kept; see `load_decoder`."""

    dtype: torch.dtype
    device: torch.device | None
    linear: LinearConfig


def _layer(
    traits: DecoderTraits, index: int, source: Source, place: Placement, wrap: Wrap | None
) -> DecoderLayer:
    norms: dict[str, Tensor] = {}
    projections: dict[str, LinearMethod] = {}
    for parameter in layer_parameters(traits, index):
        name, _, kind = parameter.name.partition(".")
        integers = source.integers(parameter, place.dtype) if kind == "weight" else None
        linear = _linear_config(name, place.linear)
        quantization = linear.quantization
        if integers is not None and place.device is None and name != ROUTER:
            projections[name] = make_linear(integers, config=linear)
            continue
        if integers is not None:
            tensor = dequantized(integers).to(place.device, place.dtype)
        else:
            tensor = _assemble(parameter, source, place)
        if kind == "weight":
            if quantization and not can_quantize(tensor.shape[1], quantization):
                raise TrouperValidationError(
                    f"groups of {GROUP} do not divide the {tensor.shape[1]} inputs of {parameter.name}",
                    parameter="quantization",
                    value=quantization,
                )
            if name == ROUTER:
                tensor = _padded(tensor)
            projections[name] = make_linear(tensor, config=linear)
        elif kind == "bias":
            projections[name].bias = tensor
        else:
            norms[name] = tensor
    if wrap is not None:
        projections = _wrapped(projections, layer_parameters(traits, index), wrap)
    if traits.qk_norm == "head":
        q_ND = norms.pop("q_norm").expand(traits.num_q_heads, -1)
        k_ND = norms.pop("k_norm").expand(traits.num_kv_heads, -1)
        norms["head_norm"] = torch.cat((q_ND, k_ND))
    return DecoderLayer(
        traits.layers[index],
        qkv=projections["qkv"],
        o=projections["o"],
        mlp=_mlp(projections, traits, index),
        **norms,
    )


def _mlp(projections: dict[str, LinearMethod], traits: DecoderTraits, index: int) -> Mlp:
    has_dense = "gate_up" in projections
    dense = GatedMlp(projections["gate_up"], projections["down"]) if has_dense else None
    experts = traits.experts
    if experts is None or not traits.layers[index].is_sparse:
        assert dense is not None
        return dense
    routing = Routing(experts.count, experts.top_k, experts.is_normalised, dense is not None)
    gate_up, down = (
        [projections[f"{name}_{i}"] for i in range(experts.count)] for name in ("gate_up", "down")
    )
    return SparseMlp(projections[ROUTER], make_experts(gate_up, down, routing), dense)


def _linear_config(name: str, config: LinearConfig) -> LinearConfig:
    """Say how one projection is kept: a router as it is, experts in the form that one launch multiplies together."""
    if name == ROUTER:
        return config._replace(quantization=None)
    return config._replace(is_compressed=config.is_compressed and name in ADAPTED)


def _padded(router: Tensor) -> Tensor:
    """Add outputs of zeros up to whole registers, so that any kernel multiplies it."""
    return torch.nn.functional.pad(router, (0, 0, 0, -len(router) % LANES))


def _wrapped(
    projections: dict[str, LinearMethod], parameters: Iterable[Parameter], wrap: Wrap
) -> dict[str, LinearMethod]:
    named = {parameter.name: parameter for parameter in parameters}
    return {
        name: wrap(named[f"{name}.weight"], linear) if name in ADAPTED else linear
        for name, linear in projections.items()
    }


def _assemble(parameter: Parameter, source: Source, place: Placement) -> Tensor:
    """The fused tensor, in memory of its own: the file may go away."""
    shapes = [shape for _, shape in parameter.sources]
    # 1 + w of Gemma's norms would lose w's last bits in bf16; see kernels/reference/rms_norm.py
    kept = torch.float32 if parameter.offset else place.dtype
    size = (sum(shape[0] for shape in shapes), *shapes[0][1:])
    fused = torch.empty(size, dtype=kept, device=place.device)
    first = 0
    for name, shape in parameter.sources:
        source.read_into(name, fused[first : first + shape[0]])
        first += shape[0]
    return fused.add_(parameter.offset) if parameter.offset else fused
