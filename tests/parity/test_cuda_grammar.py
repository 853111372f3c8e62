"""An engine on the GPU follows grammars as one on the CPU does: same tokens, with two steps in flight and preempted."""

import pytest

from trouper import LLM, SamplingParams, StructuredOutputsParams

pytest.importorskip("triton", reason="no Triton")
pytestmark = [
    pytest.mark.usefixtures("machines"),
    pytest.mark.timeout(300),  # the kernels are interpreted
    pytest.mark.filterwarnings("ignore:All-NaN"),  # the interpreter's maximum, of a row that fails
]
BASE = {
    "dtype": "float32", "max_model_len": 32, "block_size": 4, "num_gpu_blocks_override": 24,
    "max_num_seqs": 3, "max_num_batched_tokens": 16, "enforce_eager": True,
}  # fmt: skip
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def wanted(seed, options=(), **kinds):
    structured = StructuredOutputsParams(**kinds)
    options = {"max_tokens": 7, **dict(options)}
    return SamplingParams(seed=seed, structured_outputs=structured, **options)


PARAMS = [
    wanted(1, json=SCHEMA),
    SamplingParams(max_tokens=7, seed=2, ignore_eos=True),
    wanted(3, {"min_tokens": 6, "ignore_eos": True}, choice=["yes", "no"]),
]


def run(device, params=PARAMS, **options):
    with LLM(device=device, **{**BASE, **options}) as llm:
        outputs = llm.generate(["a b", "c", "d e f"], params, use_tqdm=False)
        preemptions = llm.llm_engine.statistics().scheduler.num_preemptions
    return [(o.outputs[0].token_ids, o.outputs[0].finish_reason) for o in outputs], preemptions


@pytest.fixture(scope="module")
def expected():
    return run("cpu")[0]


def test_the_same_tokens_as_on_the_cpu(expected, machines):
    assert run("cuda")[0] == expected
    assert all(machine.most_in_flight == 2 for machine in machines)


@pytest.mark.slow
def test_the_same_tokens_when_preempted():
    params = [wanted(seed, {"max_tokens": 14}, regex="[a-z ]{60}") for seed in range(3)]
    expected, _ = run("cpu", params)
    found, num_preemptions = run("cuda", params, num_gpu_blocks_override=7, max_model_len=24)
    assert (found, num_preemptions > 0) == (expected, True)
