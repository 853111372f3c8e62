"""Divide a model among workers: layers among pipeline stages, and each layer's tensors among tensor-parallel ranks.

Everything here is a pure function of the model's sizes, so all workers compute the same division without talking.

    tensor                          part of rank r of t                                  afterwards
    qkv                             the rows of N / t query heads and of their KV heads
    o, down                         the columns that multiply the rank's own activations sum over all ranks
    gate_up, also of each expert    the rows of M / t of gate, and of up
    biases of o and down            rank 0 has all of it, so the sum adds it once
    head, tied or not               rows of the vocabulary, in whole registers           logits are concatenated
    norm of all heads together      the rank's heads                                     sums of squares are added
    sinks of the attention          those of its query heads
    embedding, router, other norms  all of it

KV heads are divided if t divides their number. If their number divides t, t / H neighbouring ranks keep the same head.
"""

from collections.abc import Callable, Sequence
from typing import Self

import msgspec
import torch
from torch import Tensor

from trouper.actors.executor.models.families.registry import decoder_traits
from trouper.actors.executor.models.parameters import (
    WHOLE,
    Cut,
    HeadOrder,
    Parameter,
    Span,
    grouped_heads,
)
from trouper.actors.executor.models.traits import DecoderTraits, LayerTraits
from trouper.config.engine_config import EngineConfig
from trouper.config.kv_layout import short_step, tables_of
from trouper.config.parallel import Stage, split_layers
from trouper.errors import UnsupportedFeatureError, invalid
from trouper.kernels.codegen.units import LANES
from trouper.kernels.cpu.linear.quantization import BLOCK, IntegerWeight, ScaleBlocks

# Inputs that share a scale if weights are rounded to four bits.
INT4_GROUP = 32
OPTION = "tensor_parallel_size"


class Shard(msgspec.Struct, frozen=True):
    """One of the ranks among which each layer is divided, the only one by default.

    Attention heads and the widths of MLPs are divided evenly.
    """

    rank: int = 0
    size: int = 1

    def share(self, count: int) -> Span:
        """Return this rank's range of `count` evenly divided items.

        The config was checked before, so `count` is a multiple of the number of ranks.
        """
        each = count // self.size
        return self.rank * each, (self.rank + 1) * each

    def kv_heads(self, count: int) -> Span:
        """Return the range of KV heads to which this rank's query heads attend.

        If there are fewer KV heads than ranks, several ranks keep a copy of one head.
        """
        if count % self.size == 0:
            return self.share(count)
        head = self.rank * count // self.size
        return head, head + 1

    def vocabulary(self, size: int) -> Span:
        """Return the range of tokens for which this rank computes logits. The last rank may have fewer than the others."""
        each = -(-size // (LANES * self.size)) * LANES
        return self.rank * each, min(size, (self.rank + 1) * each)


ALONE = Shard()


class ModelPart(msgspec.Struct, frozen=True):
    """The part of a model that one worker computes: the layers of its stage, and its rank's share of each."""

    whole: DecoderTraits
    stage: Stage
    shard: Shard
    # Those of this part.
    traits: DecoderTraits

    @classmethod
    def of(cls, config: EngineConfig, stage: Stage | None = None, shard: Shard = ALONE) -> Self:
        """Read the config's model and cut it. Without a stage, all layers are here.

        Raises:
            TrouperValidationError: the model cannot be divided among this many ranks.
        """
        whole = decoder_traits(config.model.hf_config, config.model.architecture)
        if gives_blocks_back(config, whole):
            whole = with_tables(config, whole)
        stage = stage or Stage(0, 1, 0, len(whole.layers))
        check_shards(whole, shard.size, quantization=config.quantization)
        return cls(whole, stage, shard, shard_traits(traits_of(stage, whole), shard))


def gives_blocks_back(config: EngineConfig, traits: DecoderTraits) -> bool:
    """Whether layers with a window may have block tables of their own.

    Elsewhere all layers share one table, and their sequences keep all blocks: a state is saved with all keys before it, and a GPU's
    kernels read one table.  The tier on disk stores blocks of all layers.  If all tokens of a
    prompt see each other, they do so beyond a window.  A draft model reads the target's first table, which must keep all blocks.
    """
    if config.tier is not None or (
        config.media is not None and config.media.family.spans == "prompt"
    ):
        return False
    if config.draft_model is not None and (
        config.draft_model is config.model or all(layer.window for layer in traits.layers)
    ):
        return False
    is_paged = config.device == "cpu" and config.pooler is None
    return is_paged and traits.is_causal and not traits.keeps_state


def with_tables(config: EngineConfig, traits: DecoderTraits) -> DecoderTraits:
    """Assign a block table to each layer, if this saves memory because some layers have a window that sequences exceed."""
    longest = config.max_model_len
    windows = [
        None if layer.window is None or layer.window >= longest else layer.window
        for layer in traits.layers
    ]
    step = short_step(config.scheduler, config.media)
    num_drafting = 0.0
    if config.draft_model is not None:
        drafting = decoder_traits(config.draft_model.hf_config, config.draft_model.architecture)
        num_drafting = len(drafting.layers) * drafting.kv_size / traits.kv_size
    spans = [(stage.first, stage.last) for stage in model_stages(config, traits)]
    tables = tables_of(windows, longest, config.block_size, step, num_drafting, spans)
    if tables is None:
        return traits
    layers = tuple(
        msgspec.structs.replace(layer, window=window, table=table)
        for layer, window, table in zip(traits.layers, windows, tables, strict=True)
    )
    by_table = dict(zip(tables, windows, strict=True))
    of_tables = tuple(by_table[table] for table in sorted(by_table))
    return msgspec.structs.replace(traits, layers=layers, table_windows=of_tables)


def check_shards(traits: DecoderTraits, size: int, *, quantization: str | None = None) -> None:
    """Check that a model can be divided among this many ranks.

    Args:
        quantization: the format to which its weights are rounded at load.

    Raises:
        TrouperValidationError: it cannot; the message lists the possible numbers of ranks.
    """
    problem = _problem(traits, size, quantization)
    if problem is None:
        return
    counts = range(1, traits.num_q_heads + 1)
    possible = [n for n in counts if _problem(traits, n, quantization) is None]
    shown = ", ".join(map(str, possible))
    raise invalid(OPTION, f"{problem}; possible: {shown}", size)


def shard_traits(traits: DecoderTraits, shard: Shard) -> DecoderTraits:
    """Return the traits of a rank's part of each layer. The vocabulary remains that of the whole model."""
    if shard.size == 1:
        return traits
    size, experts = shard.size, traits.experts
    first, last = shard.kv_heads(traits.num_kv_heads)
    width = traits.mlp.intermediate_size // size
    if experts is not None:
        experts = msgspec.structs.replace(
            experts,
            intermediate_size=experts.intermediate_size // size,
            shared_size=experts.shared_size // size,
        )
        if not _has_dense_layers(traits):
            width = experts.intermediate_size
    return msgspec.structs.replace(
        traits,
        num_q_heads=traits.num_q_heads // size,
        num_kv_heads=last - first,
        mlp=msgspec.structs.replace(traits.mlp, intermediate_size=width),
        experts=experts,
    )


def sharded(parameter: Parameter, traits: DecoderTraits, shard: Shard) -> Parameter | None:
    """Return a parameter with the part of it that a rank keeps; None = it keeps nothing.

    Small tensors such as norms are kept by every rank.

    Args:
        traits: of the whole model.
    """
    if shard.size == 1:
        return parameter
    name, _, kind = parameter.name.partition(".")
    name = name.rstrip("0123456789").rstrip("_")
    if kind == "bias" and name in ("o", "down"):
        return parameter if shard.rank == 0 else None
    cut = SPLITS.get(name)
    if cut is None:
        return parameter
    return msgspec.structs.replace(parameter, cuts=cut(parameter, traits, shard))


def _heads(parameter: Parameter, traits: DecoderTraits, shard: Shard) -> tuple[Cut, ...]:
    if traits.qkv_by_group:
        q, kv = shard.share(traits.num_q_heads), shard.kv_heads(traits.num_kv_heads)
        return (grouped_heads(traits, q, kv),)
    q, kv = _q_span(traits, shard), _kv_span(traits, shard)
    blocks = (traits.q_size, q), (traits.kv_size, kv), (traits.kv_size, kv)
    return _rows(parameter, blocks)


def _head_inputs(_parameter: Parameter, traits: DecoderTraits, shard: Shard) -> tuple[Cut, ...]:
    return (Cut(columns=_q_span(traits, shard)),)


def _gate_and_up(parameter: Parameter, traits: DecoderTraits, shard: Shard) -> tuple[Cut, ...]:
    num_parts = 2 if traits.mlp.is_gated else 1
    width = sum(shape[0] for _, shape in parameter.sources) // num_parts
    return _rows(parameter, ((width, shard.share(width)),) * num_parts)


def _mlp_inputs(parameter: Parameter, _traits: DecoderTraits, shard: Shard) -> tuple[Cut, ...]:
    ((_, shape),) = parameter.sources
    return (Cut(columns=shard.share(shape[1])),)


def _vocabulary(_parameter: Parameter, traits: DecoderTraits, shard: Shard) -> tuple[Cut, ...]:
    return (Cut(rows=(shard.vocabulary(traits.vocab_size),)),)


def _q_norm(parameter: Parameter, traits: DecoderTraits, shard: Shard) -> tuple[Cut, ...]:
    return _norm(parameter, traits, shard.share(traits.num_q_heads))


def _k_norm(parameter: Parameter, traits: DecoderTraits, shard: Shard) -> tuple[Cut, ...]:
    return _norm(parameter, traits, shard.kv_heads(traits.num_kv_heads))


def _sinks(_parameter: Parameter, traits: DecoderTraits, shard: Shard) -> tuple[Cut, ...]:
    return (Cut(rows=(shard.share(traits.num_q_heads),)),)


def _norm(parameter: Parameter, traits: DecoderTraits, heads: Span) -> tuple[Cut, ...]:
    """Cut the norms of a range of heads: rows of one tensor, or tensors of their own."""
    if traits.qk_norm == "head":
        return ()
    first, last = heads
    width, num_sources = traits.head_dim, len(parameter.sources)
    if num_sources > 1:
        return tuple(
            Cut(rows=((0, width if first <= i < last else 0),)) for i in range(num_sources)
        )
    size = width if traits.qk_norm == "projection" else 1
    return (Cut(rows=((first * size, last * size),)),)


Split = Callable[[Parameter, DecoderTraits, Shard], tuple[Cut, ...]]
SPLITS: dict[str, Split] = {  # by the names of `DecoderLayer`; what is not here is whole
    "qkv": _heads,
    "o": _head_inputs,
    "gate_up": _gate_and_up,
    "down": _mlp_inputs,
    "head": _vocabulary,
    "q_norm": _q_norm,
    "k_norm": _k_norm,
    "q_norm_bias": _q_norm,
    "k_norm_bias": _k_norm,
    "sinks": _sinks,
}


def _rows(parameter: Parameter, blocks: Sequence[tuple[int, Span]]) -> tuple[Cut, ...]:
    """Cut stacked blocks of rows, in one source or in several.

    Args:
        blocks: the rows of each, and the kept rows among them.
    """
    left = list(blocks)
    cuts: list[Cut] = []
    for _, shape, whole in parameter.parts:
        spans: list[Span] = []
        begin = 0
        while begin < shape[0]:
            size, (first, last) = left.pop(0)
            spans.append((begin + first, begin + last))
            begin += size
        cuts.append(Cut(rows=tuple(spans), heads=whole.heads))
    return tuple(cuts)


def _q_span(traits: DecoderTraits, shard: Shard) -> Span:
    first, last = shard.share(traits.num_q_heads)
    return first * traits.head_dim, last * traits.head_dim


def _kv_span(traits: DecoderTraits, shard: Shard) -> Span:
    first, last = shard.kv_heads(traits.num_kv_heads)
    return first * traits.head_dim, last * traits.head_dim


def _has_dense_layers(traits: DecoderTraits) -> bool:
    return not all(layer.is_sparse for layer in traits.layers)


def _problem(traits: DecoderTraits, size: int, quantization: str | None) -> str | None:
    """Return the reason why this number of ranks cannot share the model, or None if it can."""
    if size == 1:
        return None
    if traits.keeps_state:
        return "a model with recurrent layers cannot be divided among ranks yet"
    num_q, num_kv = traits.num_q_heads, traits.num_kv_heads
    if num_q % size:
        return f"{size} does not divide {num_q} query heads"
    if num_kv % size and size % num_kv:
        return f"{num_kv} KV heads cannot be shared out among {size} ranks"
    step = INT4_GROUP if quantization == "int4" else LANES
    widths = traits.mlp_widths if _has_dense_layers(traits) else traits.mlp_widths[1:]
    for width in widths:
        if width % (step * size):
            return f"{size} does not divide an MLP of {width} into multiples of {step}"
    if quantization == "int4" and traits.q_size % (INT4_GROUP * size):
        return f"{size} does not divide heads of {traits.q_size} numbers into multiples of {step}"
    first, end = Shard(size - 1, size).vocabulary(traits.vocab_size)
    if end - first < LANES:  # kernels finish logits by whole registers
        return f"{size} ranks share out a vocabulary of {traits.vocab_size} in multiples of {LANES}"
    return None


def model_stages(config: EngineConfig, traits: DecoderTraits) -> tuple[Stage, ...]:
    """Divide the layers among pipeline stages: by the config's partition, or so that all stages read about as many bytes.

    Raises:
        TrouperValidationError: there are more stages than layers, or the partition does not fit.
    """
    head = traits.vocab_size * traits.hidden_size
    return split_layers(
        [_layer_size(traits, layer) for layer in traits.layers],
        config.num_stages,
        head_cost=head,
        partition=config.layer_partition,
    )


def traits_of(stage: Stage, traits: DecoderTraits) -> DecoderTraits:
    """Return the traits of the model without the layers of other stages.

    Layers keep their windows and other differences.
    """
    return msgspec.structs.replace(traits, layers=traits.layers[stage.first : stage.last])


def _layer_size(traits: DecoderTraits, layer: LayerTraits) -> int:
    """Count the weights of a layer's products. All experts count, because a step of many tokens reads all of them."""
    width, num_matrices = traits.mlp.intermediate_size, 3 if traits.mlp.is_gated else 2
    if layer.is_sparse and traits.experts is not None:
        experts = traits.experts
        width = experts.count * experts.intermediate_size + experts.shared_size
        num_matrices = 3
    return traits.hidden_size * (_mixer_size(traits, layer) + num_matrices * width)


def _mixer_size(traits: DecoderTraits, layer: LayerTraits) -> int:
    """Count the inputs and outputs of a layer's attention or recurrent mixer."""
    delta, mamba = traits.gated_delta, traits.mamba2
    if layer.mixer == "gated_delta" and delta is not None:
        return delta.num_channels + 2 * delta.v_size + 2 * delta.num_v_heads
    if layer.mixer == "mamba2" and mamba is not None:
        return 2 * mamba.size + mamba.num_channels + mamba.num_heads
    if layer.mixer == "short_conv":
        return 4 * traits.hidden_size
    return (2 + traits.attention_gate) * traits.q_size + 2 * traits.kv_size


def part_of(x: Tensor, cut: Cut) -> Tensor:
    """Return the part of a tensor: a view if its rows are one range, so that no more of a mapped file is read."""
    if cut.columns is not None:
        first, last = cut.columns
        x = x.narrow(1, first, last - first)
    if cut.rows is not None:
        parts = [x.narrow(0, first, last - first) for first, last in cut.rows]
        x = parts[0] if len(parts) == 1 else torch.cat(parts)
    return x if cut.heads is None else x[row_order(len(x), cut.heads)]


def row_order(num_rows: int, heads: HeadOrder) -> Tensor:
    """Return the stored position of each row, such that interleaved rotary pairs become the two halves of a head."""
    width, rotated = heads
    rows_HD = torch.arange(num_rows).view(-1, width)
    pairs: Tensor = rows_HD[:, :rotated].reshape(len(rows_HD), -1, 2).transpose(1, 2).flatten(1)
    return torch.cat((pairs, rows_HD[:, rotated:]), dim=1).flatten()


def part_of_integers(weight: IntegerWeight, cut: Cut, name: str) -> IntegerWeight:
    """Return the part of a quantized matrix with its scales; the numbers are the same as in the whole matrix.

    Args:
        name: the matrix's name, for errors.

    Raises:
        TrouperValidationError: the part ends within a group of inputs that share a scale.
        UnsupportedFeatureError: the columns of the matrix are stored in another order (act-order).
    """
    if cut == WHOLE:
        return weight
    groups = Cut(cut.rows, _groups(weight, cut.columns, name), cut.heads)

    def kept(x_OG: Tensor | None) -> Tensor | None:
        return None if x_OG is None else part_of(x_OG, groups).contiguous()

    return weight._replace(
        q_OI=part_of(weight.q_OI, cut).contiguous(),
        scales_OG=part_of(weight.scales_OG, groups).contiguous(),
        zeros_OG=kept(weight.zeros_OG),
        minima_OG=kept(weight.minima_OG),
        blocks=None if weight.blocks is None else _part_of_blocks(weight.blocks, groups, cut),
    )


def _part_of_blocks(blocks: ScaleBlocks, groups: Cut, cut: Cut) -> ScaleBlocks | None:
    """Return the part of scales in blocks, or None if it ends within a block: then the scales themselves are used."""
    of_blocks = groups
    if groups.columns is not None and cut.columns is not None:
        if any(column % BLOCK for column in cut.columns):
            return None
        first, last = cut.columns
        of_blocks = Cut(cut.rows, (first // BLOCK, last // BLOCK), cut.heads)
    scales_OG, factors_OB, minima_OG, minimum_factors_OB = blocks
    return ScaleBlocks(
        part_of(scales_OG, groups).contiguous(),
        part_of(factors_OB, of_blocks).contiguous(),
        None if minima_OG is None else part_of(minima_OG, groups).contiguous(),
        None if minimum_factors_OB is None else part_of(minimum_factors_OB, of_blocks).contiguous(),
    )


def _groups(weight: IntegerWeight, columns: Span | None, name: str) -> Span | None:
    """Return the range of groups that make up a range of inputs, or None for all of them."""
    (num_in, num_groups) = weight.q_OI.shape[1], weight.scales_OG.shape[1]
    if columns is None or columns == (0, num_in):
        return None
    if weight.order_I is not None:
        raise UnsupportedFeatureError(
            f"{OPTION}: the inputs of {name} are in an order of their own (act-order), so they cannot be divided among ranks",
            parameter=OPTION,
        )
    if num_groups == 1:
        return None
    size, (first, last) = num_in // num_groups, columns
    if first % size or last % size:
        rule = f"the {num_in} inputs of {name} have scales for {size} each, which a part of {last - first} would cut"
        raise invalid(OPTION, rule)
    return first // size, last // size
