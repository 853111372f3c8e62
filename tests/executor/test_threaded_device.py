"""The device thread: order, cancellation, failure, the end.  A dummy model of a few thousand weights."""

import json
import os
import platform
import queue
import subprocess
import sys
import threading

import anyio
import anyio.to_thread
import pytest
import torch

from trouper.actors.executor.device import DeviceInfo, PendingResult
from trouper.actors.executor.devices.threaded import DEVICE_THREAD, ThreadedDevice
from trouper.actors.executor.runners.cpu.process_resources import NICER
from trouper.actors.messages.controls import ProbeDevice, Sleep, Wake
from trouper.actors.messages.requests import SequenceId
from trouper.actors.messages.steps import NewSequence, Sampling, StepDone, StepFailed, StepPlan
from trouper.actors.runtime.startup import num_physical_cores
from trouper.config.args import EngineArgs
from trouper.config.resolve import resolve
from trouper.errors import TrouperValidationError, UnsupportedFeatureError

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 16,
    "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 64, "dtype": "float32",
}  # fmt: skip


@pytest.fixture
def config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return resolve(
        EngineArgs(
            model=str(tmp_path),
            load_format="dummy",
            block_size=8,
            max_num_seqs=4,
            skip_tokenizer_init=True,
        )
    )


def first_plan(row=0, epoch=0):
    new = NewSequence(row, SequenceId(row), (1, 2, 3), 3, (1, 2), Sampling(temperature=0.0))
    return StepPlan(0, epoch, (row,), (0,), (3,), (1,), new_sequences=(new,))


def next_plan(step, row=0, epoch=0):
    return StepPlan(step, epoch, (row,), (2 + step,), (1,), (1,))


async def answers_of(device, num=1):
    """The next answers, waited for if they are not there."""
    answers = []
    with anyio.fail_after(10):
        for _ in range(num):
            answers.append(await device.receive())  # noqa: PERF401  # a comprehension hides the await from the linter
    return answers


def device_threads():
    return [thread for thread in threading.enumerate() if thread.name == "trouper-device"]


@pytest.mark.anyio
async def test_answers_come_in_the_order_of_the_plans(config):
    device = ThreadedDevice(config)
    info = await device.load()
    assert (info.block_size, info.num_blocks, info.dtype) == (8, 4 * 8 + 1, "float32")
    device.submit(first_plan())
    for step in (1, 2, 3):
        device.submit(next_plan(step))
    answers = await answers_of(device, 4)
    assert [answer.step for answer in answers] == [0, 1, 2, 3]
    assert all(isinstance(answer, StepDone) for answer in answers)
    await device.aclose()


@pytest.mark.anyio
async def test_receiver_waits_for_plan_that_comes_later(config):
    device = ThreadedDevice(config)
    await device.load()
    found = []

    async def take():
        found.extend(await answers_of(device))

    async with anyio.create_task_group() as tg:
        tg.start_soon(take)
        await anyio.wait_all_tasks_blocked()
        device.submit(first_plan())
    assert found[0].step == 0
    await device.aclose()


@pytest.mark.anyio
async def test_results_that_are_not_received_are_kept(config):
    device = ThreadedDevice(config)
    await device.load()
    with anyio.CancelScope() as scope:
        scope.cancel()
        await device.receive()
    device.submit(first_plan())
    device.submit(next_plan(1))
    await device.call(ProbeDevice())  # behind them
    assert [answer.step for answer in await answers_of(device, 2)] == [0, 1]
    await device.aclose()


@pytest.mark.anyio
async def test_wait_for_result_that_is_cancelled_loses_none(config):
    device = ThreadedDevice(config)
    await device.load()
    found = []
    with anyio.fail_after(10):
        for step in range(4):
            device.submit(next_plan(step) if step else first_plan())
            with anyio.CancelScope() as scope:
                scope.cancel()
                found.append(await device.receive())
            await device.call(ProbeDevice())
            with anyio.CancelScope() as scope:
                found.append(await device.receive())
                scope.cancel()
    assert [answer.step for answer in found] == [0, 1, 2, 3]
    await device.aclose()


@pytest.mark.anyio
async def test_failed_step_fails_its_epoch_and_nothing_after(config, caplog):
    device = ThreadedDevice(config)
    await device.load()
    device.submit(next_plan(1, row=77))  # there is no such row
    device.submit(first_plan())
    device.submit(first_plan(epoch=1))
    first, second, third = await answers_of(device, 3)
    assert isinstance(first, StepFailed)
    assert "IndexError" in first.message
    assert isinstance(second, StepFailed)
    assert isinstance(third, StepDone)
    assert "step 1 with 1 entries failed" in caplog.text
    await device.aclose()


@pytest.mark.anyio
async def test_errors_of_loading_reach_the_caller(config, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "architectures": ["Mamba"]}))
    unknown = resolve(EngineArgs(model=str(tmp_path), skip_tokenizer_init=True))
    for broken, error in ((unknown, UnsupportedFeatureError), (None, TrouperValidationError)):
        device = ThreadedDevice(broken or _without_weights(tmp_path))
        with pytest.raises(error):
            await device.load()
        await device.aclose()
    assert device_threads() == []


def _without_weights(folder):
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return resolve(EngineArgs(model=str(folder), skip_tokenizer_init=True))


@pytest.mark.anyio
async def test_closing_waits_for_what_is_queued_and_ends_thread(config):
    device = ThreadedDevice(config)
    await device.load()
    assert len(device_threads()) == 1
    device.submit(first_plan())
    device.submit(next_plan(1))
    with anyio.CancelScope() as scope:  # closing is clean-up: cancellation does not shorten it
        scope.cancel()
        await device.aclose()
    assert device_threads() == []
    await device.aclose()
    with pytest.raises(RuntimeError, match="closed"):
        device.submit(next_plan(2))


@pytest.mark.anyio
async def test_device_that_was_never_loaded_closes_at_once(config):
    device = ThreadedDevice(config)
    await device.aclose()
    with pytest.raises(RuntimeError, match="never loaded"):
        device.submit(first_plan())


@pytest.mark.anyio
async def test_sleeping_devices_fail_steps_and_wake_with_same_answers(config):
    device = ThreadedDevice(config)
    await device.load()
    device.submit(first_plan())
    [before] = await answers_of(device)
    await device.call(Sleep(2))
    device.submit(first_plan())
    [failed] = await answers_of(device)
    assert isinstance(failed, StepFailed)
    await device.call(Wake(frozenset({"weights", "kv_cache"})))
    device.submit(first_plan(epoch=1))
    [after] = await answers_of(device)
    assert after.token_ids == before.token_ids
    await device.aclose()


class SlowRunner:
    """Launches steps whose results are ready when a test says so."""

    is_tiny = True

    def __init__(self, config, kept=None):
        self.log = []
        self.launches = threading.Semaphore(0)
        self.ready = set()
        self.broken = {}  # step -> what its end raises
        SlowRunner.last = self

    def load(self):
        return DeviceInfo(9, 8, "float32", "slow")

    def execute(self, plan):
        self.log.append(("launch", plan.step))
        self.launches.release()
        return PendingResult(lambda: self._is_ready(plan.step), lambda: self._finish(plan.step))

    def _is_ready(self, step):
        if isinstance(self.broken.get(step), torch.AcceleratorError):
            raise self.broken[step]
        return step in self.ready

    def _finish(self, step):
        self.log.append(("finish", step))
        if step in self.broken:
            raise self.broken[step]
        return StepDone(step, ((step,),))

    def sleep(self, level):
        self.log.append(("sleep", level))

    def release(self):
        self.log.append(("release", None))

    def close(self):
        self.log.append(("close", None))


@pytest.fixture
def slow(monkeypatch):
    monkeypatch.setattr("trouper.actors.executor.runners.cpu.runner.CpuRunner", SlowRunner)


async def launched(runner, num):
    """Until the device thread has launched so many more."""
    for _ in range(num):
        await anyio.to_thread.run_sync(runner.launches.acquire, limiter=anyio.CapacityLimiter(1))


@pytest.mark.anyio
@pytest.mark.skipif(platform.system() != "Linux", reason="threads that are nice one by one")
@pytest.mark.parametrize(("is_tiny", "nicer"), [(False, NICER), (True, 0)])
async def test_device_that_computes_on_every_core_is_nice_to_loop(
    slow, config, monkeypatch, is_tiny, nicer
):
    monkeypatch.setattr(SlowRunner, "is_tiny", is_tiny)
    monkeypatch.setattr("trouper.actors.executor.workers.model_host.num_physical_cores", lambda: 2)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    device = ThreadedDevice(config)
    try:
        await device.load()
        [own] = [
            thread.native_id for thread in threading.enumerate() if thread.name == DEVICE_THREAD
        ]
        assert os.getpriority(os.PRIO_PROCESS, own) == os.getpriority(os.PRIO_PROCESS, 0) + nicer
    finally:
        await device.aclose()
        torch.set_num_threads(num_threads)


@pytest.mark.anyio
async def test_step_launches_before_previous_results(slow, config):
    device = ThreadedDevice(config)
    await device.load()
    runner = SlowRunner.last
    for step in (1, 2):
        device.submit(next_plan(step))
    await launched(runner, 2)
    assert runner.log == [("launch", 1), ("launch", 2)]
    runner.ready = {2}  # results come in the order of the steps all the same
    device.submit(next_plan(3))
    await launched(runner, 1)
    runner.ready = {1, 2, 3}
    assert [answer.token_ids for answer in await answers_of(device, 3)] == [
        ((1,),),
        ((2,),),
        ((3,),),
    ]
    assert runner.log[3:] == [("finish", 1), ("finish", 2), ("finish", 3)]
    await device.aclose()


class ForgetfulQueue(queue.SimpleQueue):
    """CPython's before 3.13, when the thread loses its processor just after `get` has set its clock."""

    def get(self, block=True, timeout=None):
        return super().get(block)


@pytest.mark.anyio
async def test_silent_step_ends_though_wait_with_timeout_might_not(slow, config, monkeypatch):
    monkeypatch.setattr(queue, "SimpleQueue", ForgetfulQueue)
    device = ThreadedDevice(config)
    await device.load()
    device.submit(next_plan(1))
    await launched(SlowRunner.last, 1)
    SlowRunner.last.ready = {1}
    with anyio.fail_after(10):
        assert [answer.step for answer in await answers_of(device)] == [1]
    await device.aclose()


@pytest.mark.anyio
async def test_nobody_looks_at_step_that_tells_when_it_is_ready(slow, config, monkeypatch):
    looks, acts = [], queue.SimpleQueue()
    right = SlowRunner.execute

    def execute(self, plan):
        later = right(self, plan)

        def is_ready():
            looks.append(plan.step)
            return later.is_ready()

        return PendingResult(is_ready, later.finish, acts.put)

    monkeypatch.setattr(SlowRunner, "execute", execute)
    device = ThreadedDevice(config)
    await device.load()
    runner = SlowRunner.last
    device.submit(next_plan(1))
    await launched(runner, 1)
    await anyio.wait_all_tasks_blocked()
    device.submit(next_plan(2))
    await launched(runner, 1)
    assert len(looks) <= 2  # once for each post
    runner.ready = {1, 2}
    act = await anyio.to_thread.run_sync(acts.get)
    act()
    assert [answer.step for answer in await answers_of(device, 2)] == [1, 2]
    await device.aclose()


@pytest.mark.anyio
async def test_call_and_end_wait_for_steps_ahead_of_them(slow, config):
    device = ThreadedDevice(config)
    await device.load()
    runner = SlowRunner.last
    device.submit(next_plan(1))
    with anyio.fail_after(10):
        await device.call(Sleep(1))
    device.submit(next_plan(2))
    await device.aclose()
    assert runner.log == [
        ("launch", 1), ("finish", 1), ("sleep", 1), ("launch", 2), ("finish", 2), ("close", None)
    ]  # fmt: skip


@pytest.mark.anyio
@pytest.mark.parametrize("error", [ValueError("late"), torch.OutOfMemoryError("no memory")])
async def test_error_that_comes_late_fails_what_was_launched_after_it(slow, config, error):
    device = ThreadedDevice(config)
    await device.load()
    runner = SlowRunner.last
    runner.broken, runner.ready = {1: error}, {1, 2, 3}
    for step, epoch in ((1, 0), (2, 0), (3, 1)):
        device.submit(next_plan(step, epoch=epoch))
    first, second, third = await answers_of(device, 3)
    is_memory = isinstance(error, torch.OutOfMemoryError)
    assert first == StepFailed(1, f"{type(error).__name__}: {error}", is_memory)
    assert second == StepFailed(2, "an earlier step failed")
    assert (third.step, third.token_ids) == (3, ((3,),))
    assert (("release", None) in runner.log) == is_memory
    await device.aclose()


@pytest.mark.anyio
async def test_a_gpu_that_is_lost_ends_the_engine(slow, config):
    device = ThreadedDevice(config)
    await device.load()
    SlowRunner.last.broken = {1: torch.AcceleratorError("an illegal memory access")}
    device.submit(next_plan(1))
    with pytest.raises(torch.AcceleratorError):
        await answers_of(device)
    await device.aclose()


def test_the_module_does_not_import_torch():
    code = "import sys, trouper.actors.executor.devices.threaded; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_there_is_at_least_one_core():
    assert num_physical_cores() >= 1
