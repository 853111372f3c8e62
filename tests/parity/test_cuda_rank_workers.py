"""An engine on two emulated GPUs, a worker process each: what it says, what it does when one dies, and what it refuses."""

import os
import signal
from functools import partial
from importlib.util import find_spec

import anyio
import pytest

from trouper import SamplingParams
from trouper.actors.executor.devices.process import ProcessDevice
from trouper.actors.executor.workers.launching import launch
from trouper.config import devices
from trouper.config.args import EngineArgs
from trouper.config.resolve import resolve
from trouper.errors import TrouperValidationError, UnsupportedFeatureError
from trouper.frontends.python import async_engine
from trouper.frontends.python.async_engine import AsyncLLMEngine
from trouper.inputs import TokensPrompt

from .conftest import HAS_GPU
from .engines import BASE, PROMPTS, make_model, open_llm, run, tokens
from .ranks_in_processes import ROOT

pytestmark = [
    pytest.mark.timeout(300),  # the kernels are interpreted
    pytest.mark.skipif(HAS_GPU, reason="of emulated GPUs"),
]
SHORT = [PROMPTS[2], PROMPTS[0]]
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="no Triton")
GREEDY = SamplingParams(temperature=0, max_tokens=4)
SIZES = {"max_num_batched_tokens": 16, "max_num_seqs": 2, "max_model_len": 32}
GRAPHS = {"enforce_eager": False, "cudagraph_capture_sizes": [2, 16]}
TWO = {"tensor_parallel_size": 2, **SIZES, **GRAPHS}


@pytest.fixture
def worker_group(monkeypatch):
    """Two GPUs, whose workers emulate them; returns those that were started."""
    peers = []

    def start(rank, *, files=()):
        peers.append(launch(rank, "tests.parity.emulated_worker", files=files))
        return peers[-1]

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(devices, "cuda_problem", lambda: None)
    monkeypatch.setattr(devices, "num_devices", lambda: 2)
    monkeypatch.setattr(
        async_engine,
        "ProcessDevice",
        lambda config, _, **more: ProcessDevice(config, start, **more),
    )
    return peers


@pytest.fixture(params=["asyncio"])
def anyio_backend(request):
    return request.param


@pytest.fixture
def folder(tmp_path):
    return make_model(tmp_path)


@pytest.fixture
def expected(folder):
    """Of the CPU, by prompt."""
    with open_llm(folder, "cpu", **SIZES) as llm:
        return [ids for (ids,) in tokens(run(llm, GREEDY, SHORT))]


@needs_triton
@pytest.mark.slow
@pytest.mark.anyio
async def test_streams_survive_killed_rank_and_sleep(folder, expected, worker_group):
    found = {}

    async def ask(engine, i, *, kill_at=None):
        async with engine.generate(TokensPrompt(prompt_token_ids=SHORT[i]), GREEDY) as stream:
            async for output in stream:
                found[i] = output.outputs[0].token_ids
                if kill_at is not None and len(found[i]) >= kill_at:
                    kill_at = os.kill(worker_group[1].pid, signal.SIGKILL)

    args = EngineArgs(model=folder, device="cuda", **{**BASE, **TWO})
    async with AsyncLLMEngine(args) as engine:
        async with anyio.create_task_group() as tg:
            tg.start_soon(ask, engine, 0)
            tg.start_soon(partial(ask, engine, 1, kill_at=2))
        assert [found[0], found[1]] == expected
        assert len(worker_group) == 4
        await engine.sleep(2)
        await engine.wake_up()
        await ask(engine, 0)
        assert found[0] == expected[0]
    for peer in worker_group:
        with pytest.raises(ProcessLookupError):
            os.kill(peer.pid, 0)


@pytest.mark.usefixtures("worker_group")
@pytest.mark.parametrize(
    ("options", "kind", "parameter", "words"),
    [
        ({"tensor_parallel_size": 4}, TrouperValidationError, "tensor_parallel_size",
         "needs a GPU for each, but 2 are visible"),
        ({"pipeline_parallel_size": 2}, UnsupportedFeatureError, "pipeline_parallel_size", "on a GPU yet"),
        ({"tensor_parallel_size": 2, "device_worker": "inline"}, TrouperValidationError,
         "device_worker", "must be auto or process"),
        ({"tensor_parallel_size": 2, "nnodes": 2}, UnsupportedFeatureError, "nnodes", "on a GPU yet"),
    ],
)  # fmt: skip
def test_wishes_that_cannot_be_met_name_the_option(options, kind, parameter, words):
    with pytest.raises(kind, match=words) as caught:
        resolve(EngineArgs(device="cuda", **options))
    assert caught.value.parameter == parameter
