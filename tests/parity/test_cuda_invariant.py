"""Batch-invariant mode: a request has the same bits alone, in a crowd, in any chunks, and after a preemption."""

import pytest

from trouper import SamplingParams

from .engines import PROMPTS, make_model, open_llm, run

pytest.importorskip("triton", reason="no Triton")
pytestmark = [
    pytest.mark.usefixtures("machines", "ordered_dots"),
    pytest.mark.timeout(300),  # interpreted
]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=5, logprobs=2),
    SamplingParams(temperature=1.0, seed=4, max_tokens=5, logprobs=0),
]


def test_bits_depend_on_nobody_else(tmp_path):
    folder, prompts = make_model(tmp_path), PROMPTS[:2]
    with open_llm(folder, "cuda", batch_invariant=True) as llm:
        alone = [run(llm, s, [prompt])[0] for s, prompt in zip(PARAMS, prompts, strict=True)]
    crowded = {
        "max_num_batched_tokens": 7,
        "max_model_len": 36,
        "num_gpu_blocks_override": 9,
        "enforce_eager": False,
        "cudagraph_capture_sizes": [2, 4],
    }
    with open_llm(folder, "cuda", batch_invariant=True, **crowded) as llm:
        assert run(llm, PARAMS, prompts) == alone
        assert llm.llm_engine.statistics().scheduler.num_preemptions > 0
