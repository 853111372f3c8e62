"""Fields of `hf_overrides` win over those of config.json wherever the config has them, or are refused by name."""

import pytest

from tests.executor.test_traits import BASE
from trouper.actors.executor.models.families.registry import decoder_traits
from trouper.config.checkpoint.hf_config import overridden
from trouper.errors import TrouperValidationError

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
DEFAULT = {"rope_type": "default", "rope_theta": 5e5}
GROUPS = {
    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    "own", [{"rope_parameters": DEFAULT}, {"rope_parameters": DEFAULT | LLAMA3},
            {"rope_scaling": LLAMA3, "rope_theta": 5e5}, {"rope_theta": 5e5}],
)  # fmt: skip
@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_scaling_wins_under_either_name_and_keeps_frequency(own, name, key):
    wish = {key: "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    (rope,) = decoder_traits(overridden(BASE | own, {name: wish}), "LlamaForCausalLM").ropes
    found = (rope.kind, rope.theta, rope.factor, rope.original_max_position)
    assert found == ("yarn", 5e5, 4.0, 64)


def test_scaling_of_same_kind_is_changed_field_by_field():
    own = {"rope_parameters": DEFAULT | LLAMA3}
    found = overridden(own, {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}})
    assert found == {"rope_parameters": DEFAULT | LLAMA3 | {"factor": 2.0}}
    assert overridden(own, {"rope_scaling": {"factor": 2.0}}) == found
    assert overridden(own, {"rope_scaling": None}) == {"rope_parameters": DEFAULT}
    assert own == {"rope_parameters": DEFAULT | LLAMA3}


def test_kind_that_not_is_refused_by_name():
    for name in ("rope_scaling", "rope_parameters"):
        with pytest.raises(TrouperValidationError, match=r"hf_overrides: rope_type.*nonsense"):
            overridden({"rope_parameters": DEFAULT}, {name: {"rope_type": "nonsense"}})


def test_layers_of_whole_context_are_those_stretched():
    for name in ("rope_scaling", "rope_parameters"):
        found = overridden({"rope_parameters": GROUPS}, {name: YARN})["rope_parameters"]
        assert found["full_attention"] == YARN | {"rope_theta": 1e6}
        assert found["sliding_attention"] == GROUPS["sliding_attention"]
    only = {"rope_parameters": {"full_attention": YARN}}
    assert overridden({"rope_parameters": GROUPS}, only)["rope_parameters"] == found
    others = {"rope_parameters": {"a": DEFAULT, "b": DEFAULT}}
    with pytest.raises(TrouperValidationError, match=r"rope_scaling: .* separate values for a, b"):
        overridden(others, {"rope_scaling": YARN})


def test_frequencies_go_where_the_config_has_them():
    found = overridden({"rope_parameters": DEFAULT}, {"rope_theta": 2e6})
    assert found["rope_parameters"]["rope_theta"] == 2e6
    own = {"rope_parameters": GROUPS}
    found = overridden(own, {"rope_theta": 2e6, "rope_local_base_freq": 2e4})["rope_parameters"]
    assert [group["rope_theta"] for group in found.values()] == [2e6, 2e4]


def test_field_that_only_text_config_has_is_replaced_there():
    own = {
        "model_type": "outer",
        "text_config": {"model_type": "inner", "rope_parameters": DEFAULT},
    }
    found = overridden(own, {"rope_scaling": YARN, "model_type": "other"})
    rope = YARN | {"rope_theta": 5e5}
    text = {"model_type": "inner", "rope_parameters": rope}
    assert found == {"model_type": "other", "text_config": text}
