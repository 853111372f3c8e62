"""Models with recurrent mixers: neither the cuts of a text nor its companions nor recorded steps change a bit."""

import pytest
import torch

from trouper import LLM, SamplingParams
from trouper.actors.executor.runners.cpu.runner import CpuRunner
from trouper.actors.messages.steps import Sampling
from trouper.inputs import TokensPrompt

from .driver import Driver, engine_config, random_prompts
from .test_architectures import RECURRENT, tiny_model

EVERY = Sampling(temperature=0.0, logprobs=-1)
CASES = ("qwen3-5", "lfm2", "granite-4-h", "lfm2-moe")
SLOW = ("qwen3-next", "granite-4-h-moe")
each = pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)]
)


# Whole registers of logits, which kernels of fixed order compute.
VOCAB = 208


def make(case, folder, **changes):
    name, fields = RECURRENT[case]
    tiny_model(name, fields | {"vocab_size": VOCAB} | changes, folder)


def answers(folder, *, chunk, stagger=0, num_prompts=3, **changes):
    """The bits of all logprobs of each prompt."""
    driver = Driver(CpuRunner(engine_config(folder, **changes)), chunk=chunk, stagger=stagger)
    prompts = random_prompts((40, 9, 23), VOCAB)[:num_prompts]
    return [
        (s.token_ids, [(p.token_ids, p.logprobs) for p in s.logprobs])
        for s in driver.run(prompts, 10, EVERY)
    ]


def check_cuts(folder, dtype, **options):
    whole = answers(folder, chunk=10**6, dtype=dtype, **options)
    assert answers(folder, chunk=1, dtype=dtype, **options) == whole
    assert answers(folder, chunk=7, stagger=3, dtype=dtype, **options) == whole
    assert answers(folder, chunk=18, num_prompts=1, dtype=dtype, **options) == whole[:1]


@each
def test_no_cut_or_companion_changes_a_bit(case, tmp_path):
    make(case, tmp_path)
    check_cuts(tmp_path, "bfloat16")


@each
@pytest.mark.parametrize("block_size", [8, 32])
def test_cuts_and_neighbouring_blocks_keep_float32_bits(case, block_size, tmp_path):
    make(case, tmp_path)
    check_cuts(tmp_path, "float32", block_size=block_size)


@each
def test_recorded_steps_have_the_bits_of_direct_ones(case, tmp_path):
    make(case, tmp_path)
    recorded = CpuRunner(engine_config(tmp_path))
    direct = CpuRunner(engine_config(tmp_path, enforce_eager=True))
    prompts = random_prompts((30, 3), VOCAB)
    found, wanted = (
        [(s.token_ids, s.logprobs) for s in Driver(runner, chunk=8).run(prompts, 8, EVERY)]
        for runner in (recorded, direct)
    )
    assert found == wanted
    assert recorded.steps is not None
    assert recorded.steps.recorded is not None, "steps are not recorded"
    assert recorded.steps.recorded._steps


@each
def test_a_row_used_before_changes_nothing(case, tmp_path):
    make(case, tmp_path)
    driver = Driver(CpuRunner(engine_config(tmp_path)), chunk=16)
    prompts = random_prompts((21, 34), VOCAB)
    first, second = (driver.run([prompt], 5, EVERY)[0].logprobs for prompt in prompts)
    again = [driver.run([prompt], 5, EVERY)[0].logprobs for prompt in reversed(prompts)]
    assert again == [second, first]


@each
def test_cached_prefixes_change_no_token(case, tmp_path):
    make(case, tmp_path)
    prompts = [TokensPrompt(prompt_token_ids=ids) for ids in random_prompts((70, 40), VOCAB)]
    params = SamplingParams(temperature=1.0, seed=3, n=2, max_tokens=8)
    options = {"dtype": "float32", "skip_tokenizer_init": True, "block_size": 16}
    with LLM(str(tmp_path), **options, max_num_batched_tokens=48) as llm:
        first, second = (llm.generate(prompts, params, use_tqdm=False) for _ in range(2))
    for cold, warm in zip(first, second, strict=True):
        assert warm.num_cached_tokens >= 32 > cold.num_cached_tokens
        for wanted, found in zip(cold.outputs, warm.outputs, strict=True):
            assert found.token_ids == wanted.token_ids


@each
@pytest.mark.parametrize(("quantization", "least"), [("int8", 0.95), ("int4", 0.6)])
def test_rounded_weights_stay_near_the_exact_ones(case, quantization, least, tmp_path):
    make(case, tmp_path)
    options = {"chunk": 16, "num_prompts": 1, "dtype": "bfloat16"}
    exact = answers(tmp_path, **options)[0]
    rounded = answers(tmp_path, **options, quantization=quantization)[0]
    first, other = (
        torch.tensor(x).scatter(0, torch.tensor(ids), torch.tensor(x))
        for ids, x in (exact[1][0], rounded[1][0])
    )
    correlation = torch.corrcoef(torch.stack((first, other)))[0, 1]
    assert least < correlation < 1
