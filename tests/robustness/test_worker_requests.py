"""Grammars, reasoning budgets and adapters work in a worker process and survive its death."""

import os
import re
import signal
from contextlib import asynccontextmanager

import anyio
import pytest

from tests.support.adapters import random_tensors, write_adapter
from trouper.actors.engine.wiring import open_engine
from trouper.actors.executor.devices.process import ProcessDevice
from trouper.actors.executor.devices.threaded import ThreadedDevice
from trouper.actors.executor.workers.launching import MODULE
from trouper.actors.messages.requests import RequestOptions
from trouper.config.args import EngineArgs
from trouper.config.resolve import resolve
from trouper.errors import RetryableRequestError, TrouperValidationError, UnsupportedFeatureError
from trouper.kernels.codegen import units
from trouper.lora import LoRARequest
from trouper.params import SamplingParams, StructuredOutputsParams
from trouper.pooling import PoolingParams

from .recorded_workers import LocalWorkers

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]
NEEDS_KERNELS = pytest.mark.skipif(not units.can_multiply(), reason="needs compiled kernels")
NUM_TOKENS = 24
START, END = "<think>", "</think>"
OPTIONS = {
    "dtype": "float32", "max_model_len": 256, "max_num_seqs": 16, "num_gpu_blocks_override": 64,
    "reasoning_config": {"reasoning_start_str": START, "reasoning_end_str": END},
}  # fmt: skip
DIGITS = StructuredOutputsParams(regex="[0-9]{40}")
ITEMS = {"type": "array", "items": {"type": "integer"}, "minItems": 20}


@pytest.fixture
def adapters(tmp_path):
    return [
        LoRARequest(
            f"a{seed}", seed, write_adapter(tmp_path / str(seed), random_tensors(seed=seed))
        )
        for seed in (1, 2)
    ]


@asynccontextmanager
async def an_engine(place, **options):
    config = resolve(EngineArgs(device_worker=place, **OPTIONS, **options))
    worker_group = LocalWorkers(MODULE)
    is_inline = config.device_worker == "inline"
    device = ThreadedDevice(config) if is_inline else ProcessDevice(config, worker_group)
    async with open_engine(config, device) as engine:
        yield engine, worker_group


def wanted(kind, seed):
    """Return the prompt and the parameters of one kind of stream."""
    options = {"max_tokens": NUM_TOKENS, "temperature": 1.0, "seed": seed, "ignore_eos": True}
    match kind:
        case "regex":
            return "x =", SamplingParams(structured_outputs=DIGITS, **options)
        case "json":
            rules = StructuredOutputsParams(json=ITEMS)
            return "x =", SamplingParams(structured_outputs=rules, **options)
        case "budget":
            return f"x {START}\n", SamplingParams(thinking_token_budget=9, **options)
        case "both":
            return f"x {START}\n", SamplingParams(
                thinking_token_budget=5, structured_outputs=DIGITS, **options
            )
        case _:
            return "def f(", SamplingParams(**options)


KINDS = ("regex", "json", "budget", "both", "plain")


async def outputs_of(engine, adapters=(None,), *, at_token=None, do=None):
    """Return the texts of each kind of stream with each adapter. `do` is called once, when one stream has `at_token` tokens."""
    found, is_done = {}, do is None

    async def read(kind, number, adapter):
        nonlocal is_done
        prompt, params = wanted(kind, number)
        async for output in engine.generate(
            prompt, params, f"{kind}-{number}-{at_token}", RequestOptions(lora_request=adapter)
        ):
            (completion,) = output.outputs
            found[kind, number] = completion.text, list(completion.token_ids)
            if not is_done and len(completion.token_ids) >= at_token:
                is_done = True
                do()

    async with anyio.create_task_group() as readers:
        for number, adapter in enumerate(adapters):
            for kind in KINDS:
                readers.start_soon(read, kind, number, adapter)
    return found


@pytest.mark.parametrize(
    ("num_stages", "num_ranks"),
    [
        (1, 1),
        pytest.param(2, 1, marks=pytest.mark.slow),
        pytest.param(1, 2, marks=[pytest.mark.slow, NEEDS_KERNELS]),
    ],
)
async def test_grammars_budgets_adapters_survive_worker_death(num_stages, num_ranks, adapters):
    """The adapters' files no longer exist when the worker is restarted."""
    of_all = [None, *adapters]
    options = {"enable_lora": True, "max_loras": 2}
    async with an_engine("inline", **options) as (engine, _):
        expected = await outputs_of(engine, of_all)
    assert len({text for text, _ in expected.values()}) == len(expected)
    assert re.fullmatch("[0-9]+", expected["regex", 0][0])
    options["pipeline_parallel_size"] = num_stages
    options["tensor_parallel_size"] = num_ranks
    async with an_engine("process", **options) as (engine, worker_group):

        def kill():
            for adapter in adapters:
                os.remove(f"{adapter.lora_path}/adapter_model.safetensors")
            os.kill(worker_group.peers[-1].pid, signal.SIGKILL)

        assert await outputs_of(engine, of_all, at_token=8, do=kill) == expected
        assert await engine.adapters.load(adapters[0]) is False
    assert len(worker_group.peers) == 2 * num_stages * num_ranks


@pytest.mark.slow
async def test_sleeping_worker_that_dies_has_its_adapters_again(tmp_path):
    mine = LoRARequest("mine", 7, write_adapter(tmp_path / "mine", random_tensors(seed=5)))
    async with an_engine("process", enable_lora=True) as (engine, worker_group):
        expected = await outputs_of(engine, [mine])
        await engine.controls.sleep(level=2)
        os.kill(worker_group.peers[-1].pid, signal.SIGKILL)
        while True:  # its loss is noticed, its successor loaded
            try:
                await engine.controls.wake()
                break
            except RetryableRequestError:
                await anyio.sleep(0.05)
        await engine.controls.resume()
        assert await outputs_of(engine, [mine]) == expected
    assert len(worker_group.peers) == 2


@pytest.mark.slow
async def test_embeddings_are_same_when_worker_dies_under_them():
    options = {"runner": "pooling", "dtype": "float32", "max_model_len": 256}
    texts = ["def f(x):\n    return x\n" * number for number in range(1, 9)]

    async def embeddings(engine, name):
        found = {}

        async def embed(number):
            stream = engine.encode(texts[number], PoolingParams(task="embed"), f"{name}{number}")
            async for output in stream:
                found[number] = output.outputs.data.tolist()

        async with anyio.create_task_group() as tasks:
            for number in range(len(texts)):
                tasks.start_soon(embed, number)
        return found

    config = resolve(EngineArgs(device_worker="inline", **options))
    async with open_engine(config, ThreadedDevice(config)) as engine:
        expected = await embeddings(engine, "inline")
    config = resolve(EngineArgs(device_worker="process", **options))
    worker_group = LocalWorkers(MODULE)
    async with open_engine(config, ProcessDevice(config, worker_group)) as engine:
        assert await embeddings(engine, "first") == expected
        os.kill(worker_group.peers[-1].pid, signal.SIGKILL)
        assert await embeddings(engine, "second") == expected
    assert len(worker_group.peers) == 2


@pytest.mark.slow
async def test_bad_adapter_is_refused_and_streams_continue(tmp_path):
    tensors = random_tensors(rank=32)
    wide = LoRARequest("wide", 1, write_adapter(tmp_path / "wide", tensors, rank=32))
    other = random_tensors()
    other["base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector.weight"] = (
        other.popitem()[1]
    )
    dora = LoRARequest("dora", 2, write_adapter(tmp_path / "dora", other))
    found = []
    for place in ("inline", "process"):
        errors = []
        async with an_engine(place, enable_lora=True) as (engine, _):
            for adapter, kind in ((wide, TrouperValidationError), (dora, UnsupportedFeatureError)):
                with pytest.raises(kind) as caught:
                    await engine.adapters.load(adapter)
                errors.append((str(caught.value), caught.value.parameter))
            assert engine.adapters.num_free_slots == 32
            text, _ = (await outputs_of(engine))["regex", 0]
        found.append((errors, text))
    assert found[0] == found[1]
    assert "max_lora_rank" in found[0][0][0][0]
