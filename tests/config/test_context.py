"""The length of the context that is not given: what fits the memory that is there; and how that memory is read."""

import json
import logging

import pytest

from trouper import LLM, SamplingParams
from trouper.config.args import EngineArgs
from trouper.config.context import (
    KV_SHARE,
    LEAST_CONTEXT,
    PROGRAM_BYTES,
    available_bytes,
    context_line,
    fitted,
    weight_bytes,
)
from trouper.config.model import ModelConfig
from trouper.config.resolve import resolve
from trouper.errors import TrouperValidationError

GIB = 2**30


def shape(architecture, layers, hidden, width, heads, kv_heads, head_dim, vocab, length, **more):
    """Write what config.json says of a model in bfloat16."""
    return {
        "architectures": [architecture], "dtype": "bfloat16", "num_hidden_layers": layers,
        "hidden_size": hidden, "intermediate_size": width, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": head_dim, "vocab_size": vocab,
        "max_position_embeddings": length, "eos_token_id": 2, **more,
    }  # fmt: skip


# The models that README and the pages name, and those that people run most, from 0.27 to 8 B.
SHAPES = {
    "gemma-3-270m": shape("Gemma3ForCausalLM", 18, 640, 2048, 4, 1, 256, 262_144, 32_768, model_type="gemma3_text"),
    "SmolLM2-360M": shape("LlamaForCausalLM", 32, 960, 2560, 15, 5, 64, 49_152, 8192, model_type="llama", tie_word_embeddings=True),
    "Qwen2.5-0.5B": shape("Qwen2ForCausalLM", 24, 896, 4864, 14, 2, 64, 151_936, 32_768, model_type="qwen2", tie_word_embeddings=True),
    "Qwen3-0.6B": shape("Qwen3ForCausalLM", 28, 1024, 3072, 16, 8, 128, 151_936, 40_960, model_type="qwen3", tie_word_embeddings=True),
    "Llama-3.2-1B": shape("LlamaForCausalLM", 16, 2048, 8192, 32, 8, 64, 128_256, 131_072, model_type="llama", tie_word_embeddings=True),
    "Phi-3.5-mini": shape("Phi3ForCausalLM", 32, 3072, 8192, 32, 32, 96, 32_064, 131_072, model_type="phi3"),
    "Mistral-7B": shape("MistralForCausalLM", 32, 4096, 14_336, 32, 8, 128, 32_768, 32_768, model_type="mistral"),
    "Qwen3-8B": shape("Qwen3ForCausalLM", 36, 4096, 12_288, 32, 8, 128, 151_936, 40_960, model_type="qwen3"),
    "Llama-3.1-8B": shape("LlamaForCausalLM", 32, 4096, 14_336, 32, 8, 128, 128_256, 131_072, model_type="llama"),
}  # fmt: skip
TINY = shape("LlamaForCausalLM", 2, 64, 128, 4, 2, 16, 100, 10_000, model_type="llama")
TINY_TOKEN_BYTES = 2 * 2 * 2 * 16 * 2


@pytest.fixture
def folder(tmp_path):
    """Writes a model's config.json: `folder(config)`."""

    def write(config=TINY):
        (tmp_path / "config.json").write_text(json.dumps(config))
        return str(tmp_path)

    return write


@pytest.fixture
def memory(monkeypatch):
    """Sets the bytes that the machine can give: `memory(18 * GIB)`, None where it does not say."""

    def set_available(size):
        monkeypatch.setattr("trouper.config.context.available_bytes", lambda **_: size)

    return set_available


def dummy(path, **options):
    return resolve(EngineArgs(path, load_format="dummy", **options))


@pytest.mark.parametrize("name", SHAPES)
def test_every_model_starts_without_a_flag(folder, memory, name):
    config = SHAPES[name]
    memory(23 * GIB)
    large = dummy(folder(config))
    assert LEAST_CONTEXT <= large.max_model_len <= config["max_position_embeddings"]
    assert large.is_length_open
    assert large.scheduler.max_model_len == large.max_model_len


@pytest.mark.parametrize(("name", "length"), [("Qwen3-0.6B", 40_960), ("Llama-3.2-1B", 131_072)])
def test_the_whole_context_is_taken_where_it_fits(folder, memory, name, length):
    memory(18 * GIB)
    config = dummy(folder(SHAPES[name]))
    assert config.max_model_len == length
    assert context_line(config) is None


def test_little_memory_gives_shorter_context_and_one_line_says_so(folder, memory):
    memory(19 * 10**9)
    config = dummy(folder(SHAPES["Llama-3.1-8B"]))
    assert LEAST_CONTEXT < config.max_model_len < 131_072
    line = context_line(config)
    assert line.startswith(f"context {config.max_model_len:,} of 131,072 tokens: ")
    assert line.endswith("increase --kv-cache-memory-bytes")


def test_cache_takes_half_of_what_weights_and_program_leave(folder, memory):
    memory(8 * GIB)
    config = dummy(folder())
    left = 8 * GIB - PROGRAM_BYTES
    assert KV_SHARE * left - 2**20 < config.kv_cache_bytes <= KV_SHARE * left
    memory(None)
    assert dummy(folder()).kv_cache_bytes == 2 * GIB


def test_workers_share_the_memory(folder, memory):
    memory(8 * GIB)
    alone = dummy(folder()).kv_cache_bytes
    for name in ("data_parallel_size", "tensor_parallel_size", "pipeline_parallel_size"):
        assert dummy(folder(), **{name: 2}).kv_cache_bytes < alone / 2
    # a stage has half of the layers, and a rank half of the heads
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        config = dummy(folder(), kv_cache_memory_bytes=128 * TINY_TOKEN_BYTES // 2, **{name: 2})
        assert config.max_model_len == 128


def test_replicas_have_weights_of_their_own(folder, memory):
    memory(20 * GIB)
    path = folder(SHAPES["Llama-3.2-1B"])
    one, two = dummy(path), dummy(path, data_parallel_size=2)
    assert 2 * two.kv_cache_bytes < one.kv_cache_bytes - GIB


def test_least_context_may_have_all_that_is_left(folder, memory):
    path = folder(SHAPES["Llama-3.1-8B"])
    weights = 16.1 * 10**9
    needed = LEAST_CONTEXT * 32 * 2 * 8 * 128 * 2
    memory(int(weights + PROGRAM_BYTES + 1.1 * needed))
    assert dummy(path).max_model_len >= LEAST_CONTEXT


def test_model_that_has_no_room_is_refused_in_sentence(folder, memory):
    path = folder(SHAPES["Llama-3.1-8B"])
    memory(16 * 10**9)
    with pytest.raises(
        TrouperValidationError, match=r"a context of 1,024 tokens 0.1 GB, but this machine has only"
    ) as e:
        dummy(path)
    assert "kv_cache_memory_bytes (--kv-cache-memory-bytes)" in str(e.value)
    memory(9 * 10**9)
    with pytest.raises(TrouperValidationError, match=r"weights take about 16.1 GB, .* only 9.0 GB"):
        dummy(path)
    assert dummy(path, quantization="int4").max_model_len >= LEAST_CONTEXT
    assert dummy(path, kv_cache_memory_bytes=GIB).max_model_len == 8192


def test_a_length_that_was_given_is_never_shortened(folder, memory):
    memory(19 * 10**9)
    config = dummy(folder(SHAPES["Llama-3.1-8B"]), max_model_len=131_072)
    assert (config.max_model_len, config.is_length_open) == (131_072, False)
    assert context_line(config) is None


def test_length_given_gets_more_than_half_of_memory(folder, memory):
    memory(GIB)
    room = GIB - PROGRAM_BYTES
    length = int(0.9 * room / TINY_TOKEN_BYTES) // 128 * 128
    path = folder({**TINY, "max_position_embeddings": 2 * length})
    assert dummy(path, max_model_len=length).kv_cache_bytes >= length * TINY_TOKEN_BYTES


@pytest.mark.parametrize(
    ("value", "length"),
    [
        *[(value, 10_000) for value in (None, "auto", "AUTO", " auto ", -1, "-1")],
        ("8k", 8000), ("8K", 8192), ("4.5k", 4500), (" 512 ", 512), (512, 512),
    ],
)  # fmt: skip
def test_lengths_are_read_as_vllm_reads_them(folder, value, length):
    assert dummy(folder(), max_model_len=value).max_model_len == length


def test_memory_may_be_given_with_a_suffix(folder):
    assert dummy(folder(), kv_cache_memory_bytes="2G").kv_cache_bytes == 2 * GIB
    assert dummy(folder(), kv_cache_memory_bytes="1.5g").kv_cache_bytes == 15 * 10**8
    with pytest.raises(TrouperValidationError, match="kv_cache_memory_bytes: must be a number"):
        dummy(folder(), kv_cache_memory_bytes="much")


def test_files_of_weights_are_counted_at_dtype_that_they_get(folder, memory):
    path = folder({**TINY, "dtype": "float32"})
    with open(f"{path}/model.safetensors", "wb") as file:
        file.truncate(8 * GIB)  # a hole: it takes no room on the disk
    memory(9 * GIB)
    float32 = resolve(EngineArgs(path)).kv_cache_bytes
    half = resolve(EngineArgs(path, dtype="bfloat16")).kv_cache_bytes
    assert half - float32 == pytest.approx(KV_SHARE * 4 * GIB, rel=0.01)


def test_model_that_pools_keeps_no_cache_and_its_length(folder, memory):
    memory(GIB)
    config = dummy(folder(SHAPES["SmolLM2-360M"]), runner="pooling")
    assert config.max_model_len == 8192
    assert context_line(config) is None


def test_the_devices_have_the_last_word(folder, memory):
    memory(8 * GIB)
    config = dummy(folder())
    assert fitted(config, 100 * 128) is config
    short = fitted(config, 3 * 128)
    assert (short.max_model_len, short.scheduler.max_model_len) == (384, 384)
    given = dummy(folder(), max_model_len=10_000)
    assert fitted(given, 3 * 128) is given


def test_engine_works_with_length_that_fits_and_says_so_once(caplog, memory):
    caplog.set_level(logging.WARNING, "trouper")
    options = {"block_size": 16, "max_num_seqs": 2, "model": "tiny", "load_format": "dummy"}
    with LLM(num_gpu_blocks_override=3, **options) as llm:
        assert llm.llm_engine.async_engine.config.max_model_len == 48
        params = SamplingParams(max_tokens=None, ignore_eos=True, temperature=0)
        (output,) = llm.generate([[5] * 40], params, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 8
        with pytest.raises(TrouperValidationError, match=r"\b48\b"):
            llm.generate([[5] * 60], params, use_tqdm=False)
    assert [line for line in caplog.messages if line.startswith("context 48 of 2,048")]
    assert len(caplog.messages) == 1


def test_model_has_vllms_names_and_length_in_force():
    options = {"block_size": 16, "max_num_seqs": 2, "served_model_name": "small"}
    with LLM("tiny", load_format="dummy", num_gpu_blocks_override=3, **options) as llm:
        model = llm.get_model_config()
        config = llm.llm_engine.vllm_config
        assert config.model_config.max_model_len == model.max_model_len
        assert config.cache_config.block_size > 0
        assert config.parallel_config.world_size == 1
        assert config.scheduler_config.max_num_seqs > 0
        with pytest.raises(AttributeError, match="VllmConfig has no 'kv_transfer_config'"):
            config.kv_transfer_config  # noqa: B018
    assert (model.model, model.served_model_name, model.max_model_len) == ("tiny", "small", 48)
    assert (model.get_vocab_size(), model.get_hidden_size(), model.get_head_size()) == (
        4096,
        64,
        16,
    )
    assert (model.dtype, model.runner_type) == ("bfloat16", "generate")
    assert model.hf_config.num_hidden_layers == model.hf_config["num_hidden_layers"] == 2
    assert model.tokenizer is not None
    assert not hasattr(model.hf_config, "no_such_field")
    assert not hasattr(model, "no_such_name")


def test_only_given_length_that_does_not_fit_is_error(memory):
    memory(8 * GIB)
    options = {"model": "tiny", "load_format": "dummy", "max_num_seqs": 2, "block_size": 16}
    with pytest.raises(TrouperValidationError) as error:
        LLM(max_model_len=2048, kv_cache_memory_bytes=2**15, **options)
    for part in ("max_model_len='auto'", "--max-model-len auto", "--kv-cache-memory-bytes", "48"):
        assert part in str(error.value)


@pytest.fixture
def machine(tmp_path):
    """Writes files of a system, and returns what it can give: `machine({path: text})`."""

    def read(files, **options):
        for path, text in files.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
        return available_bytes(tmp_path, **options)

    return read


MEMINFO = {"proc/meminfo": "MemTotal: 3000 kB\nMemAvailable: 2000 kB\nSwapFree: 500 kB\n"}


def test_a_machine_gives_what_it_has_left(machine):
    assert machine({}) is None
    assert machine(MEMINFO) == 2000 * 1024
    assert machine(MEMINFO, with_swap=True) == 2500 * 1024
    assert 2**20 < available_bytes() < 2**50


def test_a_container_gives_what_its_limit_leaves(machine):
    files = {
        "proc/self/cgroup": "0::/a/b\n",
        "sys/fs/cgroup/a/memory.max": "1000000\n", "sys/fs/cgroup/a/memory.current": "700000\n",
        "sys/fs/cgroup/a/memory.stat": "anon 1\ninactive_file 200000\n",
        "sys/fs/cgroup/a/b/memory.max": "max\n", "sys/fs/cgroup/a/b/memory.current": "1\n",
    }  # fmt: skip
    assert machine(MEMINFO | files) == 500_000


def test_version_1_of_control_groups_is_read_too(machine):
    group = "sys/fs/cgroup/memory"
    files = {
        "proc/self/cgroup": "4:memory:/not/mounted/here\n2:cpu,cpuacct:/\n",
        f"{group}/memory.limit_in_bytes": "900000", f"{group}/memory.usage_in_bytes": "500000",
        f"{group}/memory.stat": "inactive_file 1\ntotal_inactive_file 100000\n",
    }  # fmt: skip
    assert machine(MEMINFO | files) == 500_000
    files[f"{group}/memory.limit_in_bytes"] = str(2**63 - 4096)
    assert machine(MEMINFO | files) == 2000 * 1024


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SHAPES)
def test_every_model_really_starts_without_a_flag(folder, name):
    """Only up to 5 GB of random weights are made, because those of 7 B take a minute."""
    path = folder(SHAPES[name])
    needed = weight_bytes(EngineArgs(path, load_format="dummy"), dummy_model(path), "bfloat16")
    if needed > min(5 * 10**9, available_bytes() - 6 * GIB):
        pytest.skip(f"needs {needed / 1e9:.0f} GB for the weights")
    with LLM(path, load_format="dummy") as llm:
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        (output,) = llm.generate([[5] * 8], params, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 2


def dummy_model(path):
    return ModelConfig.load(EngineArgs(path, load_format="dummy"))
