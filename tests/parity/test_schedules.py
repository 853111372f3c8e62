"""Logprobs have the same bits in every schedule: however prompts are cut, forked, cached or computed again.  On the bundled model."""

import pytest
import torch

from trouper import LLM, SamplingParams
from trouper.kernels.codegen import units

TEXT = "def add(a, b):\n    return a + b\n\n\n"  # 12 tokens
LONG_PROMPT = 14 * TEXT  # more than a block of 128
PROMPTS = [
    LONG_PROMPT,
    LONG_PROMPT + "def sub(",
    9 * TEXT + "# the outputs of this one begin another block\n",
    "class Stack:\n    def push(self, item):",
    "# no",
]
FIXED = {"ignore_eos": True, "logprobs": 2}
PARAMS = [
    SamplingParams(temperature=0, max_tokens=36, **FIXED),
    SamplingParams(temperature=0.8, seed=1, max_tokens=30, prompt_logprobs=1, **FIXED),
    SamplingParams(temperature=1.0, seed=2, max_tokens=25, n=2, **FIXED),
    SamplingParams(temperature=0.7, seed=3, max_tokens=40, repetition_penalty=1.2, **FIXED),
    SamplingParams(temperature=0, max_tokens=20, **FIXED),
]
SUFFIX = {"speculative_config": {"method": "suffix"}}
SCHEDULES = {
    "one at a time": {"max_num_seqs": 1},
    "short chunks": {"max_num_batched_tokens": 13},
    "short chunks, drafts": {"max_num_batched_tokens": 48, **SUFFIX},
    "two at a time, drafts": {"max_num_seqs": 2, **SUFFIX},
    "too few blocks": {"num_gpu_blocks_override": 4},
    "too few blocks, drafts": {"num_gpu_blocks_override": 4, **SUFFIX},
    "eager": {"enforce_eager": True, "max_num_batched_tokens": 100},
}


def run(dtype, num_rounds=1, **options):
    """Generate all prompts together, so many times; return what each round gives, and the statistics."""
    base = {"dtype": dtype, "max_model_len": 512, "num_gpu_blocks_override": 32, "max_num_seqs": 4}
    base["enable_prefix_caching"] = num_rounds > 1
    with LLM(**{**base, **options}) as llm:
        rounds = [
            [
                [(each.token_ids, each.logprobs) for each in output.outputs]
                + [output.prompt_logprobs]
                for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)
            ]
            for _ in range(num_rounds)
        ]
        return rounds, llm.llm_engine.statistics().scheduler


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def plain(request):
    if units.kind_of(getattr(torch, request.param)) is None:
        pytest.skip("torch attends here, and cuts count")
    (found,), stats = run(request.param)
    assert stats.num_preemptions == 0
    return request.param, found


@pytest.mark.parametrize("name", SCHEDULES)
def test_logprobs_do_not_depend_on_the_schedule(name, plain):
    dtype, wanted = plain
    (found,), stats = run(dtype, **SCHEDULES[name])
    assert found == wanted
    assert (stats.num_preemptions > 0) == ("blocks" in name)
    assert (stats.num_accepted_tokens > 0) == ("drafts" in name)


@pytest.mark.parametrize("options", [{}, SUFFIX], ids=["plain", "drafts"])
def test_logprobs_do_not_depend_on_what_is_cached(options, plain):
    dtype, wanted = plain
    (first, second), stats = run(dtype, num_rounds=2, **options)
    assert first == second == wanted
    assert stats.prefix_cache_hits > 0


@pytest.mark.slow
def test_torch_attention_is_independent_of_batch():
    """In float16, of which no kernel is compiled; prompts are whole, the outputs of two begin another block."""
    prompts = [9 * TEXT, 9 * TEXT + "# another\n", "class Stack:\n    def push(self, item):"]
    params = [SamplingParams(temperature=0.8, seed=i, max_tokens=25, **FIXED) for i in range(3)]
    base = {"dtype": "float16", "max_model_len": 256, "num_gpu_blocks_override": 16}
    found = []
    for options in ({"max_num_seqs": 1}, {"max_num_seqs": 3}, {"max_num_seqs": 3, **SUFFIX}):
        with LLM(**base, **options) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            found.append([(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs])
            stats = llm.llm_engine.statistics().scheduler
    assert found[0] == found[1] == found[2]
    assert stats.num_accepted_tokens > 0
