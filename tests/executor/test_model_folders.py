"""Model folders that come from anywhere: whatever their files say, an engine starts or names what is wrong."""

import json
import os
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trouper.actors.executor.models.families.registry import (
    ENCODERS,
    decoder_traits,
    encoder_traits,
)
from trouper.actors.executor.models.families.registry import READERS as DECODERS
from trouper.actors.executor.weights.checkpoint import INDEX, Checkpoint
from trouper.actors.executor.weights.schemes import read_scheme
from trouper.actors.rendering.prompts.prompts import template_text
from trouper.actors.rendering.tokenizer import Tokenizer
from trouper.config.args import EngineArgs
from trouper.config.checkpoint.files import MAX_TEXT_BYTES, HfFields, Rope
from trouper.config.resolve import resolve
from trouper.errors import TrouperValidationError, UnsupportedFeatureError

BASE = {
    "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "eos_token_id": 2, "dtype": "bfloat16", "architectures": ["LlamaForCausalLM"],
}  # fmt: skip
ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
DENSE = {"type": "sentence_transformers.models.Dense", "path": "2_Dense"}


@pytest.fixture
def folder(tmp_path):
    """Write a model folder: files by their names."""

    def write(files=(), **changes):
        (tmp_path / "config.json").write_text(json.dumps({**BASE, **changes}))
        for name, value in dict(files).items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(value if isinstance(value, str) else json.dumps(value))
        return tmp_path

    return write


def refused(path, **options):
    with pytest.raises(TrouperValidationError) as caught:
        resolve(EngineArgs(str(path), **options))
    return caught.value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_hidden_layers", 10**9), ("num_hidden_layers", 0), ("num_hidden_layers", True),
        ("hidden_size", "64"), ("hidden_size", 64.0), ("hidden_size", 10**12), ("vocab_size", -1),
        ("num_attention_heads", [4]), ("head_dim", 0), ("max_position_embeddings", 10**18),
        ("rope_theta", 0), ("rope_theta", float("nan")), ("rms_norm_eps", "1e-6"), ("use_parallel_residual", "yes"), ("alibi", 1),
        ("rope_scaling", "yarn"), ("rope_parameters", [1]), ("layer_types", "full_attention"),
        ("architectures", "LlamaForCausalLM"), ("torch_dtype", 16), ("eos_token_id", "2"),
        ("tie_word_embeddings", "yes"), ("id2label", ["a"]), ("id2label", {"a": "b"}),
        ("quantization_config", "gptq"),
    ],
    ids=repr,
)  # fmt: skip
def test_wrong_field_is_named_with_value(folder, field, value):
    error = refused(folder(**{field: value}))
    assert f"config.json: {field}: " in str(error)
    assert error.parameter == "model"
    assert repr(error.value) in map(repr, (value, "a"))


def test_a_nested_text_config_must_be_an_object(folder):
    assert "config.json: text_config: " in str(refused(folder(text_config=[1])))


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", -1), ("top_p", 0), ("top_k", 1.5), ("min_p", "x"), ("max_new_tokens", 0),
     ("repetition_penalty", 0.0), ("repetition_penalty", [1.1])],
)  # fmt: skip
def test_sampling_default_that_no_request_could_use_is_named(folder, field, value):
    error = refused(folder({"generation_config.json": {field: value}}))
    assert "generation_config.json: " in str(error)
    assert error.value == value


def test_default_length_is_no_longer_than_engines(folder):
    path = folder({"generation_config.json": {"max_new_tokens": 10**6}})
    assert resolve(EngineArgs(str(path))).model.default_sampling == {"max_tokens": 512}
    short = resolve(EngineArgs(str(path), max_model_len=64))
    assert short.model.default_sampling == {"max_tokens": 64}


@pytest.mark.parametrize("text", ["[" * 10**5, "9" * 10**4, "\xff", '"' + "x" * 10**6])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_file_that_is_no_json_is_named(folder, name, text):
    error = refused(folder({name: text}))
    assert error.parameter == "model"
    assert name in str(error)


def test_file_that_is_too_large_is_not_parsed(folder):
    path = folder()
    with open(path / "generation_config.json", "wb") as file:
        file.truncate(MAX_TEXT_BYTES + 1)
    assert "larger than 32 MiB" in str(refused(path))


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "model.safetensors", INDEX, "vocab.txt"]
)
def test_pipe_or_device_in_folder_is_not_opened(folder, name):
    path = folder()
    (path / name).unlink(missing_ok=True)
    os.mkfifo(path / name)
    assert f"{name} is not a regular file" in str(refused(path))
    (path / name).unlink()
    (path / name).symlink_to("/dev/zero")
    assert f"{name} is not a regular file" in str(refused(path))


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja", "merges.txt"])
def test_pipe_in_tokenizers_folder_is_not_opened(make_folder, name):
    path = make_folder("bytes")
    (path / name).unlink(missing_ok=True)
    os.mkfifo(path / name)
    with pytest.raises(TrouperValidationError, match=f"{name} is not a regular file") as caught:
        Tokenizer.load(path)
    assert caught.value.parameter == "tokenizer"


def test_a_pipe_is_no_chat_template(tmp_path):
    os.mkfifo(tmp_path / "template")
    with pytest.raises(TrouperValidationError, match="not a regular file") as caught:
        template_text(str(tmp_path / "template"))
    assert caught.value.parameter == "chat_template"


@pytest.mark.parametrize(
    "config",
    [
        {"chat_template": 5}, {"chat_template": ["x"]}, {"chat_template": [{"name": "default"}]},
        {"chat_template": {"name": 3}}, {"added_tokens_decoder": ["x"]}, {"eos_token": 5},
        {"added_tokens_decoder": {"x": {}}}, {"additional_special_tokens": [None]},
    ],
    ids=str,
)  # fmt: skip
def test_a_tokenizers_config_of_wrong_types_is_named(make_folder, config):
    with pytest.raises(TrouperValidationError, match=r"tokenizer_config\.json"):
        Tokenizer.load(make_folder("bytes", **config))


@pytest.mark.parametrize(
    "index",
    [
        [], "x", {}, {"weight_map": []}, {"weight_map": {"a": 1}}, {"weight_map": {"a": "../x.safetensors"}},
        {"weight_map": {"a": "/etc/x.safetensors"}}, {"weight_map": {"a": ".."}},
        {"weight_map": {"a": "sub/x.safetensors"}}, {"weight_map": {"a": "model.bin"}},
    ],
    ids=str,
)  # fmt: skip
def test_an_index_names_files_of_its_own_folder(folder, index):
    with pytest.raises(TrouperValidationError, match=INDEX):
        Checkpoint(folder({INDEX: index}))


@pytest.mark.parametrize("path", ["../elsewhere", "/etc", "2_Dense/../../x"])
def test_a_module_lies_in_the_models_folder(folder, path):
    error = refused(folder({"modules.json": [{**DENSE, "path": path}]}))
    assert "modules.json has a path that leads out of the folder" in str(error)
    assert error.value == path


@pytest.mark.parametrize(
    "dense",
    [{}, {"in_features": "64", "out_features": 8}, {"in_features": 64, "out_features": 10**12}],
    ids=str,
)
def test_a_modules_config_of_wrong_types_is_named(folder, dense):
    error = refused(folder({"modules.json": [DENSE], "2_Dense/config.json": dense}))
    assert "2_Dense/config.json: " in str(error)


@pytest.mark.parametrize("modules", [5, [5], {"type": "x"}, [{"type": 5}]], ids=str)
def test_modules_of_wrong_types_are_named(folder, modules):
    assert "modules.json: " in str(refused(folder({"modules.json": modules})))


numbers = st.integers(-3, 9) | st.sampled_from([10**9, 2**63, -(10**30), 10**400]) | st.floats()
scalars = st.none() | st.booleans() | numbers | st.text(max_size=9)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(st.sampled_from(Rope.__struct_fields__) | st.text(max_size=5), inner)
    ),
    max_leaves=6,
)
ropes = st.fixed_dictionaries(
    {"type": st.sampled_from(["default", "linear", "llama3", "yarn", "longrope", "no"])},
    optional=dict.fromkeys(set(Rope.__struct_fields__) - {"type"}, values),
)
quantizations = st.fixed_dictionaries(
    {"quant_method": st.sampled_from(["gptq", "awq", "compressed-tensors"])},
    optional=dict.fromkeys(["bits", "group_size", "config_groups", "format"], values),
)
changes = st.dictionaries(
    st.sampled_from(HfFields.__struct_fields__), values, min_size=1, max_size=3
) | st.fixed_dictionaries(
    {}, optional={"rope_parameters": ropes, "rope_scaling": ropes, "quantization_config": quantizations}
)  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("model")


@given(
    architecture=st.sampled_from([*DECODERS, *(f"{prefix}Model" for prefix in ENCODERS)]),
    base=st.sampled_from(
        [{}, {"rope_parameters": ROPE}, {"type_vocab_size": 2, "pad_token_id": 1}]
    ),
    changes=changes,
)
def test_any_config_is_read_or_refused_with_typed_error(place, architecture, base, changes):
    config = {**BASE, **base, "architectures": [architecture], **changes}
    (place / "config.json").write_text(json.dumps(config))
    with suppress(TrouperValidationError, UnsupportedFeatureError):
        model = resolve(EngineArgs(str(place))).model
        read_scheme(model.hf_config)
        traits = encoder_traits(model.hf_config, model.architecture)
        if traits is None:
            traits = decoder_traits(model.hf_config, model.architecture)
            assert len(traits.layers) == model.hf_config["num_hidden_layers"]
        assert traits.head_dim > 0


@given(st.dictionaries(st.sampled_from(["temperature", "top_k", "top_p", "min_p", "max_new_tokens",
                                        "repetition_penalty", "eos_token_id"]), values))  # fmt: skip
def test_any_generation_config_is_read_or_refused_with_typed_error(place, config):
    (place / "config.json").write_text(json.dumps(BASE))
    (place / "generation_config.json").write_text(json.dumps(config))
    try:
        with suppress(TrouperValidationError, UnsupportedFeatureError):
            resolve(EngineArgs(str(place)))
    finally:
        (place / "generation_config.json").unlink()
