"""A model in stages says what it says whole: fp32, every architecture, one process or several."""

import json
import os
import threading
from contextlib import contextmanager

import msgspec
import pytest
import torch

from tests.support.adapters import random_tensors, write_adapter
from trouper import LLM, SamplingParams
from trouper.actors.executor.models.families.registry import decoder_traits
from trouper.actors.executor.runners.cpu.runner import CpuRunner
from trouper.actors.executor.runners.cpu.stage_runner import StageRunner
from trouper.actors.executor.worker_links import ModelSizes, SharedSizes, create_shared_files
from trouper.actors.messages.requests import SequenceId
from trouper.actors.messages.steps import NewSequence, Sampling, StepPlan
from trouper.config.adapters import LoRAConfig, read_adapter
from trouper.errors import TrouperValidationError
from trouper.inputs import TokensPrompt

from .driver import GREEDY, Driver, engine_config, random_prompts
from .test_architectures import CASES, CPU_ONLY, RECURRENT, VOCAB, tiny_model

PROMPTS = random_prompts((1, 7, 40, 33), VOCAB)
SEEDED = Sampling(temperature=0.9, seed=5, top_k=20)


class StagesInTurn:
    """All stages of a model in this thread: each plan goes through them one after the other."""

    def __init__(self, config, num_stages, partition=None):
        scheduler = msgspec.structs.replace(config.scheduler, num_stages=num_stages)
        config = msgspec.structs.replace(config, scheduler=scheduler, layer_partition=partition)
        traits = decoder_traits(config.model.hf_config, config.model.architecture)
        model = ModelSizes(traits.hidden_size, traits.vocab_size)
        files = create_shared_files(SharedSizes.of(config, model))
        # each stage closes its own, as if it had inherited them
        self.stages = [
            StageRunner(config, index, duplicated(mine)) for index, mine in enumerate(files)
        ]
        for file in {file for mine in files for file in mine}:
            os.close(file)

    def load(self):
        return min((stage.load() for stage in self.stages), key=lambda info: info.num_blocks)

    def execute(self, plan):
        *others, answer = [stage.execute(plan) for stage in self.stages]
        assert others == [None] * len(others)
        return answer

    def close(self):
        for stage in self.stages:
            stage.close()


def duplicated(files):
    return [os.dup(file) for file in files]


@contextmanager
def stages_in_turn(*args, **options):
    stages = StagesInTurn(*args, **options)
    try:
        yield stages
    finally:
        stages.close()


def outputs(runner, **options):
    driver = Driver(runner, chunk=13, shuffle=1, stagger=2, **options)
    wishes = [GREEDY, SEEDED, Sampling(temperature=0.0, prompt_logprobs=2), GREEDY]
    found = driver.run(PROMPTS, 12, wishes)
    ranks = [[entry.rank for entry in s.prompt_logprobs] for s in found]
    return [s.token_ids for s in found], ranks


# The others run with the slow tests.
DEFAULT = {"gemma2", "smollm3", "lfm2"}
EACH_CASE = [
    pytest.param(c, marks=() if c in DEFAULT else pytest.mark.slow) for c in CASES | CPU_ONLY
]


@pytest.mark.parametrize("case", EACH_CASE)
def test_two_and_three_stages_give_tokens_of_one(case, tmp_path):
    tiny_model(*(CASES | CPU_ONLY)[case], tmp_path)
    config = engine_config(tmp_path)
    expected = outputs(CpuRunner(config))
    found = json.loads((tmp_path / "config.json").read_text())
    num_layers = found.get("text_config", found).get("num_hidden_layers", 3)
    for num_stages in range(2, min(3, num_layers) + 1):
        with stages_in_turn(config, num_stages) as runner:
            assert outputs(runner) == expected


def chunk_plan(step, start, count, *, samples=0, reads=0, **options):
    """A chunk of the only prompt, which is in slot 0 and in the blocks from 1 on."""
    new = NewSequence(
        0, SequenceId(0), tuple(PROMPTS[2]), len(PROMPTS[2]), (1, 2, 3, 4, 5, 6), GREEDY, **options
    )
    return StepPlan(
        step, 0, (0,), (start,), (count,), (samples,), (new,) if start == 0 else (), reads=reads
    )


def test_first_stage_computes_chunks_while_last_has_not_begun(tmp_path):
    """And it waits for a token only where a plan reads it."""
    tiny_model(*CASES["llama"], tmp_path)
    config = engine_config(tmp_path)
    plans = [
        chunk_plan(1, 0, 20),
        chunk_plan(2, 20, 20, samples=1),
        chunk_plan(3, 40, 1, samples=1, reads=2),
    ]
    alone = CpuRunner(config)
    alone.load()
    wanted = [alone.execute(plan).token_ids for plan in plans]
    with stages_in_turn(config, 2) as runner:
        runner.load()
        first, last = runner.stages
        assert [first.execute(plan) for plan in plans[:2]] == [None, None]
        reader = threading.Thread(target=first.execute, args=(plans[2],), daemon=True)
        reader.start()
        found = [last.execute(plan).token_ids for plan in plans]
        reader.join(20)
        assert not reader.is_alive()
    assert found == wanted


def test_stages_share_adapter_or_refuse_it(tmp_path):
    tiny_model(*CASES["llama"], tmp_path)
    config = msgspec.structs.replace(engine_config(tmp_path), lora=LoRAConfig(num_slots=1))
    good = random_tensors(model=tmp_path)
    adapter = read_adapter(write_adapter(tmp_path / "good", good))
    plans = [
        chunk_plan(1, 0, 40, samples=1, adapter_slot=1),
        chunk_plan(2, 40, 1, samples=1, reads=1),
    ]
    alone = CpuRunner(config)
    alone.load()
    plain = [alone.execute(plan).token_ids for plan in plans]
    alone.load_adapter(1, adapter)
    wanted = [alone.execute(plan).token_ids for plan in plans]
    assert wanted != plain
    good["base_model.model.model.layers.9.mlp.up_proj.lora_A.weight"] = good.popitem()[1]
    bad = read_adapter(write_adapter(tmp_path / "bad", good))
    with stages_in_turn(config, 2) as runner:
        runner.load()
        for stage in runner.stages:
            stage.load_adapter(1, adapter)
        for stage in runner.stages:
            with pytest.raises(TrouperValidationError, match=r"layers\.9\.mlp\.up_proj"):
                stage.load_adapter(1, bad)
        assert [runner.execute(plan).token_ids for plan in plans] == wanted


@pytest.mark.parametrize("options", [{"quantization": "int4"}, {"quantization": "int8"}])
def test_rounded_weights_are_the_same_in_stages(options, tmp_path):
    tiny_model("Qwen3", {"head_dim": 32, "intermediate_size": 128}, tmp_path)
    config = engine_config(tmp_path, **options)
    expected = outputs(CpuRunner(config))
    with stages_in_turn(config, 3) as runner:
        assert outputs(runner) == expected


def test_blocks_are_those_of_stage_that_has_fewest(tmp_path):
    tiny_model("Llama", {"num_hidden_layers": 4}, tmp_path)
    config = engine_config(tmp_path, max_num_seqs=512)
    with stages_in_turn(config, 2, (1, 3)) as runner:
        counts = [stage.load().num_blocks - 1 for stage in runner.stages]
        assert counts[0] == pytest.approx(3 * counts[1], rel=0.01)
        assert runner.load().num_blocks - 1 == counts[1]


def test_rows_of_states_have_the_same_numbers_in_all_stages(tmp_path):
    """The stage with the most recurrent layers has room for the fewest. One without such layers has no rows."""
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    tiny_model("Qwen3_5Text", RECURRENT["qwen3-5"][1] | {"layer_types": kinds}, tmp_path)
    config = msgspec.structs.replace(
        engine_config(tmp_path), num_blocks=None, kv_cache_bytes=2**20, is_length_open=True
    )
    with stages_in_turn(config, 3, (1, 2, 1)) as runner:
        infos = [stage.load() for stage in runner.stages]
        rows = {(info.num_state_rows, info.num_snapshots) for info in infos}
        assert len(rows) == 1
        one, two, none = (info.state_bytes for info in infos)
        assert (two, none) == (2 * one, 0)
        assert min(rows)[1] == 2**18 // two


# In processes

TEXTS = [
    "def quicksort(items):",
    "class Stack:\n    def push(self, item):" * 12,
    "x = [",
    "import os\n" * 40,
]
WISHES = [
    SamplingParams(temperature=0, max_tokens=16, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=1, max_tokens=12, logprobs=2, n=2),
    SamplingParams(temperature=1.2, top_p=0.9, seed=2, max_tokens=9, repetition_penalty=1.2),
    SamplingParams(temperature=0, max_tokens=1),
]
ENGINE = {
    "dtype": "float32", "max_model_len": 512, "block_size": 16, "num_gpu_blocks_override": 64,
    "max_num_seqs": 8, "max_num_batched_tokens": 64,
}  # fmt: skip


def tokens_of(llm):
    found = llm.generate(TEXTS, WISHES, use_tqdm=False)
    return [[completion.token_ids for completion in output.outputs] for output in found]


@pytest.fixture(scope="module")
def whole():
    with LLM(**ENGINE) as llm:
        return tokens_of(llm)


@pytest.mark.timeout(120)
def test_two_processes_give_tokens_of_one_and_sleep_together(whole):
    with LLM(pipeline_parallel_size=2, **ENGINE) as llm:
        assert tokens_of(llm) == whole
        llm.sleep(2)
        assert llm.wake_up()
        assert tokens_of(llm) == whole


HYBRID_ENGINE = {
    "dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 128, "block_size": 16, "max_num_seqs": 4,
    "max_num_batched_tokens": 48,
}  # fmt: skip


def hybrid_answers(llm):
    """Answers with several completions, from cold, from the cache, and from the middle of a cached prompt."""
    first, second, third = random_prompts((93, 45, 30), VOCAB)
    found = []
    for batch in (
        [first, second, third],
        [second, first],
        [[*first[:70], 5, 6]],
        [[*first[:70], 9]],
    ):
        wishes = [
            SamplingParams(temperature=0.8, seed=3, max_tokens=12, logprobs=1, ignore_eos=True, n=n)
            for n in range(1, len(batch) + 1)
        ]
        prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in batch]
        for output in llm.generate(prompts, wishes, use_tqdm=False):
            found.append([output.num_cached_tokens])
            for one in output.outputs:
                values = [[entry.logprob for entry in each.values()] for each in one.logprobs]
                found.append([one.token_ids, values])
    return found


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("case", ["lfm2", "qwen3-5"])
def test_hybrids_in_processes_have_the_bits_of_one(case, tmp_path):
    tiny_model(*RECURRENT[case], tmp_path)
    with LLM(str(tmp_path), **HYBRID_ENGINE) as llm:
        wanted = hybrid_answers(llm)
    assert {cached for (cached, *rest) in wanted if not rest} >= {0, 64, 80}
    with LLM(str(tmp_path), pipeline_parallel_size=2, **HYBRID_ENGINE) as llm:
        assert hybrid_answers(llm) == wanted
        llm.sleep(1)
        assert llm.wake_up()
        assert hybrid_answers(llm) == wanted


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "options",
    [
        {"pipeline_parallel_size": 3, "enable_prefix_caching": False},
        {"num_gpu_blocks_override": 9, "enforce_eager": True},
    ],
    ids=["three", "preempted"],
)
def test_tokens_of_hybrid_in_stages_do_not_depend_on(options, tmp_path):
    tiny_model(*RECURRENT["lfm2"], tmp_path)
    options = HYBRID_ENGINE | {"pipeline_parallel_size": 2, "disable_log_stats": False} | options
    prompts = [TokensPrompt(prompt_token_ids=p) for p in random_prompts((30, 31, 32, 33), VOCAB)]
    wishes = SamplingParams(temperature=0.8, seed=3, max_tokens=30, ignore_eos=True)
    found = []
    for engine in (HYBRID_ENGINE, options):
        with LLM(str(tmp_path), **engine) as llm:
            answers = llm.generate(prompts, wishes, use_tqdm=False)
            found.append([answer.outputs[0].token_ids for answer in answers])
            num_preemptions = llm.llm_engine.statistics().scheduler.num_preemptions
    assert found[0] == found[1]
    assert (num_preemptions > 0) == ("num_gpu_blocks_override" in options)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_embeddings_are_taken_by_the_first_stage(tmp_path):
    model = tiny_model(*CASES["gemma2"], tmp_path)
    rows = model.get_input_embeddings()(torch.tensor(PROMPTS[2])).detach()
    prompts = [{"prompt_embeds": rows}, {"prompt_token_ids": PROMPTS[3]}]
    options = {
        "dtype": "float32", "skip_tokenizer_init": True, "enable_prompt_embeds": True,
        "max_num_batched_tokens": 16, "max_num_seqs": 4, "max_model_len": 128,
    }  # fmt: skip
    found = []
    for num_stages in (1, 2):
        with LLM(str(tmp_path), pipeline_parallel_size=num_stages, **options) as llm:
            answers = llm.generate(
                prompts, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False
            )
            found.append([answer.outputs[0].token_ids for answer in answers])
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "options",
    [
        {"pipeline_parallel_size": 3},
        {"async_scheduling": False},
        {"enable_prefix_caching": False},
        {"max_model_len": 384, "num_gpu_blocks_override": 25},  # preemptions
        {"enforce_eager": True},
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 512},
    ],
    ids=lambda options: ",".join(f"{k}={v}" for k, v in options.items()),
)
def test_tokens_of_stages_do_not_depend_on(options, whole):
    with LLM(**{**ENGINE, "pipeline_parallel_size": 2, **options}) as llm:
        assert tokens_of(llm) == whole
