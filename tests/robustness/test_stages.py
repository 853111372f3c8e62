"""When a stage dies, the other stages end too, and each text still equals that of one process."""

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
from trouper.actors.executor.workers.launching import MODULE
from trouper.config.args import EngineArgs
from trouper.config.resolve import resolve
from trouper.errors import GenerationError, TrouperValidationError

from .recorded_workers import OPTIONS, LocalWorkers
from .test_worker import params, texts

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120), pytest.mark.slow]


@asynccontextmanager
async def staged_engine(num_stages=2, module=MODULE, **options):
    config = resolve(EngineArgs(**OPTIONS | options, pipeline_parallel_size=num_stages))
    worker_group = LocalWorkers(module)
    async with open_engine(config, ProcessDevice(config, worker_group)) as engine:
        yield engine, worker_group


async def expected(num=4, **options):
    config = resolve(EngineArgs(**OPTIONS | options))
    async with open_engine(config, ThreadedDevice(config)) as engine:
        return await texts(engine, num=num)


async def test_streams_go_on_when_any_stage_is_killed(caplog):
    wanted = await expected()
    async with staged_engine(3, max_worker_restarts=5) as (engine, worker_group):
        assert await texts(engine) == wanted
        for rank in range(3):
            victim = worker_group.peers[-3 + rank].pid

            def kill(victim=victim):
                os.kill(victim, signal.SIGKILL)

            assert await texts(engine, at_token=3, do=kill) == wanted
    assert len(worker_group.peers) == 3 * 4
    for rank in range(3):
        assert f"worker {rank} died of SIGKILL in step" in caplog.text
    for peer in worker_group.peers:
        with pytest.raises(ProcessLookupError):
            os.kill(peer.pid, 0)


async def test_abort_in_mid_prompt_leaves_other_streams_unchanged():
    wanted = await expected()
    async with staged_engine() as (engine, _):

        async def leave(number):
            """Send a prompt of many chunks, and disconnect while they are computed."""
            stream = engine.generate(
                {"prompt_token_ids": [5 + number] * 400}, params(0), f"l{number}"
            )
            with anyio.move_on_after(0.05 * number):
                await anext(stream)
            await stream.aclose()

        for _ in range(3):
            async with anyio.create_task_group() as tasks:
                for number in range(4):
                    tasks.start_soon(leave, number)
                assert await texts(engine, at_token=2, do=lambda: None) == wanted
        statistics = engine.statistics().scheduler
        assert statistics.num_blocks_free == statistics.num_blocks_total


async def test_a_poisonous_newcomer_ends_alone_in_any_stage(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    wanted = await expected(num=7)
    codes = []

    async def send_poison(engine):
        stream = engine.generate({"prompt_token_ids": [POISON, 8, 9]}, params(0), "poison")
        with pytest.raises(GenerationError) as info:
            async for _ in stream:
                pass
        codes.append(info.value.code)

    module = "tests.robustness.faulty_worker"
    async with staged_engine(2, module, max_worker_restarts=3) as (engine, worker_group):
        async with anyio.create_task_group() as group:
            start = partial(group.start_soon, send_poison, engine)
            assert await texts(engine, at_token=5, do=start, num=7) == wanted
        assert len(worker_group.peers) <= 2 * 4
    assert codes == ["poisoned_request"]


async def test_load_error_of_later_stage_is_raised(monkeypatch):
    monkeypatch.setenv("TROUPER_PP_LAYER_PARTITION", "4,5")
    with pytest.raises(TrouperValidationError, match="load_format"):
        async with staged_engine(load_format="nonsense"):
            pass
