"""An engine on the GPU gives what an engine on the CPU gives, in float32, whatever it is asked for."""

import shutil

import anyio
import pytest
import torch
from safetensors.torch import load_file, save_file

from trouper import SamplingParams
from trouper.config.args import EngineArgs
from trouper.errors import GenerationError
from trouper.frontends.python.async_engine import AsyncLLMEngine
from trouper.inputs import TokensPrompt

from .conftest import HAS_GPU
from .engines import BASE, PROMPTS, VOCAB, make_model, open_llm, run, tokens

GREEDY = SamplingParams(temperature=0, max_tokens=6)
MIXED = [
    SamplingParams(temperature=0, max_tokens=6, repetition_penalty=1.4, frequency_penalty=0.3),
    SamplingParams(temperature=0.8, seed=1, max_tokens=6, n=2),
    SamplingParams(temperature=1.2, top_p=0.9, top_k=20, seed=2, max_tokens=6, min_p=0.01),
    SamplingParams(
        seed=3, max_tokens=5, min_tokens=5, stop_token_ids=[1, 2], presence_penalty=0.5,
        logit_bias={7: 2.0, 1: 20.0}, allowed_token_ids=[*range(60)],
    ),
]  # fmt: skip
GRAPHS = {"enforce_eager": False, "cudagraph_capture_sizes": [1, 2, 4, 16]}


pytest.importorskip("triton", reason="no Triton")
pytestmark = [
    pytest.mark.usefixtures("machines"),
    pytest.mark.timeout(300),  # the kernels are interpreted
    pytest.mark.filterwarnings("ignore:All-NaN"),  # the interpreter's maximum, of a row that fails
]
emulated = pytest.mark.skipif(HAS_GPU, reason="of the emulated GPU")
MIB = 2**20


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def expected(folder):
    with open_llm(folder, "cpu") as llm:
        return tokens(run(llm, GREEDY)), tokens(run(llm, MIXED))


def test_tokens_equal_those_of_cpu_with_two_steps_in_flight(folder, expected, machines):
    with open_llm(folder, "cuda") as llm:
        assert tokens(run(llm, MIXED)) == expected[1]
        # rows and blocks that others have used
        assert tokens(run(llm, GREEDY, PROMPTS[:2])) == expected[0][:2]
    assert all(machine.most_in_flight == 2 for machine in machines)


def test_captured_steps_give_the_same_tokens(folder, expected, machines):
    with open_llm(folder, "cuda", **GRAPHS) as llm:
        assert tokens(run(llm, MIXED)) == expected[1]
    assert all(machine.num_replays > 9 for machine in machines)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"async_scheduling": False}, marks=pytest.mark.slow),
        {"max_num_batched_tokens": 5},
        {"num_gpu_blocks_override": 11, "max_model_len": 44},  # preemptions
        pytest.param({"max_num_seqs": 1}, marks=pytest.mark.slow),
        pytest.param({"block_size": 16}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_tokens_do_not_depend_on(options, folder, expected):
    with open_llm(folder, "cuda", **options) as llm:
        assert tokens(run(llm, GREEDY)) == expected[0]
        if "num_gpu_blocks_override" in options:
            assert llm.llm_engine.statistics().scheduler.num_preemptions > 0


def test_a_prefix_from_the_cache_changes_nothing(folder, expected):
    with open_llm(folder, "cuda") as llm:
        for _ in range(2):
            assert tokens(run(llm, GREEDY, PROMPTS[3:])) == expected[0][3:]
        assert llm.llm_engine.statistics().scheduler.prefix_cache_hits > 0


def test_logprobs_equal_those_of_the_cpu(folder):
    wishes = [
        SamplingParams(temperature=0, max_tokens=3, logprobs=3, prompt_logprobs=2),
        SamplingParams(temperature=1.0, seed=1, max_tokens=3, logprobs=0),
        SamplingParams(temperature=0, max_tokens=2, logprobs=-1, prompt_logprobs=-1),
        SamplingParams(temperature=0, max_tokens=2),
    ]
    found = []
    for device in ("cpu", "cuda"):
        with open_llm(folder, device, max_logprobs=-1, max_num_batched_tokens=16) as llm:
            inputs = [TokensPrompt(prompt_token_ids=prompt) for prompt in PROMPTS]
            outputs = llm.generate(inputs, wishes, use_tqdm=False)
        found.append([(o.prompt_logprobs, o.outputs[0].logprobs) for o in outputs])
    for ours, theirs in zip(found[1], found[0], strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert _numbers(a) == pytest.approx(_numbers(b), abs=1e-4)
            assert _ranks(a) == _ranks(b)


def _entries(logprobs):
    for i, position in enumerate(logprobs or ()):
        for token, entry in sorted((position or {}).items()):
            yield (i, token), entry


def _numbers(logprobs):
    return {key: entry.logprob for key, entry in _entries(logprobs)}


def _ranks(logprobs):
    return {key: entry.rank for key, entry in _entries(logprobs)}


@pytest.mark.parametrize("level", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_sleep_gives_memory_back_and_wakes_with_same_tokens(level, folder, expected, machines):
    with open_llm(folder, "cuda", **GRAPHS) as llm:
        assert tokens(run(llm, GREEDY, PROMPTS[1:3])) == expected[0][1:3]
        llm.sleep(level)
        for machine in machines:
            assert machine.num_alive() == 0
            assert (machine.host_bytes > 0) == (level == 1)
        assert llm.wake_up()
        assert tokens(run(llm, GREEDY, PROMPTS[1:3])) == expected[0][1:3]


@pytest.mark.trio
async def test_a_request_that_is_left_harms_nobody(folder, expected):
    args = EngineArgs(model=folder, device="cuda", **BASE)
    found = {}

    async def ask(i, *, leave_after=None):
        prompt = TokensPrompt(prompt_token_ids=PROMPTS[i])
        async with engine.generate(prompt, GREEDY) as stream:
            async for output in stream:
                found[i] = output.outputs[0].token_ids
                if leave_after is not None and len(found[i]) >= leave_after:
                    return

    async with AsyncLLMEngine(args) as engine:
        async with anyio.create_task_group() as tg:
            tg.start_soon(lambda: ask(0))
            tg.start_soon(lambda: ask(1, leave_after=2))
            tg.start_soon(lambda: ask(2))
        await ask(3)
    assert [found[i] for i in (0, 2, 3)] == [expected[0][i][0] for i in (0, 2, 3)]
    assert found[1] == expected[0][1][0][: len(found[1])]


@emulated
def test_step_without_memory_is_tried_again_in_smaller_ones(folder, expected, machines, caplog):
    """Neither an upload nor a launch finds memory for more than eight tokens."""

    def fail(host):
        if host.shape == (6, 5) and host[0, -1] > 8:
            raise torch.OutOfMemoryError("CUDA out of memory")

    with open_llm(folder, "cuda", enable_chunked_prefill=True) as llm:
        (machine,) = machines
        machine.fail = fail
        released = machine.num_released
        assert tokens(run(llm, GREEDY)) == expected[0]
        assert machine.num_released > released
    assert "failed" in caplog.text


def test_prompts_of_embeddings_equal_those_of_the_cpu(folder):
    torch.manual_seed(0)
    prompts = [{"prompt_embeds": torch.randn(n, 64)} for n in (5, 37)]
    found = []
    for device in ("cpu", "cuda"):
        with open_llm(folder, device, enable_prompt_embeds=True) as llm:
            inputs = [prompts[0], TokensPrompt(prompt_token_ids=PROMPTS[2]), prompts[1]]
            found.append(llm.generate(inputs, MIXED[:1] * 3, use_tqdm=False))
    ours, theirs = ([o.outputs[0].token_ids for o in outputs] for outputs in found)
    assert ours == theirs


@pytest.mark.trio
async def test_a_row_that_is_not_finite_fails_alone(folder, expected, tmp_path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    seen = {*PROMPTS[0], *PROMPTS[1], *expected[0][0][0], *expected[0][1][0]}
    poisoned = next(token for token in range(VOCAB) if token not in seen)
    weights["model.embed_tokens.weight"][poisoned] = torch.nan
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    prompts = [PROMPTS[0], [2, poisoned, 3], PROMPTS[1]]
    found = {}

    async def ask(i):
        async with engine.generate(TokensPrompt(prompt_token_ids=prompts[i]), GREEDY) as stream:
            try:
                async for output in stream:
                    found[i] = output.outputs[0].token_ids
            except GenerationError as error:
                found[i] = str(error)

    async with AsyncLLMEngine(EngineArgs(model=str(tmp_path), device="cuda", **BASE)) as engine:
        async with anyio.create_task_group() as tg:
            for i in range(3):
                tg.start_soon(ask, i)
    assert [found[0], found[2]] == [e[0] for e in expected[0][:2]]
    assert "not finite" in found[1]


@emulated
def test_the_cache_takes_what_the_largest_step_leaves(folder, machines):
    sizes = {"num_gpu_blocks_override": None, "max_num_batched_tokens": 8, "max_num_seqs": 2}
    with open_llm(folder, "cuda", gpu_memory_utilization=0.75, **sizes) as llm:
        block_bytes = 2 * 2 * 2 * 32 * 4 * 4  # layers, k and v, heads, width, tokens, bytes
        (machine,) = machines
        free = 48 * MIB - 16 * MIB - machine.step_bytes
        assert llm.llm_engine.statistics().scheduler.num_blocks_total == free // block_bytes
