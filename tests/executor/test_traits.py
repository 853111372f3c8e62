"""Configs as transformers writes them and as older checkpoints have them."""

import msgspec
import pytest
import torch

from trouper.actors.executor.models.families.registry import (
    READERS,
    decoder_traits,
    generating_sibling,
)
from trouper.actors.executor.models.parameters import layer_parameters, outer_parameters
from trouper.actors.executor.models.traits import LayerTraits
from trouper.actors.executor.weights.layouts import Stacks
from trouper.errors import TrouperValidationError, UnsupportedFeatureError

BASE = {
    "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip


def traits_of(architecture, **changes):
    return decoder_traits({**BASE, **changes}, f"{architecture}ForCausalLM")


def windows_of(traits):
    return [layer.window for layer in traits.layers]


EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}


# Without these its layers would be recurrent.
OWN = {"GraniteMoeHybridForCausalLM": {"layer_types": ["attention"] * 4, "num_local_experts": 0}}


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"layer_types": ["attention", "conv"] * 2}, "conv"),
        ({"layer_types": ["attention", "mamba"] * 2, "hidden_act": "gelu"}, "hidden_act"),
        ({"layer_types": ["attention", "mamba"] * 2, "mamba_n_heads": 3}, "mamba_n_heads"),
        ({"num_local_experts": 2, "num_experts_per_tok": 3}, "num_experts_per_tok"),
        ({"layer_types": ["attention"] * 3}, "3 layers, not 4"),
    ],
)
def test_unsupported_granite_4_is_refused_by_name(change, word):
    name = "GraniteMoeHybridForCausalLM"
    with pytest.raises((UnsupportedFeatureError, TrouperValidationError), match=word):
        decoder_traits(BASE | OWN[name] | change, name)


@pytest.mark.parametrize("name", ["Qwen3_5ForCausalLM", "Qwen3NextForCausalLM"])
def test_value_heads_without_key_heads_are_refused(name):
    heads = {"linear_num_key_heads": 3, "linear_num_value_heads": 4}
    with pytest.raises(TrouperValidationError, match="linear_num_value_heads"):
        decoder_traits(BASE | EXPERTS | heads, name)


@pytest.mark.parametrize("architecture", READERS)
def test_every_architecture_reads_the_common_numbers_alone(architecture):
    own = {"attention_types": [[["global", "local"], 2]], "rotary_dim": 8}
    traits = decoder_traits(BASE | EXPERTS | own | OWN.get(architecture, {}), architecture)
    assert traits.vocab_size == 100
    assert len(traits.layers) == 4
    assert traits.q_size == 4 * traits.head_dim
    assert msgspec.convert(msgspec.to_builtins(traits), type(traits)) == traits


def test_unknown_architecture_is_answered_with_known_ones():
    with pytest.raises(UnsupportedFeatureError, match=r"'NoSuchModel'.*LlamaForCausalLM.*Qwen3"):
        decoder_traits(BASE, "NoSuchModel")


@pytest.mark.parametrize(
    ("architecture", "sibling"),
    [
        ("Qwen3Model", "Qwen3ForCausalLM"),
        ("LlamaForSequenceClassification", "LlamaForCausalLM"),
        ("Qwen2ForCausalLM", "Qwen2ForCausalLM"),
        ("GPT2LMHeadModel", "GPT2LMHeadModel"),
    ],
)
def test_decoder_that_pools_is_read_as_its_known_sibling(architecture, sibling):
    assert generating_sibling(architecture) == sibling


@pytest.mark.parametrize("name", sorted(BASE.keys() - {"num_key_value_heads"}))
def test_a_missing_number_is_named(name):
    config = {key: value for key, value in BASE.items() if key != name}
    with pytest.raises(TrouperValidationError, match=name):
        decoder_traits(config, "LlamaForCausalLM")


def test_heads_that_cannot_be_shared_are_refused():
    with pytest.raises(TrouperValidationError, match="4 query heads cannot share 3"):
        traits_of("Llama", num_key_value_heads=3)


def test_without_kv_heads_every_query_head_has_its_own():
    assert traits_of("Llama", num_key_value_heads=None).num_kv_heads == 4


def test_rope_is_same_in_its_old_and_its_new_spelling():
    scaling = {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }  # fmt: skip
    new = traits_of("Llama", rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **scaling})
    old = traits_of("Llama", rope_theta=5e5, rope_scaling={"type": "llama3", **scaling})
    assert new.ropes == old.ropes
    assert (new.ropes[0].kind, new.ropes[0].theta, new.ropes[0].factor) == ("llama3", 5e5, 8.0)


def test_an_unknown_rope_is_an_unsupported_feature():
    with pytest.raises(UnsupportedFeatureError, match="rope_type='spiral'"):
        traits_of("Llama", rope_parameters={"rope_type": "spiral"})


def test_dynamic_scaling_is_none_within_the_trained_length():
    scaled = traits_of("Llama", rope_scaling={"type": "dynamic", "factor": 2.0})
    assert scaled.ropes == traits_of("Llama").ropes


def test_longrope_needs_a_factor_for_each_frequency():
    rope = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 8}
    with pytest.raises(TrouperValidationError, match="8 factors"):
        traits_of("Phi3", rope_parameters=rope)


def test_phi3_says_su_and_yarn_where_longrope_is_meant():
    rope = {"type": "su", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    traits = traits_of("Phi3", rope_scaling=rope, original_max_position_embeddings=128)
    assert (traits.ropes[0].kind, traits.ropes[0].factor) == ("longrope", 4.0)
    assert traits.ropes[0].attention_factor > 1


def test_partial_rotation_narrows_the_rotated_width():
    assert traits_of("Phi3", partial_rotary_factor=0.5).ropes[0].width == 8


def test_windows_follow_each_familys_pattern():
    assert windows_of(traits_of("Mistral", sliding_window=7)) == [7] * 4
    assert windows_of(traits_of("Mistral", sliding_window=None)) == [None] * 4
    qwen = {"sliding_window": 7, "max_window_layers": 3}
    assert windows_of(traits_of("Qwen2", **qwen)) == [None] * 4
    assert windows_of(traits_of("Qwen2", use_sliding_window=True, **qwen)) == [None] * 3 + [7]
    assert windows_of(traits_of("Gemma2", sliding_window=7)) == [7, None, 7, None]
    gemma3 = traits_of("Gemma3", sliding_window=7, sliding_window_pattern=3)
    assert gemma3.layers == (
        LayerTraits(7, 1),
        LayerTraits(7, 1),
        LayerTraits(None, 0),
        LayerTraits(7, 1),
    )
    named = ["full_attention", "sliding_attention"] * 2
    assert windows_of(traits_of("Gemma2", sliding_window=7, layer_types=named)) == [None, 7] * 2


def test_layer_types_of_another_length_are_refused():
    with pytest.raises(TrouperValidationError, match="describes 2 layers, not 4"):
        traits_of("Gemma2", layer_types=["full_attention"] * 2)


def test_gemma3_has_two_ropes():
    old = traits_of(
        "Gemma3",
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        rope_scaling={"type": "linear", "factor": 8},
    )
    new = traits_of(
        "Gemma3",
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    )
    assert old.ropes == new.ropes
    assert [(rope.kind, rope.theta) for rope in old.ropes] == [("linear", 1e6), ("default", 1e4)]


def test_smollm3_leaves_every_fourth_layer_without_positions():
    assert [layer.rope for layer in traits_of("SmolLM3").layers] == [0, 0, 0, None]
    chosen = traits_of("SmolLM3", no_rope_layers=[1, 0, 0, 1])
    assert [layer.rope for layer in chosen.layers] == [0, None, None, 0]


def test_multipliers_of_granite_and_gemma():
    granite = traits_of("Granite", logits_scaling=8.0, residual_multiplier=0.2)
    assert (granite.logits_scale, granite.residual_scale) == (0.125, 0.2)
    gemma = traits_of("Gemma2", query_pre_attn_scalar=144)
    assert (gemma.attention_scale, gemma.embedding_scale) == (1 / 12, 8.0)
    assert (gemma.norm_offset, gemma.norm_placement, gemma.tied_embeddings) == (
        1.0,
        "sandwich",
        True,
    )


def test_activation_that_is_not_known_is_unsupported_feature():
    with pytest.raises(UnsupportedFeatureError, match="xielu"):
        traits_of("Llama", hidden_act="xielu")


def test_fused_checkpoints_are_read_as_they_are():
    names = [p.sources[0][0] for p in layer_parameters(traits_of("Phi3"), 2)]
    assert "model.layers.2.self_attn.qkv_proj.weight" in names
    assert "model.layers.2.mlp.gate_up_proj.weight" in names
    split = {p.name: p.sources for p in layer_parameters(traits_of("Llama", mlp_bias=True), 0)}
    assert [shape for _, shape in split["qkv.weight"]] == [(64, 64), (32, 64), (32, 64)]
    assert [name.rsplit(".", 2)[1] for name, _ in split["gate_up.bias"]] == ["gate_proj", "up_proj"]


def test_tied_head_is_not_asked_of_checkpoint():
    assert [p.name for p in outer_parameters(traits_of("Gemma2"))] == ["embedding", "norm"]
    assert [p.name for p in outer_parameters(traits_of("Llama"))] == ["embedding", "norm", "head"]


def test_matrix_by_group_is_cut_into_queries_keys_and_values():
    """Of two KV heads and four query heads of 16 numbers: q q k v q q k v."""
    traits = traits_of("Falcon", new_decoder_architecture=True, num_kv_heads=2)
    (qkv,) = (p for p in layer_parameters(traits, 0) if p.name == "qkv.weight")
    firsts = [first // 16 for first, _ in qkv.cuts[0].rows]
    assert firsts == [0, 1, 4, 5, 2, 6, 3, 7]


REFUSED = [
    ("GPT2LMHeadModel", {"scale_attn_by_inverse_layer_idx": True}),
    ("GPT2LMHeadModel", {"add_cross_attention": True}),
    ("GPTNeoForCausalLM", {"attention_types": [[["strided"], 4]]}),
    ("OPTForCausalLM", {"do_layer_norm_before": False}),
    ("OPTForCausalLM", {"word_embed_proj_dim": 32}),
    ("FalconForCausalLM", {"alibi": True}),
    ("OlmoForCausalLM", {"clip_qkv": 8.0}),
    ("Lfm2ForCausalLM", {"conv_L_cache": 1}),
    ("GraniteMoeHybridForCausalLM", {"mamba_d_conv": 1}),
]
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16}
# Values of a recurrent mixer's fields from which nothing can be computed.
IMPOSSIBLE = [
    ("Lfm2ForCausalLM", {"conv_L_cache": 0}),
    ("Lfm2ForCausalLM", {"conv_L_cache": None}),
    ("Qwen3_5ForCausalLM", {"linear_conv_kernel_dim": "4"}),
    ("GraniteMoeHybridForCausalLM", {"time_step_limit": [0.1]}),
    ("GraniteMoeHybridForCausalLM", {"time_step_limit": [0.1, None]}),
    ("GraniteMoeHybridForCausalLM", {"time_step_limit": [1.0, 0.5]}),
]


@pytest.mark.parametrize(("architecture", "changes"), IMPOSSIBLE)
def test_impossible_field_of_mixer_is_named(architecture, changes):
    with pytest.raises(TrouperValidationError) as error:
        decoder_traits(BASE | MAMBA | changes, architecture)
    ((name, value),) = changes.items()
    assert (error.value.parameter, error.value.value) == (name, value)


@pytest.mark.parametrize(("architecture", "changes"), REFUSED)
def test_field_that_no_trait_computes_is_refused_by_name(architecture, changes):
    with pytest.raises(UnsupportedFeatureError, match=next(iter(changes))):
        decoder_traits(BASE | changes, architecture)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"new_decoder_architecture": True, "parallel_attn": False}, "parallel_attn"),
        ({"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn"),
        ({"hidden_size": 66}, "num_attention_heads"),
    ],
)
def test_a_contradiction_of_falcons_fields_is_named(changes, name):
    with pytest.raises(TrouperValidationError, match=name):
        decoder_traits(BASE | changes, "FalconForCausalLM")


def test_layers_without_experts_are_those_that_config_names():
    config = BASE | EXPERTS | {"decoder_sparse_step": 2, "mlp_only_layers": [3]}
    traits = decoder_traits(config, "Qwen3MoeForCausalLM")
    assert [layer.is_sparse for layer in traits.layers] == [False, True, False, False]
    names = [{p.name for p in layer_parameters(traits, i)} for i in range(4)]
    assert all(("router.weight" in found) == (i == 1) for i, found in enumerate(names))
    assert "down_7.weight" in names[1]
    assert "gate_up.weight" not in names[1]


@pytest.mark.parametrize("lacking", ["num_experts_per_tok", "moe_intermediate_size", "num_experts"])
def test_mixture_of_experts_says_which_number_it_lacks(lacking):
    config = {name: n for name, n in (BASE | EXPERTS).items() if name != lacking}
    # Mixtral's name for the number is the other that is looked for
    name = "num_local_experts" if lacking == "num_experts" else lacking
    with pytest.raises(TrouperValidationError, match=name):
        decoder_traits(config, "Qwen3MoeForCausalLM")


def test_token_cannot_use_more_experts_than_there_are():
    with pytest.raises(TrouperValidationError, match="there are 8 experts") as error:
        decoder_traits(BASE | EXPERTS | {"num_experts_per_tok": 9}, "MixtralForCausalLM")
    assert (error.value.parameter, error.value.value) == ("num_experts_per_tok", 9)


def test_sparse_qwen2_windows_alternate():
    config = BASE | EXPERTS | {
        "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3,
    }  # fmt: skip
    assert windows_of(decoder_traits(config, "Qwen2MoeForCausalLM")) == [8, None, 8, None]


@pytest.mark.parametrize("width", [32, 48, 64])
@pytest.mark.parametrize("projection", ["gate_proj", "up_proj", "down_proj"])
def test_experts_are_read_in_both_layouts(projection, width):
    """Also where one of the two tensors of a layer is square: the other one shows the layout."""
    torch.manual_seed(0)
    shape = (64, width) if projection == "down_proj" else (width, 64)
    part = Stacks(4, "qwen3_vl_moe").find(f"mlp.experts.2.{projection}.weight", shape)
    shapes = {
        "mlp.experts.gate_up_proj": (4, 2 * width, 64),
        "mlp.experts.down_proj": (4, 64, width),
    }
    assert part.shape == shapes[part.name]
    whole = torch.randn(part.shape)
    name, right = part.witness
    assert right == shapes[name]
    plain = part.stored_as(right).of(whole)
    turned = whole.transpose(1, 2).contiguous()
    assert plain.shape == shape
    assert plain.equal(part.stored_as((right[0], right[2], right[1])).of(turned))
    assert part.stored_as((9, 9)) == part
