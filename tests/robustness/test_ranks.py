"""When a rank dies, the other ranks end too, and each text still equals that of one process."""

import os
import re
import signal
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from trouper.actors.engine.wiring import open_engine
from trouper.actors.executor.devices.process import ProcessDevice
from trouper.actors.executor.devices.threaded import ThreadedDevice
from trouper.actors.executor.workers.launching import MODULE
from trouper.config.args import EngineArgs
from trouper.config.resolve import resolve
from trouper.kernels.codegen import units

from .recorded_workers import OPTIONS, LocalWorkers
from .test_worker import texts

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.timeout(120),
    pytest.mark.slow,
    pytest.mark.skipif(not units.can_multiply(), reason="needs compiled kernels"),
]


@asynccontextmanager
async def ranked_engine(num_ranks=2, num_stages=1, module=MODULE, **options):
    sizes = {"tensor_parallel_size": num_ranks, "pipeline_parallel_size": num_stages}
    config = resolve(EngineArgs(**sizes, **OPTIONS, **options))
    worker_group = LocalWorkers(module)
    async with open_engine(config, ProcessDevice(config, worker_group)) as engine:
        yield engine, worker_group


async def expected(num=4):
    config = resolve(EngineArgs(**OPTIONS))
    async with open_engine(config, ThreadedDevice(config)) as engine:
        return await texts(engine, num=num)


async def test_streams_survive_killed_rank_of_stage(caplog):
    wanted = await expected()
    async with ranked_engine(2, 2) as (engine, worker_group):
        assert len(worker_group.peers) == 4
        kill = partial(os.kill, worker_group.peers[3].pid, signal.SIGKILL)
        assert await texts(engine, at_token=3, do=kill) == wanted
    assert len(worker_group.peers) == 8
    assert "worker 3 died of SIGKILL in step" in caplog.text
    for peer in worker_group.peers:
        with pytest.raises(ProcessLookupError):
            os.kill(peer.pid, 0)


async def test_disagreeing_ranks_are_reported_and_streams_continue(monkeypatch, tmp_path, caplog):
    fault = tmp_path / "fault"
    fault.write_text("another step")
    monkeypatch.setenv("TROUPER_TEST_FAULT", str(fault))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    wanted = await expected()
    async with ranked_engine(module="tests.robustness.faulty_worker") as (engine, worker_group):
        assert await texts(engine) == wanted
    assert len(worker_group.peers) == 4
    found = re.search(
        r"RanksDisagreeError: rank (\d) was in step (\d+) .*, rank (\d) in step (\d+)", caplog.text
    )
    ours, our_step, theirs, their_step = map(int, found.groups())
    assert {ours, theirs} == {0, 1}
    assert abs(our_step - their_step) == 1
