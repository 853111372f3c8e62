"""When one replica is killed, its streams continue on the other with unchanged texts."""

import os
import signal
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import anyio
import pytest

from tests.robustness.faulty_worker import POISON
from trouper.actors.engine.wiring import open_engine
from trouper.actors.executor.devices.process import ProcessDevice
from trouper.actors.executor.devices.threaded import ThreadedDevice
from trouper.actors.executor.workers.launching import MODULE, launch
from trouper.config.args import EngineArgs
from trouper.config.resolve import resolve
from trouper.errors import GenerationError
from trouper.params import SamplingParams

from .test_worker import texts

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120), pytest.mark.slow]
FAULTY = "tests.robustness.faulty_worker"
OPTIONS = {"dtype": "float32", "max_num_seqs": 16, "max_model_len": 512}


@asynccontextmanager
async def replicated_engine(num_replicas=2, module=MODULE, **options):
    config = resolve(EngineArgs(data_parallel_size=num_replicas, **OPTIONS, **options))
    peers = [[] for _ in range(num_replicas)]

    def start(replica, rank, *, files=()):
        peers[replica].append(launch(rank, module, files=files))
        return peers[replica][-1]

    devices = [ProcessDevice(config, partial(start, r), replica=r) for r in range(num_replicas)]
    async with open_engine(config, devices) as engine:
        yield engine, peers


async def wait_back(engine):
    with anyio.fail_after(60):
        while any(  # noqa: ASYNC110  # nothing tells of it
            replica.is_device_lost for replica in engine.statistics().replicas
        ):
            await anyio.sleep(0.02)


async def test_streams_move_from_killed_replica_which_returns(caplog, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    config = resolve(EngineArgs(**OPTIONS))
    async with open_engine(config, ThreadedDevice(config)) as engine:
        wanted = await texts(engine, num=6)
    async with replicated_engine(module=FAULTY) as (engine, peers):
        assert await texts(engine, num=6) == wanted
        for victim in (0, 1):
            was_lost = []

            def kill(victim=victim, was_lost=was_lost):
                os.kill(peers[victim][-1].pid, signal.SIGKILL)
                was_lost.append(victim)

            assert await texts(engine, at_token=5, do=kill, num=6) == wanted
            # The streams have not waited for it: they ended while it was being started.
            assert engine.statistics().replicas[victim].is_device_lost
            await wait_back(engine)
        before = [s.num_generation_tokens for s in engine.statistics().replicas]
        assert await texts(engine, at_token=1, do=lambda: None, num=6) == wanted
        after = [s.num_generation_tokens for s in engine.statistics().replicas]
        assert all(new > old for old, new in zip(before, after, strict=True))
        assert await engine.controls.sleep(2)
        assert await engine.controls.wake()
        await _kill_by_poison(engine, wanted)
    # The poison has killed one replica, once for each halving of the newcomers that it began with, and the other never.
    other, poisoned = sorted(len(incarnations) for incarnations in peers)
    assert other == 2
    assert 2 < poisoned <= 2 + 4
    assert "worker 0 died of SIGKILL" in caplog.text
    assert "worker 1 died of SIGKILL" in caplog.text
    for peer in (*peers[0], *peers[1]):
        with pytest.raises(ProcessLookupError):
            os.kill(peer.pid, 0)


async def _kill_by_poison(engine, wanted):
    """Send a request that kills any worker while six streams run; the streams notice nothing."""

    async def send_poison():
        params = SamplingParams(max_tokens=4)
        stream = engine.generate({"prompt_token_ids": [POISON, 8, 9]}, params, "poison")
        with pytest.raises(GenerationError) as caught:
            async for _ in stream:
                pass
        assert caught.value.code == "poisoned_request"

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(send_poison)
        assert await texts(engine, at_token=99, do=lambda: None, num=6) == wanted


@pytest.mark.parametrize("parallel", ["pipeline_parallel_size", "tensor_parallel_size"])
async def test_replicas_of_several_workers_match_one_process(parallel):
    config = resolve(EngineArgs(**OPTIONS))
    async with open_engine(config, ThreadedDevice(config)) as engine:
        wanted = await texts(engine, num=6)
    async with replicated_engine(**{parallel: 2}) as (engine, peers):
        assert await texts(engine, num=6) == wanted
        assert [len(incarnations) for incarnations in peers] == [2, 2]
        assert all(s.num_generation_tokens for s in engine.statistics().replicas)


async def test_streams_move_from_dead_replica_of_stages(caplog):
    async with replicated_engine(pipeline_parallel_size=2) as (engine, peers):
        wanted = await texts(engine)

        def kill():
            os.kill(peers[1][-1].pid, signal.SIGKILL)

        assert await texts(engine, at_token=5, do=kill) == wanted
    assert "worker 3 died of SIGKILL" in caplog.text
