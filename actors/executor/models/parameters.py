"""Traits -> the tensors that a checkpoint must hold, with their names and shapes."""

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from trouper.actors.executor.models.traits import DecoderTraits, ExpertsTraits

Shape = tuple[int, ...]
Span = tuple[int, int]  # the first, and one past the last


class Cut(msgspec.Struct, frozen=True):
    """The part of a stored tensor that is kept: ranges of its rows, one below the other, and a range of its columns."""

    rows: tuple[Span, ...] | None = None  # None = all
    columns: Span | None = None

    def shape_of(self, whole: Shape) -> Shape:
        """Return the shape of this part of a tensor of that shape."""
        num_rows, *columns = whole
        if self.rows is not None:
            num_rows = sum(last - first for first, last in self.rows)
        if self.columns is not None:
            first, last = self.columns
            columns = [last - first]
        return num_rows, *columns


WHOLE = Cut()


class Parameter(msgspec.Struct, frozen=True):
    """One tensor of the decoder: the rows of `sources`, or of a part of each, one below the other."""

    name: str
    sources: tuple[tuple[str, Shape], ...]  # (name in the checkpoint, its shape)
    offset: float = 0.0  # added on loading
    cuts: tuple[Cut, ...] = ()  # of the sources, one each; none: all of them are whole

    @property
    def parts(self) -> tuple[tuple[str, Shape, Cut], ...]:
        """The sources, each with the part of it that is kept."""
        cuts = self.cuts or (WHOLE,) * len(self.sources)
        return tuple((*source, cut) for source, cut in zip(self.sources, cuts, strict=True))

    @property
    def part_shapes(self) -> tuple[Shape, ...]:
        """The shapes of those parts."""
        return tuple(cut.shape_of(shape) for _, shape, cut in self.parts)


EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


def outer_parameters(traits: DecoderTraits) -> Iterator[Parameter]:
    """Yield the tensors outside of the layers."""
    table = (traits.vocab_size, traits.hidden_size)
    yield Parameter("embedding", ((EMBEDDING, table),))
    yield Parameter("norm", (("model.norm.weight", (traits.hidden_size,)),), traits.norm_offset)
    if not traits.tied_embeddings:
        yield Parameter("head", ((HEAD, table),))


def layer_parameters(traits: DecoderTraits, layer: int) -> Iterator[Parameter]:
    """Yield the tensors of one layer under the names of `DecoderLayer`."""
    prefix = f"model.layers.{layer}."
    for name, norm, width in _norms(traits):
        yield Parameter(name, ((f"{prefix}{norm}.weight", (width,)),), traits.norm_offset)
    if traits.has_sinks:
        yield Parameter("sinks", ((f"{prefix}self_attn.sinks", (traits.num_q_heads,)),))
    is_sparse = traits.layers[layer].is_sparse
    mlp = _experts(traits, traits.experts) if is_sparse and traits.experts else _mlp(traits)
    for name, module, parts, num_inputs, has_bias in (*_attention(traits), *mlp):
        for kind, shape in (("weight", (num_inputs,)), ("bias", ())):
            if kind == "weight" or has_bias:
                sources = (
                    (f"{prefix}{module}.{part}.{kind}", (size, *shape)) for part, size in parts
                )
                yield Parameter(f"{name}.{kind}", tuple(sources))


def _norms(traits: DecoderTraits) -> Iterator[tuple[str, str, int]]:
    """Yield (our name, the checkpoint's name, width).  The checkpoint's names depend on which norms there are."""
    hidden = traits.hidden_size
    if traits.norm_placement != "post":
        yield "attention_norm", "input_layernorm", hidden
    if traits.norm_placement == "pre":
        yield "mlp_norm", "post_attention_layernorm", hidden
    else:
        yield "attention_post_norm", "post_attention_layernorm", hidden
        yield "mlp_post_norm", "post_feedforward_layernorm", hidden
    if traits.norm_placement == "sandwich":
        yield "mlp_norm", "pre_feedforward_layernorm", hidden
    if traits.qk_norm:
        is_head = traits.qk_norm == "head"
        yield "q_norm", "self_attn.q_norm", traits.head_dim if is_head else traits.q_size
        yield "k_norm", "self_attn.k_norm", traits.head_dim if is_head else traits.kv_size


Projection = tuple[str, str, tuple[tuple[str, int], ...], int, bool]
"""Our name, the checkpoint's module, its parts and their rows, columns, has a bias."""


def _attention(traits: DecoderTraits) -> Iterator[Projection]:
    q, kv, hidden = traits.q_size, traits.kv_size, traits.hidden_size
    qkv = (("q_proj", q), ("k_proj", kv), ("v_proj", kv))
    if traits.fused_checkpoint:
        qkv = (("qkv_proj", q + 2 * kv),)
    yield "qkv", "self_attn", qkv, hidden, traits.qkv_bias
    yield "o", "self_attn", (("o_proj", hidden),), q, traits.o_bias


def _mlp(traits: DecoderTraits) -> Iterator[Projection]:
    width, has_bias, hidden = traits.mlp.intermediate_size, traits.mlp.has_bias, traits.hidden_size
    gate_up = (("gate_proj", width), ("up_proj", width))
    if traits.fused_checkpoint:
        gate_up = (("gate_up_proj", 2 * width),)
    yield "gate_up", "mlp", gate_up, hidden, has_bias
    yield "down", "mlp", (("down_proj", hidden),), width, has_bias


class ExpertNames(NamedTuple):
    """The names of a mixture's modules; where one tensor holds all experts, `weights/stacks.py` finds each one's part."""

    module: str = "mlp"
    router: str = "gate"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")


EXPERT_NAMES = {
    "mlp": ExpertNames(),
    "block_sparse_moe": ExpertNames("block_sparse_moe", projections=("w1", "w3", "w2")),
    "gpt_oss": ExpertNames(router="router"),
    "granite_moe": ExpertNames("block_sparse_moe", router="router.layer"),
}


def _experts(traits: DecoderTraits, experts: ExpertsTraits) -> Iterator[Projection]:
    """Yield the router, with the gate of a shared expert below it; that expert; then the others."""
    hidden, width, shared = traits.hidden_size, experts.intermediate_size, experts.shared_size
    module, router, (gate, up, down) = EXPERT_NAMES[experts.names]
    has_bias = experts.has_bias
    parts = ((router, experts.count), *([("shared_expert_gate", 1)] if shared else []))
    yield "router", module, parts, hidden, has_bias
    if shared:
        own = f"{module}.shared_expert"
        yield "gate_up", own, ((gate, shared), (up, shared)), hidden, has_bias
        yield "down", own, ((down, hidden),), shared, has_bias
    for i in range(experts.count):
        own = f"{module}.experts.{i}"
        yield f"gate_up_{i}", own, ((gate, width), (up, width)), hidden, has_bias
        yield f"down_{i}", own, ((down, hidden),), width, has_bias
