"""`LLM` with more adapters than may be loaded at once: its prompts wait for each other, and none is lost."""

import pytest

from tests.support.adapters import random_tensors, write_adapter
from trouper import LLM, EngineArgs, LLMEngine, LoRARequest, SamplingParams
from trouper.errors import AdaptersInUseError, TrouperClientError

OPTIONS = {
    "max_model_len": 256, "max_num_seqs": 8, "num_gpu_blocks_override": 64, "dtype": "float32",
    "enable_lora": True, "max_loras": 2, "max_cpu_loras": 2,
}  # fmt: skip
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPT = "def f("


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    return [
        LoRARequest(f"a{number}", number, write_adapter(root / f"a{number}", tensors))
        for number in range(1, 6)
        for tensors in [random_tensors(seed=number)]
    ]


@pytest.fixture(scope="module")
def llm():
    with LLM(**OPTIONS) as llm:
        yield llm


@pytest.fixture(autouse=True)
def assert_idle(llm):
    yield
    assert llm.llm_engine.statistics().num_open_requests == 0


def texts(outputs):
    return [output.outputs[0].text for output in outputs]


def generate(llm, prompts, adapters):
    return llm.generate(prompts, PARAMS, use_tqdm=False, lora_request=adapters)


def test_each_prompt_has_its_adapter_however_many_there_are(llm, adapters):
    alone = [text for each in adapters for text in texts(generate(llm, PROMPT, each))]
    assert len(set(alone)) > 2
    order = [0, 1, 2, 3, 4, 0, 2, 4, 1, 3]
    outputs = generate(llm, [PROMPT] * len(order), [adapters[i] for i in order])
    assert texts(outputs) == [alone[i] for i in order]
    assert [output.lora_request for output in outputs] == [adapters[i] for i in order]


def test_prompts_queued_wait_for_no_reader_of_ones_before(llm, adapters):
    ids = llm.enqueue([PROMPT] * 3, PARAMS, use_tqdm=False, lora_request=adapters[:3])
    ids += llm.enqueue([PROMPT] * 2, PARAMS, use_tqdm=False, lora_request=adapters[3:])
    assert [output.request_id for output in llm.wait_for_completion(use_tqdm=False)] == ids


def test_bad_prompt_or_adapter_ends_queued_batch(llm, adapters, tmp_path):
    nowhere = LoRARequest("nowhere", 9, str(tmp_path / "nowhere"))
    for prompts, last in (
        ([PROMPT] * 5, nowhere),
        ([*[PROMPT] * 4, "x" * 4096], adapters[4]),
    ):
        with pytest.raises(TrouperClientError):
            generate(llm, prompts, [*adapters[:4], last])
        assert llm.llm_engine.statistics().num_open_requests == 0
    assert len(generate(llm, [PROMPT] * 5, adapters)) == 5


def test_a_paused_engine_is_not_waited_for(llm, adapters):
    """Nothing ends in it, so no turn would come."""
    llm.sleep(level=0)
    try:
        with pytest.raises(AdaptersInUseError, match="max_cpu_loras"):
            llm.enqueue([PROMPT] * 3, PARAMS, use_tqdm=False, lora_request=adapters[:3])
    finally:
        llm.wake_up()


def test_engine_stepped_by_hand_says_that_step_is_needed(adapters):
    engine = LLMEngine.from_engine_args(EngineArgs(**OPTIONS))
    with engine:
        for number in range(2):
            engine.add_request(str(number), PROMPT, PARAMS, lora_request=adapters[number])
        with pytest.raises(AdaptersInUseError):
            engine.add_request("2", PROMPT, PARAMS, lora_request=adapters[2])
        while engine.has_unfinished_requests():
            engine.step()
        engine.add_request("2", PROMPT, PARAMS, lora_request=adapters[2])
        engine.abort_request("2")
