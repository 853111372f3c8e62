"""Two machines are simulated by processes on the loopback. When one dies with its workers, the streams continue."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import asynccontextmanager, contextmanager
from functools import partial

import pytest

from tests.support.accepting import accept
from tests.workers.test_model_files import change
from trouper.actors.engine.wiring import open_engine
from trouper.actors.executor.devices.process import ProcessDevice
from trouper.actors.executor.workers.machines.launch_hosts import open_nodes
from trouper.config.args import EngineArgs
from trouper.config.model import DEMO_MODEL
from trouper.config.parallel import CLUSTER_KEY
from trouper.config.resolve import resolve
from trouper.errors import TrouperValidationError
from trouper.frontends.python.async_engine import AsyncLLMEngine

from .recorded_workers import OPTIONS
from .test_orphans import workers_of
from .test_stages import expected
from .test_worker import texts

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120), pytest.mark.slow]
KEY = "a key of these machines"
COORDINATOR = """
import sys
from trouper.frontends.python.llm import LLM
from trouper.params import SamplingParams
llm = LLM(nnodes=2, pipeline_parallel_size=2, master_port=int(sys.argv[1]), max_model_len=512)
print("up", flush=True)
llm.generate(["def f("], SamplingParams(max_tokens=100000, ignore_eos=True))
"""


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv(CLUSTER_KEY, KEY)


@pytest.fixture
def port():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


@contextmanager
def a_host(port, model=DEMO_MODEL, **environment):
    """Run machine 1 like `trouper serve`; its workers end with it."""
    options = [str(model), "--nnodes=2", "--node-rank=1", f"--master-port={port}", "-pp=2"]
    process = subprocess.Popen(
        [sys.executable, "-m", "trouper", "serve", *options, "--max-model-len=512"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
        assert left_of(process.pid) == []


def left_of(pid):
    """Return the workers of a process that still exist 2 s after its end."""
    deadline = time.monotonic() + 2.0
    while (left := workers_of(pid)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


@asynccontextmanager
async def an_engine_on_two_machines(port, **options):
    config = resolve(EngineArgs(nnodes=2, master_port=port, **OPTIONS, **options))
    async with open_nodes(config, config.nodes) as launcher_of:
        replicas = range(config.data_parallel_size)
        devices = [
            ProcessDevice(config, replica=r, launch_workers=launcher_of(r)) for r in replicas
        ]
        async with open_engine(config, devices) as engine:
            yield engine


async def test_streams_continue_on_replacement_machine(port, caplog):
    wanted = await expected()
    with a_host(port) as first:
        async with an_engine_on_two_machines(port, pipeline_parallel_size=2) as engine:
            assert await texts(engine) == wanted
            assert len(workers_of(first.pid)) == len(workers_of(os.getpid())) == 1
            with a_host(port) as second:  # it is refused for as long as the first is there
                assert await texts(engine, at_token=3, do=first.kill) == wanted
                assert len(workers_of(second.pid)) == 1
                (worker,) = workers_of(second.pid)
                kill = partial(os.kill, worker, signal.SIGKILL)
                assert await texts(engine, at_token=3, do=kill) == wanted
    assert re.search(r"worker 1 closed its connection.*node 1 at 127.0.0.1 is gone", caplog.text)
    assert "worker 1 died of SIGKILL in step" in caplog.text


async def test_replica_continues_without_the_other_machine(port):
    wanted = await expected()
    with a_host(port) as host:
        async with an_engine_on_two_machines(port, data_parallel_size=2) as engine:
            assert await texts(engine) == wanted
            assert len(workers_of(host.pid)) == 1
            assert await texts(engine, at_token=3, do=host.kill) == wanted


async def test_different_model_on_host_is_logged_by_both(port, tmp_path):
    folder = shutil.copytree(DEMO_MODEL, tmp_path / "model")
    change(folder)  # a fine-tune: nothing but its numbers differs
    args = EngineArgs(nnodes=2, master_port=port, pipeline_parallel_size=2, **OPTIONS)
    with a_host(port, folder) as host:
        words = r"^worker 1 on node 1: model: is not the model with which the engine .* model.safetensors"
        with pytest.raises(TrouperValidationError, match=words) as caught:
            async with AsyncLLMEngine(args):
                pass
        assert caught.value.value == str(folder)
        assert host.poll() is None
        host.terminate()
        assert "worker 1: TrouperValidationError: model: is not the model" in host.stderr.read()


def test_a_host_outlives_its_front_without_workers(port):
    with a_host(port) as host:
        coordinator = subprocess.Popen(
            [sys.executable, "-c", COORDINATOR, str(port)], stdout=subprocess.PIPE
        )
        try:
            assert coordinator.stdout.readline() == b"up\n"
            assert len(workers_of(host.pid)) == 1
        finally:
            coordinator.kill()
            coordinator.communicate()
        assert left_of(coordinator.pid) == left_of(host.pid) == []
        assert host.poll() is None


def test_host_with_wrong_key_ends_with_error(port):
    with socket.create_server(("127.0.0.1", port)) as coordinator:
        with a_host(port, **{CLUSTER_KEY: "another key of others"}) as host:
            connection, _ = coordinator.accept()
            with connection:
                assert not accept(connection, KEY.encode())
            text = host.stderr.read()
            assert host.wait() == 2
    assert f"{CLUSTER_KEY}: the coordinator at 127.0.0.1:{port} has a different key" in text
