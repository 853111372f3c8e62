"""Workers run in a Ray cluster of logical nodes. When a node is removed with its worker, the streams continue."""

import logging
import signal
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

pytest.importorskip("ray")  # in an environment of its own: pytest -m ray

import anyio
import anyio.to_thread
import ray
from ray.cluster_utils import Cluster

from trouper.actors.engine.wiring import open_engine
from trouper.actors.executor.devices.process import ProcessDevice
from trouper.actors.executor.workers.machines import launch_ray
from trouper.actors.executor.workers.machines.launch_ray import open_ray
from trouper.config.args import EngineArgs
from trouper.config.resolve import resolve
from trouper.errors import DeviceStartError

from .recorded_workers import OPTIONS
from .test_stages import expected
from .test_worker import texts

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.ray,
    pytest.mark.timeout(180),
    pytest.mark.filterwarnings("ignore"),  # Ray's own
]


@pytest.fixture
def cluster(monkeypatch):
    """Start two logical nodes of one processor each, and join the first with this process."""
    monkeypatch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    found.second = found.add_node(num_cpus=1)
    ray.init(address=found.address, logging_level="error")
    found.wait_for_nodes()
    yield found
    ray.shutdown()
    found.shutdown()


@asynccontextmanager
async def an_engine_at_places(**options):
    config = resolve(EngineArgs(distributed_executor_backend="ray", **OPTIONS, **options))
    async with open_ray(config, config.nodes) as launcher_of:
        async with open_engine(
            config, ProcessDevice(config, launch_workers=launcher_of(0))
        ) as engine:
            yield engine


def workers_at_places():
    """Return the number of workers that Ray actors of this environment have started."""
    found = 0
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        found += words[0] == sys.executable.encode() and b"--machine" in words
    return found


async def test_streams_continue_on_joining_node(cluster, caplog):
    wanted = await expected()
    async with an_engine_at_places(pipeline_parallel_size=2) as engine:
        assert await texts(engine) == wanted
        assert workers_at_places() == 2

        def replace_a_node():  # in this thread, where Ray handles signals
            cluster.remove_node(cluster.second, allow_graceful=False)
            cluster.second = cluster.add_node(num_cpus=1)

        assert await texts(engine, at_token=3, do=replace_a_node) == wanted
        assert await texts(engine) == wanted
    assert "closed its connection" in caplog.text
    with anyio.fail_after(20):
        while ray.available_resources().get("CPU") != 2.0 or workers_at_places():  # noqa: ASYNC110  # no event tells of another process
            await anyio.sleep(0.05)


async def test_missing_capacity_is_named_in_error(cluster, monkeypatch):
    monkeypatch.setattr(launch_ray, "RESERVE_S", 1.0)
    with pytest.raises(DeviceStartError, match=r"want 3 x \{CPU: 1\}, 2 is free"):
        async with an_engine_at_places(pipeline_parallel_size=3):
            pass


async def test_cluster_is_joined_silently_and_keeps_signals(cluster, monkeypatch, caplog):
    ray.shutdown()
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    before = signal.getsignal(signal.SIGTERM)
    ray_logger = logging.getLogger("ray")
    monkeypatch.setattr(ray_logger, "handlers", [*ray_logger.handlers, caplog.handler])
    await anyio.to_thread.run_sync(launch_ray._join, ray)
    assert signal.getsignal(signal.SIGTERM) is before
    assert "SIGTERM" not in caplog.text
