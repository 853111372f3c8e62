"""Drafts change nothing: tokens, logprobs and reasons are those of an engine without them.  fp32, on the bundled model."""

import pytest

from trouper import LLM, SamplingParams

PROMPTS = [
    "def add(a, b):\n    return a + b\n\n\ndef add(a, b):\n    return a + b\n\n\ndef add(",
    "x = [1, 2, 3]\ny = [1, 2, 3]\nz = [1, 2,",
    "class Stack:\n    def push(self, item):",
    "# nothing that repeats\n",
]
LONG = {"max_tokens": 40, "ignore_eos": True}
PARAMS = {
    "greedy": SamplingParams(temperature=0, **LONG),
    "seeded": SamplingParams(temperature=0.8, seed=1, **LONG),
    "top": SamplingParams(temperature=1.1, top_p=0.9, top_k=40, min_p=0.02, seed=2, **LONG),
    "penalties": SamplingParams(
        temperature=0.7, seed=3, repetition_penalty=1.2, presence_penalty=0.3,
        frequency_penalty=0.2, **LONG,
    ),
    "bias": SamplingParams(temperature=0, logit_bias={5: 2.0, 9: -1.0}, bad_words=["self"], **LONG),
    "logprobs": SamplingParams(temperature=0, logprobs=3, prompt_logprobs=1, **LONG),
    "stop": SamplingParams(temperature=0, stop=["return", ", "], max_tokens=40),
    "least": SamplingParams(temperature=0.9, seed=4, min_tokens=20, max_tokens=40),
    "several": SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=20),
    "repetition": SamplingParams(temperature=0, max_tokens=1, ignore_eos=True),
}  # fmt: skip
BASE = {
    "dtype": "float32", "max_model_len": 256, "num_gpu_blocks_override": 16, "max_num_seqs": 2,
}  # fmt: skip


def run(llm, names=tuple(PARAMS)):
    found = {}
    for name in names:
        outputs = llm.generate(PROMPTS, PARAMS[name], use_tqdm=False)
        found[name] = [
            [(c.token_ids, c.text, c.logprobs, c.finish_reason, c.stop_reason) for c in o.outputs]
            + [o.prompt_logprobs]
            for o in outputs
        ]
    return found


@pytest.fixture(scope="module")
def plain():
    with LLM(**BASE) as llm:
        return run(llm)


@pytest.mark.parametrize(
    "speculation",
    [
        {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3},
        {"method": "suffix", "num_speculative_tokens": 5},
    ],
    ids=lambda config: config["method"],
)
def test_every_sampling_parameter_gives_what_it_gives_without(speculation, plain):
    with LLM(**BASE, speculative_config=speculation) as llm:
        assert run(llm) == plain
        stats = llm.llm_engine.statistics().scheduler
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


@pytest.mark.parametrize(
    "options",
    [
        {"max_model_len": 96, "num_gpu_blocks_override": 7, "block_size": 16},  # preemptions
        {"max_num_batched_tokens": 8},
        {"enforce_eager": True},
        {"enable_prefix_caching": False},
    ],
    ids=lambda options: ",".join(f"{k}={v}" for k, v in options.items()),
)
def test_the_schedule_does_not_matter(options, plain):
    with LLM(**{**BASE, **options}, speculative_config={"method": "suffix"}) as llm:
        found = run(llm, ("seeded", "penalties"))
        stats = llm.llm_engine.statistics().scheduler
    assert found == {name: plain[name] for name in found}
    assert stats.num_accepted_tokens > 0
    assert (stats.num_preemptions > 0) == ("max_model_len" in options)
