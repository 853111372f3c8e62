"""The part that a rank reads is that part of the whole, number by number, however the weights are stored."""

from pathlib import Path

import gguf
import msgspec
import pytest
import torch

from tests.support.adapters import random_tensors, write_adapter
from trouper.actors.executor.models.families.registry import decoder_traits
from trouper.actors.executor.models.parameters import layer_parameters
from trouper.actors.executor.models.sharding import Shard, part_of, sharded
from trouper.actors.executor.runners.cpu.runner import CpuRunner
from trouper.actors.executor.weights.checkpoint import Checkpoint
from trouper.actors.executor.weights.gguf import GgufCheckpoint
from trouper.actors.executor.weights.schemes import read_scheme
from trouper.config.adapters import LoRAConfig, read_adapter
from trouper.errors import TrouperValidationError, UnsupportedFeatureError
from trouper.kernels.cpu.linear.quantization import dequantized

from . import test_gguf, test_integer_checkpoints, test_narrow_checkpoints
from .driver import engine_config
from .ranks import ranks_in_threads
from .test_architectures import tiny_model
from .test_gguf import MIXED, converted
from .test_ranks import compare, make_model, outputs
from .test_stages import PROMPTS, chunk_plan

WIDE = {"intermediate_size": 128}


def wide_model(folder):
    tiny_model("Qwen3", {"num_hidden_layers": 2, "tie_word_embeddings": True, **WIDE}, folder)


def parameters_of(config):
    traits = decoder_traits(config.model.hf_config, config.model.architecture)
    matrices = [p for i in range(2) for p in layer_parameters(traits, i) if ".weight" in p.name]
    return traits, matrices


def check_parts(source, config, size=2, dtype=torch.bfloat16):
    """Compare the integers that each rank reads with those of the whole; returns how many matrices have some."""
    traits, matrices = parameters_of(config)
    num_found = 0
    for matrix in matrices:
        whole = source.integers(matrix, dtype)
        if whole is None:
            continue
        num_found += 1
        rows = [shape[0] for _, shape in matrix.sources]
        for rank in range(size):
            part = sharded(matrix, traits, Shard(rank, size))
            found = source.integers(part, dtype)
            by_source = dequantized(whole).split(rows)
            expected = [part_of(x, cut) for x, (*_, cut) in zip(by_source, part.parts, strict=True)]
            assert (found.fmt, found.dtype) == (whole.fmt, whole.dtype)
            assert found.q_OI.is_contiguous()
            assert torch.equal(dequantized(found), torch.cat(expected)), part.name
    return num_found


@pytest.mark.parametrize("kind", test_integer_checkpoints.CONFIGS)
def test_a_rank_has_its_integers_of_four_bits(tmp_path, kind):
    _, packed = test_integer_checkpoints.write(tmp_path, kind, **WIDE)
    config = engine_config(packed)
    source = Checkpoint(packed, scheme=read_scheme(config.model.hf_config))
    assert check_parts(source, config) == 8


# Not those that no rank may cut, and codes of a table, which are read as plain weights.
NOT_CUT = {"gptq_act_order", "bnb_nf4", "bnb_nf4_nested", "bnb_fp4"}


@pytest.mark.parametrize("kind", sorted(test_narrow_checkpoints.KINDS.keys() - NOT_CUT))
def test_a_rank_has_its_part_of_narrow_numbers(tmp_path, kind):
    scheme, quantise = test_narrow_checkpoints.KINDS[kind]
    write = test_narrow_checkpoints.write
    # blocks of 24 inputs fit into half of 96
    model = test_narrow_checkpoints.tiny_dense if kind == "fp8_blocks" else wide_model
    _, narrow = write(tmp_path, scheme, lambda _: quantise, model=model)
    config = engine_config(narrow)
    source = Checkpoint(narrow, scheme=read_scheme(config.model.hf_config))
    assert check_parts(source, config) == 8


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_1", "Q8_0"])
def test_rank_has_its_blocks_of_gguf_file(tmp_path, kind):
    """Rows of q and k are in another order there."""
    model = tiny_model("Llama", {"num_hidden_layers": 4, **WIDE}, tmp_path)
    numbers = {"feed_forward_length": 128}
    stored_as = gguf.GGMLQuantizationType[kind]
    path = converted(model, tmp_path / "m.gguf", "llama", numbers, stored_as)
    assert check_parts(GgufCheckpoint(path), engine_config(path)) == 8


# Whole models, fp32


@pytest.mark.parametrize("quantization", ["int4", "int8"])
def test_weights_are_rounded_before_they_are_cut(tmp_path, quantization):
    """The scale of eight bits is that of all inputs, so halves rounded by themselves would be other numbers."""
    wide_model(tmp_path)
    config = engine_config(tmp_path, quantization=quantization)
    expected = outputs(CpuRunner(config))
    with ranks_in_threads(config, 2) as runner:
        compare(outputs(runner), expected)


@pytest.mark.parametrize("arch", ["llama", "qwen2moe", "falcon"])
def test_ranks_of_gguf_file_give_tokens_of_one(tmp_path, arch):
    name, changes, numbers = (MIXED | test_gguf.MODELS)[arch]
    model = tiny_model(name, {"num_hidden_layers": 4, "rms_norm_eps": 1e-6, **changes}, tmp_path)
    path = converted(model, tmp_path / "m.gguf", arch, numbers)
    config = engine_config(path)
    expected = outputs(CpuRunner(config))
    with ranks_in_threads(config, 2) as runner:
        compare(outputs(runner), expected)


def test_ranks_of_dummy_weights_give_tokens_of_one(tmp_path):
    make_model("olmoe", tmp_path)
    config = engine_config(tmp_path, load_format="dummy")
    expected = outputs(CpuRunner(config))
    with ranks_in_threads(config, 2) as runner:
        compare(outputs(runner), expected)


@pytest.mark.parametrize("case", ["llama", "qwen3-tied", "ernie4-5"])
def test_ranks_share_adapter_or_refuse_it(tmp_path, case):
    make_model(case, tmp_path)
    config = msgspec.structs.replace(engine_config(tmp_path), lora=LoRAConfig(num_slots=1))
    good = random_tensors(model=tmp_path)
    adapter = read_adapter(write_adapter(tmp_path / "good", good))
    plans = [chunk_plan(1, 0, len(PROMPTS[2]), samples=1, adapter_slot=1)]
    plans += [chunk_plan(step, 38 + step, 1, samples=1, reads=step - 1) for step in (2, 3, 4)]
    alone = CpuRunner(config)
    alone.load()
    plain = [alone.execute(plan).token_ids for plan in plans]
    alone.load_adapter(1, adapter)
    wanted = [alone.execute(plan).token_ids for plan in plans]
    assert wanted != plain
    good["base_model.model.model.layers.9.mlp.up_proj.lora_A.weight"] = good.popitem()[1]
    bad = read_adapter(write_adapter(tmp_path / "bad", good))
    with ranks_in_threads(config, 2) as runner:
        runner.load()
        assert [runner.execute(plan).token_ids for plan in plans] == plain
        runner.on_each("load_adapter", 1, adapter)
        with pytest.raises(TrouperValidationError, match=r"layers\.9\.mlp\.up_proj"):
            runner.on_each("load_adapter", 1, bad)
        assert [runner.execute(plan).token_ids for plan in plans] == wanted


def test_ranks_look_tokens_up_in_pages_that_they_share(tmp_path):
    """And a rank alone in memory of its own."""
    make_model("llama", tmp_path)
    file = str(tmp_path / "model.safetensors")

    def is_mapped(runner):
        address = runner.model.decoder._embedding.data_ptr()
        for line in Path("/proc/self/maps").read_text().splitlines():
            first, last = (int(x, 16) for x in line.split()[0].split("-"))
            if first <= address < last:
                return line.endswith(file)
        return False

    config = engine_config(tmp_path)
    alone = CpuRunner(config)
    alone.load()
    with ranks_in_threads(config, 2) as runner:
        runner.load()
        assert [is_mapped(each) for each in (alone, *runner.runners)] == [False, True, True]


# Refusals


def test_groups_of_inputs_are_not_cut(tmp_path):
    """Half of an MLP of 96 is a group and a half."""
    _, packed = test_integer_checkpoints.write(tmp_path, "gptq")
    rule = "96 inputs of .*down_proj.* have scales for 32 each, which a part of 48 would cut"
    with (
        ranks_in_threads(engine_config(packed), 2) as runner,
        pytest.raises(TrouperValidationError, match=rule) as error,
    ):
        runner.load()
    assert error.value.parameter == "tensor_parallel_size"


def test_inputs_in_order_of_their_own_are_not_cut(tmp_path):
    scheme, quantise = test_narrow_checkpoints.KINDS["gptq_act_order"]
    _, narrow = test_narrow_checkpoints.write(
        tmp_path, scheme, lambda _: quantise, model=wide_model
    )
    with (
        ranks_in_threads(engine_config(narrow), 2) as runner,
        pytest.raises(UnsupportedFeatureError, match=r"o_proj.*act-order") as error,
    ):
        runner.load()
    assert error.value.parameter == "tensor_parallel_size"


def test_indivisible_heads_are_refused_before_reading(
    tmp_path,
):
    make_model("llama", tmp_path)
    config = engine_config(tmp_path)
    with pytest.raises(
        TrouperValidationError, match="3 does not divide 4 query heads; possible: 1, 2"
    ):
        ranks_in_threads(config, 3).__enter__()
