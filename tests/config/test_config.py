"""From wishes to a plan: names, ranges, cross checks, model folders."""

import json
import subprocess
import sys
from dataclasses import fields

import msgspec
import pytest

from trouper.config.args import EQUIVALENT, NOT_IMPLEMENTED, NOT_NEEDED, AsyncEngineArgs, EngineArgs
from trouper.config.checkpoint.model_path import GEOMETRIES
from trouper.config.context import UNKNOWN_KV_CACHE_BYTES
from trouper.config.model import DEMO_MODEL, DTYPES, ModelConfig
from trouper.config.resolve import resolve
from trouper.errors import TrouperValidationError, UnsupportedFeatureError

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "max_position_embeddings": 10_000,
    "eos_token_id": 2,
    "dtype": "bfloat16",
}


@pytest.fixture
def folder(tmp_path):
    """Writes the json files of a model folder."""

    def write(config=CONFIG, generation=None):
        (tmp_path / "config.json").write_text(json.dumps(config))
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return str(tmp_path)

    return write


def test_defaults_are_those_of_the_specification(folder):
    config = resolve(EngineArgs(folder()))
    assert config.scheduler.max_num_seqs == 128
    assert config.scheduler.max_num_active_seqs == 128
    assert config.scheduler.max_num_scheduled_tokens == 1024  # on a CPU
    assert config.scheduler.policy == "priority"
    assert config.scheduler.enable_chunked_prefill
    assert config.scheduler.enable_prefix_caching
    assert config.scheduler.max_steps_in_flight == 2
    assert (config.block_size, config.num_blocks) == (128, None)
    assert config.kv_cache_bytes > 0
    assert (config.dtype, config.max_model_len, config.max_logprobs) == ("bfloat16", 10_000, 20)


def test_offline_limits_are_larger(folder):
    scheduler = resolve(EngineArgs(folder()), offline=True).scheduler
    assert (scheduler.max_num_seqs, scheduler.max_num_scheduled_tokens) == (256, 1024)


def test_a_step_takes_what_it_is_given(folder):
    for name in ("max_num_batched_tokens", "max_num_scheduled_tokens"):
        scheduler = resolve(EngineArgs(folder(), **{name: 4096})).scheduler
        assert scheduler.max_num_scheduled_tokens == 4096


def test_async_engine_args_are_engine_args():
    assert AsyncEngineArgs(dtype="half") == AsyncEngineArgs.from_cli_args({"dtype": "half"})
    assert {f.name for f in fields(AsyncEngineArgs)} == {f.name for f in fields(EngineArgs)}


@pytest.mark.parametrize("name", ["enable_chunked_prefill", "chunked_prefill_enabled"])
def test_both_spellings_are_one_option(name):
    assert EngineArgs(**{name: False}).enable_chunked_prefill is False


def test_two_spellings_must_agree():
    args = EngineArgs(cuda_graph_sizes=[1, 2], cudagraph_capture_sizes=[1, 2])
    assert args.cudagraph_capture_sizes == [1, 2]
    with pytest.raises(TrouperValidationError, match="enable_chunked_prefill are the same option"):
        EngineArgs(chunked_prefill_enabled=True, enable_chunked_prefill=False)


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(TrouperValidationError, match="'max_num_seq'; did you mean max_num_seqs"):
        EngineArgs(max_num_seq=4)


def test_a_name_like_no_other_gets_no_suggestion():
    with pytest.raises(TrouperValidationError, match=r"unknown option 'zzz' \(parameter=zzz\)"):
        EngineArgs(zzz=4)


@pytest.mark.parametrize(
    ("name", "same", "other"),
    [
        ("mamba_cache_mode", "align", "all"),
        ("mamba_ssm_cache_dtype", "float32", "bfloat16"),
        ("mamba_ssm_cache_dtype", "float32", "float16"),
    ],
)
def test_values_that_describe_the_engine_are_accepted(name, same, other):
    EngineArgs(**{name: same})
    with pytest.raises(UnsupportedFeatureError, match=f"{name}='{other}'.*or '{same}'"):
        EngineArgs(**{name: other})


@pytest.mark.parametrize("name", sorted(NOT_IMPLEMENTED.keys() - EQUIVALENT))
def test_what_is_not_implemented_is_accepted_at_its_default_only(name):
    EngineArgs(**{name: NOT_IMPLEMENTED[name]})
    with pytest.raises(UnsupportedFeatureError, match=name) as error:
        EngineArgs(**{name: "something else"})
    assert error.value.parameter == name


def test_step_length_is_learnt_or_unlimited():
    lengths = [resolve(EngineArgs(**wish)).scheduler.max_step_ms for wish in MAX_STEPS]
    assert lengths == [0, None, 0, 250]


MAX_STEPS = {}, {"max_step_ms": None}, {"max_step_ms": 0}, {"max_step_ms": 250}


@pytest.mark.parametrize("limit", [None, 0, 100])
def test_pooling_steps_take_a_time_limit(limit):
    assert resolve(EngineArgs(runner="pooling", max_step_ms=limit)).scheduler.max_step_ms == limit


@pytest.mark.parametrize("name", sorted(NOT_NEEDED))
def test_limits_on_prompts_are_not_needed(name):
    with pytest.raises(UnsupportedFeatureError, match=r"not needed: steps are shared by time"):
        EngineArgs(**{name: 2})


def test_the_runner_may_be_said_aloud():
    assert resolve(EngineArgs(runner="generate", convert="none")).pooler is None
    assert resolve(EngineArgs(runner="pooling")).pooler.tasks == ("embed", "token_embed")
    with pytest.raises(TrouperValidationError, match="parameter=runner"):
        resolve(EngineArgs(runner="draft?"))


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"max_num_seqs": 0}, r"at least 1 \(parameter=max_num_seqs, value=0\)"),
        ({"max_num_seqs": "many"}, r"must be a number \(parameter=max_num_seqs"),
        ({"block_size": 1.5}, r"must be an integer \(parameter=block_size"),
        ({"max_num_batched_tokens": 0}, "parameter=max_num_batched_tokens"),
        ({"max_num_scheduled_tokens": 0}, "parameter=max_num_scheduled_tokens"),
        ({"max_num_active_seqs": 0}, "parameter=max_num_active_seqs"),
        ({"max_num_queued_reqs": -1}, "parameter=max_num_queued_reqs"),
        ({"max_num_queued_tokens": -1}, "parameter=max_num_queued_tokens"),
        ({"block_size": 0}, "parameter=block_size"),
        ({"num_gpu_blocks_override": 0}, "parameter=num_gpu_blocks_override"),
        ({"kv_cache_memory_bytes": 0}, "parameter=kv_cache_memory_bytes"),
        ({"renderer_num_workers": 0}, "parameter=renderer_num_workers"),
        ({"stream_interval": 0}, "parameter=stream_interval"),
        ({"max_step_ms": -1}, "parameter=max_step_ms"),
        ({"max_step_ms": 1.5}, "parameter=max_step_ms"),
        ({"long_prefill_token_threshold": -1}, "parameter=long_prefill_token_threshold"),
        ({"max_logprobs": -2}, "parameter=max_logprobs"),
        ({"shutdown_timeout": -0.5}, "parameter=shutdown_timeout"),
        ({"shutdown_timeout": float("nan")}, "parameter=shutdown_timeout"),
        ({"scheduling_policy": "lifo"}, "priority or fcfs"),
        ({"prefix_caching_hash_algo": "md5"}, "parameter=prefix_caching_hash_algo"),
        ({"watermark": 1.0}, r"in \[0, 1\)"),
        ({"watermark": float("nan")}, "parameter=watermark"),
        ({"gpu_memory_utilization": 0.0}, r"in \(0, 1\]"),
        ({"max_model_len": 10_001}, r"in \[1, 10000\] for this model"),
        ({"max_model_len": 0}, "parameter=max_model_len"),
        ({"max_model_len": "long"}, "such as 4096, 8k or 1M"),
        ({"max_model_len": "infk"}, "such as 4096, 8k or 1M"),
        ({"dtype": "int8"}, "auto or one of half, float16"),
    ],
)
def test_a_value_out_of_range_names_its_parameter(folder, wish, message):
    with pytest.raises(TrouperValidationError, match=message):
        resolve(EngineArgs(folder(), **wish))


def test_cross_checks_name_both_numbers(folder):
    path = folder()
    with pytest.raises(TrouperValidationError, match=r"\(4\) must be at least max_num_seqs \(8\)"):
        resolve(EngineArgs(path, max_num_batched_tokens=4, max_num_seqs=8))
    with pytest.raises(TrouperValidationError, match=r"\(500\) must be at least .* \(10000\)"):
        resolve(EngineArgs(path, max_num_batched_tokens=500, enable_chunked_prefill=False))
    with pytest.raises(TrouperValidationError, match=r"\(9\) must be at most max_num_seqs \(8\)"):
        resolve(EngineArgs(path, max_num_active_seqs=9, max_num_seqs=8))


def test_what_is_left_out_fits_what_is_given(folder):
    path = folder()
    few_tokens = resolve(EngineArgs(path, max_num_batched_tokens=32)).scheduler
    assert (few_tokens.max_num_seqs, few_tokens.max_num_scheduled_tokens) == (32, 32)
    many_seqs = resolve(EngineArgs(path, max_num_seqs=3000)).scheduler
    assert (many_seqs.max_num_seqs, many_seqs.max_num_scheduled_tokens) == (3000, 3000)
    whole_prompts = resolve(EngineArgs(path, enable_chunked_prefill=False)).scheduler
    assert whole_prompts.max_num_scheduled_tokens == 10_000


@pytest.mark.parametrize(
    ("wished", "length"),
    [
        ("8k", 8000),
        ("8K", 8192),
        ("1.5k", 1500),
        ("64", 64),
        (64, 64),
        ("0.001M", 1048),
        ("1KiB", 1024),
        ("8kiB", 8192),
    ]
    + [(nothing, 10_000) for nothing in (None, -1, "-1", "auto")],
)
def test_lengths_may_be_written_for_people(folder, wished, length):
    assert resolve(EngineArgs(folder(), max_model_len=wished)).max_model_len == length


@pytest.mark.parametrize(("num_ranks", "length"), [(1, 1024), (2, 2048), (4, 4096), (8, 4096)])
def test_longest_sequence_is_what_rank_has_memory_for(folder, num_ranks, length):
    """Four KV heads: two ranks keep the same one where there are eight."""
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16, "hidden_size": 128}  # fmt: skip
    args = EngineArgs(
        folder({**CONFIG, **sizes}),
        dtype="bfloat16",
        max_model_len="auto",
        kv_cache_memory_bytes=1024 * 2 * 2 * 4 * 16 * 2,
        tensor_parallel_size=num_ranks,
    )
    assert resolve(args).max_model_len == length


@pytest.mark.parametrize("name", DTYPES)
def test_dtypes_have_vllms_names(folder, name):
    assert resolve(EngineArgs(folder(), dtype=name)).dtype == DTYPES[name]


def test_a_torch_dtype_is_understood_by_its_name(folder):
    assert resolve(EngineArgs(folder(), dtype="torch.float16")).dtype == "float16"


def test_an_unknown_stored_dtype_is_named(folder):
    with pytest.raises(TrouperValidationError, match="value='float8'"):
        resolve(EngineArgs(folder({**CONFIG, "dtype": "float8"})))


@pytest.mark.parametrize(
    "model", ["/no/such/folder", "./nowhere", "~nobody/x", "a/b/c", "x.gguf", ""]
)
def test_a_missing_model_folder_is_named(model):
    with pytest.raises(
        TrouperValidationError, match=rf"no such (model folder|file).*value='{model}'"
    ):
        resolve(EngineArgs(model))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"no config.json in the model folder \(parameter=model"),
        ("{", "config.json cannot be read"),
        ("[]", "config.json is not an object"),
        ("{}", "has no 'architectures'"),
        (json.dumps({"architectures": ["X"]}), "has no 'vocab_size'"),
        (json.dumps({**CONFIG, "vocab_size": None}), "has no 'vocab_size'"),
        (json.dumps({**CONFIG, "vocab_size": "many"}), "config.json: vocab_size: .*value='many'"),
    ],
)
def test_an_unusable_config_says_what_is_wrong(tmp_path, text, message):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(TrouperValidationError, match=message):
        resolve(EngineArgs(str(tmp_path)))


@pytest.mark.parametrize("name", GEOMETRIES)
def test_geometry_is_model_of_dummy_weights_with_demos_tokenizer(name, monkeypatch):
    monkeypatch.setattr("trouper.config.context.available_bytes", lambda **_: 2**40)
    config = resolve(EngineArgs(name, load_format="dummy"))
    assert config.model.hf_config.items() >= GEOMETRIES[name].items()
    assert (config.model.path, config.tokenizer) == (name, str(DEMO_MODEL))
    assert config.max_model_len == GEOMETRIES[name]["max_position_embeddings"]


@pytest.mark.parametrize(
    "wish", [{"model": "qwen3-0.6b"}, {"model": "qwen3", "load_format": "dummy"}], ids=str
)
def test_geometry_needs_dummy_weights_and_known_name(wish):
    with pytest.raises(
        TrouperValidationError, match=r"presets for load_format=.dummy.: qwen3-0\.6b, "
    ):
        resolve(EngineArgs(**wish))


def test_a_folder_of_a_geometrys_name_wins(tmp_path, monkeypatch):
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny/config.json").write_text(json.dumps(CONFIG))
    monkeypatch.chdir(tmp_path)
    assert resolve(EngineArgs("tiny", load_format="dummy")).model.vocab_size == 100


def test_a_nested_text_config_is_lifted(folder):
    nested = {"architectures": ["Outer"], "text_config": {**CONFIG, "architectures": ["Inner"]}}
    model = ModelConfig.load(EngineArgs(folder(nested)))
    assert (model.architecture, model.vocab_size, model.eos_token_ids) == ("Outer", 100, (2,))


def test_silent_text_config_has_sizes_of_its_class(folder):
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34}
    path = folder({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text})
    model = ModelConfig.load(EngineArgs(path))
    assert (model.hidden_size, model.vocab_size) == (2560, 262_208)
    assert model.max_position_embeddings == 131_072


def test_overrides_win_over_the_config_field_by_field(folder):
    nested = {"architectures": ["Outer"], "text_config": CONFIG}
    overrides = {"text_config": {"vocab_size": 77}}
    model = ModelConfig.load(EngineArgs(folder(nested), hf_overrides=overrides))
    assert (model.vocab_size, model.eos_token_ids) == (77, (2,))
    with pytest.raises(TrouperValidationError, match=r"config.json: vocab_size"):
        ModelConfig.load(EngineArgs(folder(CONFIG), hf_overrides={"vocab_size": "many"}))


def test_yarn_stretches_the_longest_sequence(folder):
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
    path = folder({**CONFIG, "max_position_embeddings": 40_960})
    assert resolve(EngineArgs(path, hf_overrides={"rope_scaling": yarn})).max_model_len == 131_072
    with pytest.raises(TrouperValidationError, match=r"\[1, 40960\]"):
        resolve(EngineArgs(path, max_model_len=131_072))


@pytest.mark.parametrize(
    ("kind", "model_type", "length"),
    [("linear", "llama", 4096), ("linear", "gemma3_text", 1024), ("dynamic", "llama", 1024)],
)
def test_linear_scaling_stretches_longest_sequence_and_dynamic_does_not(
    folder, kind, model_type, length
):
    own = {"model_type": model_type, "max_position_embeddings": 1024}
    for rope in ({"rope_type": kind, "factor": 4.0}, {"type": kind, "factor": 4.0}):
        path = folder({**CONFIG, **own, "rope_scaling": rope})
        assert ModelConfig.load(EngineArgs(path)).max_position_embeddings == length
    with pytest.raises(TrouperValidationError, match=rf"\[1, {length}\]"):
        resolve(EngineArgs(path, max_model_len=length + 1))


def test_generation_config_gives_eos_and_sampling_defaults(folder):
    generation = {
        "eos_token_id": [5, 6],
        "temperature": 0.5,
        "max_new_tokens": 7,
        "do_sample": True,
    }
    path = folder(generation=generation)
    model = ModelConfig.load(EngineArgs(path))
    assert model.eos_token_ids == (5, 6)
    assert model.default_sampling == {"temperature": 0.5, "max_tokens": 7}
    args = EngineArgs(path, override_generation_config={"temperature": 0.25})
    assert ModelConfig.load(args).default_sampling["temperature"] == 0.25


@pytest.mark.parametrize("source", ["trouper", "vllm"])
def test_generation_config_may_be_ignored_but_for_its_eos(folder, source):
    path = folder(generation={"eos_token_id": 5, "temperature": 0.5})
    model = ModelConfig.load(EngineArgs(path, generation_config=source))
    assert (model.eos_token_ids, model.default_sampling) == ((5,), {})


def test_generation_config_may_lie_elsewhere(folder, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    path = folder(generation={"top_k": 3})
    with pytest.raises(TrouperValidationError, match=r"no generation_config.json"):
        resolve(EngineArgs(path, generation_config=str(elsewhere)))
    (elsewhere / "generation_config.json").write_text('{"top_k": 4}')
    model = ModelConfig.load(EngineArgs(path, generation_config=str(elsewhere)))
    assert model.default_sampling == {"top_k": 4}


def test_a_model_without_eos_has_none(folder):
    config = {name: value for name, value in CONFIG.items() if name != "eos_token_id"}
    assert ModelConfig.load(EngineArgs(folder(config))).eos_token_ids == ()


def test_tokenizer_may_lie_elsewhere_or_be_left_out(folder, tmp_path):
    path = folder()
    assert resolve(EngineArgs(path)).tokenizer == path
    assert resolve(EngineArgs(path, skip_tokenizer_init=True)).tokenizer is None
    elsewhere = tmp_path / "tokenizer"
    elsewhere.mkdir()
    assert resolve(EngineArgs(path, tokenizer=str(elsewhere))).tokenizer == str(elsewhere)


def test_cache_size_comes_from_the_environment(folder, monkeypatch):
    monkeypatch.setattr("trouper.config.context.available_bytes", lambda **_: None)
    for text, size in (("0", UNKNOWN_KV_CACHE_BYTES), ("0.5", 2**29)):
        monkeypatch.setenv("TROUPER_CPU_KVCACHE_SPACE", text)
        assert resolve(EngineArgs(folder())).kv_cache_bytes == size
    assert resolve(EngineArgs(folder(), kv_cache_memory_bytes=10)).kv_cache_bytes == 10


@pytest.mark.parametrize("text", ["much", "nan", "inf", "-1", ""])
def test_a_malformed_variable_is_named(folder, monkeypatch, text):
    monkeypatch.setenv("TROUPER_CPU_KVCACHE_SPACE", text)
    with pytest.raises(TrouperValidationError, match="TROUPER_CPU_KVCACHE_SPACE"):
        resolve(EngineArgs(folder()))


@pytest.mark.parametrize(("wish", "steps"), [(None, 2), (True, 2), (False, 1)])
def test_async_scheduling_plans_one_step_ahead(folder, wish, steps):
    config = resolve(EngineArgs(folder(), async_scheduling=wish))
    assert config.scheduler.max_steps_in_flight == steps


def test_the_vocabulary_needs_no_torch():
    code = "import sys, trouper.config.resolve, trouper.params, trouper.outputs; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, False),
        ({"max_num_seqs": 1}, True),
        ({"max_num_seqs": 7}, True),
        ({"max_num_seqs": 8}, False),
        ({"max_num_seqs": 1, "compress_weights": False}, False),
        ({"max_num_seqs": 8, "compress_weights": True}, True),
    ],
)
def test_weights_are_compressed_for_few_sequences_or_on_request(options, expected):
    assert resolve(EngineArgs(**options)).compress_weights is expected


@pytest.mark.parametrize("own", ["awq", "gptq", "fp8", "compressed-tensors", "mxfp4"])
def test_method_of_checkpoint_itself_is_no_rounding(folder, own):
    path = folder({**CONFIG, "quantization_config": {"quant_method": own}})
    assert resolve(EngineArgs(path, quantization=own)).quantization is None
    other = "fp8" if own != "fp8" else "awq"
    with pytest.raises(TrouperValidationError, match=f"the checkpoint is quantized with {own}"):
        resolve(EngineArgs(path, quantization=other))
    with pytest.raises(TrouperValidationError, match="already quantized"):
        resolve(EngineArgs(path, quantization="int4"))
    with pytest.raises(TrouperValidationError, match="not quantized; use int8 or int4 to round"):
        resolve(EngineArgs(folder(CONFIG), quantization=own))


def test_vllms_names_of_kernels_are_those_of_method(folder):
    path = folder({**CONFIG, "quantization_config": {"quant_method": "gptq"}})
    assert resolve(EngineArgs(path, quantization="gptq_marlin")).quantization is None


@pytest.mark.parametrize("kind", ["mamba", "mamba2", "falcon_mamba", "xlstm", "kimi_linear"])
def test_recurrent_models_need_no_number_of_positions(folder, kind):
    sizes = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2}
    path = folder({"architectures": ["XForCausalLM"], "model_type": kind, **sizes})
    assert resolve(EngineArgs(path)).max_model_len == 32768
    assert resolve(EngineArgs(path, max_model_len=100_000)).max_model_len == 100_000


@pytest.mark.parametrize(
    ("served", "wanted"),
    [("nice", "nice"), (["one", "two"], "one"), (None, "folder"), ([], "folder")],
)
def test_metrics_show_the_served_name_and_no_path(folder, tmp_path, served, wanted):
    path = folder()
    (tmp_path / "folder").symlink_to(path)
    for model in (tmp_path / "folder", f"{tmp_path}/folder/", f"{tmp_path}/x/../folder"):
        (tmp_path / "x").mkdir(exist_ok=True)
        config = resolve(EngineArgs(str(model), served_model_name=served))
        assert config.shown_name == wanted


@pytest.mark.parametrize("name", ["org/model", "trouper-demo"])
def test_metrics_show_name_of_model_of_hub(folder, name):
    config = resolve(EngineArgs(folder()))
    config = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, name=name))
    assert config.shown_name == name
