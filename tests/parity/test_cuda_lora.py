"""Adapters on a GPU: the tokens and logprobs of peft, in float32, in captured steps of every mixture."""

import pytest

from trouper import SamplingParams
from trouper.config.adapters import read_adapter
from trouper.config.args import EngineArgs
from trouper.config.resolve import resolve

from .engines import BASE, make_model, open_llm
from .test_lora import PROMPTS as ALL_PROMPTS
from .test_lora import VARIANTS, compare, greedy_of_peft, run, save_adapter, values

pytest.importorskip("triton", reason="no Triton")
pytest.importorskip("peft")
from trouper import LoRARequest

pytestmark = [
    pytest.mark.usefixtures("machines"),
    pytest.mark.timeout(300),  # the kernels are interpreted
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),  # peft
]
PROMPTS = ALL_PROMPTS[:1] + ALL_PROMPTS[2:3]
NUM_OUTPUTS = 4
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_OUTPUTS, ignore_eos=True, logprobs=-1)
GRAPHS = {"enforce_eager": False, "cudagraph_capture_sizes": [2, 4]}
OPTIONS = {
    "enable_lora": True, "max_loras": 3, "max_lora_rank": 16, "max_logprobs": -1, "max_num_seqs": 4,
    "num_gpu_blocks_override": 64,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def adapters(folder, tmp_path_factory):
    found = []
    for number, name in enumerate(("all", "attention", "patterns"), 1):
        path = tmp_path_factory.mktemp(name)
        save_adapter(folder, path, VARIANTS[name], seed=number)
        found.append(LoRARequest(name, number, str(path)))
    return found


@pytest.fixture(scope="module")
def expected(folder, adapters):
    """Of each prompt, by adapter; None is the model alone."""
    paths = {None: None, **{adapter.lora_int_id: adapter.lora_path for adapter in adapters}}
    return {
        number: [
            (ids[:NUM_OUTPUTS], logprobs[:NUM_OUTPUTS])
            for ids, logprobs in greedy_of_peft(folder, path, PROMPTS)
        ]
        for number, path in paths.items()
    }


def test_mixture_gives_each_request_what_peft_gives_with_its_adapter(
    folder, adapters, expected, machines
):
    first, second, third = adapters
    with open_llm(folder, "cuda", **OPTIONS, **GRAPHS) as llm:
        for chosen in ([first, second], [third, None]):
            numbers = [each and each.lora_int_id for each in chosen]
            wanted = [expected[number][i] for i, number in enumerate(numbers)]
            compare(run(llm, PROMPTS, chosen, GREEDY), wanted)
    assert all(machine.num_replays > 3 for machine in machines)


def test_adapters_survive_sleep_and_give_their_memory_back(folder, adapters, expected, machines):
    with open_llm(folder, "cuda", **{**OPTIONS, "max_loras": 1, "max_cpu_loras": 1}) as llm:
        for level, adapter in ((1, adapters[0]), (2, adapters[1])):  # the second takes the slot
            wanted = expected[adapter.lora_int_id][:1]
            compare(run(llm, PROMPTS[:1], adapter, GREEDY), wanted)
            llm.sleep(level)
            assert all(machine.num_alive() == 0 for machine in machines)
            assert llm.wake_up()
            compare(run(llm, PROMPTS[:1], adapter, GREEDY), wanted)


def test_runner_closed_keeps_no_adapter_on_device(folder, adapters, machines):
    from trouper.actors.executor.runners.cuda.runner import CudaRunner

    config = resolve(EngineArgs(**{**BASE, **OPTIONS}, model=folder, device="cuda"))
    runner = CudaRunner(config)
    runner.load()
    runner.load_adapter(1, read_adapter(adapters[0].lora_path))
    for _ in range(2):
        runner.close()
        assert all(machine.num_alive() == 0 for machine in machines)


def test_no_prefix_crosses_adapters(folder, adapters):
    with open_llm(folder, "cuda", **OPTIONS) as llm:
        for adapter in (adapters[0], adapters[1], None):
            for num_cached in (0, 8):
                (output,) = run(llm, PROMPTS[:1], adapter, SamplingParams(max_tokens=1))
                assert output.num_cached_tokens == num_cached


@pytest.mark.slow
@pytest.mark.usefixtures("ordered_dots")
def test_eight_adapters_in_batch_are_each_alone_bit_by_bit(folder, tmp_path):
    """With the products whose rows do not depend on their number."""
    names = [*VARIANTS][:8]
    chosen = []
    for number, name in enumerate(names, 1):
        save_adapter(folder, tmp_path / name, VARIANTS[name], seed=number)
        chosen.append(LoRARequest(name, number, str(tmp_path / name)))
    options = {
        **OPTIONS,
        "max_loras": 8,
        "max_num_seqs": 9,
        "max_lora_rank": 32,
        "max_cpu_loras": 8,
    }
    chosen.insert(4, None)
    prompts = [[3 + i, 5][: 1 + i % 2] for i in range(9)]
    params = SamplingParams(
        temperature=0, max_tokens=2, ignore_eos=True, logprobs=-1, skip_reading_prefix_cache=True
    )
    with open_llm(folder, "cuda", batch_invariant=True, **options) as llm:
        alone = [
            values(run(llm, [prompt], adapter, params))[0]
            for prompt, adapter in zip(prompts, chosen, strict=True)
        ]
        assert values(run(llm, prompts, chosen, params)) == alone
    assert len({tuple(ids) for ids, _ in alone}) > 1
