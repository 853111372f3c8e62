"""When a worker process dies in the middle of streams, its engine continues, and the texts are unchanged."""

import logging
import os
import signal
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path

import anyio
import pytest

from tests.robustness.faulty_worker import POISON
from tests.support.vision import VisionModel, picture
from trouper.actors.engine.wiring import open_engine
from trouper.actors.executor.devices.process import ProcessDevice
from trouper.actors.executor.workers.launching import MODULE, launch
from trouper.config.args import EngineArgs
from trouper.config.resolve import resolve
from trouper.errors import (
    DeviceStartError,
    EngineDeadError,
    GenerationError,
    RetryableRequestError,
    TrouperValidationError,
)
from trouper.params import SamplingParams

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]
NUM_TOKENS = 24
FAULTY = "tests.robustness.faulty_worker"
PROMPTS = ["def f(", "class A:", "import os", "for x in"]


class RecordedWorkers:
    """Start workers and record them."""

    def __init__(self, module, inside):
        self.peers = []
        self.module = module
        self.inside = inside

    def __call__(self, rank, files=()):
        self.peers.append(self.inside(partial(launch, files=files), rank, self.module))
        return self.peers[-1]

    def signal(self, number):
        os.kill(self.peers[-1].pid, number)


@asynccontextmanager
async def an_engine(module=MODULE, inside=lambda function, *args: function(*args), **options):
    config = resolve(EngineArgs(dtype="float32", device_worker="process", **options))
    worker_group = RecordedWorkers(module, inside)
    async with open_engine(config, ProcessDevice(config, worker_group)) as engine:
        yield engine, worker_group


def params(number):
    """Return greedy and seeded parameters alternately."""
    return SamplingParams(
        temperature=number % 2, seed=number, max_tokens=NUM_TOKENS, ignore_eos=True
    )


async def texts(engine, *, at_token=None, do=None, num=4):
    """Return the token ids of `num` streams. `do` is called once, when the first stream has `at_token` tokens."""
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
    async with an_engine(block_size=8) as (engine, worker_group):
        expected = await texts(engine)
        for at_token in (1, 7):
            killed = await texts(
                engine, at_token=at_token, do=lambda: worker_group.signal(signal.SIGKILL)
            )
            assert killed == expected
        lost = engine.statistics().replicas[0].num_lost_tokens
    # Of each stream and loss less than a block, and two steps in flight.
    assert 0 < lost <= 2 * len(PROMPTS) * (8 + 2)
    assert len(worker_group.peers) == 3
    assert "worker 0 died of SIGKILL in step" in caplog.text
    with pytest.raises(ProcessLookupError):
        worker_group.signal(0)


@pytest.fixture
def fault(monkeypatch, tmp_path):
    """Return a function that makes a faulty worker fail once, in its next step."""
    path = tmp_path / "fault"
    monkeypatch.setenv("TROUPER_TEST_FAULT", str(path))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    return path.write_text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("segv", "worker 0 died of SIGSEGV in step"),
        ("exit", "worker 0 exited with status 3 in step"),
        ("sticky", "worker 0 failed in step"),
    ],
)
async def test_fault_names_its_step_and_texts_continue(name, words, fault, caplog):
    async with an_engine(FAULTY) as (engine, worker_group):
        expected = await texts(engine)
        assert await texts(engine, at_token=3, do=partial(fault, name)) == expected
        assert await texts(engine) == expected
    assert len(worker_group.peers) == 2
    assert words in caplog.text


@pytest.mark.slow
async def test_image_is_encoded_again_after_a_kill(fault, tmp_path):
    VisionModel("llava", tmp_path / "model")
    see = {"prompt": "See <image> this", "multi_modal_data": {"image": picture(1)}}
    options = {
        "model": str(tmp_path / "model"),
        "enable_prefix_caching": False,
        "encoder_cache_gb": 0,
    }
    async with an_engine(FAULTY, max_model_len=256, **options) as (engine, worker_group):

        async def ids(name, prompt="read this", do=None):
            found = []
            async for output in engine.generate(prompt, params(1), name):
                found = list(output.outputs[0].token_ids)
                if do is not None and len(found) >= 2:
                    await do()
                    do = None
            return found

        expected = [await ids("text"), await ids("image", see)]
        answers = []

        async def look():
            fault("encode")
            answers.append(await ids("again", see))

        assert [await ids("beside", do=look), *answers] == expected
    assert len(worker_group.peers) == 2


@contextmanager
def little_memory(num_bytes):
    """Make a cgroup with this memory limit. Yields a function that runs another function inside."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    (path,) = [line.split(":", 2)[2] for line in lines if ":memory:" in line] or [""]
    own = Path(f"/sys/fs/cgroup/memory{path}")
    inner = own / f"trouper-test-{os.getpid()}"
    try:
        inner.mkdir()
        (inner / "memory.limit_in_bytes").write_text(str(num_bytes))
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")

    def inside(function, *args):
        (inner / "cgroup.procs").write_text(str(os.getpid()))
        try:
            return function(*args)
        finally:
            (own / "cgroup.procs").write_text(str(os.getpid()))

    try:
        yield inside
    finally:
        inner.rmdir()


@pytest.mark.slow
async def test_out_of_memory_kill_is_named_and_texts_continue(fault, caplog):
    with little_memory(2**30) as inside:
        async with an_engine(FAULTY, inside=inside) as (engine, worker_group):
            expected = await texts(engine)
            assert await texts(engine, at_token=3, do=partial(fault, "memory")) == expected
        assert len(worker_group.peers) == 2
    assert (
        "worker 0 was killed by the operating system, which was out of memory, in step"
        in caplog.text
    )


@pytest.mark.slow
async def test_worker_that_hangs_is_killed_at_its_deadline(caplog):
    async with an_engine(step_timeout=2.0) as (engine, worker_group):
        expected = await texts(engine)
        assert (
            await texts(engine, at_token=3, do=lambda: worker_group.signal(signal.SIGSTOP))
            == expected
        )
    assert "without an answer in step" in caplog.text


@pytest.mark.slow
async def test_an_idle_worker_that_dies_is_replaced():
    async with an_engine() as (engine, worker_group):
        expected = await texts(engine)
        worker_group.signal(signal.SIGKILL)
        assert await texts(engine) == expected
    assert len(worker_group.peers) == 2


async def test_losses_beyond_the_budget_end_the_engine():
    with pytest.raises(EngineDeadError) as info:
        async with an_engine(max_worker_restarts=0) as (engine, worker_group):
            stream = engine.generate(PROMPTS[0], params(0), "r")
            await anext(stream)
            worker_group.signal(signal.SIGKILL)
            async for _ in stream:
                pass
    assert isinstance(info.value.__cause__, DeviceStartError)
    assert "died of SIGKILL" in str(info.value.__cause__)


async def test_error_at_load_is_raised_as_it_was(caplog):
    caplog.set_level(logging.CRITICAL)
    with pytest.raises(TrouperValidationError, match="load_format"):
        async with an_engine(load_format="nonsense"):
            pass


@pytest.mark.slow
async def test_poisonous_newcomer_ends_alone_and_others_go_on(caplog, monkeypatch):
    """The two losses of the first request do not count, so the engine also survives a second one."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    codes = []

    async def send_poison(engine):
        stream = engine.generate(
            {"prompt_token_ids": [POISON, 8, 9]}, params(0), f"poison-{len(codes)}"
        )
        with pytest.raises(GenerationError) as info:
            async for _ in stream:
                pass
        codes.append(info.value.code)

    async with an_engine(FAULTY, max_worker_restarts=2) as (engine, worker_group):
        expected = await texts(engine, num=15)
        async with anyio.create_task_group() as group:
            start = partial(group.start_soon, send_poison, engine)
            assert await texts(engine, at_token=5, do=start, num=15) == expected
        assert len(worker_group.peers) == 3
        await send_poison(engine)
    assert codes == ["poisoned_request"] * 2
    assert caplog.text.count("died of SIGILL") == 4
    assert "Illegal instruction, File" in caplog.text


@pytest.mark.slow
async def test_sleeping_worker_that_dies_sleeps_again_and_wakes():
    async with an_engine() as (engine, worker_group):
        expected = await texts(engine)
        await engine.controls.sleep(level=1)
        worker_group.signal(signal.SIGKILL)
        while True:  # its loss is noticed, its successor loaded
            try:
                await engine.controls.wake()
                break
            except RetryableRequestError:
                await anyio.sleep(0.05)
        await engine.controls.resume()
        assert await texts(engine) == expected
    assert len(worker_group.peers) == 2
