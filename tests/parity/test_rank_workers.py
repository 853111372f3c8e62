"""The workers of ranks and stages, with all that they share, say what one worker says: fp32 and bfloat16."""

import weakref
from contextlib import contextmanager

import pytest

from trouper import LLM, SamplingParams
from trouper.actors.executor.runners.cpu.runner import CpuRunner
from trouper.actors.executor.runners.cpu.stage_runner import check_sums
from trouper.actors.messages.steps import Sampling
from trouper.config.args import EngineArgs
from trouper.config.resolve import resolve
from trouper.errors import TrouperValidationError, UnsupportedFeatureError
from trouper.kernels.codegen import units
from trouper.kernels.cpu.rank_exchange import RanksDisagreeError

from .driver import GREEDY, Driver, engine_config, random_prompts
from .ranks import WorkersInThreads
from .test_architectures import CASES, CPU_ONLY, VOCAB, each_case, tiny_model
from .test_ranks import make_model

PROMPTS = random_prompts((1, 7, 40, 33), VOCAB)
SEEDED = Sampling(temperature=0.9, seed=5, top_k=20)
WISHES = [GREEDY, SEEDED, Sampling(temperature=0.0, prompt_logprobs=2), GREEDY]
needs_kernels = pytest.mark.skipif(not units.can_multiply(), reason="needs compiled kernels")


@contextmanager
def workers(*args):
    worker_group = WorkersInThreads(*args)
    try:
        yield worker_group
    finally:
        worker_group.close()


def outputs(runner, num_outputs=8):
    found = Driver(runner, chunk=13, shuffle=1, stagger=2).run(PROMPTS, num_outputs, WISHES)
    ranks = [[entry.rank for entry in s.prompt_logprobs] for s in found]
    return [s.token_ids for s in found], ranks


@needs_kernels
@pytest.mark.parametrize(
    ("case", "num_ranks", "num_stages"),
    [("llama", 2, 1), ("olmo2", 2, 2), ("gemma2", 2, 1), ("mixtral", 2, 1), ("llama", 4, 1)],
)
def test_workers_give_the_tokens_of_one(case, num_ranks, num_stages, tmp_path):
    name, own = (CASES | CPU_ONLY)[case]
    tiny_model(name, {**own, "intermediate_size": 128}, tmp_path)
    config = engine_config(tmp_path)
    expected = outputs(CpuRunner(config))
    with workers(config, num_ranks, num_stages) as worker_group:
        assert outputs(worker_group) == expected


@needs_kernels
@pytest.mark.parametrize("case", each_case())
def test_stages_of_ranks_give_the_tokens_of_one(case, tmp_path):
    """Every architecture has stages of ranks."""
    make_model(case, tmp_path)
    config = engine_config(tmp_path)
    expected = outputs(CpuRunner(config))
    with workers(config, 2, 2) as worker_group:
        assert outputs(worker_group) == expected


@needs_kernels
@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("case", ["gemma2", "gpt-oss"])
def test_replicas_of_stages_of_ranks_give_tokens_of_one_process(case, tmp_path):
    make_model(case, tmp_path)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    wishes = [
        SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
        SamplingParams(temperature=0.9, seed=5, max_tokens=12, ignore_eos=True),
    ]
    found = []
    for size in (1, 2):
        with LLM(
            str(tmp_path), dtype="float32", skip_tokenizer_init=True, max_model_len=128, max_num_seqs=4,
            tensor_parallel_size=size, pipeline_parallel_size=size, data_parallel_size=size,
        ) as llm:  # fmt: skip
            answers = llm.generate(prompts, wishes * 2, use_tqdm=False)
            found.append([answer.outputs[0].token_ids for answer in answers])
    assert found[0] == found[1]


@needs_kernels
def test_logprobs_of_prompt_leave_logits_of_recorded_step_alone(tmp_path):
    """A step with logits of its own samples for one request, and computes those of another's prompt."""
    tiny_model("Llama", {"vocab_size": 224}, tmp_path)
    config = engine_config(tmp_path)
    wishes = [Sampling(temperature=0.0, logprobs=1), Sampling(temperature=0.0, prompt_logprobs=1)]

    def found(runner):
        sequences = Driver(runner, stagger=2).run(PROMPTS[:2], 8, wishes)
        return [(s.token_ids, [e.rank for e in s.prompt_logprobs]) for s in sequences]

    expected = found(CpuRunner(config))
    with workers(config, 2) as worker_group:
        assert found(worker_group) == expected
        assert all(runner.runner.steps.recorded is not None for runner in worker_group.runners)


@needs_kernels
def test_steps_are_recorded_on_all_ranks_or_on_none(tmp_path, monkeypatch):
    tiny_model(*CASES["llama"], tmp_path)
    config = engine_config(tmp_path)
    expected = outputs(CpuRunner(config))
    with workers(config, 2) as worker_group:
        assert outputs(worker_group) == expected
        assert all(runner.runner.steps.recorded is not None for runner in worker_group.runners)
    with workers(config, 2) as worker_group:
        worker_group.load()
        monkeypatch.setattr(
            type(worker_group.runners[1].runner.model.decoder._layers[0].qkv),
            "apply",
            unrecordable_on(worker_group.runners[1]),
        )
        assert outputs(worker_group) == expected
        assert all(runner.runner.steps.recorded is None for runner in worker_group.runners)


def unrecordable_on(runner):
    """A product that torch computes, on one of the ranks."""
    linear = runner.runner.model.decoder._layers[0].qkv
    apply = type(linear).apply

    def other(self, x):
        return apply(self, x * 1.0 if self is linear else x)

    return other


@needs_kernels
def test_ranks_sleep_and_wake_together(tmp_path):
    tiny_model(*CASES["llama"], tmp_path)
    config = engine_config(tmp_path)
    with workers(config, 2) as worker_group:
        expected = outputs(worker_group)
        worker_group.on_each("sleep", 2)
        worker_group.on_each("wake", frozenset({"weights", "kv_cache"}))
        assert outputs(worker_group) == expected


@needs_kernels
def test_ranks_that_sleep_without_weights_keep_no_norm(tmp_path):
    """Check the workers in bfloat16, whose norms the kernels read in float32."""
    tiny_model(*CASES["llama"], tmp_path)
    config = engine_config(tmp_path, dtype="bfloat16", enforce_eager=True)
    with workers(config, 2) as worker_group:
        Driver(worker_group).run(PROMPTS[:1], 2)
        norms = [
            weakref.ref(runner.runner.model.decoder._layers[0].mlp_norm)
            for runner in worker_group.runners
        ]
        worker_group.on_each("sleep", 2)
        assert [norm() for norm in norms] == [None, None]


@needs_kernels
def test_rank_that_is_given_another_step_says_so(tmp_path):
    tiny_model(*CASES["llama"], tmp_path)
    config = engine_config(tmp_path, enforce_eager=True)
    with workers(config, 2) as worker_group:
        second = worker_group.runners[1].execute
        worker_group.runners[1].execute = lambda plan: second(
            plan if plan.step < 3 else type(plan)(**{**fields_of(plan), "step": plan.step + 1})
        )
        with pytest.raises(
            RanksDisagreeError, match=r"rank 0 was in step 3 with .* rank 1 in step 4"
        ):
            outputs(worker_group)


def fields_of(plan):
    return {name: getattr(plan, name) for name in plan.__struct_fields__}


TEXTS = ["def quicksort(items):", "class Stack:\n    def push(self, item):" * 6]
ENGINE = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 64}
PARAMS = SamplingParams(temperature=0, max_tokens=24, prompt_logprobs=1)


def tokens_of(llm):
    found = llm.generate(TEXTS, PARAMS, use_tqdm=False)
    return [output.outputs[0].token_ids for output in found]


@needs_kernels
@pytest.mark.timeout(120)
@pytest.mark.slow
def test_two_processes_give_tokens_of_one_and_sleep_together():
    with LLM(**ENGINE) as llm:
        whole = tokens_of(llm)
    with LLM(tensor_parallel_size=2, **ENGINE) as llm:
        assert tokens_of(llm) == whole
        llm.sleep(2)
        assert llm.wake_up()
        assert tokens_of(llm) == whole


@pytest.mark.parametrize(
    ("options", "kind", "parameter", "words"),
    [
        ({"tensor_parallel_size": 0}, TrouperValidationError, "tensor_parallel_size", "at least 1"),
        ({"tensor_parallel_size": 2, "device_worker": "inline"}, TrouperValidationError,
         "device_worker", "must be auto or process with tensor_parallel_size=2"),
        ({"tensor_parallel_size": 2, "runner": "pooling"}, UnsupportedFeatureError,
         "tensor_parallel_size", "not supported for pooling models"),
        ({"tensor_parallel_size": 2, "speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
         UnsupportedFeatureError, "speculative_config", "combined with tensor_parallel_size=2"),
    ],
)  # fmt: skip
def test_wishes_that_cannot_be_met_name_the_option(options, kind, parameter, words):
    with pytest.raises(kind, match=words) as caught:
        resolve(EngineArgs(**options))
    assert caught.value.parameter == parameter


def test_ranks_are_workers_that_share_out_the_cores():
    config = resolve(
        EngineArgs(tensor_parallel_size=2, pipeline_parallel_size=3, data_parallel_size=2)
    )
    assert config.device_worker == "process"
    assert (config.workers_per_replica, config.num_workers) == (6, 12)


@pytest.mark.parametrize(("dtype", "hidden_size"), [("float32", 40), ("float16", 64)])
def test_rows_that_no_kernel_sums_are_refused(dtype, hidden_size):
    config = resolve(EngineArgs(tensor_parallel_size=2, dtype=dtype))
    with pytest.raises(UnsupportedFeatureError, match=f"rows of {hidden_size} {dtype}") as caught:
        check_sums(config, hidden_size)
    assert caught.value.parameter == "tensor_parallel_size"


def test_ranks_without_kernels_are_refused_and_stages_are_not(tmp_path, monkeypatch):
    tiny_model(*CASES["llama"], tmp_path)
    config = engine_config(tmp_path, enforce_eager=True)
    monkeypatch.setattr(units, "kind_of", lambda dtype: None)
    with pytest.raises(
        UnsupportedFeatureError, match="tensor_parallel_size=2 needs compiled kernels"
    ):
        WorkersInThreads(config, 2)
    with workers(config, 1, 2) as worker_group:
        assert worker_group.load()
