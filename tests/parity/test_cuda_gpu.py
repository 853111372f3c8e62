"""On a real GPU: whole engines beside the CPU's, the same bits in every crowd, memory that goes back."""

import os
import signal

import pytest
import torch

from trouper import LLM, SamplingParams
from trouper.actors.engine.wiring import open_engine
from trouper.actors.executor.devices.process import ProcessDevice
from trouper.actors.executor.workers.launching import launch
from trouper.config.args import EngineArgs
from trouper.config.resolve import resolve

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
COMMON = "import os\nimport sys\n\n\ndef main(argv):\n    " * 6
PROMPTS = [
    COMMON + "return 0", "def quicksort(items):", "class Stack:\n    def push(self, item):", "x = [",
    "for line in open(path):\n", COMMON + "print(argv)", "# a comment\n", "import ",
]  # fmt: skip
PARAMS = [
    SamplingParams(temperature=0, max_tokens=48),
    SamplingParams(temperature=0.8, seed=1, max_tokens=48),
    SamplingParams(temperature=1.2, top_p=0.9, seed=2, max_tokens=48, n=3),
    SamplingParams(temperature=1.0, top_k=20, seed=3, max_tokens=48, repetition_penalty=1.2),
] * 2
BASE = {"max_model_len": 512, "max_num_seqs": 64}


def answers(params=PARAMS, prompts=PROMPTS, **options):
    with LLM(**{**BASE, **options}) as llm:
        return texts(llm, params, prompts)


def texts(llm, params=PARAMS, prompts=PROMPTS):
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def expected():
    return answers(device="cpu", dtype="float32")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enforce_eager": True},
        {"async_scheduling": False},
        {"max_num_batched_tokens": 64},
        {"max_num_seqs": 3},
        {"max_model_len": 256, "num_gpu_blocks_override": 24},  # preemptions
    ],
    ids=str,
)
def test_in_float32_tokens_equal_those_of_the_cpu(options, expected):
    assert answers(device="cuda", dtype="float32", **options) == expected


def test_bfloat16_greedy_tokens_differ_only_in_ties():
    """To the first difference, which is a near tie; from there on the contexts differ."""
    params = SamplingParams(temperature=0, max_tokens=64, logprobs=5)
    found = {}
    for device in ("cpu", "cuda"):
        with LLM(device=device, dtype="bfloat16", **BASE) as llm:
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        found[device] = [output.outputs[0] for output in outputs]
    for ours, theirs in zip(found["cuda"], found["cpu"], strict=True):
        pairs = zip(ours.token_ids, theirs.token_ids, strict=False)
        different = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if different is not None:
            logprobs = theirs.logprobs[different]
            a, b = (c.token_ids[different] for c in (ours, theirs))
            assert a in logprobs
            assert logprobs[b].logprob - logprobs[a].logprob < 0.3  # two steps of bfloat16


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_batch_invariant_bits_depend_on_nobody_else(dtype):
    asking = SamplingParams(temperature=0, max_tokens=32, logprobs=3)
    options = {"device": "cuda", "dtype": dtype, "batch_invariant": True, **BASE}

    def bits(llm, crowd, prompt=PROMPTS[0]):
        others = [SamplingParams(temperature=1.0, seed=i, max_tokens=32) for i in range(crowd)]
        prompts = [prompt, *(PROMPTS[i % len(PROMPTS)] for i in range(crowd))]
        first, *_ = llm.generate(prompts, [asking, *others], use_tqdm=False)
        return first.outputs[0].token_ids, first.outputs[0].logprobs

    with LLM(**options, enable_prefix_caching=False) as llm:
        alone = bits(llm, 0)
        for crowd in (7, 31, 200):
            assert bits(llm, crowd) == alone
    for change in ({"max_num_batched_tokens": 64}, {"enforce_eager": True}):
        with LLM(**{**options, **change}) as llm:
            assert bits(llm, 31) == alone


@two_gpus
@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}], ids=str)
def test_in_float32_tokens_of_two_gpus_equal_those_of_cpu(options, expected):
    found = answers(device="cuda", dtype="float32", tensor_parallel_size=2, **options)
    assert found == expected


@two_gpus
def test_two_gpus_are_batch_invariant():
    asking = SamplingParams(temperature=0, max_tokens=32, logprobs=3)
    options = {"device": "cuda", "dtype": "bfloat16", "batch_invariant": True, **BASE}
    with LLM(tensor_parallel_size=2, enable_prefix_caching=False, **options) as llm:

        def bits(crowd):
            others = [SamplingParams(temperature=1.0, seed=i, max_tokens=32) for i in range(crowd)]
            prompts = [PROMPTS[0], *(PROMPTS[i % len(PROMPTS)] for i in range(crowd))]
            first, *_ = llm.generate(prompts, [asking, *others], use_tqdm=False)
            return first.outputs[0].token_ids, first.outputs[0].logprobs

        alone = bits(0)
        assert bits(31) == bits(200) == alone
        llm.sleep(2)
        assert llm.wake_up()
        assert bits(31) == alone


@two_gpus
@pytest.mark.anyio
async def test_streams_of_two_gpus_go_on_when_rank_is_killed(expected):
    """NCCL's kernels of the rank that is left spin until its process is killed, too."""
    config = resolve(EngineArgs(device="cuda", dtype="float32", tensor_parallel_size=2, **BASE))
    peers = []

    def start(rank, *, files=()):
        peers.append(launch(rank, files=files))
        return peers[-1]

    async with open_engine(config, ProcessDevice(config, start)) as engine:
        found = []
        async with engine.generate(PROMPTS[0], PARAMS[0]) as stream:
            async for output in stream:
                found = output.outputs[0].token_ids
                if len(found) >= 3 and len(peers) == 2:
                    os.kill(peers[1].pid, signal.SIGKILL)
    assert found == expected[0][0]
    assert len(peers) == 4


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_gives_the_memory_back(level):
    options = {"kv_cache_memory_bytes": 2**30, "batch_invariant": True}  # batches differ by timing
    with LLM(device="cuda", **options, **BASE) as llm:
        before = texts(llm)
        taken = torch.cuda.memory_reserved()
        assert taken > 2**30
        llm.sleep(level)
        assert torch.cuda.memory_reserved() < 2**28  # what cuBLAS works in
        assert llm.wake_up()
        assert texts(llm) == before
    assert torch.cuda.memory_reserved() < 2**28  # what cuBLAS works in


def test_no_more_is_taken_than_the_share():
    free, total = torch.cuda.mem_get_info()
    share = 1 - free / total + 0.1
    with LLM(device="cuda", gpu_memory_utilization=share, **BASE) as llm:
        texts(llm)
        left, _ = torch.cuda.mem_get_info()
        assert total - left < share * total + 2**29
