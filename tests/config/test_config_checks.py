"""What `EngineArgs` refuses and accepts: types, vLLM's names, options that do nothing here, lengths that fit."""

import argparse
import json
import logging
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

import trouper
from trouper.config.args import AsyncEngineArgs, EngineArgs
from trouper.config.checks import check_private_folder
from trouper.config.resolve import resolve
from trouper.errors import TrouperValidationError, UnsupportedFeatureError

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "max_position_embeddings": 10_000,
    "eos_token_id": 2,
    "dtype": "bfloat16",
}
SHAPE = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}


@pytest.fixture
def folder(tmp_path):
    def write(**more):
        (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **more}))
        return str(tmp_path)

    return write


def longest(path, **options):
    return resolve(EngineArgs(path, **{"max_model_len": "auto", **options})).max_model_len


def test_auto_is_the_longest_that_fits_the_blocks(folder):
    path = folder()
    assert longest(path, num_gpu_blocks_override=3, block_size=16) == 48
    assert longest(path, num_gpu_blocks_override=3, block_size=16, max_model_len=-1) == 48
    assert longest(path, num_gpu_blocks_override=3) == 3 * 128
    assert longest(path, num_gpu_blocks_override=10**6) == 10_000
    assert longest(path, num_gpu_blocks_override=3, block_size=16, max_model_len=None) == 48
    fixed = resolve(EngineArgs(path, num_gpu_blocks_override=3, max_model_len=10_000))
    assert fixed.max_model_len == 10_000


@pytest.mark.parametrize(
    ("shape", "dtype", "token_bytes"),
    [
        ({}, "auto", 2 * 2 * 4 * 16 * 2),
        ({"num_key_value_heads": 2}, "auto", 2 * 2 * 2 * 16 * 2),
        ({"num_key_value_heads": 1, "head_dim": 32}, "float32", 2 * 2 * 1 * 32 * 4),
    ],
)
def test_auto_is_the_longest_that_fits_the_memory(folder, shape, dtype, token_bytes):
    path = folder(**SHAPE, **shape)
    size = 100 * 16 * token_bytes
    options = {"block_size": 16, "dtype": dtype}
    assert longest(path, kv_cache_memory_bytes=size, **options) == 1600
    assert longest(path, kv_cache_memory_bytes=size - 1, **options) == 99 * 16
    assert longest(path, kv_cache_memory_bytes=2**40, **options) == 10_000


def test_auto_without_known_shape_is_models_own(folder):
    assert longest(folder(), kv_cache_memory_bytes=1) == 10_000


def test_an_engine_starts_with_the_length_that_fits():
    with trouper.LLM(
        max_model_len=-1, kv_cache_memory_bytes=2**20, block_size=16, max_num_seqs=2
    ) as llm:
        length = llm.llm_engine.async_engine.config.max_model_len
        assert 16 <= length < llm.model_config.max_position_embeddings
        params = trouper.SamplingParams(max_tokens=None, ignore_eos=True, temperature=0)
        (output,) = llm.generate([[5] * (length - 1)], params, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 1


def test_async_programs_may_switch_the_request_log_off():
    AsyncEngineArgs(enable_log_requests=False)
    with pytest.raises(UnsupportedFeatureError, match="enable_log_requests"):
        AsyncEngineArgs(enable_log_requests=True)


def test_the_public_names_have_vllms_async_ones():
    assert {"AsyncEngineArgs", "AsyncLLM", "AsyncLLMEngine"} <= set(trouper.__all__)
    assert set(trouper.__all__) == set(trouper._HOMES)
    assert trouper.AsyncLLM is trouper.AsyncLLMEngine


def test_a_namespace_may_hold_other_things():
    options = argparse.Namespace(dtype="half", host="::", kv_cache_dtype="auto")
    assert EngineArgs.from_cli_args(options) == EngineArgs(dtype="half")
    with pytest.raises(UnsupportedFeatureError, match="kv_cache_dtype"):
        EngineArgs.from_cli_args(argparse.Namespace(kv_cache_dtype="fp8"))
    with pytest.raises(TrouperValidationError, match="unknown option 'host'"):
        EngineArgs.from_cli_args({"host": "::"})


WRONG = [
    *[(field.name, "false") for field in fields(EngineArgs) if field.type in (bool, bool | None)],
    ("seed", "x"), ("seed", 2**80), ("seed", True), ("watermark", "x"), ("watermark", True),
    ("gpu_memory_utilization", "x"), ("gpu_memory_utilization", None), ("model", 5),
    ("tokenizer", 5), ("revision", 5), ("download_dir", 5), ("generation_config", 5),
    ("override_generation_config", "x"), ("profiler_config", "x"), ("served_model_name", 5),
    ("served_model_name", ["a", 5]), ("hf_token", 5), ("cudagraph_capture_sizes", "1,2"),
    ("cudagraph_capture_sizes", [1, "2"]), ("scheduling_policy", 5), ("chat_template", 5),
    ("max_model_len", True), ("max_model_len", [5]), ("prefix_caching_hash_algo", "md5"),
    ("load_format", 5), ("otlp_traces_endpoint", 5), ("scheduling_policy", []),
    ("generation_config", "/nope"), ("max_num_seqs", None if False else "8"), ("dtype", 5),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_value_of_wrong_type_names_its_parameter(folder, name, value):
    options = {"model": folder(), name: value}
    with pytest.raises(TrouperValidationError, match=f"parameter={name}"):
        resolve(EngineArgs(**options))


def test_paths_and_numpys_numbers_are_fine(folder):
    path = folder()
    config = resolve(EngineArgs(Path(path), max_num_seqs=np.int64(4), seed=np.int32(3)))
    assert (config.model.path, config.scheduler.max_num_seqs, config.seed) == (path, 4, 3)
    assert type(config.seed) is int


@pytest.mark.parametrize(
    ("name", "value"),
    [("prefix_caching_hash_algo", "xxhash"), ("prefix_caching_hash_algo", "sha256_cbor")],
)
def test_what_would_be_ignored_is_refused(folder, name, value):
    with pytest.raises(UnsupportedFeatureError, match=name):
        resolve(EngineArgs(folder(), **{name: value}))


def test_what_cpu_has_no_use_for_is_told(folder, caplog):
    caplog.set_level(logging.INFO, "trouper")
    path = folder()
    resolve(EngineArgs(path))
    assert caplog.messages == []
    resolve(EngineArgs(path, cudagraph_capture_sizes=[1], gpu_memory_utilization=0.5))
    assert caplog.messages == [
        "these options have no effect on the CPU: cudagraph_capture_sizes, gpu_memory_utilization"
    ]


def test_folder_that_others_may_write_to_is_refused(tmp_path):
    """It contains prompts, so the journal, the tier and the records share this check."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(TrouperValidationError, match="other users may write") as caught:
        check_private_folder(shared, "record")
    assert caught.value.parameter == "record"
    check_private_folder(tmp_path / "new" / "folder", "record")
    assert (tmp_path / "new" / "folder").stat().st_mode & 0o777 == 0o700


def test_options_of_no_processor_are_refused(folder):
    with pytest.raises(TrouperValidationError, match="takes no images; leave it out"):
        resolve(EngineArgs(folder(**SHAPE), mm_processor_kwargs={"size": 5}))
