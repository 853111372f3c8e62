"""Load a decoder's weights: compare the checkpoint with the traits, then read, fuse, cast and pack each tensor.

Laws:
  * Names and shapes are checked against the traits before a byte of a tensor is read (but of biases
    that the model does not use, ignored if they are zeros).
  * Files are memory-mapped; one parameter at a time is copied, cast and packed, so that the peak is
    the model plus its largest matrix.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec
import torch
from torch import Tensor
from tqdm import tqdm

from trouper.actors.executor.models.families.mixtures import check_device
from trouper.actors.executor.models.families.registry import is_text_part
from trouper.actors.executor.models.layers import GatedMlp, Mlp, PlainMlp, SparseMlp
from trouper.actors.executor.models.mixers import make_mixer
from trouper.actors.executor.models.names import NAMES, is_of_other_uses
from trouper.actors.executor.models.native_decoder import DecoderLayer, NativeDecoder, OpsT
from trouper.actors.executor.models.parameters import (
    CHOICE_BIAS,
    MIXER_TENSORS,
    NORM_BIAS,
    Cut,
    Parameter,
    embedding_name,
    head_name,
    layer_parameters,
    outer_parameters,
    pairs_of,
)
from trouper.actors.executor.models.sharding import (
    ALONE,
    Shard,
    part_of,
    row_order,
    shard_traits,
    sharded,
    traits_of,
)
from trouper.actors.executor.models.traits import DecoderTraits
from trouper.actors.executor.weights.checkpoint import Checkpoint, RandomWeights
from trouper.actors.executor.weights.gguf import GgufCheckpoint
from trouper.actors.executor.weights.layouts import views_of
from trouper.actors.executor.weights.schemes import read_scheme
from trouper.config.engine_config import EngineConfig
from trouper.config.parallel import Stage
from trouper.errors import TrouperValidationError, UnsupportedFeatureError
from trouper.kernels.codegen.units import LANES
from trouper.kernels.cpu.linear.quantization import (
    GROUP,
    IntegerWeight,
    StackedWeight,
    can_quantize,
    dequantized,
    quantize,
)
from trouper.kernels.experts import Routing
from trouper.kernels.formats import Format
from trouper.kernels.linear import LinearConfig, LinearMethod
from trouper.kernels.ops import SharedOps
from trouper.kernels.select import make_experts, make_linear, make_recurrent_ops

UNUSED_TENSORS = "the checkpoint has %d tensors that its model does not use, such as %s"
ACTIVATION_SCALES = "the checkpoint has %d scales of activations or of a KV cache, which are not used: both stay in %s"
BAR_DELAY_S = 1.0
# Products of few outputs that choose experts or set gates; they are neither rounded nor divided.
SMALL = ("router", "gates")
ADAPTED = ("qkv", "o", "in_proj", "out_proj", "gate_up", "down")  # which all tokens use
logger = logging.getLogger("trouper.loading")
Wrap = Callable[[Parameter, LinearMethod], LinearMethod]


class Source(Protocol):
    """Reads the tensors of a checkpoint by name: a folder of safetensors, a GGUF file, or random numbers."""

    def read_into(self, name: str, shape: tuple[int, ...], cut: Cut, out: Tensor) -> None:
        """Read a part of a tensor with this shape into `out`, and cast it to the dtype of `out`."""
        ...

    def mapped(self, name: str, dtype: torch.dtype) -> Tensor | None:
        """Return a tensor as a view of the file, so that processes share its pages, or None if it is stored otherwise."""
        ...

    def integers(
        self, parameter: Parameter, dtype: torch.dtype
    ) -> IntegerWeight | StackedWeight | None:
        """Read the parts of a quantized matrix, or return None if the checkpoint stores it as a plain tensor."""
        ...


class Placement(NamedTuple):
    """How and where weights are kept: dtype, device, format of the products, and part of the model.

    See `load_decoder` for their use. It is the same for all tensors of a model.
    """

    dtype: torch.dtype
    device: torch.device | None
    linear: LinearConfig
    shard: Shard


def load_decoder(
    config: EngineConfig,
    traits: DecoderTraits,
    *,
    ops: Callable[[], OpsT],
    shared: SharedOps | None = None,
    has_head: bool = True,
    device: torch.device | None = None,
    stage: Stage | None = None,
    shard: Shard = ALONE,
    wrap: Wrap | None = None,
) -> NativeDecoder[OpsT]:
    """Build the decoder of the config's model, or one worker's part of it.

    With a quantization the projections are quantised and the head is int8; the embedding stays as it is.

    Args:
        ops: asked for last; they may be compiled while the weights are read.
        shared: the group of ranks; see `NativeDecoder`.
        has_head: False for a model that pools.
        device: the target of the weights, one after another; None keeps them in host memory.
        stage: the part to build; the whole checkpoint is checked all the same.
        shard: the rank; its part of each layer is built.
        wrap: puts something on top of each projection of the layers, such as adapters.

    Raises:
        TrouperValidationError: the folder and the traits do not fit; the message names the tensors.
        UnsupportedFeatureError: experts on a GPU.
    """
    check_device(traits, "cpu" if device is None else "cuda")
    dtype: torch.dtype = getattr(torch, config.dtype)
    linear = LinearConfig(
        device="cpu" if device is None else "cuda",
        quantization=config.quantization,
        is_compressed=config.compress_weights,
        is_batch_invariant=config.batch_invariant,
    )
    place = Placement(dtype, device, linear, shard)
    source, traits = _open_source(config, traits, has_head=has_head)
    outer = _outer(traits, has_head=has_head)
    stage = stage or Stage(0, 1, 0, len(traits.layers))
    has_head = has_head and stage.is_last
    wanted = {"embedding", "positions"} if stage.is_first else set[str]()
    if stage.is_last:
        wanted |= {"norm", "norm" + NORM_BIAS}
        wanted |= {"embedding"} if has_head and traits.tied_embeddings else set()
    found = {p.name: _whole(p, traits, source, place) for p in outer if p.name in wanted}
    norms = {name: found.pop(name) for name in ("norm", "norm" + NORM_BIAS) if name in found}
    norm = _with_biases(norms, ("norm",), traits, place)["norm"] if stage.is_last else None
    positions = found.get("positions")
    head = _head(traits, source, place, found.get("embedding")) if has_head else None
    indices = indices_shown(stage.last - stage.first)
    layers = [_layer(traits, stage.first + i, source, place, wrap) for i in indices]
    return NativeDecoder(
        shard_traits(traits_of(stage, traits), shard),
        embedding=found["embedding"] if stage.is_first else None,
        positions=None if positions is None else positions[traits.first_position :],
        layers=layers,
        norm=norm,
        head=head,
        max_model_len=config.max_model_len,
        ops=ops(),
        recurrent=make_recurrent_ops(dtype) if traits.keeps_state else None,
        shared=shared,
        dtype=dtype,
    )


def _outer(traits: DecoderTraits, *, has_head: bool) -> list[Parameter]:
    return [p for p in outer_parameters(traits) if has_head or not p.name.startswith("head")]


def _all(traits: DecoderTraits, *, has_head: bool) -> Iterator[Parameter]:
    yield from _outer(traits, has_head=has_head)
    for i in range(len(traits.layers)):
        yield from layer_parameters(traits, i)


def _open_source(
    config: EngineConfig, traits: DecoderTraits, *, has_head: bool
) -> tuple[Source, DecoderTraits]:
    """Open the checkpoint, and compare all names and shapes with the traits.

    Returns:
        The checkpoint, and the traits with the head as it is stored.
    """
    folder, load_format = Path(config.model.path), config.load_format
    if load_format == "dummy":
        return RandomWeights(config.seed, getattr(torch, config.dtype)), traits
    if load_format in ("auto", "gguf") and config.model.is_gguf:
        source = GgufCheckpoint(folder)
        source.check([*_all(traits, has_head=has_head)])
        return source, traits
    if load_format not in ("auto", "safetensors"):
        raise TrouperValidationError(
            "must be auto, safetensors, gguf (of a GGUF file) or dummy",
            parameter="load_format",
            value=load_format,
        )
    scheme = None if config.model.is_gguf else read_scheme(config.model.hf_config)
    if scheme is not None and NAMES[traits.names].is_transposed:
        rule = "quantised checkpoints of a family that stores matrices as inputs by outputs (GPT-2) are not supported"
        raise UnsupportedFeatureError(f"quantization_config: {rule}", parameter="model")
    views, is_part = views_of(traits), is_text_part(config.model.architecture)
    checkpoint = Checkpoint(folder, scheme=scheme, is_part=is_part, views=views)
    names, embedding, head = NAMES[traits.names], embedding_name(traits), head_name(traits)
    if (not has_head or traits.tied_embeddings) and embedding not in checkpoint:
        # What the generating sibling wraps is stored bare, also by GPT-2's first files.
        base = names.base.partition(".")[0] + "."
        checkpoint = Checkpoint(folder, base, scheme, views=views)
    if traits.tied_embeddings and head in checkpoint and not checkpoint.are_equal(head, embedding):
        # By the flag the head is the embedding, but another one was trained and stored.
        traits = msgspec.structs.replace(traits, tied_embeddings=False)
    ignored = frozenset({head} if traits.tied_embeddings else ())
    ignored |= {name for name in checkpoint.shapes if name.endswith(names.masks)}
    unused = {x for x in checkpoint.shapes if is_of_other_uses(x, len(traits.layers))} - {head}
    if unused and has_head:
        logger.info(UNUSED_TENSORS, len(unused), ", ".join(sorted(unused)[:4]))
    ignored |= unused
    parameters = _all(traits, has_head=has_head)
    checkpoint.check(parameters, ignored=ignored if has_head else frozenset(checkpoint.shapes))
    if checkpoint.num_unused_scales:
        logger.info(ACTIVATION_SCALES, checkpoint.num_unused_scales, config.dtype)
    return checkpoint, traits


def _head(
    traits: DecoderTraits, source: Source, place: Placement, embedding: Tensor | None
) -> LinearMethod:
    """Pack the head, even if it is tied to the embedding.

    A tied matrix then exists twice: lookups need plain rows, but the GEMM of a decode step is 1.5 to 1.7 times faster on packed
    ones (32000 x 1024 bf16, one core: 5.9 -> 3.4 ms). The copy takes 7 % of the memory of a 0.5 B model.
    """
    name = "embedding" if traits.tied_embeddings else "head"
    whole = next(p for p in outer_parameters(traits) if p.name == name)
    parameter = sharded(msgspec.structs.replace(whole, name="head"), traits, place.shard)
    assert parameter is not None
    rows = source.integers(parameter, place.dtype) if place.device is None else None
    fmt: Format | None = "int8" if place.linear.quantization else None
    config = place.linear._replace(quantization=fmt)
    bias = None
    if traits.head_bias:
        whole = next(p for p in outer_parameters(traits) if p.name == "head.bias")
        part = sharded(whole, traits, place.shard)
        assert part is not None
        bias = _assemble(part, source, place)
    if rows is not None:
        return make_linear(rows, bias, config=config)
    if traits.tied_embeddings and embedding is not None:
        return make_linear(part_of(embedding, parameter.parts[0][2]), bias, config=config)
    return make_linear(_assemble(parameter, source, place), bias, config=config)


def adapted_parameters(traits: DecoderTraits) -> Iterator[Parameter]:
    """Yield the matrices of all layers to which adapters may be added.

    Embeddings, norms and the head are not among them. The checks of an adapter use the same list.
    """
    for layer in range(len(traits.layers)):
        for parameter in layer_parameters(traits, layer):
            name, _, kind = parameter.name.partition(".")
            if kind == "weight" and name in ADAPTED:
                yield parameter


def indices_shown(num_layers: int) -> Iterable[int]:
    """Yield the index of each layer, with a progress bar on terminals if loading takes longer than a second."""
    return tqdm(range(num_layers), "loading weights", delay=BAR_DELAY_S, disable=None, leave=False)


def _layer(
    traits: DecoderTraits, index: int, source: Source, place: Placement, wrap: Wrap | None
) -> DecoderLayer:
    mixing = traits.layers[index].mixer
    norms: dict[str, Tensor] = {}
    projections: dict[str, LinearMethod] = {}
    parameters = [
        part
        for parameter in layer_parameters(traits, index)
        if (part := sharded(parameter, traits, place.shard)) is not None
    ]
    for parameter in parameters:
        name, _, kind = parameter.name.partition(".")
        if kind == "weight":
            projections[name] = _projection(parameter, source, place)
        elif kind == "bias":
            bias = _assemble(parameter, source, place)
            projections[name].bias = _padded(bias) if name in SMALL else bias
        else:
            norms[name] = _assemble(parameter, source, place)
    if wrap is not None:
        projections = _wrapped(projections, parameters, wrap)
    norms = _with_biases(norms, _norms_of_layer(traits), traits, place)
    choice_bias = norms.pop(CHOICE_BIAS, None)
    mixer = None
    if mixing != "attention":
        tensors = {name: norms.pop(name) for name in MIXER_TENSORS if name in norms}
        mixer = make_mixer(mixing, traits, projections, tensors)
    elif traits.qk_norm in ("head", "own_head"):
        local = shard_traits(traits, place.shard)
        heads = (("q_norm", local.num_q_heads), ("k_norm", local.num_kv_heads))
        norms["head_norm"] = torch.cat(
            [_of_heads(norms.pop(name), count, traits) for name, count in heads]
        )
    return DecoderLayer(
        traits.layers[index],
        qkv=projections.get("qkv"),
        o=projections.get("o"),
        mixer=mixer,
        mlp=_mlp(projections, traits, index, choice_bias),
        **norms,
    )


def _norms_of_layer(traits: DecoderTraits) -> tuple[str, ...]:
    """Return the names of a layer's layer norms, which need biases. Returns none for a model with RMS norms."""
    if traits.norm == "rms":
        return ()
    qk_norms = ("q_norm", "k_norm") if traits.qk_norm else ()
    mlp_norm = () if traits.norm_placement == "parallel" else ("mlp_norm",)
    return ("attention_norm", *mlp_norm, *qk_norms)


def _with_biases(
    norms: dict[str, Tensor], wanted: Iterable[str], traits: DecoderTraits, place: Placement
) -> dict[str, Tensor]:
    """Join the weights and biases of each layer norm in one tensor. Missing ones are ones and zeros."""
    if traits.norm == "rms":
        return norms
    found = dict[str, Tensor]()
    for name in wanted:
        weight, bias = norms.get(name), norms.get(name + NORM_BIAS)
        if weight is None:
            weight = torch.ones(traits.hidden_size, dtype=place.dtype, device=place.device)
        bias = torch.zeros_like(weight) if bias is None else bias.to(weight.dtype)
        found[name] = torch.stack((weight, bias))
    return found


def _of_heads(norm: Tensor, num_heads: int, traits: DecoderTraits) -> Tensor:
    """Return a row of weights for each head, or with layer norms a row of weights and a row of biases."""
    if traits.is_interleaved:
        # The rows of q and k are reordered when they are read, so the weights of their norms must follow.
        order = row_order(traits.head_dim, pairs_of(traits))
        norm = norm.view(-1, traits.head_dim)[:, order]
    if traits.norm == "rms":
        return norm.view(-1, traits.head_dim).expand(num_heads, -1)
    return norm.view(2, -1, traits.head_dim).transpose(0, 1).expand(num_heads, -1, -1)


def _projection(parameter: Parameter, source: Source, place: Placement) -> LinearMethod:
    """Read one matrix, and pack it in the form that its product needs."""
    name = parameter.name.removesuffix(".weight")
    config = _linear_config(name, place.linear)
    integers = source.integers(parameter, place.dtype)
    if integers is not None and (place.device is not None or name in SMALL):
        tensor = dequantized(integers).to(place.device, place.dtype)
    elif integers is not None:
        return make_linear(integers, config=config)
    elif config.quantization is not None:
        _check_groups(parameter, config.quantization)
        return make_linear(_to_be_rounded(parameter, source, place), config=config)
    else:
        tensor = _assemble(parameter, source, place)
    return make_linear(_padded(tensor) if name in SMALL else tensor, config=config)


def _mlp(
    projections: dict[str, LinearMethod],
    traits: DecoderTraits,
    index: int,
    choice_bias: Tensor | None,
) -> Mlp:
    has_dense = "gate_up" in projections
    kind = GatedMlp if traits.mlp.is_gated else PlainMlp
    dense = kind(projections["gate_up"], projections["down"]) if has_dense else None
    experts = traits.experts
    if experts is None or not traits.layers[index].is_sparse:
        assert dense is not None
        return dense
    assert isinstance(dense, GatedMlp | None)
    routing = Routing(
        experts.count,
        experts.top_k,
        experts.is_normalised,
        has_shared_gate=dense is not None and experts.has_shared_gate,
        is_sigmoid=experts.is_sigmoid,
        scale=experts.scale,
        choice_bias=choice_bias,
    )
    gate_up, down = (
        [projections[f"{name}_{i}"] for i in range(experts.count)] for name in ("gate_up", "down")
    )
    return SparseMlp(projections["router"], make_experts(gate_up, down, routing), dense)


def _linear_config(name: str, config: LinearConfig) -> LinearConfig:
    """Return how one projection is packed: a router stays plain, and experts are packed for a single launch."""
    if name in SMALL:
        return config._replace(quantization=None)
    return config._replace(is_compressed=config.is_compressed and name in ADAPTED)


def _padded(router: Tensor) -> Tensor:
    """Pad a router's matrix or bias with zero outputs to whole registers, so that every kernel can multiply it."""
    missing = -len(router) % LANES
    return torch.cat((router, router.new_zeros((missing, *router.shape[1:]))))


def _wrapped(
    projections: dict[str, LinearMethod], parameters: Iterable[Parameter], wrap: Wrap
) -> dict[str, LinearMethod]:
    named = {parameter.name: parameter for parameter in parameters}
    return {
        name: wrap(named[f"{name}.weight"], linear) if name in ADAPTED else linear
        for name, linear in projections.items()
    }


def _whole(parameter: Parameter, traits: DecoderTraits, source: Source, place: Placement) -> Tensor:
    """Read a tensor that every rank has completely. Ranks share the pages of an embedding if its dtype is the model's."""
    if place.shard.size > 1 and place.device is None and parameter.name == "embedding":
        mapped = source.mapped(embedding_name(traits), place.dtype)
        if mapped is not None:
            return mapped
    return _assemble(parameter, source, place)


def _check_groups(parameter: Parameter, quantization: Format) -> None:
    num_in = parameter.sources[0][1][1]
    if not can_quantize(num_in, quantization):
        raise TrouperValidationError(
            f"groups of {GROUP} do not divide the {num_in} inputs of {parameter.name}",
            parameter="quantization",
            value=quantization,
        )


def _to_be_rounded(
    parameter: Parameter, source: Source, place: Placement
) -> Tensor | IntegerWeight:
    """Read a matrix and round it, with the scales of the whole, so that ranks do not change its integers.

    Those are other scales than the part's own where one is for all inputs of an output, and these are cut.
    """
    cut = parameter.parts[0][2]
    if cut.columns is None or place.linear.quantization != "int8":
        return _assemble(parameter, source, place)
    whole = _assemble(msgspec.structs.replace(parameter, cuts=()), source, place)
    return quantize(part_of(whole, cut), "int8", whole)


def _assemble(parameter: Parameter, source: Source, place: Placement) -> Tensor:
    """Read the sources of a parameter into one new tensor, which remains valid if the file is deleted."""
    shapes = parameter.part_shapes
    # In bf16, 1 + w of Gemma's norms would lose the last bits of w; see kernels/reference/norms.py.
    is_wide = parameter.offset or parameter.name in (*MIXER_TENSORS, CHOICE_BIAS)
    kept = torch.float32 if is_wide else place.dtype
    size = (sum(shape[0] for shape in shapes), *shapes[0][1:])
    fused = torch.empty(size, dtype=kept, device=place.device)
    first = 0
    for (name, whole, cut), shape in zip(parameter.parts, shapes, strict=True):
        source.read_into(name, whole, cut, fused[first : first + shape[0]])
        first += shape[0]
    return fused.add_(parameter.offset) if parameter.offset else fused
