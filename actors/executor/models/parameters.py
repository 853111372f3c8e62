"""List the tensors that a decoder with given traits needs, with their names and shapes in the checkpoint.

Loaders compare this list with the checkpoint before they read any tensor, and then read exactly these tensors.
"""

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from trouper.actors.executor.models.names import NAMES, Names
from trouper.actors.executor.models.traits import DecoderTraits, ExpertsTraits, Mixer

Shape = tuple[int, ...]
# The first item, and the one behind the last.
Span = tuple[int, int]


class HeadOrder(NamedTuple):
    """Heads of `width` rows. The first `rotated` rows are stored as interleaved rotary pairs, and kept as two halves."""

    width: int
    rotated: int


class Cut(msgspec.Struct, frozen=True):
    """The kept part of a stored tensor: ranges of its rows, concatenated, and a range of its columns.

    None means all rows or columns. With `heads`, the kept rows are whole heads, and the rows of each head are reordered.
    The order applies to everything read by a cut: weights, biases, quantized integers with their scales, and the
    outputs of adapters.
    """

    rows: tuple[Span, ...] | None = None
    columns: Span | None = None
    heads: HeadOrder | None = None

    def shape_of(self, whole: Shape) -> Shape:
        """Return the shape of this part of a tensor with the shape `whole`.

        Ranges of rows and of columns apply independently. Without ranges it is the whole shape.
        """
        num_rows, *columns = whole
        if self.rows is not None:
            num_rows = sum(last - first for first, last in self.rows)
        if self.columns is not None:
            first, last = self.columns
            columns = [last - first]
        return num_rows, *columns


WHOLE = Cut()
# The suffix of the name of a norm's biases.
NORM_BIAS = "_bias"
# The biases of experts that count only for their choice.
CHOICE_BIAS = "choice_bias"


class Parameter(msgspec.Struct, frozen=True):
    """One tensor of the decoder: the concatenated rows of stored tensors, or of a part of each.

    `sources` are names in the checkpoint with their shapes. `cuts` has one part for each source, or is empty if all of them
    are read whole. `offset` is added to the numbers while they are read.
    """

    name: str
    sources: tuple[tuple[str, Shape], ...]
    offset: float = 0.0
    cuts: tuple[Cut, ...] = ()

    @property
    def parts(self) -> tuple[tuple[str, Shape, Cut], ...]:
        """Return the name and shape of each source, with the part of it to keep.

        A parameter may consist of several stored tensors, such as the three of q, k and v.
        """
        cuts = self.cuts or (WHOLE,) * len(self.sources)
        return tuple((*source, cut) for source, cut in zip(self.sources, cuts, strict=True))

    @property
    def part_shapes(self) -> tuple[Shape, ...]:
        """Return the shapes of the kept parts of the sources."""
        return tuple(cut.shape_of(shape) for _, shape, cut in self.parts)


def embedding_name(traits: DecoderTraits) -> str:
    """Return the name of the embedding's tensor."""
    names = NAMES[traits.names]
    return f"{names.base}{names.embedding}.weight"


def head_name(traits: DecoderTraits) -> str:
    """Return the name of the head's matrix. Checkpoints with a tied head may omit it."""
    return f"{NAMES[traits.names].head}.weight"


def outer_parameters(traits: DecoderTraits) -> Iterator[Parameter]:
    """Yield the tensors outside of the layers: embeddings, the last norm and the head.

    A head tied to the embedding is not a tensor of its own.
    """
    names, hidden = NAMES[traits.names], traits.hidden_size
    table = (traits.vocab_size, hidden)
    yield Parameter("embedding", ((embedding_name(traits), table),))
    if traits.first_position is not None:
        rows = traits.first_position + traits.max_position, hidden
        yield Parameter("positions", ((f"{names.base}{names.positions}.weight", rows),))
    yield from _norm(traits, "norm", names.base + names.norm)
    if not traits.tied_embeddings:
        yield Parameter("head", ((head_name(traits), table),))
    if traits.head_bias:
        yield Parameter("head.bias", ((f"{names.head}.bias", (traits.vocab_size,)),))


def layer_parameters(traits: DecoderTraits, layer: int) -> Iterator[Parameter]:
    """Yield the tensors of one layer under the names of `DecoderLayer`.

    Each comes with the names and shapes of its sources in the checkpoint.
    """
    names = NAMES[traits.names]
    prefix = f"{names.base}{names.layers}{layer}."
    for name, norm in _norms(traits, names):
        yield from _norm(traits, name, prefix + norm)
    mixer = traits.layers[layer].mixer
    if mixer == "attention":
        yield from _qk_norms(traits, names, prefix)
    else:
        yield from _mixer_tensors(traits, names, mixer, prefix)
    if traits.has_sinks:
        yield Parameter("sinks", ((f"{prefix}self_attn.sinks", (traits.num_q_heads,)),))
    is_sparse = traits.layers[layer].is_sparse
    mlp = _mlp(traits, names)
    if is_sparse and traits.experts is not None:
        mlp = _experts(traits, names, traits.experts)
        if traits.experts.has_choice_bias:
            stored = f"{prefix}{EXPERT_NAMES[traits.experts.names].module}.expert_bias"
            yield Parameter(CHOICE_BIAS, ((stored, (traits.experts.count,)),))
    for name, module, parts, num_inputs, has_bias in (*_mixer(traits, names, mixer), *mlp):
        module = module and f"{module}."
        for kind, shape in (("weight", (num_inputs,)), ("bias", ())):
            if kind == "weight" or has_bias:
                sources = (
                    (f"{prefix}{module}{part}.{kind}", (size, *shape)) for part, size in parts
                )
                cuts = _order_of_rows(traits, name)
                yield Parameter(f"{name}.{kind}", tuple(sources), cuts=cuts)


def _order_of_rows(traits: DecoderTraits, name: str) -> tuple[Cut, ...]:
    """Return the cuts of a projection's sources if their rows are stored in another order than they are kept."""
    delta = traits.gated_delta
    if name == "in_proj" and delta is not None and delta.has_qkvz:
        share = delta.v_size // delta.num_k_heads
        return parts_of_heads(delta.num_k_heads, (delta.k_dim, delta.k_dim, share, share))
    if name == "gates" and delta is not None and delta.has_ba:
        share = delta.num_v_heads // delta.num_k_heads
        return parts_of_heads(delta.num_k_heads, (share, share))
    if name != "qkv":
        return ()
    if traits.attention_gate:
        queries, gates = (
            Cut(rows=tuple((first, first + traits.head_dim) for first in firsts))
            for firsts in (
                range(0, 2 * traits.q_size, 2 * traits.head_dim),
                range(traits.head_dim, 2 * traits.q_size, 2 * traits.head_dim),
            )
        )
        return queries, WHOLE, WHOLE, gates
    if traits.qkv_by_group:
        return (grouped_heads(traits),)
    if traits.is_interleaved:
        turned = Cut(heads=pairs_of(traits))
        return turned, turned, WHOLE
    return ()


def parts_of_heads(num_heads: int, sizes: tuple[int, ...]) -> tuple[Cut, ...]:
    """Return the rows of each part in a matrix that has for one head after another the rows of all parts.

    Args:
        sizes: the rows of each part that belong to one head.
    """
    width, cuts, first = sum(sizes), list[Cut](), 0
    for size in sizes:
        firsts = range(first, num_heads * width, width)
        cuts.append(Cut(rows=tuple((begin, begin + size) for begin in firsts)))
        first += size
    return tuple(cuts)


def pairs_of(traits: DecoderTraits) -> HeadOrder:
    """Return the row order of a head in a model with interleaved rotation.

    Attention expects the two numbers of a pair in two halves, so rows are reordered when they are loaded.
    """
    return HeadOrder(traits.head_dim, traits.ropes[0].width)


def grouped_heads(traits: DecoderTraits, q: Span | None = None, kv: Span | None = None) -> Cut:
    """Return the rows of some query heads, keys and values in a matrix stored by KV head.

    Args:
        q: the first query head, and one past the last; None = all.
        kv: likewise, of the KV heads.
    """
    width = traits.head_dim
    num_shared = traits.num_q_heads // traits.num_kv_heads
    size = (num_shared + 2) * width
    q_heads, kv_heads = (
        range(*(q or (0, traits.num_q_heads))),
        range(*(kv or (0, traits.num_kv_heads))),
    )
    firsts = [i // num_shared * size + i % num_shared * width for i in q_heads]
    firsts += [i * size + num_shared * width for i in kv_heads]
    firsts += [i * size + (num_shared + 1) * width for i in kv_heads]
    return Cut(rows=tuple((first, first + width) for first in firsts))


def _norm(traits: DecoderTraits, name: str, module: str) -> Iterator[Parameter]:
    """Yield the weights and biases of one norm of the hidden state, if the family's norms have them."""
    shape = (traits.hidden_size,)
    if traits.norm_has_weight:
        yield Parameter(name, ((f"{module}.weight", shape),), traits.norm_offset)
    if traits.norm_has_bias:
        yield Parameter(name + NORM_BIAS, ((f"{module}.bias", shape),))


def _norms(traits: DecoderTraits, names: Names) -> Iterator[tuple[str, str]]:
    """Yield (trouper's name, the checkpoint's name) of each norm of a layer, which depend on where the family has norms."""
    if traits.norm_placement != "post":
        yield "attention_norm", names.attention_norm
    if traits.norm_placement in ("pre", "parallel_apart"):
        yield "mlp_norm", names.mlp_norm
    elif traits.norm_placement in ("post", "sandwich"):
        yield "attention_post_norm", names.attention_post_norm
        yield "mlp_post_norm", names.mlp_post_norm
    if traits.norm_placement == "sandwich":
        yield "mlp_norm", names.inner_mlp_norm


def _qk_norms(traits: DecoderTraits, names: Names, prefix: str) -> Iterator[Parameter]:
    """Yield the norms of queries and keys: one for all heads, one for each head, or one over all heads together."""
    kinds = ("weight", "bias") if traits.qk_norm_has_bias else ("weight",)
    sides = (
        ("q_norm", names.q_norm, traits.num_q_heads),
        ("k_norm", names.k_norm, traits.num_kv_heads),
    )
    for name, module, num_heads in sides if traits.qk_norm else ():
        for kind in kinds:
            own = name + (NORM_BIAS if kind == "bias" else "")
            if traits.qk_norm == "own_head" and traits.names == "stablelm":
                heads = (f"{prefix}{module}.norms.{i}.{kind}" for i in range(num_heads))
                sources = tuple((head, (traits.head_dim,)) for head in heads)
            else:
                shapes = {
                    "head": (traits.head_dim,),
                    "own_head": (num_heads, traits.head_dim),
                    "projection": (num_heads * traits.head_dim,),
                }
                sources = ((f"{prefix}{module}.{kind}", shapes[traits.qk_norm or "head"]),)
            offset = traits.norm_offset if kind == "weight" else 0.0
            yield Parameter(own, sources, offset)


Projection = tuple[str, str, tuple[tuple[str, int], ...], int, bool]
"""Trouper's name, the checkpoint's module, its parts with their rows, the number of columns, and whether it has a bias."""


def _attention(traits: DecoderTraits, names: Names) -> Iterator[Projection]:
    q, kv, hidden = traits.q_size, traits.kv_size, traits.hidden_size
    sizes = (q, kv, kv) if len(names.qkv) > 1 else (q + 2 * kv,)
    qkv = tuple(zip(names.qkv, sizes, strict=True))
    if traits.attention_gate:
        # The matrix of the queries has the rows of a query and of its gate in turn; both are kept apart.
        doubled = [(name, 2 * q) for name in names.qkv[:1]]
        qkv = (*doubled, *qkv[1:], *doubled)
    yield "qkv", names.attention, qkv, hidden, traits.qkv_bias
    yield "o", names.attention, ((names.o, hidden),), q, traits.o_bias


def _mixer(traits: DecoderTraits, names: Names, mixer: Mixer) -> Iterator[Projection]:
    """Yield the products of what mixes a layer's tokens."""
    hidden = traits.hidden_size
    delta, mamba, short = traits.gated_delta, traits.mamba2, traits.short_conv
    if mixer == "gated_delta" and delta is not None:
        module, heads = names.gated_delta, delta.num_v_heads
        inputs = ("in_proj_qkv", delta.num_channels), ("in_proj_z", delta.v_size)
        gates = ("in_proj_b", heads), ("in_proj_a", heads)
        if delta.has_qkvz:
            inputs = (("in_proj_qkvz", delta.num_channels + delta.v_size),) * 4
        if delta.has_ba:
            gates = (("in_proj_ba", 2 * heads),) * 2
        yield "in_proj", module, inputs, hidden, False
        yield "gates", module, gates, hidden, False
        yield "out_proj", module, (("out_proj", hidden),), delta.v_size, False
    elif mixer == "mamba2" and mamba is not None:
        size = mamba.size + mamba.num_channels + mamba.num_heads
        yield "in_proj", names.mamba2, (("in_proj", size),), hidden, mamba.has_bias
        yield "out_proj", names.mamba2, (("out_proj", hidden),), mamba.size, mamba.has_bias
    elif mixer == "short_conv" and short is not None:
        module, has_bias = names.short_conv, short.has_bias
        yield "in_proj", module, (("in_proj", 3 * hidden),), hidden, has_bias
        yield "out_proj", module, (("out_proj", hidden),), hidden, has_bias
    else:
        yield from _attention(traits, names)


# Tensors of recurrent mixers by their names here, which are kept in float32.
MIXER_TENSORS = ("conv_weight", "conv_bias", "a_log", "dt_bias", "skip", "gated_norm")


def _mixer_tensors(
    traits: DecoderTraits, names: Names, mixer: Mixer, prefix: str
) -> Iterator[Parameter]:
    """Yield the tensors of a recurrent mixer that are not products."""
    delta, mamba, short = traits.gated_delta, traits.mamba2, traits.short_conv
    found: list[tuple[str, str, Shape]] = []
    if mixer == "gated_delta" and delta is not None:
        module, heads = names.gated_delta, (delta.num_v_heads,)
        found = [
            ("conv_weight", "conv1d.weight", (delta.num_channels, 1, delta.taps)),
            ("a_log", "A_log", heads),
            ("dt_bias", "dt_bias", heads),
            ("gated_norm", "norm.weight", (delta.v_dim,)),
        ]
    elif mixer == "mamba2" and mamba is not None:
        module, heads = names.mamba2, (mamba.num_heads,)
        found = [
            ("conv_weight", "conv1d.weight", (mamba.num_channels, 1, mamba.taps)),
            ("a_log", "A_log", heads),
            ("dt_bias", "dt_bias", heads),
            ("skip", "D", heads),
            ("gated_norm", "norm.weight", (mamba.size,)),
        ]
        if mamba.has_conv_bias:
            found.append(("conv_bias", "conv1d.bias", (mamba.num_channels,)))
    elif short is not None:
        module, hidden = names.short_conv, traits.hidden_size
        found = [("conv_weight", "conv.weight", (hidden, 1, short.taps))]
        if short.has_bias:
            found.append(("conv_bias", "conv.bias", (hidden,)))
    else:
        raise AssertionError(mixer)
    for name, stored, shape in found:
        yield Parameter(name, ((f"{prefix}{module}.{stored}", shape),))


def _mlp(traits: DecoderTraits, names: Names) -> Iterator[Projection]:
    width, has_bias, hidden = traits.mlp.intermediate_size, traits.mlp.has_bias, traits.hidden_size
    # A family without a gate only has the second of Llama's two modules.
    modules = names.gate_up if traits.mlp.is_gated else names.gate_up[-1:]
    size = 2 * width if traits.mlp.is_gated and len(modules) == 1 else width
    gate_up = tuple((module, size) for module in modules)
    yield "gate_up", names.mlp, gate_up, hidden, has_bias
    yield "down", names.mlp, ((names.down, hidden),), width, has_bias


class ExpertNames(NamedTuple):
    """The names of a mixture's modules. If one tensor contains all experts, `weights/layouts.py` finds the part of each."""

    module: str = "mlp"
    router: str = "gate"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")


EXPERT_NAMES = {
    "mlp": ExpertNames(),
    "block_sparse_moe": ExpertNames("block_sparse_moe", projections=("w1", "w3", "w2")),
    "gpt_oss": ExpertNames(router="router"),
    "qwen3_vl_moe": ExpertNames(),
    "granite_moe": ExpertNames("block_sparse_moe", router="router.layer"),
    "lfm2_moe": ExpertNames("feed_forward", projections=("w1", "w3", "w2")),
}


def _experts(traits: DecoderTraits, names: Names, experts: ExpertsTraits) -> Iterator[Projection]:
    """Yield the router with the gate of a shared expert below it, then the shared expert, then the others."""
    hidden, width, shared = traits.hidden_size, experts.intermediate_size, experts.shared_size
    module, router, (gate, up, down) = EXPERT_NAMES[experts.names]
    has_bias = experts.has_bias
    has_gate = shared > 0 and experts.has_shared_gate
    parts = ((router, experts.count), *([("shared_expert_gate", 1)] if has_gate else []))
    yield "router", module, parts, hidden, has_bias
    if shared and not has_gate:
        yield from _mlp(traits, names)
    elif shared:
        own = f"{module}.shared_expert"
        yield "gate_up", own, ((gate, shared), (up, shared)), hidden, has_bias
        yield "down", own, ((down, hidden),), shared, has_bias
    for i in range(experts.count):
        own = f"{module}.experts.{i}"
        yield f"gate_up_{i}", own, ((gate, width), (up, width)), hidden, has_bias
        yield f"down_{i}", own, ((down, hidden),), width, has_bias
