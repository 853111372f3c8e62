"""Batch-invariant mode: a request has the same bits alone, in a crowd, in any chunks, and after a preemption."""

import pytest

from trouper import SamplingParams

from .engines import PROMPTS, make_model, open_llm, run

PARAMS = [
    SamplingParams(temperature=0, max_tokens=5, logprobs=2),
    SamplingParams(temperature=1.0, seed=4, max_tokens=5, logprobs=0),
    SamplingParams(temperature=0.7, seed=5, top_k=9, max_tokens=5),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("qwen3"))


def test_bits_depend_on_nobody_else(folder):
    with open_llm(folder, "cuda", batch_invariant=True) as llm:
        alone = [run(llm, s, [prompt])[0] for s, prompt in zip(PARAMS[:2], PROMPTS[:2], strict=True)]
    crowded = {
        "max_num_batched_tokens": 7,
        "max_model_len": 44,
        "num_gpu_blocks_override": 11,
        "enforce_eager": False,
        "cudagraph_capture_sizes": [2, 4],
    }
    with open_llm(folder, "cuda", batch_invariant=True, **crowded) as llm:
        assert run(llm, PARAMS, PROMPTS[:3])[:2] == alone
        assert llm.llm_engine.statistics().scheduler.num_preemptions > 0
