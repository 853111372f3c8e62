"""The parts that ranks keep: together each tensor exactly once, and the same whatever rank asks."""

import numpy as np
import pytest

from trouper.actors.executor.models.families.registry import READERS, decoder_traits
from trouper.actors.executor.models.parameters import layer_parameters, outer_parameters
from trouper.actors.executor.models.sharding import (
    INT4_GROUP,
    Shard,
    check_shards,
    shard_traits,
    sharded,
)
from trouper.errors import TrouperValidationError
from trouper.kernels.cpu.linear.quantization import GROUP

BASE = {
    "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
    "attention_bias": True, "mlp_bias": True, "hidden_act": "silu", "num_experts": 3,
    "num_local_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 256, "decoder_sparse_step": 2, "tie_word_embeddings": False,
    "attention_types": [[["global", "local"], 1]], "rotary_dim": 8,
}  # fmt: skip
WHOLE = ("embedding", "norm", "router.weight", "router.bias", "attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm", "positions", "norm_bias", "attention_norm_bias", "mlp_norm_bias")  # fmt: skip


# Without these its layers would be recurrent.
OWN = {
    "GraniteMoeHybridForCausalLM": {
        "layer_types": ["attention"] * 2,
        "num_local_experts": 0,
        "shared_intermediate_size": 256,
    }
}


def traits_of(architecture, **changes):
    return decoder_traits({**BASE, **OWN.get(architecture, {}), **changes}, architecture)


def parameters_of(traits):
    layers = (p for i in range(len(traits.layers)) for p in layer_parameters(traits, i))
    return [*outer_parameters(traits), *layers]


def numbers_of(parameter):
    """Number the elements of each source, so that a part of it shows which of them it has."""
    ends = np.cumsum([np.prod(shape) for _, shape in parameter.sources])
    for (_, shape), end in zip(parameter.sources, ends, strict=True):
        size = int(np.prod(shape))
        yield np.arange(end - size, end).reshape(shape)


def kept_of(parameter):
    """The numbers that are left of each source."""
    found = []
    for whole, (_, shape, cut), part_shape in zip(
        numbers_of(parameter), parameter.parts, parameter.part_shapes, strict=True
    ):
        rows = [(0, shape[0])] if cut.rows is None else cut.rows
        part = np.concatenate([whole[first:last] for first, last in rows])
        if cut.columns is not None:
            part = part[:, slice(*cut.columns)]
        assert part.shape == part_shape
        found.append(part)
    return np.concatenate(found)


def is_of_kv(traits, numbers):
    """Which numbers of a matrix of queries, keys and values, or of its bias, are of keys and values."""
    heads = numbers * (traits.num_q_heads + 2 * traits.num_kv_heads) // len(numbers)
    if not traits.qkv_by_group:
        return heads >= traits.num_q_heads
    num_shared = traits.num_q_heads // traits.num_kv_heads
    return heads % (num_shared + 2) >= num_shared


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("architecture", READERS)
def test_ranks_have_each_number_of_each_tensor_exactly_once(architecture, size):
    """But KV heads that several ranks share, and what all of them keep whole."""
    traits = traits_of(architecture)
    if traits.keeps_state:
        with pytest.raises(TrouperValidationError, match="recurrent layers"):
            check_shards(traits, size)
        return
    check_shards(traits, size)
    copies = max(1, size // traits.num_kv_heads)
    for parameter in parameters_of(traits):
        parts = [sharded(parameter, traits, Shard(rank, size)) for rank in range(size)]
        kept = np.concatenate([kept_of(part).ravel() for part in parts if part is not None])
        numbers, counts = np.unique(kept, return_counts=True)
        assert len(numbers) == sum(np.prod(shape) for _, shape in parameter.sources)
        name = parameter.name
        is_head_norm = name[:6] in ("q_norm", "k_norm") and traits.qk_norm == "head"
        if name in WHOLE or is_head_norm:
            assert set(counts) == {size}, name
        elif name.startswith(("qkv", "k_norm")):
            is_kv = name.startswith("k_norm") or is_of_kv(traits, numbers)
            np.testing.assert_array_equal(counts, np.where(is_kv, copies, 1))
        else:
            assert set(counts) == {1}, name


@pytest.mark.parametrize("architecture", READERS)
def test_parts_have_sizes_that_traits_of_rank_tell(architecture):
    traits = traits_of(architecture)
    for rank, size in ((0, 2), (3, 4)):
        shard = Shard(rank, size)
        local = shard_traits(traits, shard)
        for layer in range(len(traits.layers)):
            of_rank = [sharded(p, traits, shard) for p in layer_parameters(traits, layer)]
            for part, own in zip(of_rank, layer_parameters(local, layer), strict=True):
                if part is not None:
                    assert part.part_shapes == own.part_shapes, own.name


def test_a_query_head_is_with_its_kv_head():
    """Of 8 query heads and 2 KV heads, whose groups are of four."""
    for size in (1, 2, 4, 8):
        for rank in range(size):
            shard = Shard(rank, size)
            first, last = shard.kv_heads(2)
            groups = {head // 4 for head in range(*shard.share(8))}
            assert groups == set(range(first, last))


def test_the_bias_after_a_sum_is_added_once():
    traits = traits_of("LlamaForCausalLM")
    biases = [p for p in layer_parameters(traits, 0) if p.name in ("o.bias", "down.bias")]
    assert len(biases) == 2
    for bias in biases:
        assert sharded(bias, traits, Shard(0, 4)) == bias
        assert [sharded(bias, traits, Shard(rank, 4)) for rank in (1, 2, 3)] == [None] * 3


def test_fused_tensors_are_cut_inside_of_their_parts():
    """Phi-3 has q, k and v in one, and gate and up."""
    traits = traits_of("Phi3ForCausalLM")
    cuts = {p.name: sharded(p, traits, Shard(1, 2)).cuts for p in layer_parameters(traits, 0)}
    assert [cut.rows for cut in cuts["qkv.weight"]] == [((64, 128), (144, 160), (176, 192))]
    assert [cut.rows for cut in cuts["gate_up.weight"]] == [((128, 256), (384, 512))]


def test_vocabulary_is_cut_between_registers_and_last_part_is_shorter():
    assert [Shard(rank, 4).vocabulary(1000) for rank in range(4)] == [
        (0, 256), (256, 512), (512, 768), (768, 1000),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("size", "changes", "message"),
    [
        (3, {}, "3 does not divide 8 query heads; possible: 1, 2, 4, 8"),
        (2, {"num_attention_heads": 9, "num_key_value_heads": 9}, "9 query heads; possible: 1"),
        (4, {"num_attention_heads": 12, "num_key_value_heads": 6},
         "6 KV heads cannot be shared out among 4 ranks; possible: 1, 2"),
        (8, {"intermediate_size": 192}, "an MLP of 192 into multiples of 16; possible: 1, 2, 4"),
        (8, {"vocab_size": 100}, "a vocabulary of 100 in multiples of 16; possible: 1, 2"),
        (4, {"vocab_size": 100}, "a vocabulary of 100 in multiples of 16; possible: 1, 2"),
    ],
)  # fmt: skip
def test_indivisible_model_is_refused_with_alternatives(size, changes, message):
    with pytest.raises(TrouperValidationError, match=message) as error:
        check_shards(traits_of("LlamaForCausalLM", **changes), size)
    assert (error.value.parameter, error.value.value) == ("tensor_parallel_size", size)


def test_groups_of_four_bits_are_not_cut():
    assert INT4_GROUP == GROUP
    traits = traits_of("LlamaForCausalLM", intermediate_size=192)
    check_shards(traits, 4)
    with pytest.raises(TrouperValidationError, match="multiples of 32; possible: 1, 2"):
        check_shards(traits, 4, quantization="int4")


def test_width_of_mlp_that_no_layer_has_is_no_hindrance():
    changes = {"intermediate_size": 99, "decoder_sparse_step": 1}
    traits = traits_of("Qwen3MoeForCausalLM", **changes)
    check_shards(traits, 2)
    assert shard_traits(traits, Shard(0, 2)).mlp_widths == (64, 64)
