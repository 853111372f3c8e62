"""A worker process that dies in mid-stream: its engine goes on, and each text is what it would have been."""

import logging
import os
import signal
from contextlib import asynccontextmanager

import anyio
import pytest

from trouper.actors.engine.wiring import open_engine
from trouper.actors.executor.devices.launch_local import launch
from trouper.actors.executor.devices.process import ProcessDevice
from trouper.config.args import EngineArgs
from trouper.config.resolve import resolve
from trouper.errors import DeviceStartError, EngineDeadError, TrouperValidationError
from trouper.params import SamplingParams

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]
NUM_TOKENS = 24
PROMPTS = ["def f(", "class A:", "import os", "for x in"]


@pytest.fixture(params=["trio"])
def anyio_backend(request):
    return request.param


class Crew:
    """Starts workers, and remembers them."""

    def __init__(self):
        self.peers = []

    def __call__(self, rank):
        self.peers.append(launch(rank))
        return self.peers[-1]

    def signal(self, number):
        os.kill(self.peers[-1].pid, number)


@asynccontextmanager
async def an_engine(**options):
    config = resolve(EngineArgs(dtype="float32", device_worker="process", **options))
    crew = Crew()
    async with open_engine(config, ProcessDevice(config, crew)) as engine:
        yield engine, crew


def params(number):
    """Greedy and seeded in turn."""
    return SamplingParams(
        temperature=number % 2, seed=number, max_tokens=NUM_TOKENS, ignore_eos=True
    )


async def texts(engine, *, at_token=None, do=None, num=4):
    """The token ids of `num` streams; `do` is called once, when the first stream has `at_token` tokens."""
    found = {}

    async def read(number):
        is_due = do is not None and number == 0
        async for output in engine.generate(
            PROMPTS[number % 4], params(number), f"r{number}-{at_token}"
        ):
            ids = list(output.outputs[0].token_ids)
            assert ids[: len(found.get(number, []))] == found.get(number, [])
            found[number] = ids
            if is_due and len(ids) >= at_token:
                is_due = False
                do()

    async with anyio.create_task_group() as readers:
        for number in range(num):
            readers.start_soon(read, number)
    return found


async def test_streams_go_on_when_the_worker_is_killed(caplog):
    async with an_engine() as (engine, crew):
        expected = await texts(engine)
        for at_token in (1, 7):
            killed = await texts(engine, at_token=at_token, do=lambda: crew.signal(signal.SIGKILL))
            assert killed == expected
    assert len(crew.peers) == 3
    assert "worker 0 died of SIGKILL in step" in caplog.text
    with pytest.raises(ProcessLookupError):
        crew.signal(0)


async def test_a_fault_of_the_process_is_named_with_its_step(caplog):
    async with an_engine() as (engine, crew):
        expected = await texts(engine)
        assert await texts(engine, at_token=3, do=lambda: crew.signal(signal.SIGSEGV)) == expected
    assert "died of SIGSEGV in step" in caplog.text


async def test_a_worker_that_hangs_is_killed_at_its_deadline(caplog):
    async with an_engine(step_timeout=2.0) as (engine, crew):
        expected = await texts(engine)
        assert await texts(engine, at_token=3, do=lambda: crew.signal(signal.SIGSTOP)) == expected
    assert "without an answer in step" in caplog.text


async def test_an_idle_worker_that_dies_is_replaced():
    async with an_engine() as (engine, crew):
        expected = await texts(engine)
        crew.signal(signal.SIGKILL)
        assert await texts(engine) == expected
    assert len(crew.peers) == 2


async def test_losses_beyond_the_budget_end_the_engine():
    with pytest.raises(EngineDeadError) as info:
        async with an_engine(max_worker_restarts=0) as (engine, crew):
            stream = engine.generate(PROMPTS[0], params(0), "r")
            await anext(stream)
            crew.signal(signal.SIGKILL)
            async for _ in stream:
                pass
    assert isinstance(info.value.__cause__, DeviceStartError)
    assert "died of SIGKILL" in str(info.value.__cause__)


async def test_an_error_at_load_is_raised_as_it_was(caplog):
    caplog.set_level(logging.CRITICAL)
    with pytest.raises(TrouperValidationError, match="load_format"):
        async with an_engine(load_format="nonsense"):
            pass
