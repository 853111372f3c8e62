"""The same requests give the same tokens, however they are scheduled: fp32, on the bundled model."""

import pytest

from trouper import LLM, SamplingParams

COMMON = "import os\nimport sys\n\n\ndef main(argv):\n    " * 6
PROMPTS = [
    COMMON + "return 0",
    COMMON + "raise SystemExit",
    "def quicksort(items):",
    "class Stack:\n    def push(self, item):",
    "x = [",
    "for line in open(path):\n",
    COMMON + "print(argv)",
    "# a comment\n",
]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=24),
    SamplingParams(temperature=0.8, seed=1, max_tokens=24),
    SamplingParams(temperature=1.2, top_p=0.9, seed=2, max_tokens=24),
    SamplingParams(temperature=1.0, top_k=20, seed=3, max_tokens=24, repetition_penalty=1.2),
] * 2
BASE = {"dtype": "float32", "max_model_len": 512, "num_gpu_blocks_override": 256, "block_size": 16}


def run(llm, order=None):
    order = list(range(len(PROMPTS)) if order is None else order)
    outputs = llm.generate([PROMPTS[i] for i in order], [PARAMS[i] for i in order], use_tqdm=False)
    return {i: output.outputs[0].token_ids for i, output in zip(order, outputs, strict=True)}


@pytest.fixture(scope="module")
def baseline():
    with LLM(**BASE) as llm:
        return run(llm)


@pytest.mark.parametrize(
    "options",
    [
        {"enable_prefix_caching": False},
        {"async_scheduling": False},
        {"max_num_batched_tokens": 16, "max_num_seqs": 8},
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 512, "max_num_seqs": 8},
        {"max_num_seqs": 1},
        {"max_num_seqs": 3},
        {"block_size": 64, "num_gpu_blocks_override": 64},
        {"max_model_len": 128, "num_gpu_blocks_override": 12},  # preemptions
        {"long_prefill_token_threshold": 7},
    ],
    ids=lambda options: ",".join(f"{k}={v}" for k, v in options.items()),
)
def test_tokens_do_not_depend_on(options, baseline):
    with LLM(**{**BASE, **options}) as llm:
        assert run(llm) == baseline
        if options.get("num_gpu_blocks_override") == 12:
            assert llm.llm_engine.statistics().scheduler.num_preemptions > 0


def test_tokens_are_same_alone_and_in_crowd_and_from_cache(baseline):
    with LLM(**BASE) as llm:
        alone = {}
        for i in range(len(PROMPTS)):
            alone |= run(llm, [i])
        assert alone == baseline
        assert run(llm, reversed(range(len(PROMPTS)))) == baseline
        assert llm.llm_engine.statistics().scheduler.prefix_cache_hits > 0


@pytest.mark.parametrize("level", [0, 1, 2])
def test_tokens_are_the_same_after_sleeping(level, baseline):
    with LLM(**BASE) as llm:
        assert run(llm) == baseline
        llm.sleep(level)
        assert llm.wake_up()
        assert run(llm) == baseline
